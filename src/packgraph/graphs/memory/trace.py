"""What the graphs of one bucket will allocate, seen before they are captured.

A capture keeps memory in a way of its own: outputs of a region until its backward, gradients until the region that
reads them, nothing of autograd in between. So what is looked at is a capture itself, thrown away at once:

    dry run ─▶ capture into pools of its own ─▶ MemoryTrace: births and deaths ─▶ graphs/memory/bank.py
                            └─▶ freed

It trains nothing, adds gradients to spare memory, and takes what graphs of the bucket take in one slot.
"""
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement

from packgraph.graphs.capture import capture_variant, dry_run
from packgraph.graphs.errors import CaptureError, user_line
from packgraph.graphs.gradients import GradientBuffer, GradientBuffers, with_local
from packgraph.graphs.graphed import GraphedModule, control
from packgraph.graphs.memory.bank import BankMemory, BankModel, Lifetime, MemoryTrace, PoolModel
from packgraph.graphs.memory.caching import CachingPool
from packgraph.graphs.memory.expandable import ExpandablePool
from packgraph.graphs.memory.first_fit import FirstFitPool
from packgraph.graphs.parameters import local_tensor
from packgraph.graphs.signature import signature
from packgraph.graphs.slots import Slot
from packgraph.graphs.strides import contiguous_strides, own_strides
from packgraph.graphs.unsupported import find_unsupported
from packgraph.graphs.wrapper import as_in_training
from packgraph.packing.capacity import Capacity


def trace_memory(graphed: GraphedModule, args: tuple[Any, ...]) -> MemoryTrace:
    """What graphs for a call with these arguments will allocate in one slot. Trains nothing and keeps no graph.

    Nothing of it but compiled code is remembered, so all ranks that share in a capture go the same way in it whatever
    became of their traces. Raises CaptureError where a capture would; with collectives in the module it is collective.
    """
    own = control(graphed)
    refused, call = find_unsupported(own.module), signature(args, {}, own.device)
    if refused is not None:
        raise CaptureError(refused.what, user_line(), refused.remedy)
    if call is None:
        raise CaptureError("an argument cannot be part of a key", user_line(),
                           f"pass tensors on {own.device}, packed batches and constants")
    lifetimes: list[Lifetime] = []
    with as_in_training(own.module), own.alone() as free:
        if not free:
            raise CaptureError("another thread is inside the module", user_line(), "trace memory before it begins")
        reason = own._check_fingerprint()
        if reason is not None:
            raise CaptureError(reason, user_line(), "graphs add to the gradients of leaf parameters")
        own._compile(call, args, {})  # first by itself, as before a capture
        program, backend, gradients = own._program, own.capture_backend, own._output_gradients.of(call.key)
        slot = Slot(0, backend, own.device, backend.new_pool())
        rehearsal = dry_run(program, backend, gradients, args, {})
        try:
            capture_variant(program, backend, slot, SpareGradients(program.module), gradients, lambda: None,
                            contextlib.nullcontext(), own.lends, args, {}, rehearsal, lifetimes).reset()
            return MemoryTrace(tuple(lifetimes), slot.buffer_bytes())
        finally:
            rehearsal.read.clear()
            rehearsal.written.clear()
            slot.clear()
            if backend.device_type == "cuda":
                torch.cuda.empty_cache()


def predict_bank(graphed: GraphedModule, traces: Mapping[Capacity, MemoryTrace], slots: int) -> BankMemory:
    """What graphs for all capacities that `traces` are of will take in `slots` slots of `graphed`."""
    own = control(graphed)
    model = BankModel(traces, pool_model(own.backend))
    return model.predict(traces, slots, alone=own._slots.limit == 1)


def pool_model(backend: str) -> Callable[[], PoolModel]:
    """The model of the pools of a backend, by its name, and by the allocator's settings."""
    if backend != "cuda":
        return FirstFitPool
    return ExpandablePool if expandable_segments() else CachingPool


def expandable_segments() -> bool:
    """Whether torch's allocator for CUDA was told `expandable_segments:True`."""
    return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])


class SpareGradients(GradientBuffers):
    """Gradients that nobody reads: those of all parameters lie in the same memory, that of the largest."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._spare: dict[torch.device, torch.Tensor] = {}
        for parameter in map(local_tensor, module.parameters()):
            nbytes = parameter.numel() * parameter.element_size()
            kept = self._spare.get(parameter.device)
            if kept is None or kept.numel() < nbytes:
                self._spare[parameter.device] = torch.zeros(max(nbytes, 1), dtype=torch.uint8, device=parameter.device)

    def buffer(self, parameter: torch.nn.Parameter, placements: Sequence[Placement] | None = None) -> GradientBuffer:
        """A buffer of the parameter's form."""
        return GradientBuffer(parameter, with_local(parameter, self._like(parameter), placements))

    def _like(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        local = local_tensor(parameter)
        strides = own_strides(local) or contiguous_strides(local.shape)
        whole = torch.empty(0, dtype=local.dtype, device=local.device)
        return whole.set_(self._spare[local.device].untyped_storage(), 0, tuple(local.shape), strides)
