"""The gradients of a region without a captured backward: its forward is run again, eagerly, and
differentiated.

That equals what was replayed as long as the forward does the same again: its inputs lie in the slot
until its backward has run, nothing that it reads has changed, it runs under the modes of its call
(autocast), and it draws the same random numbers. What it writes to (the statistics of a batch norm)
is put back afterwards. Its outputs must be those of the replay, bit by bit: it might read what it
writes, or something that was changed behind autograd's back (`.data`). Whatever is not known to be
so is an error.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_unflatten

from packgraph.graphs import fallback
from packgraph.graphs.checks.host_sync import Journal
from packgraph.graphs.checks.random_state import PastDraws
from packgraph.graphs.parameters import storage_of, without_hooks
from packgraph.graphs.region import PassThrough, Region, Token
from packgraph.graphs.slots import SlotLease
from packgraph.graphs.stages import State
from packgraph.torch_internals import version_of


def unlike_captured(
    region: Region, lease: SlotLease, gradients: Sequence[torch.Tensor | None]
) -> str | None:
    """Returns why no captured backward stands for one that begins now, if that is known."""
    if torch.is_autocast_enabled(region.modes.device_type):
        return fallback.UNDER_AUTOCAST
    if region.number >= lease.first_spent:
        return fallback.AGAIN
    for each in gradients:
        if each is not None and each.layout is not torch.strided:
            return fallback.SPARSE
    return None


def recompute_gradients(
    region: Region,
    gradients: Sequence[torch.Tensor | None],
    versions: list[int],
    draws: PastDraws | None,
) -> tuple[Any, list[Any]]:
    """The gradients of a region's parameters, inputs and returned parameters for these gradients of
    its outputs.

    versions: As they were when the forward was replayed. draws: Of that replay.

    Returns:
        What autograd is to be given for the parameters' edge, and gradients of inputs and returned
        parameters.

    Raises:
        RuntimeError: The forward could not be run again with the same result.
    """
    leaves: dict[Token, torch.Tensor] = {}
    # Code that torch does not see the operations of may write to what it reads.
    written = [
        tensor for tensor in region.context.reads if not isinstance(tensor, torch.nn.Parameter)
    ]

    def run() -> dict[int, torch.Tensor]:
        with _unwritten([*region.context.writes, *written]):
            with torch.enable_grad(), region.modes.entered():
                made = _outputs(region, region.context.run(_state(region, leaves)))
            _compare(region, made)
            return made

    with region.context.calls:  # a capture by another thread changes the module meanwhile
        _check(region, versions)
        made = _drawing_again(region, draws, run) if draws is not None else run()
    starts = [
        (made[number], gradient)
        for number, gradient in enumerate(gradients)
        if gradient is not None
    ]
    inputs = [leaves[entry.token] for entry in region.inputs if entry.differentiable]
    parameters = region.parameters.parameters
    with without_hooks([*region.returned, *parameters]):  # they fire where these gradients arrive
        found = torch.autograd.grad(
            [out for out, _ in starts],
            [*inputs, *region.returned, *parameters],
            [gradient for _, gradient in starts],
            allow_unused=True,
        )
    owned = found[len(found) - len(parameters) :]
    signal = region.parameters.deliver(owned) if region.parameters.is_wanted() else None
    given, results = set[Token](), list[Any]()
    for entry, gradient in zip(
        [entry for entry in region.inputs if entry.differentiable], found, strict=False
    ):
        results.append(
            None if entry.token in given else gradient
        )  # one leaf for all places of a tensor
        given.add(entry.token)
    return signal, [*results, *found[len(inputs) : len(inputs) + len(region.returned)]]


def _check(region: Region, versions: list[int]) -> None:
    written = {storage_of(tensor) for tensor in region.context.writes}
    for tensor, before in zip(region.context.reads, versions, strict=True):
        if version_of(tensor) != before and storage_of(tensor) not in written:
            raise _cannot(
                region,
                f"a tensor of shape {tuple(tensor.shape)} that its forward reads was changed since",
            )
    with torch.enable_grad(), region.modes.entered():  # as in the call
        changed = region.context.changed()
    if changed:
        raise _cannot(region, "the module was changed since its forward")


def _compare(region: Region, made: dict[int, torch.Tensor]) -> None:
    """Raise RuntimeError unless the outputs are those of the replay."""
    for number, output in enumerate(region.outputs):
        if number in made and not _equal(made[number].detach(), output.static.tensor):
            raise _cannot(
                region,
                "it makes other outputs now: something that it reads was changed, or it reads what "
                "it writes",
            )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _cannot(region: Region, why: str) -> RuntimeError:
    return RuntimeError(
        f"another set of outputs of {region.name} got gradients than any captured backward starts "
        "from, or gradients "
        f"of another memory layout, and the forward cannot be run again for it: {why}. Use the "
        "same outputs in the "
        "loss during warm-up, or run such calls under packgraph.eager(...)"
    )


@contextlib.contextmanager
def _unwritten(writes: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put back what the block writes to `writes`."""
    journal = Journal()
    for tensor in writes:
        journal.before_write(tensor)
    try:
        yield
    finally:
        journal.restore()


def _drawing_again(
    region: Region, draws: PastDraws, run: Callable[[], dict[int, torch.Tensor]]
) -> dict[int, torch.Tensor]:
    """Runs `run` with the random numbers of the replay; returns its result.

    The real generators are moved as long as it runs. A thread that draws just then gets numbers
    that were drawn before, and its draws are taken back: that is an error, as are other numbers
    than those of the replay.
    """
    with draws.again() as are_the_same:
        made = run()
        if not are_the_same():
            raise _cannot(region, "another thread has drawn random numbers while it ran")
    return made


def _state(region: Region, leaves: dict[Token, torch.Tensor]) -> State:
    """The state that the region was captured for, on the slot's memory. leaves: gets the
    tensors."""
    inputs = iter(region.inputs)
    state: State = {}
    for key, (spec, facts) in region.facts.items():
        flat = list[Any]()
        for fact in facts:
            if fact[0] is not torch.Tensor:
                flat.append(fact[1])
                continue
            entry = next(inputs)
            if entry.token not in leaves:
                leaves[entry.token] = entry.memory.tensor.detach().requires_grad_(fact[3])
            flat.append(leaves[entry.token])
        state[key] = tree_unflatten(flat, spec)
    return state


def _outputs(region: Region, result: State) -> dict[int, torch.Tensor]:
    """The region's outputs by number, found in the result of a run as they were found at
    capture."""
    made: dict[int, torch.Tensor] = {}
    for key, entry in region.entries.items():
        leaves = tree_leaves(result[key])
        if isinstance(entry, PassThrough):
            made.update(
                (number, leaves[place].view_as(leaves[place])) for place, number in entry.outputs
            )
        else:
            made.update(
                (what, leaf)
                for leaf, (kind, what) in zip(leaves, entry.leaves, strict=True)
                if kind == "output"
            )
    return made
