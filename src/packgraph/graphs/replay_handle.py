"""Leased slot with the captured graphs and static buffers for one call.

An ordinary call acquires a handle, runs and forgets it. A pipeline holds handles: it receives
activations straight into the slot's input buffer, gradients straight into its gradient buffer, and
keeps the slot until its sends are done.
"""

import contextlib
from typing import Any

import torch
from torch.utils._pytree import tree_map

from packgraph.graphs import fallback
from packgraph.graphs.build import Owned, Variant
from packgraph.graphs.exclusive import Calls
from packgraph.graphs.fallback import Stats
from packgraph.graphs.frozen_module import call_tensors
from packgraph.graphs.output_objects import close_objects
from packgraph.graphs.program import Program
from packgraph.graphs.region import StaticAliases, accepts
from packgraph.graphs.replay import replay_region
from packgraph.graphs.slots import SlotLease
from packgraph.graphs.stages import Run, State


class ReplayHandle:
    """A slot held for one microbatch, and the variant captured in it for this call.

    lends: outputs are aliases of static memory, valid until the slot is released, instead of
    clones.
    """

    def __init__(
        self,
        program: Program,
        variant: Variant,
        lease: SlotLease,
        lends: bool,
        stats: Stats,
        calls: Calls,
        frozen: object = None,
    ) -> None:
        """calls: of the module. frozen: stands for a block of time in which nothing about the
        module but values changes; None = no such."""
        self.calls = calls
        self.program, self.variant, self.lease, self.lends, self.stats = (
            program,
            variant,
            lease,
            lends,
            stats,
        )
        self.frozen = frozen

    @property
    def is_direct(self) -> bool:
        """Whether `forward` and `backward` may be used in place of `run` and autograd."""
        return self.variant.direct is not None

    @property
    def makes_one_number(self) -> bool:
        """Whether the output is a single number, of which autograd takes the gradient to be one."""
        assert self.variant.direct is not None
        return self.variant.direct.out.tensor.numel() == 1

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Replay the forward alone: the call's output, an alias of the slot's memory that autograd
        knows nothing of.

        What the module says of the arguments as a call begins is heard here, too: graphs cannot
        look at what the host alone knows. Raises what its `begin` raises.
        """
        assert self.variant.direct is not None
        launched = False
        try:
            with self.calls:
                if self.program.staged:
                    self.program.begin(args, kwargs)
                out = self.variant.direct.forward(call_tensors(args, kwargs), self.lease)
            launched = True
        finally:
            if not launched:
                self.lease.release()
        return out

    def backward(self, gradient: torch.Tensor | None = None) -> None:
        """Replay the backward. gradient: of the output, None = one."""
        assert self.variant.direct is not None
        self.variant.direct.backward(gradient, self.lease, self.frozen)

    def input_gradient(self, tensor: int) -> torch.Tensor | None:
        """Where `backward` leaves the gradient of the call's tensor number `tensor`: an alias of
        the slot's memory."""
        assert self.variant.direct is not None
        static = self.variant.direct.gradients.get(tensor)
        return None if static is None else static.tensor

    def buffer(self, key: str) -> torch.Tensor | None:
        """The slot's memory for the state's entry `key`, if a region reads it from there: filling
        it saves a copy."""
        for region in self.variant.regions.values():
            for entry in region.inputs:
                if entry.key == key and entry.buffer is not None:
                    return entry.buffer
        return None

    def gradient_buffer(self, number: int = 0) -> torch.Tensor | None:
        """The slot's memory for the incoming gradient of the call's output `number`, if a region
        reads it there."""
        end = self.variant.ends[number]
        if end is None:
            return None
        incoming = self.variant.regions[end[0]].incoming(end[1])
        return incoming.tensor if isinstance(incoming, Owned) else None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replay the call's forward; its backward follows by autograd."""
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.lease.release)
            with self.calls:
                result = self._run(args, kwargs)
            on_error.pop_all()
        return result

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        replay, program = _Replayed(self), self.program
        result = program.end(program.execute(program.begin(args, kwargs), replay))
        if self.lends:
            return close_objects(result)
        with self.lease.slots.launches:
            return close_objects(_left(result, replay.aliases))


class _Replayed:
    """Runs by replay, where the slot has graphs for them."""

    def __init__(self, handle: ReplayHandle) -> None:
        self._handle, self.aliases, self._was_eager = handle, StaticAliases(), False

    def captured(self, index: int, run: Run, state: State) -> State:
        region = self._handle.variant.regions.get(index)
        if region is None:
            return self.eager(index, run, state)
        if self._was_eager and not accepts(region, state, self.aliases):
            self._handle.stats.fell_back(fallback.OTHER_STATE)
            return self.eager(index, run, state)
        self._was_eager = False
        return replay_region(region, state, self._handle.lease, self.aliases)

    def eager(self, index: int, run: Run, state: State) -> State:
        self._was_eager = True
        return self._handle.program.run(run, _own_copies(state, self.aliases))


def _left(result: Any, aliases: StaticAliases) -> Any:
    """What leaves the call: never static memory, nor a view of it. One tensor in several places
    stays one."""
    clones: dict[int, torch.Tensor] = {}

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not aliases.shares(leaf):
            return leaf
        if id(leaf) not in clones:
            clones[id(leaf)] = leaf.clone()
            aliases.note_copy(leaf, clones[id(leaf)])
        return clones[id(leaf)]

    return tree_map(own, result)


def _own_copies(state: State, aliases: StaticAliases) -> State:
    """The state for an eager stage: differentiable static tensors are cloned, since autograd may
    keep them."""
    clones: dict[int, Any] = {}

    def own(leaf: Any) -> Any:
        if not aliases.is_alias(leaf) or not leaf.requires_grad:
            return leaf
        if id(leaf) not in clones:
            clone, token = leaf.clone(), aliases.token(leaf)
            aliases.note_copy(leaf, clone)
            if token is not None:
                aliases.note(clone, token, alias=False)
            clones[id(leaf)] = clone
        return clones[id(leaf)]

    return tree_map(own, state)
