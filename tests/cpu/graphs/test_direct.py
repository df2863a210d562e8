"""Replaying without autograd equals eager bit by bit where it is offered, and is not offered where
it would not."""

import copy
import random

import pytest
import torch
from graphkit import Stages
from statekit import One
from torch import nn

from packgraph.graphs.graphed import Control, control, graph
from packgraph.graphs.replay import ReplayHandle
from packgraph.graphs.stages import Stage

WIDTH = 8


class Chain(Stages):
    """A chunk as a pipeline sees it: hidden states in, hidden states out, layer by layer.

    skip: layers add to theirs the hidden states of the layer "before" them, or those of the
    "first".
    """

    def __init__(self, layers=3, tied=False, skip=""):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.skip = skip
        if tied:
            self.linears[-1].weight = self.linears[0].weight

    def begin(self, x, scale):
        return {"x": x, "scale": scale, "hidden": x}

    def end(self, state):
        return state["hidden"]

    def stages(self):
        return [
            Stage(
                "attn" if layer % 2 else "mlp",
                layer,
                lambda state, layer=layer: self.run(state, layer),
            )
            for layer in range(len(self.linears))
        ]

    def run(self, state, layer):
        hidden = (
            nn.functional.dropout(self.linears[layer](state["hidden"]).tanh(), 0.2) * state["scale"]
        )
        kept = hidden if self.skip == "before" or (self.skip and not layer) else state["x"]
        return {
            **state,
            "hidden": hidden + state["x"] if self.skip and layer else hidden,
            "x": kept,
        }


def make_chain(**options):
    torch.manual_seed(1)
    return Chain(**options)


def lending(chain, **options):
    graphed = graph(chain, warmup=0, **options)
    control(graphed).capturer.lends = True
    return graphed


def train(module, direct, steps=6, slots=3):
    """Microbatches in flight in any order; everything that must agree."""
    torch.manual_seed(2)
    order, trace = random.Random(0), []
    for step in range(steps):
        flights = []
        for _ in range(order.randint(1, slots)):
            x, up = torch.randn(order.choice((4, 6)), WIDTH, requires_grad=True), None
            scale = torch.rand(())
            if direct:
                handle = module.acquire((x, scale), {})
                out = handle.forward((x, scale), {})
            else:
                handle, out = None, module(x, scale)
            trace.append(out.detach().clone())
            up = torch.randn_like(out)
            flights.append((x, up, handle, out))
        for x, up, handle, out in order.sample(flights, len(flights)):
            if direct:
                for slot in module.slots._free:
                    slot.poison()
                handle.lease.kept = True
                handle.backward(up)
                trace.append(handle.input_gradient(0).clone())
                handle.lease.release()
            else:
                out.backward(up)
                trace.append(x.grad.clone())
        trace += [p.grad.clone() for p in module.parameters()] + [torch.get_rng_state()]
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None if step % 2 else torch.zeros_like(parameter)
    return trace


@pytest.mark.parametrize("skip", ["", "before"])
@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.few(2)
def test_direct_replays_equal_eager_bitwise_with_slots_in_any_order(granularity, skip):
    eager = train(make_chain(skip=skip), direct=False)
    graphed = lending(make_chain(skip=skip), granularity=granularity)
    found = train(graphed, direct=True)
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))
    assert graphed.stats.replayed > 5 and graphed.slots.in_flight() == 0


def test_gradients_in_a_larger_storage_are_added_to_inside_a_steady_block():
    chain, twin = make_chain(), make_chain()
    graphed = lending(chain)
    x, scale, up = torch.randn(4, WIDTH), torch.ones(()), torch.randn(4, WIDTH)
    graphed(x, scale).backward(up)
    flat = torch.zeros(sum(p.numel() for p in chain.parameters()))
    for parameter, part in zip(
        chain.parameters(), flat.split([p.numel() for p in chain.parameters()]), strict=True
    ):
        parameter.grad = part.view_as(parameter)
    torch.manual_seed(5)
    with graphed.frozen():
        for _ in range(3):
            handle = graphed.acquire((x, scale), {})
            handle.forward((x, scale), {})
            handle.backward(up)
    torch.manual_seed(5)
    for _ in range(3):
        twin(x, scale).backward(up)
    assert torch.equal(flat, torch.cat([p.grad.flatten() for p in twin.parameters()]))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: make_chain(tied=True), {"granularity": "layer"}),
        (lambda: make_chain(layers=4, skip="first"), {"granularity": "layer"}),
        (make_chain, {"scope": ["attn"]}),
    ],
    ids=["a parameter of two regions", "a sum of gradients", "an eager stage"],
)
def test_what_autograd_has_to_do_is_not_replayed_directly(make, options):
    graphed = lending(make(), **options)
    handle = graphed.acquire((torch.randn(4, WIDTH, requires_grad=True), torch.ones(())), {})
    assert isinstance(handle, ReplayHandle) and not handle.is_direct


def test_gradients_that_nobody_keeps_are_not_lent():
    graphed = graph(make_chain(), warmup=0)
    assert not graphed.acquire(
        (torch.randn(4, WIDTH, requires_grad=True), torch.ones(())), {}
    ).is_direct
    assert graphed.acquire((torch.randn(4, WIDTH), torch.ones(())), {}).is_direct


def test_a_hook_on_a_parameter_still_runs():
    chain = make_chain()
    seen = []
    chain.linears[0].weight.register_hook(lambda gradient: seen.append(1))
    graphed = lending(chain)
    assert not graphed.acquire((torch.randn(4, WIDTH), torch.ones(())), {}).is_direct


def test_a_second_backward_is_refused():
    graphed = lending(make_chain())
    handle = graphed.acquire((torch.randn(4, WIDTH), torch.ones(())), {})
    handle.forward((torch.randn(4, WIDTH), torch.ones(())), {})
    handle.lease.kept = True
    handle.backward(None)
    with pytest.raises(RuntimeError, match="a second time"):
        handle.backward(None)


def test_a_steady_block_begins_with_a_look_at_what_was_baked():
    chain = make_chain()
    graphed = lending(chain)
    x, scale = torch.randn(4, WIDTH), torch.ones(())
    graphed.acquire((x, scale), {}).lease.release()
    chain.linears[0].weight.data = torch.zeros(WIDTH, WIDTH)
    frozen = graphed.frozen()
    with pytest.warns(UserWarning, match="storage of 'linears.0.weight' was replaced"):
        frozen.__enter__()
    handle = graphed.acquire((x, scale), {})
    torch.manual_seed(3)
    out = handle.forward((x, scale), {}).clone()
    frozen.__exit__(None, None, None)
    torch.manual_seed(3)
    assert torch.equal(out, chain(x, scale))


class Scored(Chain):
    """A chain with a loss at its end."""

    def stages(self):
        head = Stage(
            "head",
            len(self.linears),
            lambda state: {**state, "hidden": state["hidden"].pow(2).mean()},
        )
        return [*super().stages(), head]


@pytest.mark.parametrize("options", [{}, {"scope": ["attn"]}, {"granularity": "layer"}], ids=str)
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.few(2)
def test_forward_and_backward_in_one_go_equal_eager_bitwise(options, looks):
    traces, seen = [], []
    for graphs in (False, True):
        torch.manual_seed(1)
        module = Scored()
        graphed = graph(module, warmup=0, **options)
        torch.manual_seed(2)
        trace = []
        for tokens in (4, 6, 4, 4, 6):
            args = torch.randn(tokens, WIDTH), torch.rand(())
            if graphs:
                loss = graphed.forward_backward(*args, before=seen.append if looks else None)
            else:
                loss = module(*args)
                loss.backward()
            trace += [
                loss.detach().clone(),
                *(p.grad.clone() for p in module.parameters()),
                torch.get_rng_state(),
            ]
        traces.append(trace)
    assert all(torch.equal(a, b) for a, b in zip(*traces, strict=True))
    assert graphed.stats.replayed == 5 and len(seen) == 5 * looks


def test_a_fallback_in_one_go_is_counted_once():
    graphed = graph(Scored(), warmup=1)
    for _ in range(3):
        graphed.forward_backward(torch.randn(4, WIDTH), torch.rand(()))
    assert dict(graphed.stats.fallbacks) == {"warm-up": 1} and graphed.stats.replayed == 2


def test_more_than_one_number_is_refused_as_autograd_does():
    graphed = graph(make_chain(), warmup=0)
    with pytest.raises(RuntimeError, match="scalar"):
        graphed.forward_backward(torch.randn(4, WIDTH), torch.ones(()))


def test_a_tensor_given_twice_at_capture_may_be_two_tensors_later():
    def run(module, step):
        torch.manual_seed(4)
        x, y = torch.rand(WIDTH), torch.rand(WIDTH)
        return [step(module, *args).detach().clone() for args in ((x, x), (x, y), (y, y))]

    def eager(module, *args):
        loss = module(*args)
        loss.backward()
        return loss

    graphed = graph(Scored(), warmup=0)
    torch.manual_seed(1)
    twin = Scored()
    graphed.load_state_dict(twin.state_dict())
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            run(control(graphed), Control.forward_backward), run(twin, eager), strict=True
        )
    )


def test_static_inputs_collect_no_history_of_autograd():
    graphed = graph(One(lambda m, x: m.linear(x.detach()).mean()), warmup=0)
    for _ in range(2):
        graphed.forward_backward(torch.randn(4, 4, requires_grad=True))
    (variant,) = graphed.slots.all[0].variants.values()
    assert variant.direct is not None
    assert not any(entry.buffer.requires_grad for entry in variant.regions[0].inputs)


class Late(Stages):
    """Its second input is read by the second stage only."""

    def __init__(self, length):
        super().__init__()
        self.weights, self.length = nn.ParameterList(torch.rand(WIDTH) for _ in range(3)), length

    def begin(self, x, y):
        return {"hidden": x, "y": y}

    def end(self, state):
        return state["hidden"]

    def stages(self):
        return [
            Stage("attn", 0, self.first),
            Stage(
                "mlp",
                1,
                lambda state: {"hidden": state["hidden"] * state["y"].sin() * self.weights[2]},
            ),
        ]

    def first(self, state):
        hidden = state["hidden"]
        for _ in range(self.length):
            hidden = (hidden * self.weights[0]).sin() * self.weights[1]
        return {**state, "hidden": hidden}


@pytest.mark.parametrize("slots", [None, 1])
@pytest.mark.parametrize("length", [1, 4])
def test_a_lent_gradient_outlives_the_backwards_that_follow(slots, length):
    torch.manual_seed(1)
    twin = Late(length)
    graphed = lending(copy.deepcopy(twin), granularity="layer", slots=slots)
    for _ in range(3):
        x, y, up = (
            torch.rand(WIDTH, requires_grad=True),
            torch.rand(WIDTH, requires_grad=True),
            torch.rand(WIDTH),
        )
        handle = graphed.acquire((x, y), {})
        handle.lease.kept = True
        handle.forward((x, y), {})
        handle.backward(up)
        twin(x, y).backward(up)
        assert torch.equal(handle.input_gradient(0), x.grad) and torch.equal(
            handle.input_gradient(1), y.grad
        )
        handle.lease.release()


class Loss(nn.Module):
    def __init__(self, outputs=1):
        super().__init__()
        self.linear, self.outputs = nn.Linear(WIDTH, WIDTH), outputs

    def forward(self, x, *, scale):
        loss = (self.linear(x) * scale).square().sum()
        return loss if self.outputs == 1 else (loss,) * self.outputs


def test_losses_of_forward_backward_stay_what_they_were():
    module = Loss()
    graphed = graph(module, warmup=1, slots=1, strict=True)
    draws = [torch.randn(4, WIDTH) for _ in range(6)]
    losses = [graphed.forward_backward(x, scale=torch.tensor(2.0)) for x in draws]
    assert losses == [module(x, scale=torch.tensor(2.0)) for x in draws]
    assert graphed.stats.replayed == 5 and not any(loss.requires_grad for loss in losses)
    sums, module.linear.weight.grad = module.linear.weight.grad, None
    for x in draws:
        module(x, scale=torch.tensor(2.0)).backward()
    assert torch.equal(sums, module.linear.weight.grad)


def test_forward_backward_wants_one_loss():
    x, scale = torch.ones(4, WIDTH), torch.ones(())
    with pytest.raises(TypeError, match="returns a loss, not an object of type tuple"):
        graph(Loss(2)).forward_backward(x, scale=scale)
    with pytest.raises(RuntimeError, match="scalar outputs"):
        graph(nn.Linear(WIDTH, WIDTH)).forward_backward(x)
