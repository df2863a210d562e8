"""How the entries of a region's result are made: handed through from its state, or built from its
outputs.

What a region hands through keeps its place in the caller's autograd graph: nothing is copied, and
whatever reads it later is no business of the region's backward. One case is different: a
differentiable tensor that the region hands through *and* reads twice or more. Autograd sums the
gradients of a tensor in the order in which they arrive, the latest reader's first. If the region
summed its own readers by itself, the same numbers would be added in another order:

    eager    ((later + second reader) + first reader)      by itself    later + (second reader + first reader)

Such a tensor therefore leaves the region as an output, an alias of its input (`owned_aliases`).
What is read later reaches the region's backward as the gradient of that output, and autograd adds
there in its own order. With one reader two numbers are added, which is the same both ways.
"""  # noqa: E501

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from packgraph.graphs.autograd_walk import readers_of_leaves
from packgraph.graphs.stages import State


@dataclass(frozen=True)
class PassThrough:
    """A state entry that the region hands through untouched, from entry `key`.

    outputs: leaves of it (their places) that leave the region as its outputs (their numbers), with
    the same contents.
    """

    key: str
    outputs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Produced:
    """A state entry built from outputs (`Output` numbers), handed-through leaves and constants."""

    spec: TreeSpec
    leaves: tuple[tuple[str, Any], ...]


def owned_aliases(result: State, leaves: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """For `leaves` of a region's state that its `result` holds and that it reads twice or more: an
    alias of each.

    Returned by the leaf's identity; an alias has the leaf's memory, shape and dtype, and launches
    nothing. They must be made when the region has run: autograd goes backwards through what was
    made last first.
    """
    made = [
        leaf
        for leaf in tree_leaves(result)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    handed = {id(leaf) for leaf in made}
    if not any(id(leaf) in handed for leaf in leaves):
        return {}
    readers = readers_of_leaves(made)
    return {
        id(leaf): leaf.view_as(leaf)
        for leaf in leaves
        if id(leaf) in handed and readers.get(id(leaf), 0) > 1
    }


def describe_entries(
    result: State, shown: State, aliases: dict[int, torch.Tensor]
) -> tuple[dict[str, PassThrough | Produced], list[torch.Tensor]]:
    """How each entry of a region's `result` is made of its state `shown`, and the region's outputs.

    aliases: what leaves as an output although it is a leaf of `shown` (`owned_aliases`).
    """
    handed = {}
    for key, value in shown.items():
        for place, leaf in enumerate(tree_leaves(value)):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in aliases:
                handed[id(leaf)] = (key, place)
    outputs: list[torch.Tensor] = []
    numbers: dict[int, int] = {}

    def number_of(leaf: torch.Tensor) -> int:
        if id(leaf) not in numbers:
            numbers[id(leaf)] = len(outputs)
            outputs.append(aliases.get(id(leaf), leaf))
        return numbers[id(leaf)]

    entries: dict[str, PassThrough | Produced] = {}
    for key, value in result.items():
        flat, spec = tree_flatten(value)
        if key in shown and value is shown[key]:
            owned = [
                (place, number_of(leaf)) for place, leaf in enumerate(flat) if id(leaf) in aliases
            ]
            entries[key] = PassThrough(key, tuple(owned))
            continue
        leaves: list[tuple[str, Any]] = []
        for leaf in flat:
            if not isinstance(leaf, torch.Tensor):
                leaves.append(("constant", leaf))
            elif id(leaf) in handed:
                leaves.append(("input", handed[id(leaf)]))
            else:
                leaves.append(("output", number_of(leaf)))
        entries[key] = Produced(spec, tuple(leaves))
    return entries, outputs


def make_entry(entry: PassThrough | Produced, state: State, made: Sequence[torch.Tensor]) -> Any:
    """The value of an entry. state: what the region was given. made: its outputs."""
    if isinstance(entry, PassThrough):
        value = state[entry.key]
        if not entry.outputs:
            return value
        leaves, spec = tree_flatten(value)
        for place, number in entry.outputs:
            leaves[place] = made[number]
        return tree_unflatten(leaves, spec)
    values = []
    for kind, what in entry.leaves:
        if kind == "output":
            values.append(made[what])
        elif kind == "input":
            values.append(tree_leaves(state[what[0]])[what[1]])
        else:
            values.append(what)
    return tree_unflatten(values, entry.spec)
