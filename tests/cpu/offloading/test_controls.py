"""What the copy streams promise, and that the emulated ones notice when somebody does not keep to
it."""

from collections import deque

import pytest
import torch
from offloadkit import DENSE, batches, config, runtime_of, same, train

from packgraph.graphs.copy_streams import HostMemory, aligned
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.recorder.copy_streams import (
    EmulatedCopyStreams,
    Queues,
    RecordedCopyStreams,
    plain,
)
from packgraph.models.decoder import DecoderModel
from packgraph.offloading.api import attach
from packgraph.offloading.group import SavedGroup
from packgraph.offloading.runtime import OffloadRuntime


def numbers(value: float, count: int = 6) -> torch.Tensor:
    return torch.full((count,), value).view(torch.uint8)


def read(memory: torch.Tensor) -> list[float]:
    return memory.view(torch.float32).tolist()


@pytest.mark.parametrize("late", [(), ("out",), ("back",), ("out", "back")])
def test_a_reload_brings_what_was_copied_out(late):
    copy_streams = EmulatedCopyStreams(set(late))
    host = copy_streams.host(aligned(24))
    copy_streams.out([numbers(1.0)], host)
    target = torch.empty(24, dtype=torch.uint8)
    back = copy_streams.back(host, [target])
    copy_streams.wait(back)
    assert read(target) == [1.0] * 6


def reuse(copy_streams: EmulatedCopyStreams, forget: bool) -> list[float]:
    """Two groups one after another in the same host memory, while the first one's reload has not
    been waited for."""
    target = torch.empty(24, dtype=torch.uint8)
    host = copy_streams.host(aligned(24))
    copy_streams.out([numbers(1.0)], host)
    first = copy_streams.back(host, [target])
    copy_streams.give_back(host)
    again = copy_streams.host(aligned(24))
    assert again is host
    if forget:
        again.last = None
    copy_streams.wait(copy_streams.out([numbers(2.0)], again))
    copy_streams.wait(first)
    return read(target)


def test_host_memory_is_written_again_after_its_reload_only():
    assert reuse(EmulatedCopyStreams({"back"}), forget=False) == [1.0] * 6
    assert reuse(EmulatedCopyStreams({"back"}), forget=True) != [1.0] * 6


def test_memory_that_was_given_back_too_early_is_copied_as_nan():
    copy_streams = EmulatedCopyStreams({"out"})
    host, source = copy_streams.host(aligned(24)), numbers(1.0)
    copy = copy_streams.out([source], host)
    copy.held = []
    del source
    copy_streams.wait(copy)
    assert all(value != value for value in read(host.spans[0][:24]))


def test_postponed_copies_copy_what_was_there_when_they_were_asked_for_at_the_next_launch():
    copy_streams, queued = EmulatedCopyStreams(), deque[int]()
    copy_streams.postpone(lambda: queued.append(1))
    assert not queued
    copy_streams.launched()
    copy_streams.launched()
    assert list(queued) == [1]


def test_who_is_under_way_when_a_capture_begins_keeps_its_host_memory():
    copy_streams = EmulatedCopyStreams(late=("out", "back"))
    host, source = copy_streams.host(64), torch.arange(64, dtype=torch.uint8)
    copy_streams.out([source], host)
    copy_streams.memories.let_go()
    assert copy_streams.memories.arenas.nbytes() == 0
    other = copy_streams.host(64)
    copy_streams.wait(copy_streams.out([torch.zeros(64, dtype=torch.uint8)], other))
    target = torch.empty_like(source)
    copy_streams.wait(copy_streams.back(host, [target]))
    assert torch.equal(target, source)
    copy_streams.give_back(host)
    assert copy_streams.host(64) is host, "which is of use again"


@pytest.fixture(scope="module")
def kept():
    return train(config(layers=3))[0]


def reload_without_waiting_for_the_copy_out(patch):
    add = Queues.add
    patch.setattr(
        Queues,
        "add",
        lambda self, copy_stream, number, after, run: add(self, copy_stream, number, None, run),
    )
    start = SavedGroup.start_reload

    def hasty(self):
        if self.copy_out is not None:
            self.copy_out.done = True
            self.copy_streams.wait, wait = (lambda copy: None), self.copy_streams.wait
            try:
                start(self)
            finally:
                self.copy_streams.wait = wait

    patch.setattr(SavedGroup, "start_reload", hasty)


def use_without_waiting_for_the_reload(patch):
    for copy_streams in (EmulatedCopyStreams, RecordedCopyStreams):
        wait = copy_streams.wait
        patch.setattr(
            copy_streams,
            "wait",
            lambda self, copy, wait=wait: None if copy.copy_stream == "back" else wait(self, copy),
        )


def give_back(copy):
    """Let nothing hold the sources of `copy` any more."""
    done = copy.done
    copy.finish()
    copy.done = done


def give_memory_back_at_once(patch):
    queued = OffloadRuntime._queued

    def hasty(self, copy_streams, copy):
        give_back(copy)
        queued(self, copy_streams, copy)

    patch.setattr(OffloadRuntime, "_queued", hasty)


def end_captures_without_joining(patch):
    patch.setattr(RecordedCopyStreams, "join", lambda self: None)


def never_take_other_host_memory(patch):
    one = HostMemory((plain(1 << 20),))
    patch.setattr(EmulatedCopyStreams, "host", lambda self, nbytes: one)


FOUND = {("chunk", give_memory_back_at_once), ("layer", end_captures_without_joining)}


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
    """Graphs say so before one of them is used."""
    broken(monkeypatch)
    for granularity in granularities:

        def run(granularity=granularity):
            found, _, _ = train(
                config(layers=3),
                DENSE,
                granularity=granularity,
                late=(late,) if late else (),
                in_flight=8,
            )
            assert not same(found, kept), granularity

        if (granularity, broken) in FOUND:
            with pytest.raises(CaptureError, match="something else in a replay"):
                run()
        else:
            run()


def test_the_controls_differ_by_what_they_break_alone(kept):
    for granularity in (None, "chunk", "layer"):
        assert same(
            train(config(layers=3), DENSE, granularity=granularity, late=("out",), in_flight=8)[0],
            kept,
        )


def test_a_second_backward_through_what_has_moved_is_refused():
    model = DecoderModel(config(), seed=1)
    runtime_of(model, model, DENSE)
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
        runtime = OffloadRuntime(
            ("core_attn",), EmulatedCopyStreams({"out", "back"}), min_bytes=1, measures=measures
        )
        attach(runtime, module)
        x = torch.randn(5, 6, requires_grad=True)
        module(x).backward()
        results.append([module.weight.grad, x.grad])
        (group,) = runtime.trace.groups
        # The product [5, 4], of which both halves were saved, and the sine [5, 2]; x is a leaf.
        assert (group.bytes, group.copies) == (4 * (5 * 4 + 5 * 2), 2)
    assert same(*results)
