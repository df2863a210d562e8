"""Calls that once gave wrong numbers: what is baked must be in the key, checked, or refused."""

import pytest
import torch
from graphkit import Stages, make_toy, toy_inputs, toy_loss
from statekit import One
from torch import nn

from packgraph.graphs.errors import PackgraphWarning
from packgraph.graphs.graphed import graph
from packgraph.graphs.stages import Stage


class Three(Stages):
    """Captured `attn` and `mlp` with one eager stage between them."""

    def __init__(self, between, last=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between, self.last = between, last

    def stages(self):
        return [
            Stage("attn", 0, lambda s: {**s, "x": self.first(s["x"]), "index": s["x"].argmax(-1)}),
            Stage("moe_dispatch", 0, lambda s: self.between(self, s)),
            Stage("mlp", 0, self.finish),
        ]

    def finish(self, state):
        out = self.second(state["x"]) * state.get("n", 1)
        return {**state, "out": out + state["extra"].sum() if "extra" in state else out}

    def end(self, state):
        return state["out"]


def partial(module):
    return graph(module, scope=["attn", "mlp"], warmup=0)


def drops_the_tensor(m, s, calls):
    return s if calls < 2 else {**s, "x": s["x"] * 2}


def writes_a_host_number(m, s, calls):
    return {**s, "n": calls + 1}


def starts_to_need_a_gradient(m, s, calls):
    return {**s, "extra": m.first.weight.detach().requires_grad_(calls >= 2)}


def changes_dtype(m, s, calls):
    return {**s, "extra": torch.ones(3, dtype=torch.float64 if calls >= 2 else torch.float32)}


def changes_in_place(m, s, calls):
    if calls >= 2:
        with torch.no_grad():
            s["x"].mul_(2)
    return s


@pytest.mark.parametrize(
    "stage",
    [
        drops_the_tensor,
        writes_a_host_number,
        starts_to_need_a_gradient,
        changes_dtype,
        changes_in_place,
    ],
    ids=lambda stage: stage.__name__,
)
def test_an_eager_stage_that_changes_its_mind_is_seen(stage):
    def make():
        calls = []

        def between(module, state):
            result = stage(module, state, max(0, len(calls) - first))
            calls.append(1)
            return result

        return Three(between), calls

    def loop(model, calls):
        torch.manual_seed(1)
        outs = []
        for _ in range(5):
            out = model(torch.randn(3, 4))
            out.square().sum().backward()
            outs.append(out.detach())
        return [*outs, *(p.grad for p in model.parameters())]

    first = 0
    expected = loop(*make())
    # The dry run, a plain call, the capture and the replay that is compared have called the eager
    # stage once more each.
    first = 4
    model, calls = make()
    graphed = partial(model)
    got = loop(graphed, calls)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert (
        graphed.stats.fallbacks["an eager stage made another state than at capture (one region)"]
        >= 3
    )


def test_what_an_eager_stage_keeps_or_returns_does_not_change_later():
    class Returns(Three):
        def end(self, state):
            return state["out"], state["view"]

    graphed = partial(Returns(lambda m, s: {**s, "view": s["index"][:2]}))
    kept = [graphed(torch.randn(3, 4))[1] for _ in range(4)]
    copies = [view.clone() for view in kept]
    for _ in range(3):
        graphed(torch.randn(3, 4))
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def part_without_autocast(m, a):
    hidden = m.linear(a)
    with torch.autocast("cpu", enabled=False):
        return (hidden.float() @ m.linear.weight).pow(2).mean()


def weight_used_twice(m, a):
    return m.linear(m.linear(a)).float().pow(2).mean()


@pytest.mark.parametrize(
    "function", [part_without_autocast, weight_used_twice], ids=lambda f: f.__name__
)
def test_autocast_ends_with_the_forward_and_caches_as_in_eager(function):
    def loop(model):
        torch.manual_seed(1)
        losses = []
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(3, 4))
            loss.backward()
            losses.append(loss.detach())
        return [*losses, *(p.grad for p in model.parameters())]

    expected, got = loop(One(function)), loop(graph(One(function), warmup=0))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_not_a_number_and_signed_zeros_are_keys_like_others():
    graphed = graph(One(lambda m, a, f: m.linear(a) * f), warmup=0)
    x = torch.randn(3, 4)
    for factor in (float("nan"), float("nan"), 0.0, -0.0):
        out = graphed(x, factor)
        out.square().sum().backward()
    assert graphed.stats.captured == 3 and torch.equal(
        out.signbit(), ~(graphed.linear(x) * 0.0).signbit()
    )


def test_gradients_of_minus_zero_keep_their_sign():
    """A gradient that begins anew is the first one bit by bit, not zero plus that."""
    module = One(lambda m, a: m.linear.bias * a)
    graphed = graph(module, warmup=0)
    for _ in range(3):
        module.zero_grad(set_to_none=True)
        graphed(torch.tensor([-0.0, 0.0, 1.0, -1.0])).sum().backward()
        assert module.linear.bias.grad.signbit().tolist() == [True, False, False, True]


def test_memory_layout_is_part_of_the_key():
    function = lambda m, a: m.linear(a) * 2 if a.is_contiguous() else m.linear(a.contiguous()) * 3  # noqa: E731
    eager, graphed = One(function), graph(One(function), warmup=0)
    for x in (torch.randn(4, 4), torch.randn(4, 4).t(), torch.randn(4, 4), torch.randn(4, 4).t()):
        assert torch.equal(graphed(x), eager(x))
    channels_last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    conv = graph(nn.Conv2d(3, 3, 1), warmup=0)
    assert conv(channels_last).is_contiguous(memory_format=torch.channels_last)


def test_microbatches_in_flight_survive_a_recapture_and_a_close():
    def loop(model, finish):
        a = toy_loss(model(*toy_inputs(8)))
        model.attention[0].weight.requires_grad_(False)
        b = toy_loss(model(*toy_inputs(8)))
        finish(model)
        b.backward()
        a.backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    torch.manual_seed(0)
    expected = loop(make_toy(dropout=0.0), lambda model: None)
    torch.manual_seed(0)
    got = loop(graph(make_toy(dropout=0.0), warmup=0), lambda model: model.close())
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b)


def test_an_error_in_an_eager_stage_gives_the_slot_back():
    def fails(module, state):
        raise KeyError("the user's own error")

    graphed = graph(Three(lambda m, s: s), scope=["attn", "mlp"], warmup=0, slots=1)
    graphed(torch.randn(3, 4)).sum().backward()
    works, graphed.module.between = graphed.module.between, fails
    kept = []
    for _ in range(2):
        try:
            graphed(torch.randn(3, 4))
        except KeyError as error:
            kept.append(error)
    graphed.module.between = works
    graphed(torch.randn(3, 4)).sum().backward()
    assert len(kept) == 2 and graphed.slots.in_flight() == 0


def test_a_result_that_no_graph_can_make_is_refused():
    class Result:
        __slots__ = ("loss",)

        def __init__(self, loss):
            self.loss = loss

    graphed = graph(One(lambda m, a: Result(m.linear(a).sum())), warmup=0)
    with pytest.warns(PackgraphWarning, match="returns a Result"):
        graphed(torch.randn(3, 4)).loss.backward()
    assert graphed.stats.fallbacks["capture failed"] == 1
