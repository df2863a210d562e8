"""Ranges in profiles: what is replayed, in which slot and capacity; none without a profiler."""

import contextlib

import pytest
import torch
from graphkit import make_toy, toy_inputs, toy_loss
from torch import nn
from torch.profiler import ProfilerActivity, profile

import packgraph
from packgraph.graphs.backend import profiler_range, range_name, sizes_in_short
from packgraph.graphs.graphed import graph
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.packing.capacity import Capacity
from packgraph.parallel.pipeline.executor import Pipeline
from packgraph.parallel.pipeline.links import Links

CPU, TOKENS = torch.device("cpu"), torch.tensor(15)
SMALL, LARGE = Capacity(24, 4), Capacity(48, 4, 24)


def decoder():
    config = DecoderConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
    )
    return DecoderModel(config, seed=1)


def batch(capacity=SMALL):
    return packgraph.PackedBatch.build([[1, 2, 3, 4], [5, 6, 7]], capacity)


@contextlib.contextmanager
def ranges():
    """The names of our ranges of the block, in the order in which they begin; filled at its end."""
    found: list[str] = []
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield found
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    found += [event.name for event in events if event.name.startswith("packgraph ")]


def both(segment, slot=0, size="24x4"):
    return [f"packgraph {segment} {way} slot {slot} {size}" for way in ("forward", "backward")]


def test_three_replays_are_named_with_segment_slot_and_capacity():
    graphed = graph(decoder(), warmup=0, granularity="chunk")
    graphed(batch(), TOKENS).backward()
    with ranges() as found:
        for capacity in (SMALL, LARGE, SMALL):
            graphed(batch(capacity), TOKENS).backward()
    small, large = both("embed to head 2"), both("embed to head 2", size="48x4x24")
    # The second was captured under the profiler, and compared.
    assert found == [*small, *large, *large, *small]


@pytest.mark.parametrize("direct", [False, True])
def test_every_segment_has_its_ranges(direct):
    graphed = graph(decoder(), warmup=0, granularity="layer")
    graphed.forward_backward(batch(), TOKENS)
    with ranges() as found:
        if direct:
            graphed.forward_backward(batch(), TOKENS)
        else:
            graphed(batch(), TOKENS).backward()
    segments = ["embed", "layer 0", "layer 1", "head 2"]
    forwards, backwards = zip(*map(both, segments), strict=True)
    assert found == [*forwards, *reversed(backwards)]


def test_microbatches_in_flight_name_their_slots():
    graphed = graph(decoder(), warmup=0, scope=["attn"], granularity="layer")
    graphed(batch(), TOKENS).backward()
    with ranges() as found:
        for loss in [graphed(batch(), TOKENS) for _ in range(2)]:
            loss.backward()
    every = [name for slot in (0, 1) for layer in (0, 1) for name in both(f"attn {layer}", slot)]
    assert sorted(found) == sorted(every)


def test_a_module_without_stages_names_the_shape_of_its_input():
    graphed = graph(nn.Linear(16, 4), warmup=1)
    graphed(torch.ones(8, 16)).sum().backward()
    with ranges() as found:
        graphed(torch.ones(8, 16)).sum().backward()
    assert found == 2 * both("module", size="8x16")  # one of them to be compared
    assert sizes_in_short(((batch(), torch.ones(2)), {"other": batch(LARGE)})) == "24x4,48x4x24"
    assert sizes_in_short(((3, None), {})) == ""
    assert range_name("module", "", LARGE) == "packgraph module 48x4x24"


@pytest.mark.parametrize("whole_steps", [False, True])
def test_a_pipeline_names_microbatches_outside_captured_code(whole_steps):
    graphed = graph(decoder(), warmup=0, slots=1, granularity="chunk")
    links = Links([0], {}, None, None)
    alone = Pipeline([graphed], links, 16, torch.float32, CPU, whole_steps=whole_steps)
    batches = [batch(), batch(LARGE)]
    with ranges() as captured:
        alone.step(batches, TOKENS)
    with ranges() as found:
        alone.step(batches, TOKENS)
    compared = set(captured) - {name for name in captured if "microbatch" in name}
    assert len(captured) == len(found) + (0 if whole_steps else len(compared))
    if whole_steps:
        assert found == ["packgraph step slot 0 24x4,48x4x24"]
    else:
        name = "packgraph microbatch {} stage 0 {} {}"
        assert found[::2] == [
            name.format(number, way, size)
            for number, size in enumerate(("24x4", "48x4x24"))
            for way in ("forward", "backward")
        ]
        small, large = both("embed to head 2"), both("embed to head 2", size="48x4x24")
        assert found[1::2] == [*small, *large]


def test_without_a_profiler_no_range_is_made(monkeypatch):
    made = []

    class Counted(torch.autograd.profiler.record_function):
        def __init__(self, name):
            made.append(name)
            super().__init__(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", Counted)
    graphed = graph(make_toy(), warmup=0)

    def three():
        for _ in range(3):
            with profiler_range("microbatch", 0, SMALL):
                toy_loss(graphed(*toy_inputs(8))).backward()

    three()
    assert made == [] and graphed.stats.replayed == 3
    with ranges() as found:
        three()
    assert made == found and found.count("packgraph microbatch 0 24x4") == 3
    three()
    assert made == found
