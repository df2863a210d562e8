"""Memory that graphs will take, measured by a capture that is thrown away.

A capture keeps memory in a way of its own: outputs of a region until its backward, gradients until
the region that reads them, nothing of autograd in between; and a pool is as large as its allocator
makes it. So the trial is a capture into pools of its own, whose sizes are read:

    dry run -> capture into one slot -> bytes of the slot's pool and of the shared one -> freed

All slots of a bank are alike. The trial trains nothing, and takes what graphs of these calls take
in one slot.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from packgraph.graphs.capture import capture_variant
from packgraph.graphs.dry_run import dry_run
from packgraph.graphs.graphed import GraphedModule, control
from packgraph.graphs.slots import Slot


@dataclass(frozen=True)
class BankMemory:
    """Memory of a bank of graphs, in bytes.

    Attributes:
        slots: Number of slots.
        slot: Of the pool of one slot.
        shared: Of the pool that the backwards of all slots share; 0 where a single slot keeps that
            memory in its own.
        buffers: Of one slot outside of pools, for inputs and gradients from eager code.
    """

    slots: int
    slot: int
    shared: int
    buffers: int

    @property
    def pools(self) -> int:
        """Bytes of all pools."""
        return self.slots * self.slot + self.shared

    @property
    def total(self) -> int:
        """Bytes of all pools and buffers."""
        return self.pools + self.slots * self.buffers


def trial_memory(
    graphed: GraphedModule, samples: Sequence[tuple[Any, ...]], slots: int
) -> BankMemory:
    """Measure what graphs for calls with these arguments will take in `slots` slots.

    Trains nothing and keeps no graph. Nothing of it but compiled code is remembered, so all ranks
    that share in a capture go the same way in it whatever became of their trials. With collectives
    in the module it is collective.

    Args:
        graphed: The module.
        samples: One tuple of call arguments for each key, in the order in which they will be
            captured: the largest first.
        slots: Number of slots.

    Raises:
        CaptureError: Where a capture would.
    """
    own = control(graphed)
    backend = own.capture_backend
    shared = None if own.slots.limit == 1 else backend.new_pool()
    slot = Slot(0, backend, own.device, shared)
    slot.pool.host.is_trial = True
    try:
        for number, args in enumerate(samples):
            with own.trial(args) as (call, buffers):
                slot.variants[number] = capture_variant(
                    call,
                    slot,
                    buffers,
                    contextlib.nullcontext(),
                    own.capturer.lends,
                    dry_run(call),
                )
        return BankMemory(
            slots, slot.pool.nbytes(), 0 if shared is None else shared.nbytes(), slot.buffer_bytes()
        )
    finally:
        slot.clear()
        if slot.device.type == "cuda":
            torch.cuda.empty_cache()
