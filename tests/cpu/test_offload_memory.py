"""Peak memory falls by what the plan says, byte by byte: every storage that a microbatch makes is counted."""
import weakref
from dataclasses import replace

import pytest
import torch
from offloadkit import CAPACITIES, DENSE, EXPERTS, config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from packgraph.graphs.lanes import DeviceMemory
from packgraph.graphs.lanes_emulated import EmulatedLanes
from packgraph.models.decoder import DecoderModel
from packgraph.offload.attach import attach
from packgraph.offload.engine import Offload
from packgraph.packing.batch import PackedBatch
from packgraph.plan.offload.plan import CopySpeed, OffloadPlan, OffloadTrace
from packgraph.plan.offload.search import plan_for_bytes, plan_for_time

SPEED = CopySpeed(1e9, 1e9, 0.0)  # memory is a matter of the program's order
WITHIN = 0.02


class Allocator(TorchDispatchMode):
    """Bytes of the storages that operations have made and somebody holds: now, and at the most since the last look."""

    def __init__(self):
        super().__init__()
        self.now = self.most = self.peak = 0
        self.known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs))
                 if isinstance(tensor, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in {*given, *self.known}:
                self.made(tensor.untyped_storage())
        return result

    def made(self, storage):
        key, nbytes = storage._cdata, storage.nbytes()

        def died(_):
            self.now -= nbytes
            del self.known[key]

        self.known[key] = weakref.ref(storage, died)
        self.now += nbytes
        self.most = max(self.most, self.now)
        self.peak = max(self.peak, self.now)

    def look(self):
        found, self.most = DeviceMemory(self.now, self.most), self.now
        return found


class Counted(EmulatedLanes):
    def __init__(self, allocator):
        super().__init__()
        self.memory = allocator.look


def run(settings, modules, parts, follows=None):
    """(peak bytes of a microbatch, trace): nothing moves, or as a plan says."""
    allocator, model = Allocator(), DecoderModel(settings, seed=1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine = Offload(modules, Counted(allocator), min_bytes=1, measures=follows is None, parts=parts)
    attach(engine, model)
    if follows is not None:
        engine.follow(*follows)
    batch = PackedBatch.build([list(range(1, 20)), list(range(1, 15))], CAPACITIES[1])
    torch.manual_seed(3)
    for _ in range(2):  # the first one makes what is made once
        with allocator:
            begin = allocator.peak = allocator.now
            model(batch, torch.tensor(20)).backward()
        engine.end_step()
    return allocator.peak - begin, engine.trace


def planned(trace: OffloadTrace, share: float) -> OffloadPlan:
    least = plan_for_time(trace, SPEED, 1.0).peak_bytes
    return plan_for_bytes(trace, SPEED, int(least + share * (trace.kept_peak_bytes - least)))


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_peak_memory_falls_by_what_the_plan_says(experts, parts):
    settings = replace(config(layers=4, experts=experts), intermediate_size=96)
    modules = EXPERTS if experts else DENSE
    kept, trace = run(settings, modules, parts)
    assert len(trace.backward_room) == len(trace.groups) and max(trace.backward_room) > trace.bytes // 20
    for share in (0.0, 0.3, 0.6, 0.9):
        plan = planned(trace, share)
        fell = kept - run(settings, modules, parts, (trace, plan))[0]
        assert plan.saved_bytes > 0 and abs(fell - plan.saved_bytes) <= WITHIN * plan.saved_bytes, share


def test_rooms_that_are_not_there_are_seen():
    """The control: with three times the room groups come back too early, and less falls than was said."""
    settings = replace(config(layers=4), intermediate_size=96)
    kept, trace = run(settings, DENSE, 1)
    false = replace(trace, backward_room=tuple(3 * room for room in trace.backward_room))
    plan = planned(false, 0.0)
    assert kept - run(settings, DENSE, 1, (false, plan))[0] < (1 - WITHIN) * plan.saved_bytes
