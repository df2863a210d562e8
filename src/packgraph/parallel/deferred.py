"""Parameters whose values come when it is known which part of them a rank keeps.

    parameter [I, J], no memory ─▶ flat buffers: this rank's part ─▶ values of that part alone

A model that is too large for one rank is made with such parameters. They have a shape, a dtype and
a device, and the memory of one element; `FlatParameters` gives them memory and fills it. Whoever
reads them before gets NaN. The invariant: each element gets the value that it has where the whole
parameter is made at once, so weights do not depend on what a rank keeps.
"""

import itertools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from packgraph.graphs.parameters import local_tensor
from packgraph.parallel.pieces import Rectangle, part_of, parts_of

MOST_THREADS = 16  # each may hold one whole matrix of float32 numbers
_MARK = "packgraph_values"
Argument = TypeVar("Argument")
Piece = tuple[tuple[int, ...], Tensor]
Fill = Callable[[Sequence[Piece]], None]
"""Fills rectangles of one parameter: offsets in the whole, and the live memory. In any thread, but
for those with an attribute `in_turn` that is true: they are called in the order of parameters."""


def values_of(parameter: Tensor) -> Fill | None:
    """Fill of `parameter`, None where it has its values."""
    return getattr(parameter, _MARK, None)


def set_values(parameter: Tensor, fill: Fill) -> None:
    """Say what will fill a parameter that has no memory."""
    setattr(parameter, _MARK, fill)


def defer(module: nn.Module, values: Mapping[str, Fill], device: torch.device) -> None:
    """Replace parameters of `module` without memory, such as those on the meta device, by such on
    `device`, and say what will fill them. A parameter of several names stays one.

    values: by name.
    """
    owners = _owners(module)
    for name, fill in values.items():
        before = module.get_parameter(name)
        made = nn.Parameter(_without_memory(before, device), requires_grad=before.requires_grad)
        made.__dict__.update(before.__dict__)
        set_values(made, fill)
        for owner, key in owners[id(before)]:
            owner.register_parameter(key, made)


@contextmanager
def set_aside(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """For the block `module` has no such parameters; afterwards the same at the same places."""
    owners, kept = _owners(module), [module.get_parameter(name) for name in names]
    places = [(owner, key, found) for found in kept for owner, key in owners[id(found)]]
    try:
        for owner, key, _ in places:
            owner.register_parameter(key, None)
        yield
    finally:
        for owner, key, found in places:
            owner.register_parameter(key, found)


@contextmanager
def on_meta(module: nn.Module) -> Iterator[None]:
    """For the block deferred parameters of `module` are on the meta device, so that they can be
    replaced by DTensors; what stands in their places then is deferred again."""
    waiting = {
        name: (fill, parameter)
        for name, parameter in module.named_parameters()
        if (fill := values_of(parameter)) is not None
    }
    fills = {name: fill for name, (fill, _) in waiting.items()}
    try:
        defer(module, fills, torch.device("meta"))
        yield
    finally:
        for name, (fill, parameter) in waiting.items():
            defer(module, {name: fill}, parameter.device)


def fill_deferred(named: Iterable[tuple[str, Tensor]], spans: Iterable[Any]) -> None:
    """Fill the memory that is kept of all deferred parameters, by all cores at once.

    spans: of the flat buffers in which those that need a gradient lie. Others get memory of their
    own, whole. Afterwards none is deferred.
    """
    kept = [
        (member.parameter, parts_of(span.kept_part(member)))
        for span in spans
        if span.is_gathered
        for member in span.members
        if values_of(member.parameter) is not None
    ]
    gathered = {id(parameter) for parameter, _ in kept}
    for _, parameter in named:
        if values_of(parameter) is not None and id(parameter) not in gathered:
            if not parameter.requires_grad:
                local = local_tensor(parameter)
                local.data = torch.empty_like(local, memory_format=torch.contiguous_format)
            kept.append((parameter, parts_of(parameter)))
    in_turn = [getattr(values_of(parameter), "in_turn", False) for parameter, _ in kept]
    in_threads(_fill, itertools.compress(kept, map(operator.not_, in_turn)))
    for target in itertools.compress(kept, in_turn):
        _fill(target)
    for parameter, _ in kept:
        delattr(parameter, _MARK)


@torch.no_grad()  # known to each thread alone
def _fill(target: tuple[Tensor, Sequence[Piece]]) -> None:
    values = values_of(target[0])
    assert values is not None
    values([(offsets, piece.detach()) for offsets, piece in target[1]])


def fill_copies(whole: Tensor, pieces: Iterable[Piece]) -> None:
    """Fill any part of a parameter from a copy of the whole."""
    for offsets, target in pieces:
        target.copy_(whole[region(offsets, target.shape, (0,) * whole.ndim)])


def in_threads(function: Callable[[Argument], None], arguments: Iterable[Argument]) -> None:
    """Call `function` with each argument, by all cores. Errors are raised here."""
    with ThreadPoolExecutor(min(MOST_THREADS, cores())) as threads:
        for _ in threads.map(function, arguments):
            pass


def whole_shape(parameter: Tensor) -> torch.Size:
    """That of the tensor of which `parameter` may be a part."""
    part = part_of(parameter)
    return parameter.shape if part is None else part.shape


def overlap(one: Rectangle, other: Rectangle) -> Rectangle | None:
    """The rectangle in both, None where there is none."""
    starts = tuple(map(max, one[0], other[0]))
    stops = [
        min(a + n, b + m) for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True)
    ]
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def region(start: Sequence[int], sizes: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """Slices of a rectangle in what lies at `origin`."""
    return tuple(
        slice(at - base, at - base + size)
        for at, size, base in zip(start, sizes, origin, strict=True)
    )


def _without_memory(parameter: Tensor, device: torch.device) -> Tensor:
    """A tensor of that shape on `device`, all of whose elements are one, not a number."""
    local = local_tensor(parameter)
    single = torch.full((), torch.nan, dtype=local.dtype, device=device).expand(local.shape)
    if not isinstance(parameter, DTensor):
        return single
    return DTensor.from_local(
        single,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=torch.empty(parameter.shape, device="meta").stride(),
    )


def _owners(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """The modules that hold each parameter, and under which name, by its id."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for key, parameter in owner.named_parameters(recurse=False):
            found.setdefault(id(parameter), []).append((owner, key))
    return found


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
