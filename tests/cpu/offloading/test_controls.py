"""What the lanes promise, and that the emulated ones notice when somebody does not keep to it."""

from collections import deque

import pytest
import torch
from offloadkit import DENSE, batches, config, engine_of, same, train

from packgraph.graphs.copy_streams import HostMemory, aligned
from packgraph.graphs.recorder.copy_streams import (
    EmulatedCopyStreams,
    Queues,
    RecordedCopyStreams,
    plain,
)
from packgraph.models.decoder import DecoderModel
from packgraph.offloading.attach import attach
from packgraph.offloading.group import SavedGroup
from packgraph.offloading.runtime import OffloadRuntime


def numbers(value: float, count: int = 6) -> torch.Tensor:
    return torch.full((count,), value).view(torch.uint8)


def read(memory: torch.Tensor) -> list[float]:
    return memory.view(torch.float32).tolist()


@pytest.mark.parametrize("late", [(), ("out",), ("back",), ("out", "back")])
def test_a_reload_brings_what_was_copied_out(late):
    lanes = EmulatedCopyStreams(set(late))
    host = lanes.host(aligned(24))
    lanes.out([numbers(1.0)], host)
    target = torch.empty(24, dtype=torch.uint8)
    back = lanes.back(host, [target])
    lanes.wait(back)
    assert read(target) == [1.0] * 6


def reuse(lanes: EmulatedCopyStreams, forget: bool) -> list[float]:
    """Two groups one after another in the same host memory, while the first one's reload has not
    been waited for."""
    target = torch.empty(24, dtype=torch.uint8)
    host = lanes.host(aligned(24))
    lanes.out([numbers(1.0)], host)
    first = lanes.back(host, [target])
    lanes.give_back(host)
    again = lanes.host(aligned(24))
    assert again is host
    if forget:
        again.last = None
    lanes.wait(lanes.out([numbers(2.0)], again))
    lanes.wait(first)
    return read(target)


def test_host_memory_is_written_again_after_its_reload_only():
    assert reuse(EmulatedCopyStreams({"back"}), forget=False) == [1.0] * 6
    assert reuse(EmulatedCopyStreams({"back"}), forget=True) != [1.0] * 6


def test_memory_that_was_given_back_too_early_is_copied_as_nan():
    lanes = EmulatedCopyStreams({"out"})
    host, source = lanes.host(aligned(24)), numbers(1.0)
    copy = lanes.out([source], host)
    copy.held = []
    del source
    lanes.wait(copy)
    assert all(value != value for value in read(host.spans[0][:24]))


def test_postponed_copies_copy_what_was_there_when_they_were_asked_for_at_the_next_launch():
    lanes, queued = EmulatedCopyStreams(), deque[int]()
    lanes.postpone(lambda: queued.append(1))
    assert not queued
    lanes.launched()
    lanes.launched()
    assert list(queued) == [1]


def test_who_is_under_way_when_a_capture_begins_keeps_its_host_memory():
    lanes = EmulatedCopyStreams(late=("out", "back"))
    host, source = lanes.host(64), torch.arange(64, dtype=torch.uint8)
    lanes.out([source], host)
    lanes.memories.let_go()
    assert lanes.memories.arenas.nbytes() == 0
    other = lanes.host(64)
    lanes.wait(lanes.out([torch.zeros(64, dtype=torch.uint8)], other))
    target = torch.empty_like(source)
    lanes.wait(lanes.back(host, [target]))
    assert torch.equal(target, source)
    lanes.give_back(host)
    assert lanes.host(64) is host, "which is of use again"


@pytest.fixture(scope="module")
def kept():
    return train(config(layers=3))[0]


def reload_without_waiting_for_the_copy_out(patch):
    add = Queues.add
    patch.setattr(
        Queues, "add", lambda self, lane, number, after, run: add(self, lane, number, None, run)
    )
    start = SavedGroup.start_reload

    def hasty(self):
        if self.copy_out is not None:
            self.copy_out.done = True
            self.lanes.wait, wait = (lambda copy: None), self.lanes.wait
            try:
                start(self)
            finally:
                self.lanes.wait = wait

    patch.setattr(SavedGroup, "start_reload", hasty)


def use_without_waiting_for_the_reload(patch):
    for lanes in (EmulatedCopyStreams, RecordedCopyStreams):
        wait = lanes.wait
        patch.setattr(
            lanes,
            "wait",
            lambda self, copy, wait=wait: None if copy.lane == "back" else wait(self, copy),
        )


def give_back(copy):
    """Let nothing hold the sources of `copy` any more."""
    done = copy.done
    copy.finish()
    copy.done = done


def give_memory_back_at_once(patch):
    queued = OffloadRuntime._queued

    def hasty(self, lanes, copy):
        give_back(copy)
        queued(self, lanes, copy)

    patch.setattr(OffloadRuntime, "_queued", hasty)


def end_captures_without_joining(patch):
    patch.setattr(RecordedCopyStreams, "join", lambda self: None)


def never_take_other_host_memory(patch):
    one = HostMemory((plain(1 << 20),))
    patch.setattr(EmulatedCopyStreams, "host", lambda self, nbytes: one)


@pytest.mark.parametrize(
    ("broken", "late", "granularities"),
    [
        (
            reload_without_waiting_for_the_copy_out,
            "out",
            (None,),
        ),  # a dry run finds what is held, and captures nothing
        (use_without_waiting_for_the_reload, "back", (None, "chunk")),
        (give_memory_back_at_once, "out", (None, "chunk")),
        (end_captures_without_joining, "out", ("layer",)),
        (never_take_other_host_memory, "", (None, "chunk")),
    ],
)
def test_whatever_is_not_waited_for_is_a_wrong_number(
    broken, late, granularities, kept, monkeypatch
):
    broken(monkeypatch)
    for granularity in granularities:
        found, _, _ = train(
            config(layers=3),
            DENSE,
            granularity=granularity,
            late=(late,) if late else (),
            in_flight=8,
        )
        assert not same(found, kept), granularity


def test_the_controls_differ_by_what_they_break_alone(kept):
    for granularity in (None, "chunk", "layer"):
        assert same(
            train(config(layers=3), DENSE, granularity=granularity, late=("out",), in_flight=8)[0],
            kept,
        )


def test_a_second_backward_through_what_has_moved_is_refused():
    model = DecoderModel(config(), seed=1)
    engine_of(model, model, DENSE)
    loss = model(batches(1)[0], torch.tensor(9))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_views_of_one_memory_are_one_copy_and_keep_their_layout():
    class Views(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(6, 4))
            self.offload = None

        def forward(self, x):
            with self.offload("core_attn"):
                first, second = (x @ self.weight).split(2, dim=1)
                return (first * second.sin()).sum()

    results = []
    for measures in (True, False):
        torch.manual_seed(0)
        module = Views()
        engine = OffloadRuntime(
            ("core_attn",), EmulatedCopyStreams({"out", "back"}), min_bytes=1, measures=measures
        )
        attach(engine, module)
        x = torch.randn(5, 6, requires_grad=True)
        module(x).backward()
        results.append([module.weight.grad, x.grad])
        (group,) = engine.trace.groups
        # The product [5, 4], of which both halves were saved, and the sine [5, 2]; x is a leaf.
        assert (group.bytes, group.copies) == (4 * (5 * 4 + 5 * 2), 2)
    assert same(*results)
