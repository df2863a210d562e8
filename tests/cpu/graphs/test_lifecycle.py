"""Slots, fallbacks, failures and what they leave behind."""

import gc
import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from graphkit import make_toy, toy_inputs, toy_loss, train
from statekit import quietly
from torch import nn
from tracekit import differences

from packgraph.graphs import build, fallback
from packgraph.graphs.checks import host_sync as guard
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.graphed import graph
from packgraph.graphs.recorder.backend import RecorderWindow
from packgraph.graphs.reference import Reference

BRIEF = {"steps": 3, "sizes": (8,), "in_flight": 2}


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.parametrize("failing", range(1, 9))
@pytest.mark.few(5)
def test_a_failure_in_the_nth_capture_changes_nothing(failing, granularity, monkeypatch):
    """R8: gradients, buffers, random state as before; training goes on eagerly; a later key can
    still be captured."""
    count = itertools.count(1)
    real = RecorderWindow.capture

    def capture(self, run):
        result = real(self, run)
        if next(count) == failing:
            raise RuntimeError("injected failure")
        return result

    options = {"steps": 4, "sizes": (8, 12), "in_flight": 2}
    eager = train(make_toy(), **options)
    monkeypatch.setattr(RecorderWindow, "capture", capture)
    graphed = graph(make_toy(), granularity=granularity, warmup=1)
    trace = quietly(lambda: train(graphed, **options))
    assert differences(eager, trace) == []
    if granularity == "layer" or failing <= 2:
        assert graphed.stats.fallbacks["capture failed"] > 0
    assert graphed.slots.in_flight() == 0


def test_a_journal_that_does_not_restore_is_seen(monkeypatch):
    """Negative control of R7: without the undo a capture on the CPU would count buffers and
    gradients twice."""
    eager = train(make_toy(), **BRIEF)
    monkeypatch.setattr(
        "packgraph.graphs.checks.host_sync.Journal.restore", lambda self: self._saved.clear()
    )
    assert differences(eager, train(graph(make_toy(), warmup=1), **BRIEF)) != []


def test_a_journal_waits_on_the_host_where_the_device_is_full(monkeypatch):
    """Old contents of a device that says it has no memory; another way would be to give up the
    capture."""
    clone, full = torch.Tensor.clone, []

    def no_memory(tensor):
        if tensor.dtype is torch.uint8:
            full.append(tensor)
            raise torch.OutOfMemoryError("injected")
        return clone(tensor)

    eager = train(make_toy(), **BRIEF)
    monkeypatch.setattr(torch.Tensor, "clone", no_memory)  # layers may call it
    graphed = graph(make_toy(), warmup=1, strict=True)
    assert differences(eager, train(graphed, **BRIEF)) == [] and full and graphed.stats.replayed > 0


@pytest.mark.parametrize(
    ("nbytes", "free", "share", "beside", "most", "fits"),
    [
        (100, 1504, 10, 0, 1000, False),
        (100, 1505, 10, 0, 1000, True),
        (100, 1519, 10, 10, 1000, False),
        (100, 1520, 10, 10, 1000, True),
        (100, 779, 10, 0, 60, False),
        (100, 780, 10, 0, 60, True),
        (100, 849, 10, 10, 60, False),
        (100, 850, 10, 10, 60, True),
        (100, 2000, 0.849, 0, 60, False),
        (100, 2000, 0.850, 0, 60, True),
        (99, 0, 1, 0, 1000, True),
    ],
)
def test_a_copy_leaves_the_device_what_the_process_has_needed(
    nbytes, free, share, beside, most, fits, monkeypatch
):
    """20 of 70 bytes that are reserved are not used, and as many as `most` have been; share: of
    1,000 bytes that the process may take. What earlier copies take is needed beside them. Before a
    step has run nobody knows what it needs: all copies take an eighth of what was free."""
    monkeypatch.setattr(guard, "LARGE", 100)
    for name, found in {
        "mem_get_info": (free, 1000),
        "memory_allocated": 50,
        "memory_reserved": 70,
        "max_memory_allocated": most,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda device: share)
    whole = SimpleNamespace(device=torch.device("cuda", 0), numel=lambda: nbytes)
    assert guard._has_room(whole, beside) == fits


def test_strict_raises_and_names_the_injected_error(monkeypatch):
    def fail(*args):
        raise RuntimeError("injected failure")

    monkeypatch.setattr(build, "describe_entries", fail)
    with pytest.raises(CaptureError, match="injected failure"):
        graph(make_toy(), warmup=0, strict=True)(*toy_inputs(8))


def test_outputs_are_nan_between_capture_and_first_replay(monkeypatch):
    monkeypatch.setattr(Reference, "is_met_by", lambda *given: True)  # which replays
    graphed = graph(nn.Linear(4, 4), warmup=0)
    graphed.build([(torch.randn(3, 4),)])
    variant = next(iter(graphed.slots.all[0].variants.values()))
    assert variant.regions[0].outputs[0].static.tensor.isnan().all()
    assert graphed(torch.randn(3, 4)).isfinite().all()


def test_a_second_backward_through_a_region_is_an_error_not_a_wrong_number():
    graphed = graph(make_toy(), warmup=0)
    loss = toy_loss(graphed(*toy_inputs(8)))
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


@pytest.mark.parametrize("granularity", ["chunk", "layer"])
def test_a_graph_that_is_kept_is_run_again_for_each_further_backward(granularity):
    eager, module = make_toy(), make_toy()
    graphed = graph(module, warmup=1, granularity=granularity)
    for step in range(4):
        for model in (eager, graphed):
            torch.manual_seed(step)
            loss = toy_loss(model(*toy_inputs(8)))
            for kept in (True, True, False):
                quietly(lambda loss=loss, kept=kept: loss.backward(retain_graph=kept))
        for one, other in zip(eager.parameters(), module.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
    assert graphed.stats.replayed == 3 and graphed.stats.fallbacks[fallback.AGAIN] >= 6
    del loss
    assert not graphed.slots.in_flight()


def test_slots_return_when_a_loss_is_dropped_without_backward():
    graphed = graph(make_toy(), warmup=0)
    for _ in range(5):
        graphed(*toy_inputs(8))
    gc.collect()
    assert len(graphed.slots.all) == 1 and graphed.slots.in_flight() == 0


def test_slots_follow_the_microbatches_in_flight():
    graphed = graph(make_toy(), warmup=0)
    outs = [graphed(*toy_inputs(8)) for _ in range(4)]
    assert len(graphed.slots.all) == 4
    for out in reversed(outs):
        toy_loss(out).backward()
    assert graphed.slots.in_flight() == 0


def test_too_few_slots_fall_back_and_stay_exact():
    options = {"steps": 4, "in_flight": 4}
    eager = train(make_toy(), **options)
    graphed = graph(make_toy(), warmup=1, slots=2)
    assert differences(eager, train(graphed, **options)) == []
    assert graphed.stats.fallbacks["no free slot"] > 0
    assert len(graphed.slots.all) == 2


def test_releasing_a_slot_twice_is_an_error():
    graphed = graph(make_toy(), warmup=0)
    lease = graphed.slots.acquire("key")
    slot = lease.slot
    lease.release()
    with pytest.raises(RuntimeError, match="released twice"):
        graphed.slots.release(slot)


def test_slots_tell_whether_a_microbatch_of_another_living_thread_has_one():
    slots, held, end = graph(make_toy(), warmup=0).slots, [], threading.Event()

    def takes():
        held.append(slots.acquire("key"))
        end.wait(10)

    other = threading.Thread(target=takes)
    other.start()
    while not held:
        time.sleep(1e-3)
    assert slots.in_flight_elsewhere()
    end.set()
    other.join()
    assert not slots.in_flight_elsewhere(), "nobody will run that backward"
    held.pop().release()
    lease = slots.acquire("key")
    assert not slots.in_flight_elsewhere()
    lease.release()


def test_variants_share_the_slots_pool_largest_not_sum():
    graphed = graph(make_toy(), warmup=0)
    sizes = []
    for tokens in (64, 16, 8):
        toy_loss(graphed(*toy_inputs(tokens))).backward()
        sizes.append(graphed.stats.pool_bytes)
    assert len(set(sizes)) == 1
    assert len(graphed.slots.all[0].variants) == 3


def test_a_larger_variant_takes_the_slot_and_the_smaller_is_captured_again():
    graphed = graph(make_toy(), warmup=0)
    for tokens in (8, 64, 8, 64, 8):
        toy_loss(graphed(*toy_inputs(tokens))).backward()
    assert graphed.stats.captured == 3
    assert graphed.stats.recaptures["a larger variant took the slot"] == 1


def test_a_declared_bank_is_built_without_touching_training_state():
    graphed, eager = graph(make_toy(), warmup=0, slots=2), make_toy()
    torch.manual_seed(7)
    toy_inputs(8)
    before = [t.clone() for t in (*graphed.parameters(), *graphed.buffers())]
    samples = [toy_inputs(n) for n in (6, 12, 8)]
    state = torch.get_rng_state()
    graphed.build(samples)
    after = [*graphed.parameters(), *graphed.buffers()]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in graphed.parameters())
    assert graphed.stats.captured == 6
    assert (
        differences(train(eager, steps=4, in_flight=2), train(graphed, steps=4, in_flight=2)) == []
    )
    assert graphed.stats.captured == 6 and not graphed.stats.fallbacks


def test_close_frees_everything_and_later_calls_are_eager():
    graphed = graph(make_toy(), warmup=0)
    toy_loss(graphed(*toy_inputs(8))).backward()
    graphed.close()
    assert graphed.stats.pool_bytes == 0
    toy_loss(graphed(*toy_inputs(8))).backward()
    assert dict(graphed.stats.fallbacks) == {"closed": 1}


def test_two_graphed_modules_live_side_by_side():
    first, second = graph(make_toy(), warmup=0), graph(make_toy(layers=1), warmup=0)
    for _ in range(3):
        a, b = first(*toy_inputs(8)), second(*toy_inputs(8))
        toy_loss(a).backward()
        toy_loss(b).backward()
    first.close()
    toy_loss(second(*toy_inputs(8))).backward()
    assert second.stats.replayed == 4
