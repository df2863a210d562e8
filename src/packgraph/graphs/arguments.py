"""The arguments of a call in words: which of them it is about, by name, and what is the matter with
it."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from packgraph.graphs import fallback
from packgraph.graphs.signature import packed_batches, unfit
from packgraph.packing.capacity import Capacity


def named_leaves(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The leaves of a call's arguments, each with the name or position of its argument of
    `forward`."""
    try:
        names = [
            parameter.name
            for parameter in inspect.signature(forward).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (ValueError, TypeError):  # of code that is not Python's
        names = []
    named = [(repr(names[i]) if i < len(names) else str(i), arg) for i, arg in enumerate(args)]
    for name, arg in [*named, *((repr(name), arg) for name, arg in kwargs.items())]:
        for number, leaf in enumerate(tree_leaves(arg)):
            yield (
                (f"argument {name}" if leaf is arg else f"entry {number} of argument {name}"),
                leaf,
            )


def detail(
    reason: str,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    capacities: Sequence[Capacity],
) -> str:
    """What it is about these arguments that the call runs eagerly for `reason`; empty where it is
    not about them."""
    declared = f"declared: {', '.join(map(str, capacities)) or 'none'}"
    if reason == fallback.NO_KEY:
        found = ((name, unfit(leaf, device)) for name, leaf in named_leaves(forward, args, kwargs))
        return next((f"{name} is {problem}" for name, problem in found if problem is not None), "")
    if reason in (fallback.UNDECLARED, fallback.DOCUMENTS):
        other = [
            str(batch.capacity)
            for batch in packed_batches((args, kwargs))
            if batch.capacity not in capacities
        ]
        return f"{', '.join(other)}; {declared}"
    if reason == fallback.UNKNOWN_SHAPE:
        shapes = [
            str(tuple(leaf.shape))
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        ]
        return f"tensors of shapes {', '.join(shapes) or '(none)'}; {declared}"
    return ""
