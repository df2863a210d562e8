"""Memory of graphs by a capture that is thrown away, against what graphs take; a trial changes
nothing."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from graphkit import Toy, make_toy, toy_inputs, toy_loss
from torch import nn

from packgraph.graphs.graphed import graph
from packgraph.graphs.memory.trial import trial_memory
from packgraph.graphs.recorder.backend import RecorderBackend

SIZES = (40, 16)


def warmed(**options):
    graphed = graph(make_toy(layers=1), warmup=1, **options)
    toy_loss(graphed(*toy_inputs(8))).backward()
    return graphed


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.parametrize(
    "scope", [None, pytest.param(["attn"], marks=pytest.mark.slow), ["mlp", "head"]], ids=str
)
@pytest.mark.few(3)
def test_the_recorders_pools_are_as_predicted(scope, granularity, slots):
    graphed = warmed(scope=scope, granularity=granularity, slots=slots)
    predicted = trial_memory(graphed, [toy_inputs(size) for size in SIZES], slots)
    graphed.build([toy_inputs(size) for size in SIZES], slots)
    assert graphed.failures == 0
    assert predicted.pools == graphed.stats.pool_bytes
    assert predicted.buffers == graphed.slots.all[0].buffer_bytes()


@pytest.mark.parametrize("slots", [1, 3])
def test_the_largest_call_is_enough(slots):
    """Variants of a slot exclude each other, so its pool is as large as the largest needs."""
    graphed = warmed(slots=slots, granularity="layer")
    assert trial_memory(graphed, [toy_inputs(max(SIZES))], slots) == trial_memory(
        graphed, [toy_inputs(size) for size in SIZES], slots
    )


def test_without_the_pool_of_backwards_the_prediction_is_far_off():
    """The negative control: memory that backwards use while they run is a large part."""
    graphed = warmed(slots=3, granularity="layer")
    predicted = trial_memory(graphed, [toy_inputs(40)], 3)
    graphed.build([toy_inputs(40)], 3)
    assert predicted.pools - predicted.shared < 0.95 * graphed.stats.pool_bytes


def facts_of(graphed):
    facts = {f"parameter {name}": p.detach().clone() for name, p in graphed.named_parameters()}
    facts |= {
        f"gradient {name}": p.grad.clone()
        for name, p in graphed.named_parameters()
        if p.grad is not None
    }
    facts |= {f"buffer {name}": b.clone() for name, b in graphed.named_buffers()}
    return facts | {"rng": torch.get_rng_state()}


def test_a_trial_changes_nothing_and_holds_nothing():
    graphed = warmed(granularity="layer")
    before, inputs = facts_of(graphed), toy_inputs(12)
    before["rng"] = torch.get_rng_state()
    storages = [p.grad.data_ptr() for p in graphed.parameters()]
    trial_memory(graphed, [inputs], 1)
    after = facts_of(graphed)
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    assert [p.grad.data_ptr() for p in graphed.parameters()] == storages
    assert graphed.stats.captured == graphed.stats.replayed == 0 and inputs[1].grad is None
    assert not graphed.capturer.dry_runs and not graphed.slots.all, (
        "a trial on one rank alone changes no other rank's way"
    )


def test_a_second_trial_is_the_same():
    graphed = warmed(granularity="layer")
    first, second = (trial_memory(graphed, [toy_inputs(12)], 1) for _ in range(2))
    assert first == second


class WritesToItsBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.plain = torch.zeros(4)

    def forward(self, x):
        self.seen.add_(1)
        self.plain.add_(1)
        return self.linear(x).sum()


def test_writes_to_tensors_from_outside_are_undone():
    graphed = graph(WritesToItsBuffer(), warmup=0)
    trial_memory(graphed, [(torch.randn(8, 4),)], 1)
    assert not graphed.module.seen.any() and not graphed.module.plain.any()


class CountsByItself(Toy):
    """Has a count that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.count = torch.zeros(3)

    def embed(self, state):
        self.count.add_(1)
        return super().embed(state)


@pytest.fixture
def unseen(monkeypatch):
    """A backend as on CUDA: it dry-runs, and does not see what its graphs write when they run."""
    opened = RecorderBackend.window

    @contextlib.contextmanager
    def window(self, *args, **options):
        with opened(self, *args, **options) as made:
            made.journal = SimpleNamespace(before_write=lambda tensor: None, call=made.journal.call)
            yield made

    monkeypatch.setattr(RecorderBackend, "window", window)
    monkeypatch.setattr(RecorderBackend, "warm_up", lambda self, run: run())
    monkeypatch.setattr(RecorderBackend, "guard_device", "cpu")


@pytest.mark.parametrize("how", ["trial", "capture"])
def test_what_graphs_write_when_they_run_for_eager_stages_is_undone(unseen, how):
    """They run once while the next regions are captured, to give the stages between them their
    inputs."""
    graphed = graph(CountsByItself(), warmup=0, scope=["embed", "mlp"], strict=True, slots=1)
    if how == "trial":
        trial_memory(graphed, [toy_inputs(8)], 1)
    else:
        graphed.build([toy_inputs(8)], 1)
    assert not graphed.module.count.any() and not graphed.module.calls.any()
    toy_loss(graphed(*toy_inputs(8))).backward()
    assert (
        graphed.stats.replayed == 1
        and (graphed.module.count == 1).all()
        and graphed.module.calls == 1
    )


class DoublesWhatItSaved(torch.autograd.Function):
    """Writes to its own activation in the backward."""

    @staticmethod
    def forward(ctx, hidden):
        ctx.saved = hidden.detach().clone()
        return hidden * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved.mul_(2).sign().abs()


class WritesInItsBackward(CountsByItself):
    def attend(self, state, layer):
        state = super().attend(state, layer)
        return {**state, "hidden": DoublesWhatItSaved.apply(state["hidden"])}


def test_what_is_put_back_was_there_before_the_rehearsal(unseen):
    """Its own activations, of which backwards and later stages may make what they like, are not
    held for long."""
    graphed = graph(WritesInItsBackward(), warmup=0, scope=["embed", "mlp"], strict=True, slots=1)
    graphed.build([toy_inputs(8)], 1)
    (dry_run,) = graphed.capturer.dry_runs.values()
    storages = {tensor.untyped_storage().data_ptr() for tensor in dry_run.written}
    assert storages == {graphed.module.count.data_ptr(), graphed.module.calls.data_ptr()}
