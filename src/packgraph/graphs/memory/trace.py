"""What the graphs of one bucket will allocate, seen before they are captured.

A capture keeps memory in a way of its own: outputs of a region until its backward, gradients until
the region that reads them, nothing of autograd in between. So what is looked at is a capture
itself, thrown away at once:

    dry run ─▶ capture into pools of its own ─▶ MemoryTrace: births and deaths ─▶
    graphs/memory/bank.py
                            └─▶ freed

It trains nothing, adds gradients to spare memory, and takes what graphs of the bucket take in one
slot.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement

from packgraph.graphs.capture import capture_variant, dry_run
from packgraph.graphs.gradients import GradientBuffer, GradientBuffers, with_local
from packgraph.graphs.graphed import GraphedModule, control
from packgraph.graphs.memory.bank import BankMemory, BankModel, Lifetime, MemoryTrace, PoolModel
from packgraph.graphs.memory.caching import CachingPool
from packgraph.graphs.memory.expandable import ExpandablePool
from packgraph.graphs.memory.first_fit import FirstFitPool
from packgraph.graphs.parameters import local_tensor
from packgraph.graphs.slots import Slot
from packgraph.graphs.strides import contiguous_strides, own_strides
from packgraph.packing.capacity import Capacity


def trace_memory(graphed: GraphedModule, args: tuple[Any, ...]) -> MemoryTrace:
    """What graphs for a call with these arguments will allocate in one slot. Trains nothing and
    keeps no graph.

    Nothing of it but compiled code is remembered, so all ranks that share in a capture go the same
    way in it whatever became of their traces. Raises CaptureError where a capture would; with
    collectives in the module it is collective.
    """
    own, lifetimes = control(graphed), list[Lifetime]()
    with own.trial(args) as (program, gradients):
        backend = own.capture_backend
        slot = Slot(0, backend, own.device, backend.new_pool())
        tried = dry_run(program, backend, gradients, args, {})
        try:
            capture_variant(
                program,
                backend,
                slot,
                SpareGradients(program.module),
                gradients,
                lambda: None,
                contextlib.nullcontext(),
                own.lends,
                args,
                {},
                tried,
                lifetimes,
            ).reset()
            return MemoryTrace(tuple(lifetimes), slot.buffer_bytes())
        finally:
            tried.read.clear()
            tried.written.clear()
            slot.clear()
            if backend.device_type == "cuda":
                torch.cuda.empty_cache()


def predict_bank(
    graphed: GraphedModule, traces: Mapping[Capacity, MemoryTrace], slots: int
) -> BankMemory:
    """What graphs for all capacities that `traces` are of will take in `slots` slots of
    `graphed`."""
    own = control(graphed)
    model = BankModel(traces, pool_model(own.backend))
    return model.predict(traces, slots, alone=own.has_one_slot)


def pool_model(backend: str) -> Callable[[], PoolModel]:
    """The model of the pools of a backend, by its name, and by the allocator's settings."""
    if backend != "cuda":
        return FirstFitPool
    return ExpandablePool if expandable_segments() else CachingPool


def expandable_segments() -> bool:
    """Whether torch's allocator for CUDA was told `expandable_segments:True`."""
    return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])


class SpareGradients(GradientBuffers):
    """Gradients that nobody reads: those of all parameters lie in the same memory, that of the
    largest."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._spare: dict[torch.device, torch.Tensor] = {}
        for parameter in map(local_tensor, module.parameters()):
            nbytes = parameter.numel() * parameter.element_size()
            kept = self._spare.get(parameter.device)
            if kept is None or kept.numel() < nbytes:
                self._spare[parameter.device] = torch.zeros(
                    max(nbytes, 1), dtype=torch.uint8, device=parameter.device
                )

    def buffer(
        self, parameter: torch.nn.Parameter, placements: Sequence[Placement] | None = None
    ) -> GradientBuffer:
        """A buffer of the parameter's form."""
        return GradientBuffer(parameter, with_local(parameter, self._like(parameter), placements))

    def _like(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        local = local_tensor(parameter)
        strides = own_strides(local) or contiguous_strides(local.shape)
        whole = torch.empty(0, dtype=local.dtype, device=local.device)
        return whole.set_(
            self._spare[local.device].untyped_storage(), 0, tuple(local.shape), strides
        )
