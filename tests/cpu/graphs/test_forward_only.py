"""Calls without gradients, and in evaluation mode: forward graphs of their own, in the slots and
pools of the training graphs."""

import contextlib
import warnings

import pytest
import torch
from graphkit import Stages, make_toy, poison_free_slots, toy_inputs, toy_loss, train
from torch import nn
from tracekit import differences

import packgraph
from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.graphed import graph
from packgraph.graphs.stages import Stage

LOOP = {"steps": 4, "sizes": (8, 12), "in_flight": 2}
QUIET = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def pair(dropout=0.0, **options):
    """An eager toy, and a graphed one that has been trained with."""
    eager, graphed = make_toy(dropout=dropout), graph(make_toy(dropout=dropout), **options)
    for seed in range(3):
        for model in (eager, graphed):
            torch.manual_seed(seed)
            toy_loss(model(*toy_inputs(8))).backward()
    return eager, graphed


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", QUIET)
def test_calls_without_gradients_replay(mode, training):
    eager, graphed = pair(dropout=0.1, warmup=1)
    own, pool = packgraph.control(graphed), graphed.stats.pool_bytes
    eager.train(training)
    graphed.train(training)
    for seed in range(4):
        outs = []
        for model in (eager, graphed):
            torch.manual_seed(seed)
            inputs = toy_inputs(8)
            poison_free_slots(graphed, 0)
            with QUIET[mode]():
                outs.append(model(*inputs))
            assert own.slots.has_free() and own.slots.in_flight() == 0
        assert_same(*outs)
        assert not any(out.requires_grad for out in outs[1].values())
        assert torch.equal(eager.calls, graphed.calls)
    assert dict(graphed.stats.fallbacks) == {"warm-up": 1}
    assert graphed.stats.replayed == 2 + 4 and graphed.stats.captured == 2
    assert graphed.stats.pool_bytes == pool, "they need no memory of their own"
    assert len(own.slots.all) == 1


def test_training_with_evaluations_between_forward_and_backward_is_that_of_eager():
    def evaluate(model, step):
        state = torch.get_rng_state()
        torch.manual_seed(step)
        ids, x = toy_inputs(8)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                model(ids, x)
        model.eval()
        with torch.no_grad():
            model(ids, x)
        model.train()
        torch.set_rng_state(state)
        if isinstance(model, packgraph.GraphedModule):
            poison_free_slots(model, step)

    eager, graphed = make_toy(), graph(make_toy(), warmup=2)
    traces = [train(model, **LOOP, between=evaluate) for model in (eager, graphed)]
    assert differences(*traces) == []
    assert set(graphed.stats.fallbacks) == {"warm-up"} and graphed.stats.replayed > 35
    assert graphed.stats.fallbacks["warm-up"] <= 4


def test_a_forward_in_the_slot_of_a_microbatch_in_flight_would_spoil_its_gradients():
    """The negative control: what slots are for."""
    eager, graphed = pair()
    slots = packgraph.control(graphed).slots
    with torch.no_grad():
        graphed(*toy_inputs(8))
    (slot,) = slots.all
    forward_only = [v for v in slot.variants.values() if not v.regions[0].backwards]
    assert len(slot.variants) == 2 and len(forward_only) == 1
    found = []
    for spoil in (False, True):
        for model in (eager, graphed):
            model.zero_grad()
            torch.manual_seed(7)
            loss = toy_loss(model(*toy_inputs(8)))
            if model is graphed and spoil:
                slot._buffers[("input", 1)].fill_(1)
                forward_only[0].regions[0].forward.replay()
            elif model is graphed:
                with torch.no_grad():
                    graphed(*toy_inputs(8))
            loss.backward()
        pairs = zip(eager.parameters(), graphed.parameters(), strict=True)
        found.append(all(torch.equal(a.grad, b.grad) for a, b in pairs))
    assert found == [True, False]


def test_with_all_slots_in_flight_an_evaluation_runs_eagerly_and_says_so():
    eager, graphed = pair(slots=1)
    waiting = graphed(*toy_inputs(8))
    inputs = toy_inputs(8)
    with torch.no_grad(), pytest.warns(packgraph.PackgraphWarning, match="no free slot"):
        assert_same(graphed(*inputs), eager(*inputs))
    toy_loss(waiting).backward()
    before = graphed.stats.replayed
    with torch.no_grad():
        assert_same(graphed(*inputs), eager(*inputs))
    assert graphed.stats.replayed == before + 1


def test_outputs_outlive_later_calls():
    eager, graphed = pair()
    kept = []
    for _ in range(3):
        inputs = toy_inputs(8)
        with torch.no_grad():
            kept.append((graphed(*inputs), eager(*inputs)))
        poison_free_slots(graphed, 0)
    for ours, theirs in kept:
        assert_same(ours, theirs)


def test_evaluation_mode_with_gradients_has_graphs_of_its_own():
    eager, graphed = pair(dropout=0.1)
    for seed in range(4):
        for model in (eager, graphed):
            model.zero_grad()
            model.train(seed == 3)
            torch.manual_seed(seed)
            toy_loss(model(*toy_inputs(8))).backward()
        for ours, theirs in zip(graphed.parameters(), eager.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
    assert dict(graphed.stats.fallbacks) == {"warm-up": 2} and not graphed.stats.recaptures


def test_a_call_for_training_takes_the_pool_that_forwards_had_alone():
    _, graphed = pair(warmup=1)
    alone, mixed = graphed.stats.pool_bytes, graph(make_toy(dropout=0.0), warmup=1)
    for _ in range(3):
        with torch.no_grad():
            mixed(*toy_inputs(8))
    small = mixed.stats.pool_bytes
    assert mixed.stats.replayed == 2 and 0 < small < alone
    for _ in range(3):
        toy_loss(mixed(*toy_inputs(8))).backward()
        with torch.no_grad():
            mixed(*toy_inputs(8))
    assert mixed.stats.pool_bytes == alone
    assert dict(mixed.stats.recaptures) == {"a larger variant took the slot": 1}
    assert dict(mixed.stats.fallbacks) == {"warm-up": 2}


def test_a_change_that_one_mode_finds_drops_the_graphs_of_both():
    eager, graphed = pair()
    inputs = toy_inputs(8)
    with torch.no_grad():
        graphed(*inputs)
        for model in (eager, graphed):
            model.eval()
        graphed(*inputs)
        for model in (eager, graphed):
            model.mlps[0][1].weight = nn.Parameter(torch.ones(32, 16))
        with pytest.warns(packgraph.PackgraphWarning, match="capturing again"):
            assert_same(graphed(*inputs), eager(*inputs))
        for model in (eager, graphed):
            model.train()
        assert_same(graphed(*inputs), eager(*inputs))
    assert graphed.stats.recaptures["module changed"] == 3


class Mixed(Stages):
    """A captured stage without gradients of its own, and an eager one that trains."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def stages(self):
        return [Stage("body", 0, self.run_body), Stage("head", 1, self.run_head)]

    def end(self, state):
        return state["loss"]

    def run_body(self, state):
        return {"hidden": self.body(state["x"]).tanh()}

    def run_head(self, state):
        self.seen = state["hidden"]
        return {"loss": self.head(state["hidden"]).square().sum()}


def test_what_an_eager_stage_keeps_is_not_written_to_by_the_next_replay():
    eager, graphed = Mixed(), graph(Mixed(), scope=["body"], warmup=0)
    for _ in range(3):
        inputs = [torch.randn(3, 4) for _ in range(2)]
        for model in (eager, graphed):
            model.zero_grad()
            losses = [model(x) for x in inputs]
            for loss in losses:
                loss.backward()
        pairs = zip(eager.head.parameters(), graphed.head.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
        with torch.no_grad():
            for x in inputs:
                assert torch.equal(eager(x), graphed(x))
                kept = graphed.seen
                graphed(torch.randn(3, 4))
                assert torch.equal(kept, eager.seen)
    assert not graphed.stats.fallbacks


def test_inference_mode_runs_modules_with_eager_stages_eagerly():
    eager, graphed = Mixed(), graph(Mixed(), scope=["body"], warmup=0)
    with torch.inference_mode():
        x = torch.randn(3, 4)
        found = graphed(x)
        assert found.is_inference() and torch.equal(found, eager(x))
        with torch.enable_grad():
            whole = graph(Mixed(), warmup=0)
            assert torch.equal(whole(x), found)
    assert dict(graphed.stats.fallbacks) == dict(whole.stats.fallbacks) == {"inference mode": 1}


def test_arguments_may_be_made_in_inference_mode_and_are_handed_through_as_they_are():
    class Through(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    module = Through(4, 4)
    graphed = graph(module, warmup=0)
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(2, 4)
            out, same = graphed(x)
            assert same is x and torch.equal(out, module(x)[0])
    assert graphed.stats.replayed == 3 and not graphed.stats.fallbacks


@pytest.mark.parametrize("asks", [torch.is_inference_mode_enabled, torch.Tensor.is_inference])
def test_code_that_asks_for_inference_mode_is_not_captured(asks):
    class Asks(nn.Linear):
        def forward(self, x):
            asked = asks(x) if asks is torch.Tensor.is_inference else asks()
            return super().forward(x) + (1.0 if asked else 0.0)

    module, x = Asks(4, 4), torch.randn(2, 4)
    graphed = graph(module, warmup=0)
    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(CaptureError, match="is_inference"):
            graph(module, warmup=0, strict=True)(x)
        with mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore", PackgraphWarning)
            assert torch.equal(graphed(x), module(x))
    assert graphed.stats.replayed == 0 and dict(graphed.stats.fallbacks) == {"capture failed": 3}


def test_warm_up_is_counted_for_calls_without_gradients_until_training_has_had_its_own():
    for trained, warm in ((0, 3), (3, 0)):
        graphed = graph(nn.Linear(4, 4), warmup=3)
        for _ in range(trained):
            graphed(torch.randn(2, 4)).sum().backward()
        for _ in range(5):
            with torch.no_grad():
                graphed(torch.randn(2, 4))
        assert graphed.stats.replayed == 5 - warm
        assert dict(graphed.stats.fallbacks) == {"warm-up": 3}


def test_modes_are_captured_as_they_are():
    class Asks(nn.Linear):
        def forward(self, x):
            return (
                super().forward(x)
                * (2.0 if torch.is_grad_enabled() else 3.0)
                * (5.0 if self.training else 7.0)
            )

    module = Asks(4, 4)
    graphed = graph(module, warmup=0)
    for _ in range(3):
        for training in (True, False):
            for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
                graphed.train(training)
                x = torch.randn(2, 4)
                with mode():
                    assert torch.equal(graphed(x), module(x))
    assert graphed.stats.captured == 4 and graphed.stats.replayed == 18


def test_a_bank_is_built_for_training_whatever_the_modes_are_and_forgotten_in_all():
    eager, graphed = make_toy(dropout=0.0), graph(make_toy(dropout=0.0), warmup=0)
    own, inputs = packgraph.control(graphed), toy_inputs(8)
    graphed.eval()
    with torch.no_grad():
        own.build([inputs])
        assert_same(graphed(*inputs), eager(*inputs))
    assert graphed.stats.captured == 2
    graphed.train()
    toy_loss(graphed(*inputs)).backward()
    assert graphed.stats.captured == 2 and graphed.stats.replayed == 2
    with torch.no_grad():
        assert own.forget(inputs) == 2 and not own.slots.all


class _Frozen(nn.Module):
    """Attention that is frozen and in evaluation mode, where torch has a fast path, or not."""

    def __init__(self, training):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True).train(training)
        self.attention.requires_grad_(False)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("training", [True, False])
def test_a_fast_path_that_a_capture_does_not_take_runs_eagerly(training):
    module = _Frozen(training)
    graphed = graph(module, warmup=1)
    with contextlib.nullcontext() if training else pytest.warns(PackgraphWarning, match="kernel"):
        for _ in range(5):
            x = torch.randn(2, 5, 8)
            found = graphed(x)
            found.sum().backward()
            assert torch.equal(found, module(x))
    assert graphed.stats.replayed == (4 if training else 0)


def test_another_kernel_for_calls_without_gradients_runs_eagerly():
    class Values(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return torch.linalg.svdvals(self.linear(x))

    module = Values()
    graphed = graph(module, warmup=1)
    for _ in range(3):
        x = torch.randn(6, 6)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", PackgraphWarning)
            assert torch.equal(graphed(x), module(x))
