"""Traces tell compute alone, whatever was copied meanwhile; copies are timed where there are
any."""

import pytest
import torch
from offloadkit import DENSE, config
from torch import nn

from packgraph.graphs.recorder.copy_streams import EmulatedCopyStreams
from packgraph.models.decoder import DecoderModel
from packgraph.offloading.api import attach
from packgraph.offloading.plan import CopySpeed
from packgraph.offloading.runtime import OffloadRuntime
from packgraph.offloading.timing import copy_speed
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

COMPUTE, WAIT = 10.0, 1000.0


class CountedLanes(EmulatedCopyStreams):
    """A clock that counts: every module that runs takes COMPUTE, every copy that main waits for
    takes WAIT."""

    def __init__(self):
        super().__init__()
        self.now, self.waits = 0.0, 0

    def clock(self):
        return self.now

    def elapsed_us(self, start, end):
        return end - start

    def wait(self, copy):
        if not copy.done:
            self.now, self.waits = self.now + WAIT, self.waits + 1
        super().wait(copy)


def traced(measures, modules=DENSE, in_flight=1):
    """The trace of an eager pass, and how often main waited. measures: nothing moves."""
    model, copy_streams = DecoderModel(config(layers=3), seed=1), CountedLanes()

    def work(*_):
        copy_streams.now += COMPUTE

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(work)
            module.register_full_backward_pre_hook(work)
    runtime = OffloadRuntime(
        modules, copy_streams, min_bytes=1, in_flight=in_flight, measures=measures
    )
    attach(runtime, model)
    for _ in range(2):
        model(PackedBatch.build([[1, 2, 3], [4, 5]], Capacity(24, 4))).backward()
    runtime.end_step()
    return runtime.trace, copy_streams.waits


@pytest.mark.parametrize("in_flight", [0, 1, 3])
def test_a_trace_of_what_moves_is_one_of_compute_alone(in_flight):
    moved, waits = traced(False, in_flight=in_flight)
    kept, none = traced(True)
    assert waits > 20 and not none
    assert moved == kept, "no microsecond of the waits is in it"
    assert kept.forward_us > 0 < kept.backward_us


def test_copies_are_taken_for_what_plans_assume_where_there_is_no_device():
    assert copy_speed(torch.device("cpu")) == CopySpeed()
