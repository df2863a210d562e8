"""Which stages torch.compile gets together: those of one layer.

stages    embed | attn mlp | attn mlp | ... | head
pieces    [---]   [------]   [------]         [--]
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from packgraph.graphs.stages import Stage, State


class CompileUnit(NamedTuple):
    """Consecutive stages of one layer that are compiled together.

    owner: the module whose methods they are, or None. methods: what to call: functions of (owner,
    state), or of state.
    """

    owner: Any
    methods: tuple[Callable[..., State], ...]
    name: str


def compile_units_of(stages: Sequence[Stage]) -> tuple[CompileUnit, ...]:
    """Cut consecutive stages where the layer or the owner changes."""
    pieces: list[CompileUnit] = []
    last: int | None = None
    for stage in stages:
        owner, method = getattr(stage.run, "__self__", None), getattr(stage.run, "__func__", None)
        if not isinstance(owner, torch.nn.Module) or method is None:
            owner, method = None, stage.run
        if pieces and last == stage.layer and pieces[-1].owner is owner:
            before = pieces.pop()
            pieces.append(
                CompileUnit(owner, (*before.methods, method), f"{before.name}, {stage.name}")
            )
        else:
            pieces.append(CompileUnit(owner, (method,), stage.name))
        last = stage.layer
    return tuple(pieces)


def saving(piece: CompileUnit, state: State) -> contextlib.AbstractContextManager[None]:
    """The block that the piece's compiled code is to run in: the mark `offload` of its owner, if it
    has one, for all that the code saves. What needs no gradient of the state is shared by all
    layers and stays.
    """
    mark = getattr(piece.owner, "offload", None)
    if mark is None:
        return contextlib.nullcontext()
    return mark(
        "layer",
        leave=[
            leaf
            for leaf in tree_leaves(state)
            if isinstance(leaf, torch.Tensor) and not leaf.requires_grad
        ],
    )
