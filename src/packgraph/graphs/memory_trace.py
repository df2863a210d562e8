"""What the graphs of one bucket will allocate, seen before they are captured.

A capture keeps memory in a way of its own: outputs of a region until its backward, gradients until the region that
reads them, nothing of autograd in between. So what is watched is the build itself (`build.py`), with a window that
runs the operations instead of capturing them, and notes the birth and death of every storage they make:

    VariantBuild ─▶ TraceWindow.capture(run) ─▶ operations run on real memory ─▶ MemoryTrace ─▶ plan/memory/bank.py

It is undone like a rehearsal, takes about the memory of one eager microbatch, and adds gradients to a spare buffer.
Memory that a kernel takes and gives back inside one operation (accumulators of attention, say) is no tensor that
anybody sees: on CUDA the allocator's peak during each operation tells of it. That starts the allocator's peak
statistics (torch.cuda.max_memory_allocated) again; what they said before is in `peak_memory.py`.
"""
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from packgraph.graphs.backend import Backend, Result
from packgraph.graphs.build import VariantBuild
from packgraph.graphs.capture import Observed, compiled_code, explained, undone
from packgraph.graphs.effects import HostEffects, ObservedProgram
from packgraph.graphs.errors import CaptureError, user_line
from packgraph.graphs.graphed import GraphedModule
from packgraph.graphs.guard import PLAIN_TENSORS, Journal, Watch, shapes_only
from packgraph.graphs.lanes import Copy, HostMemory, Lanes, TimedCopy, capturing_lanes
from packgraph.graphs.parameters import GradientBuffers, aliased_parameters, local_tensor
from packgraph.graphs.peak_memory import look
from packgraph.graphs.program import Program
from packgraph.graphs.refusals import refusal
from packgraph.graphs.signature import signature
from packgraph.graphs.slot import Slot
from packgraph.graphs.strides import contiguous_strides, own_strides
from packgraph.graphs.wrapper import as_in_training
from packgraph.packing.capacity import Capacity
from packgraph.plan.memory.bank import BankMemory, BankModel, Lifetime, MemoryTrace, PoolModel
from packgraph.plan.memory.caching import CachingPool
from packgraph.plan.memory.expandable import ExpandablePool
from packgraph.plan.memory.first_fit import FirstFitPool


def trace_memory(graphed: GraphedModule, args: tuple[Any, ...]) -> MemoryTrace:
    """What graphs for a call with these arguments will allocate in one slot. Trains nothing and captures nothing.

    Raises CaptureError where a capture would; with collectives in the module it is collective.
    """
    refused = refusal(graphed.module)
    if refused is not None:
        raise CaptureError(refused.what, user_line(), refused.remedy)
    with as_in_training(graphed.module):
        call = signature(args, {}, graphed.device)
        if call is not None:
            graphed._compile(call, args, {})  # first by itself, as before a capture
        return _trace(graphed._program, graphed._backend, graphed._observed, graphed.lends, args)


def predict_bank(graphed: GraphedModule, traces: Mapping[Capacity, MemoryTrace], slots: int) -> BankMemory:
    """What graphs for all capacities that `traces` are of will take in `slots` slots of `graphed`."""
    model = BankModel(traces, pool_model(graphed.backend))
    return model.predict(traces, slots, alone=graphed._slots.limit == 1)


def pool_model(backend: str) -> Callable[[], PoolModel]:
    """The model of the pools of a backend, by its name, and by the allocator's settings."""
    if backend != "cuda":
        return FirstFitPool
    return ExpandablePool if expandable_segments() else CachingPool


def expandable_segments() -> bool:
    """Whether torch's allocator for CUDA was told `expandable_segments:True`."""
    return bool(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])


def _trace(program: Program, backend: Backend, observed: Observed, lends: bool, args: tuple[Any, ...]) -> MemoryTrace:
    effects = HostEffects(program.module, program.volatile, program.assigned)
    traces: list[MemoryTrace] = []
    device = next((tensor.device for tensor in [*program.module.parameters(), *program.module.buffers()]),
                  torch.device(backend.device_type))
    slot = Slot(0, backend, device)

    def work() -> None:
        buffers = SpareGradients(program.module)
        window = TraceWindow(journal, device, buffers.storages(), backend.lanes)
        build = VariantBuild(ObservedProgram(program, effects), slot, window, aliases, buffers, observed, journal,
                             lends)
        build.capture(args, {})
        traces.append(window.close())

    with explained(), undone(program.module, backend, effects) as journal, \
            aliased_parameters(program.module) as aliases, \
            compiled_code(program.compiler is not None, fixed=True):
        if backend.device_type == "cuda":
            backend.warm_up(work)  # on the stream of captures, whose workspaces then exist
        else:
            work()
    return replace(traces[0], buffers=slot.buffer_bytes())


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

    def storages(self) -> list[torch.UntypedStorage]:
        """The memory that gradients are added to."""
        return [kept.untyped_storage() for kept in self._spare.values()]

    def buffer(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """A tensor of the parameter's form."""
        local = local_tensor(parameter)
        strides = own_strides(local) or contiguous_strides(local.shape)
        whole = torch.empty(0, dtype=local.dtype, device=local.device)
        spare = whole.set_(self._spare[local.device].untyped_storage(), 0, tuple(local.shape), strides)
        if not isinstance(parameter, DTensor):
            return spare
        return DTensor.from_local(spare, parameter.device_mesh, parameter.placements, run_check=False,
                                  shape=parameter.shape, stride=parameter.stride())


class _Unbound:
    """Stands for a tensor of the window; there is no static memory behind it."""

    @property
    def tensor(self) -> torch.Tensor:
        raise RuntimeError("a memory trace has no static tensors: it captures nothing")


class _NoGraph:
    """Stands for a graph."""

    def replay(self) -> None:
        raise RuntimeError("a memory trace has no graphs: it captures nothing")

    def reset(self) -> None:
        """Nothing to free."""


class _WindowLanes:
    """Lanes of the window, on those of eager work: with captures and copies of their own, as every window has.

    So an offload engine does in a trace what it does in the capture: nothing is postponed until a graph is launched,
    what captured stages save is another pass than what eager ones between them do, and no eager pass is timed.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.scope, self.replayed = 0, set[int]()  # nothing is ever replayed, so nobody asks its clocks
        self.timed: list[TimedCopy] | None = None
        self.host, self.give_back, self.memory = lanes.host, lanes.give_back, lanes.memory
        self.point, self.clock, self.elapsed_us = lanes.point, lanes.clock, lanes.elapsed_us
        self.postpone, self.launched = lanes.postpone, lanes.launched
        self._lanes, self._under_way = lanes, list[Copy]()

    def out(self, sources: Sequence[torch.Tensor], host: HostMemory, since: Any = None) -> Copy:
        """See Lanes."""
        self._under_way.append(self._lanes.out(sources, host, since))
        return self._under_way[-1]

    def back(self, host: HostMemory, targets: Sequence[torch.Tensor]) -> Copy:
        """See Lanes."""
        self._under_way.append(self._lanes.back(host, targets))
        return self._under_way[-1]

    def wait(self, copy: Copy) -> None:
        """See Lanes."""
        self._lanes.wait(copy)
        self._under_way = [other for other in self._under_way if other is not copy]

    def join(self) -> None:
        """Main waits for the window's copies; those of eager work are not looked at."""
        for copy in list(self._under_way):
            self.wait(copy)


class TraceWindow:
    """A window that runs what it should capture, and notes when memory is taken and given back."""

    def __init__(self, journal: Journal, device: torch.device, spare: list[torch.UntypedStorage], lanes: Lanes) -> None:
        """spare: memory that may be written to without being put back. lanes: of eager work, which carry the copies."""
        self.journal, self.device, self.lanes = journal, device, _WindowLanes(lanes)
        self.own = {storage._cdata for storage in spare}
        self._hidden = _HiddenMemory(device) if device.type == "cuda" else None
        self._clock = 0
        self._brief = False
        self._blocks: list[list[Any]] = []  # of each: bytes, birth, death, brief
        self._storages: list[weakref.ref[torch.UntypedStorage] | None] = []
        self._block_of: dict[int, int] = {}

    def capture(self, run: Callable[[], Result], brief: bool = False) -> tuple[_NoGraph, Result]:
        """Run `run` and note what it allocates."""
        self._brief = brief
        self.lanes.scope += 1  # copies end with the capture that they begin in
        with capturing_lanes(self.lanes), _Tracing(self):
            try:
                result = run()
            finally:
                self.lanes.join()  # also where memory runs out: sources of copies under way are held until then
        self._brief = False
        return _NoGraph(), result

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Memory of the slot's pool in `like`'s form."""
        tensor = torch.empty_like(like)
        self._take(tensor.untyped_storage(), brief=False)
        return tensor

    def materialise(self) -> None:
        """Nothing to do: the operations have run."""

    def static(self, tensor: torch.Tensor) -> _Unbound:
        """Nothing: no replay will ask."""
        return _Unbound()

    def close(self) -> MemoryTrace:
        """What was noted."""
        if any(block[2] is None for block in self._blocks):
            gc.collect()
        self._storages.clear()  # what dies from here on is held by the caller: it outlives the capture
        return MemoryTrace(tuple(Lifetime(*block) for block in self._blocks))

    def begin_operation(self) -> None:
        """An operation is about to run."""
        if self._hidden is not None:
            self._hidden.begin()

    def end_operation(self, result: Any, inputs: set[int]) -> None:
        """Note what an operation made. inputs: the storages it was given."""
        made = 0
        for out in tree_leaves(result):
            if not isinstance(out, torch.Tensor) or out.layout is not torch.strided or shapes_only([type(out)]):
                continue
            storage = out.untyped_storage()
            known = storage._cdata in inputs or storage._cdata in self._block_of
            if not known and storage.nbytes() and storage.device.type == self.device.type:
                self._take(storage, self._brief)
                made += storage.nbytes()
        hidden = self._hidden.end(made) if self._hidden is not None else 0
        if hidden:
            self._blocks.append([hidden, self._tick(), self._tick(), self._brief])
            self._storages.append(None)

    def _take(self, storage: torch.UntypedStorage, brief: bool) -> None:
        number, cdata = len(self._blocks), storage._cdata

        def died(_: Any) -> None:
            self._blocks[number][2] = self._tick()
            if self._block_of.get(cdata) == number:
                del self._block_of[cdata]

        self._blocks.append([storage.nbytes(), self._tick(), None, brief])
        self._storages.append(weakref.ref(storage, died))
        self._block_of[cdata] = number
        self.own.add(cdata)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


class _HiddenMemory:
    """Bytes that were taken and given back inside one operation, by the allocator's own peak."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before = 0

    def begin(self) -> None:
        """Look at what is taken now."""
        self._before = look(self.device)["requested_bytes"]["all"]["current"]

    def end(self, made: int) -> int:
        """Bytes at the peak since `begin` beyond the `made` bytes of new tensors."""
        peak = torch.cuda.memory.memory_stats_as_nested_dict(self.device)["requested_bytes"]["all"]["peak"]
        return max(0, peak - self._before - made)


class _Tracing(Watch):
    """Runs operations for a window; writes to what existed before are journalled."""

    def __init__(self, window: TraceWindow) -> None:
        super().__init__(window.journal, refuse=False, device=None)
        self._own, self._window = window.own, window

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if shapes_only(types) or any(t not in PLAIN_TENSORS for t in types):
            return super().__torch_dispatch__(func, types, args, kwargs)
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs or {}))
                  if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided}
        self._window.begin_operation()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._window.end_operation(result, inputs)
        return result
