"""What the user is told of calls that run eagerly: once, at his line, with what to do; an error in
strict mode."""

import copy
import gc
import re
import subprocess
import sys
import warnings

import pytest
import torch
from statekit import One, X, captured, quietly, train
from torch import nn

import packgraph
from packgraph.graphs import cache, fallback
from packgraph.graphs.agreement import alone
from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.graphed import graph
from packgraph.graphs.recorder.backend import RecorderWindow

PACK = packgraph.Capacity(tokens=8, documents=3)
OUTSIDE = torch.randn(5, 4)


def told(call, *args):
    """The messages of the warnings that a call makes; none may be lost because Python has seen its
    like."""
    gc.collect()  # modules of earlier tests say at their end that none of their calls was replayed
    with warnings.catch_warnings(record=True, action="always") as caught:
        call(*args)
    assert all(issubclass(warning.category, PackgraphWarning) for warning in caught)
    assert all(warning.filename == __file__ for warning in caught), "said at the user's line"
    return [str(warning.message) for warning in caught]


class Mixed(nn.Module):
    """Takes anything beside its tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x, extra=None, factor=1.0):
        return self.linear(x) * factor


def checkpointed(graphed):
    torch.utils.checkpoint.checkpoint(graphed, X, use_reentrant=False).square().sum().backward()


def functional(graphed):
    torch.func.functional_call(
        graphed, {"linear.weight": graphed.linear.weight * 2}, (X,)
    ).square().sum().backward()


CASES = {
    "unknown shape": (
        {"capacities": PACK},
        lambda g: g(OUTSIDE),
        r"shapes \(5, 4\).*tokens=8",
        "pad",
    ),
    "an argument cannot be part of a key": (
        {},
        lambda g: g(X, object()),
        "argument 'extra' is an object of type object",
        "attributes of the",
    ),
    "no free slot": ({"slots": 1}, lambda g: (g(X), g(X)), "", r"slots=\.\.\."),
    fallback.SAVED_TENSOR_HOOKS: ({}, checkpointed, "", "checkpoint inside the module"),
    "parameters are not leaf parameters": ({}, functional, "", "functional_call"),
}


@pytest.mark.parametrize("reason", CASES)
def test_the_first_unwanted_fallback_of_a_reason_is_told_once(reason):
    options, call, detail, remedy = CASES[reason]
    graphed = graph(Mixed(), warmup=0, **options)
    kept = []
    (said,) = told(lambda: kept.append(call(graphed)))
    assert reason in said and __file__ in said and "to do: " in said
    assert re.search(detail, said) and re.search(remedy, said)
    kept.clear()
    counted = graphed.stats.fallbacks[reason]  # a checkpoint calls twice
    assert told(lambda: call(graphed)) == [] and graphed.stats.fallbacks[reason] == 2 * counted > 0
    other = graph(Mixed(), warmup=0, **options)
    assert len(told(lambda: kept.append(call(other)))) == 1, "another module says it again"


@pytest.mark.parametrize("reason", CASES)
def test_strict_raises_for_every_unwanted_fallback(reason):
    options, call, _, remedy = CASES[reason]
    graphed = graph(Mixed(), warmup=0, strict=True, **options)
    for _ in range(2):
        with pytest.raises(
            CaptureError, match=f"(?s){__import__('re').escape(reason)}.*{remedy}"
        ) as caught:
            call(graphed)
        assert __file__ in caught.value.where
        gc.collect()
    assert not graphed.stats.fallbacks, "it did not fall back"
    packgraph.control(graphed).strict = False
    quietly(call, graphed)
    assert graphed.stats.fallbacks[reason] > 0


def test_what_was_asked_for_is_neither_told_nor_an_error():
    for strict in (False, True):
        graphed = graph(Mixed(), warmup=1, strict=strict)

        def asked(graphed=graphed):
            graphed(X).square().sum().backward()
            with packgraph.eager("unknown shape"):
                graphed(X).square().sum().backward()
            with torch.inference_mode(), torch.enable_grad():
                graphed(X)
            graphed.close()
            graphed(X)

        assert told(asked) == []
        assert dict(graphed.stats.fallbacks) == {
            "warm-up": 1,
            "unknown shape": 1,
            "inference mode": 1,
            "closed": 1,
        }


def test_nothing_is_told_in_warm_up_and_warm_up_ends_though_no_call_fits():
    graphed = graph(Mixed(), capacities=PACK, warmup=2)
    assert told(lambda: (graphed(OUTSIDE), graphed(OUTSIDE))) == []
    assert len(told(lambda: graphed(OUTSIDE))) == 1 and graphed.stats.fallbacks == {
        "unknown shape": 3
    }


def test_a_failed_capture_is_told_once_and_is_an_error_at_every_call_in_strict_mode():
    forward = lambda module, x: module.linear(x) * float(x.sum())  # noqa: E731
    graphed = graph(One(forward), warmup=0)
    (said,) = told(lambda: [graphed(X) for _ in range(3)])
    assert "waits for the device" in said and graphed.stats.fallbacks == {"capture failed": 3}
    strict = graph(One(forward), warmup=0, strict=True)
    for _ in range(3):
        with pytest.raises(CaptureError):
            strict(X)


def test_schedules_that_claim_for_themselves_tell_as_much_and_no_more():
    graphed = graph(One(lambda module, x: module.linear(x).sum()), capacities=PACK, warmup=0)
    assert len(told(lambda: [graphed.forward_backward(OUTSIDE) for _ in range(3)])) == 1
    strict = graph(
        One(lambda module, x: module.linear(x).sum()), capacities=PACK, warmup=0, strict=True
    )
    with pytest.raises(CaptureError, match="unknown shape"):
        strict.forward_backward(OUTSIDE)


def test_every_reason_has_an_entry_with_what_to_do():
    names = {
        value for name, value in vars(fallback).items() if name.isupper() and isinstance(value, str)
    }
    assert names == set(fallback.REASONS) and len(names) > 20
    for text, reason in fallback.REASONS.items():
        assert reason.text == text and reason.remedy.strip() and not reason.remedy.endswith(".")
    assert {text for text, reason in fallback.REASONS.items() if reason.asked} == {
        "warm-up",
        "inference mode",
        "closed",
        "inside the capture of another module",
        "over the memory budget",
        "the first backward, which no warm-up call has shown",
    }
    assert not fallback.reason_of("never heard of").asked


@pytest.mark.parametrize("how", ["deleted", "closed"])
def test_a_module_that_never_replays_says_so_in_the_end(how):
    graphed = graph(Mixed(), capacities=PACK, warmup=0)
    quietly(lambda: [graphed(OUTSIDE) for _ in range(4)])

    def end():
        nonlocal graphed
        if how == "closed":
            graphed.close()
            graphed.close()
        del graphed

    (said,) = told(end)
    assert (
        "none of its calls was replayed" in said
        and "unknown shape: 4" in said
        and "to do: pad" in said
    )


def test_a_module_that_has_replayed_or_was_never_called_ends_quietly():
    graphed = captured(Mixed(), X)
    quietly(lambda: graphed(X, object()))
    idle, evaluated = graph(Mixed()), graph(Mixed()).eval()
    evaluated(X)

    def end():
        nonlocal graphed, idle, evaluated
        del graphed, idle, evaluated

    assert told(end) == []


def test_a_run_that_never_replayed_says_so_when_the_process_ends(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "import torch, packgraph\n"
        "graphed = packgraph.graph(torch.nn.Linear(4, 4), warmup=0,\n"
        "                          capacities=packgraph.Capacity(tokens=8, documents=3))\n"
        "graphed(torch.randn(5, 4)).square().sum().backward()\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True
    )
    assert "none of its calls was replayed" in ended.stderr and f"{script}:2" in ended.stderr


def values(graphed, kind, count):
    for number in range(count):
        graphed(X, None, kind(number)).square().sum().backward()


@pytest.mark.parametrize(("kind", "most"), [(lambda n: n / 7, 3), (lambda n: n + 2, 8)])
def test_a_number_that_changes_is_told_with_its_values(kind, most):
    graphed = graph(Mixed(), warmup=0)
    assert told(lambda: values(graphed, kind, most - 1)) == []
    (said,) = told(lambda: values(graphed, kind, most + 2))
    assert f"argument 'factor' of Mixed has had {most} values ({kind(0)!r}, {kind(1)!r}" in said
    assert "0-d tensor" in said and ("few sizes" in said) is (most == 8)


def test_the_same_numbers_for_many_shapes_are_fine():
    graphed = graph(Mixed(), warmup=0)
    shapes = [torch.randn(rows, 4) for rows in range(2, 12)]
    calls = lambda: [  # noqa: E731
        graphed(x, None, factor).square().sum().backward() for x in shapes for factor in (0.5, 2.0)
    ]
    assert told(calls) == []
    assert graphed.stats.captured == 20


def test_words_and_numbers_inside_containers_are_named():
    class Nested(Mixed):
        def forward(self, x, options):
            return self.linear(x) * options["scale"]

    graphed = graph(Nested(), warmup=0)
    (said,) = told(lambda: [graphed(X, options={"scale": n / 3, "mode": "a"}) for n in range(5)])
    assert "entry 0 of argument 'options'" in said or "entry 1 of argument 'options'" in said
    graphed = graph(Mixed(), warmup=0)
    (said,) = told(lambda: [graphed(X, str(n)) for n in range(9)])
    assert "argument 'extra'" in said and "strings" in said


def test_a_zero_dimensional_tensor_is_the_way_out():
    module = Mixed()
    eager, graphed = copy.deepcopy(module), graph(module, warmup=0, strict=True)

    outs = []
    for model in (eager, graphed):
        for number in range(20):
            out = model(X, None, torch.tensor(number / 7))
            out.square().sum().backward()
            outs.append(out.detach())
    assert all(torch.equal(a, b) for a, b in zip(outs[:20], outs[20:], strict=True))
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(eager.parameters(), module.parameters(), strict=True)
    )
    assert (
        graphed.stats.captured == 1 and graphed.stats.replayed == 20 and not graphed.stats.fallbacks
    )


class Stateful(Mixed):
    """Writes to a buffer and draws random numbers: what a capture that fails half-way must undo."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return nn.functional.dropout(self.linear(x), 0.3)


def failing_captures(monkeypatch, errors, after=0):
    """Let captures of single graphs, from number `after` on, end in these errors, one each."""
    original, left, count = RecorderWindow.capture, list(errors), [0]

    def capture(self, run, scratch=False):
        result = original(self, run, scratch)
        count[0] += 1
        if left and count[0] > after:
            raise left.pop(0)
        return result

    monkeypatch.setattr(RecorderWindow, "capture", capture)


def step(model):
    out = model(X)
    out.square().sum().backward()
    return out.detach(), torch.get_rng_state(), model.calls.clone()


def same_steps(eager, graphed, steps):
    """Train both from the same random state; every step must agree bit by bit."""
    torch.manual_seed(5)
    plain = [step(eager) for _ in range(steps)]
    torch.manual_seed(5)
    found = [step(graphed) for _ in range(steps)]
    assert all(
        torch.equal(a, b)
        for one, other in zip(plain, found, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(eager.parameters(), graphed.parameters(), strict=True)
    )


@pytest.mark.parametrize("after", [0, 1])
def test_memory_that_comes_back_lets_graphs_be_captured_later(monkeypatch, after):
    module = Stateful()
    eager, graphed = copy.deepcopy(module), graph(module, warmup=0)
    failing_captures(
        monkeypatch, [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")], after
    )
    monkeypatch.setattr(cache, "CALLS_BETWEEN", (3, 9))
    (said,) = told(lambda: same_steps(eager, graphed, 10))
    assert "no memory" in said and "OutOfMemoryError" in said and "free memory" in said
    assert graphed.stats.fallbacks == {fallback.NO_MEMORY: 4} and graphed.stats.replayed == 6
    assert graphed.slots.in_flight() == 0 and graphed.failures == 0


def test_a_capture_is_tried_again_at_growing_distance_and_not_for_ever(monkeypatch):
    module = Stateful()
    eager, graphed = copy.deepcopy(module), graph(module, warmup=0)
    failing_captures(monkeypatch, [torch.OutOfMemoryError("CUDA out of memory")] * 9)
    monkeypatch.setattr(cache, "CALLS_BETWEEN", (2, 5))
    assert len(told(lambda: same_steps(eager, graphed, 20))) == 3
    assert graphed.stats.fallbacks == {fallback.NO_MEMORY: 1 + 2 + 1 + 5, "capture failed": 20 - 9}
    assert graphed.failures == 1 and graphed.stats.replayed == 0 and graphed.slots.in_flight() == 0


def test_ranks_that_vote_do_not_try_again_one_by_one(monkeypatch):
    graphed = graph(Stateful(), warmup=0)
    packgraph.control(graphed).capturer.cache.join(type(alone)())  # not that of one rank
    failing_captures(monkeypatch, [torch.OutOfMemoryError("CUDA out of memory")])
    assert len(told(lambda: [step(graphed) for _ in range(3)])) == 1
    assert graphed.stats.fallbacks == {"capture failed": 3}


def test_no_memory_is_an_error_in_strict_mode(monkeypatch):
    graphed = graph(Stateful(), warmup=0, strict=True)
    failing_captures(monkeypatch, [torch.OutOfMemoryError("CUDA out of memory")])
    with pytest.raises(CaptureError, match=r"(?s)OutOfMemoryError.*free memory"):
        graphed(X)


def test_another_error_of_a_capture_is_not_tried_again(monkeypatch):
    graphed = graph(Stateful(), warmup=0)
    failing_captures(monkeypatch, [RuntimeError("illegal")])
    monkeypatch.setattr(cache, "CALLS_BETWEEN", (1, 1))
    quietly(lambda: [step(graphed) for _ in range(6)])
    assert graphed.stats.fallbacks == {"capture failed": 6}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("after", [0, 1])
def test_an_interrupted_capture_is_undone_and_the_next_call_captures(monkeypatch, error, after):
    module = Stateful()
    eager, graphed = copy.deepcopy(module), graph(module, warmup=0, strict=True)
    failing_captures(monkeypatch, [error()], after)
    parameters, state = dict(module.named_parameters()), torch.get_rng_state()
    with pytest.raises(error):
        graphed(X)
    assert torch.equal(state, torch.get_rng_state()) and module.calls == 0 and gc.isenabled()
    assert all(parameters[name] is p and p.grad is None for name, p in module.named_parameters())
    assert graphed.slots.in_flight() == 0 and graphed.failures == 0 and not graphed.stats.fallbacks
    same_steps(eager, graphed, 5)
    assert graphed.stats.replayed == 5 and graphed.stats.captured == 1


def test_an_interrupted_call_between_forward_and_backward_gives_its_slot_back():
    graphed = graph(Stateful(), warmup=0, slots=1)

    def interrupted():
        out = graphed(X)
        assert out is not None
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    train(graphed, X, 2)
    assert graphed.stats.replayed == 3
