"""A claim: one call's right to replay, with its slot, its graphs and the static memory it may write into directly.

An ordinary call claims, runs and forgets. A pipeline holds claims: it receives activations straight into the slot's
input buffer, gradients straight into its gradient buffer, and keeps the slot until its sends are done.
"""
from typing import Any

import torch
from torch.utils._pytree import tree_map

from packgraph.graphs.build import Owned, Variant
from packgraph.graphs.program import Program
from packgraph.graphs.region import replay_region
from packgraph.graphs.slot import Ticket
from packgraph.plan.stages import State


class Claim:
    """A slot held for one microbatch, and the variant captured in it for this call.

    lends: outputs are aliases of static memory, valid until the slot is released, instead of clones.
    """

    def __init__(self, program: Program, variant: Variant, ticket: Ticket, lends: bool) -> None:
        self.program, self.variant, self.ticket, self.lends = program, variant, ticket, lends

    def buffer(self, key: str) -> torch.Tensor | None:
        """The slot's memory for the state's entry `key`, if a region reads it from there: filling it saves a copy."""
        for region in self.variant.regions.values():
            for entry in region.inputs:
                if entry.key == key and entry.buffer is not None:
                    return entry.buffer
        return None

    def gradient_buffer(self, number: int = 0) -> torch.Tensor | None:
        """The slot's memory for the incoming gradient of the call's output `number`, if a region reads it there."""
        end = self.variant.ends[number]
        if end is None:
            return None
        incoming = self.variant.regions[end[0]].outputs[end[1]].incoming
        return incoming.tensor if isinstance(incoming, Owned) else None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replay the call's forward; its backward follows by autograd."""
        state = self.program.begin(args, kwargs)
        lent: dict[int, torch.Tensor] = {}
        for index, run in enumerate(self.program.runs):
            if run.captured:
                state = replay_region(self.variant.regions[index], state, self.ticket, lent)
            else:
                state = self.program.run(run, _own_copies(state, lent))
        result = self.program.end(state)
        if self.lends:
            return result
        return tree_map(lambda leaf: leaf.clone() if id(leaf) in lent else leaf, result)


def _own_copies(state: State, lent: dict[int, torch.Tensor]) -> State:
    """The state for an eager stage: differentiable static tensors are cloned, since autograd may keep them."""
    clones: dict[int, Any] = {}

    def own(leaf: Any) -> Any:
        if id(leaf) not in lent or not leaf.requires_grad:
            return leaf
        if id(leaf) not in clones:
            clones[id(leaf)] = leaf.clone()
        return clones[id(leaf)]

    return tree_map(own, state)
