"""The loops that every entry is run in, the same for eager and for graphs."""

import os
import random
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus.entry import ENTRIES, Draw, Entry, Keywords, loss_of, scalar, trained
from corpus.facts import (
    ANY_ERROR,
    BROKEN,
    Run,
    Verdict,
    first_difference,
    judge,
    note,
    note_grads,
    note_state,
)
from torch import Tensor

import packgraph.graphs
from packgraph.graphs.errors import PackgraphWarning
from packgraph.graphs.graphed import control, graph

_GRAPHS = Path(packgraph.graphs.__file__).parent
RATE = 0.02
STEPS = {"plain": 7, "accumulate": 4, "rough": 7, "own": 0}
CHANGE = {"plain": 4, "accumulate": 2, "rough": 4}
WARMUP = {"plain": 2, "accumulate": 1, "rough": 1, "own": 1}


def check(entry: Entry, loop: str, device: str = "cpu") -> Verdict:
    """Run one loop of an entry without graphs and with them, and judge."""
    eager, graphs = run(entry, loop, device, graphs=False), run(entry, loop, device, graphs=True)
    verdict = judge(eager, graphs, entry.documented)
    if verdict.good:
        return verdict
    again = run(entry, loop, device, graphs=False)
    found = first_difference(eager.trace, again.trace)
    return verdict if found is None else Verdict(BROKEN, f"two eager runs differ: {found[0]}")


def numbers() -> list[int]:
    """Of the entries that PACKGRAPH_CORPUS names (a part of their names), of all without it."""
    return [
        number
        for number, name in enumerate(ENTRIES)
        if os.environ.get("PACKGRAPH_CORPUS", "") in name
    ]


def failures(entry: Entry, device: str = "cpu", loops: Sequence[str] = ()) -> list[str]:
    """What is wrong with an entry, a line for each loop (default: all of its loops): nothing, if
    all is well."""
    verdicts = {loop: check(entry, loop, device) for loop in loops or loops_of(entry)}
    return [
        f"{found.kind} in the {loop} loop: {found.what}"
        for loop, found in verdicts.items()
        if not found.good
    ]


def loops_of(entry: Entry) -> list[str]:
    """The names of the loops that an entry is run in."""
    return list(entry.loops) if entry.drive is None else ["own"]


def run(entry: Entry, loop: str, device: str, *, graphs: bool) -> Run:
    """One run of one loop."""
    _seed()
    with warnings.catch_warnings(record=True) as seen, torch.device(device):
        warnings.simplefilter("always")
        model: Any = entry.make()
        model.train()
        if graphs:
            model = graph(
                model, backend="auto" if device != "cpu" else "recorder", warmup=WARMUP[loop]
            )
    stats = control(model).stats if graphs else None
    trace: list[dict[str, Any]] = []
    error: BaseException | None = None
    own_error = False
    _seed()
    with warnings.catch_warnings(record=True, action="always") as later:
        try:
            if entry.prepare is not None:
                entry.prepare(model)
            LOOPS[loop](entry, model, trace, device)
        except ANY_ERROR as raised:
            own_error = str(_GRAPHS) in innermost_file(raised)
            error = raised.with_traceback(None)
    told = [
        str(warning.message)
        for warning in [*seen, *later]
        if issubclass(warning.category, PackgraphWarning)
    ]
    if graphs:
        return Run(trace, error, told, own_error, stats.replayed, dict(stats.fallbacks))
    return Run(trace, error, told)


def innermost_file(error: BaseException) -> str:
    """The file that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename if frames else ""


def _seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def _call(entry: Entry, model: Any, arguments: tuple[Any, ...]) -> Any:
    if entry.call is not None:
        return entry.call(model, arguments)
    if arguments and isinstance(arguments[-1], Keywords):
        return model(*arguments[:-1], **arguments[-1])
    return model(*arguments)


def _backward(
    entry: Entry, model: Any, outputs: Any, arguments: tuple[Any, ...], step: int
) -> Tensor:
    loss = loss_of(entry, outputs)
    if entry.backward is not None:
        entry.backward(model, loss, outputs, arguments, step)
    elif isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    return loss


def _descend(model: Any) -> None:
    """A step of gradient descent with weight decay, which tells a gradient of zeros from none."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.mul_(1 - RATE).sub_(parameter.grad, alpha=RATE)


def _after(entry: Entry, model: Any, facts: dict[str, Any], arguments: Any, device: str) -> None:
    note_grads(facts, model, arguments)
    _descend(model)
    note_state(facts, model, device)
    if entry.observe is not None:
        note(facts, "observed", entry.observe(model))


def plain(entry: Entry, model: Any, trace: list[dict[str, Any]], device: str) -> None:
    """Forward, backward, a step, gradients to None."""
    for step in range(STEPS["plain"]):
        facts: dict[str, Any] = {}
        if step == CHANGE["plain"] and entry.mutate is not None:
            entry.mutate(model)
        arguments = entry.inputs(Draw(step, device), step)
        outputs = _call(entry, model, arguments)
        note(facts, "output", outputs)
        note(facts, "loss", _backward(entry, model, outputs, arguments, step))
        _after(entry, model, facts, arguments, device)
        model.zero_grad(set_to_none=True)
        trace.append(facts)


def accumulate(entry: Entry, model: Any, trace: list[dict[str, Any]], device: str) -> None:
    """Two microbatches in flight, backwards in reverse order, gradients to zero in place."""
    for step in range(STEPS["accumulate"]):
        facts: dict[str, Any] = {}
        if step == CHANGE["accumulate"] and entry.mutate is not None:
            entry.mutate(model)
        flight = []
        for number in range(2):
            arguments = entry.inputs(Draw(100 * step + number, device), 2 * step + number)
            outputs = _call(entry, model, arguments)
            note(facts, f"output {number}", outputs)
            flight.append((arguments, outputs))
        for number in (1, 0):
            arguments, outputs = flight[number]
            note(
                facts,
                f"loss {number}",
                _backward(entry, model, outputs, arguments, 2 * step + number),
            )
        _after(entry, model, facts, [arguments for arguments, _ in flight], device)
        model.zero_grad(set_to_none=False)
        trace.append(facts)


def rough(entry: Entry, model: Any, trace: list[dict[str, Any]], device: str) -> None:
    """Losses of some outputs, gradients asked for in other ways, evaluation in between."""
    for step in range(STEPS["rough"]):
        facts: dict[str, Any] = {}
        if step == CHANGE["rough"] and entry.mutate is not None:
            entry.mutate(model)
        arguments = entry.inputs(Draw(step, device), step)
        if step % 4 == 2:
            model.eval()
            with torch.no_grad():
                note(
                    facts,
                    "evaluated",
                    _call(entry, model, entry.inputs(Draw(50 + step, device), step)),
                )
            model.train()
        outputs = _call(entry, model, arguments)
        note(facts, "output", outputs)
        found = trained(outputs)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if step % 4 == 0 or entry.backward is not None or not found:
            note(facts, "loss", _backward(entry, model, outputs, arguments, step))
        elif step % 4 == 1:
            scalar(found[: max(1, len(found) // 2)]).backward()
        elif step % 4 == 2:
            gradients = torch.autograd.grad(loss_of(entry, outputs), parameters, allow_unused=True)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        else:
            loss_of(entry, outputs).backward(inputs=parameters[::2])
        _after(entry, model, facts, arguments, device)
        model.zero_grad(set_to_none=True)
        trace.append(facts)


def own(entry: Entry, model: Any, trace: list[dict[str, Any]], device: str) -> None:
    """The entry's own loop: it notes what must agree, step by step."""
    assert entry.drive is not None

    def step_done(**facts: Any) -> None:
        noted: dict[str, Any] = {}
        note(noted, "noted", facts)
        note_grads(noted, model)
        note_state(noted, model, device)
        trace.append(noted)

    entry.drive(model, lambda step: Draw(step, device), step_done)


LOOPS: dict[str, Callable[[Entry, Any, list[dict[str, Any]], str], None]] = {
    "plain": plain,
    "accumulate": accumulate,
    "rough": rough,
    "own": own,
}
