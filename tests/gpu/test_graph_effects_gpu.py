"""What leaves forward, what varies, and constants, where tensors live on a device and captures
execute nothing."""

import itertools
import types
import warnings

import pytest
import torch
from statekit import One, doing
from torch import nn

from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.graphed import graph

pytestmark = pytest.mark.gpu
AUX = []
KEPT = types.SimpleNamespace(log=None)
COUNT = itertools.count()


def clear():
    AUX.clear()
    KEPT.log = None


def runs(function, calls=6):
    """What an eager loop and a graphed one leave, and the graphed module."""
    found = []
    for wrap in (False, True):
        clear()
        module = One(function).cuda()
        model = graph(module) if wrap else module
        torch.manual_seed(3)
        seen = []
        for _ in range(calls):
            x = torch.randn(3, 4, device="cuda", requires_grad=True)
            with warnings.catch_warnings(action="ignore", category=PackgraphWarning):
                out = model(x)
                out.pow(2).sum().backward()
            seen += [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
        seen += [tensor.detach() for tensor in AUX if isinstance(tensor, torch.Tensor)]
        found.append(seen)
    return *found, model


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


class Leaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        KEPT.log = gradient * 2
        return gradient * 3


def to_an_object(m, x, h):
    KEPT.log = h.mean()


def data_of_a_weight(m, x, h):
    m.linear.weight.data = m.linear.weight.data * 0.9


def twice(hidden):
    return hidden * 2


EFFECTS = {
    "to a list": doing(lambda m, x, h: AUX.append(h.pow(2).mean())),
    "to an object": doing(to_an_object),
    "from a backward": lambda m, x: Leaks.apply(m.linear(x)),
    "a hook": doing(lambda m, x, h: h.register_hook(lambda gradient: AUX.append(1)), twice),
    "a hook on a node": doing(
        lambda m, x, h: h.grad_fn.register_hook(lambda a, b: AUX.append(1)), twice
    ),
    "a backward inside": doing(lambda m, x, h: m.linear(x).pow(2).mean().backward()),
    "data of a weight": doing(data_of_a_weight),
}


@pytest.mark.parametrize("function", EFFECTS.values(), ids=EFFECTS)
def test_what_a_replay_would_not_do_falls_back_and_equals_eager(function):
    eager, got, graphed = runs(function)
    assert graphed.stats.replayed == 0 and graphed.stats.fallbacks["capture failed"] >= 1
    assert same(eager, got)


def written_to(m, x):
    total = torch.tensor([0.0] * 4, device=x.device)
    total += m.linear(x).detach().sum(0)
    return m.linear(x) + total


OLD_TRACER = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="torch 2.11's tracer cannot read requires_grad_()"
)


def gradient_of_an_energy(m, x):
    point = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(m.linear(point).pow(2).sum(), point, create_graph=True)
    return m.linear(x) + slope


MADE = {
    "empty": lambda m, x: torch.cat([torch.tensor([], device=x.device), m.linear(x).flatten()]),
    "numbers": lambda m, x: m.linear(x) + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
    "like another": lambda m, x: m.linear(x) + x.new_tensor([1.0, 0.0, 0.0, 1.0]),
    "as an index": lambda m, x: m.linear(x)[:, torch.tensor([3, 1, 0, 0], device="cuda")],
    "written to": written_to,
}


@pytest.mark.parametrize(
    "function",
    [*MADE.values(), pytest.param(gradient_of_an_energy, marks=OLD_TRACER)],
    ids=[*MADE, "the gradient of an energy"],
)
def test_constants_and_inner_gradients_are_captured(function):
    eager, got, graphed = runs(function)
    assert graphed.stats.replayed == 4 and same(eager, got)


VARIES = {
    "an iterator": lambda m, x: m.linear(x) * next(COUNT),
    "in a constant": lambda m, x: m.linear(x) + torch.tensor([float(next(COUNT))], device=x.device),
}


@pytest.mark.parametrize("function", VARIES.values(), ids=VARIES)
def test_what_varies_is_refused_at_its_line(function):
    with pytest.raises(CaptureError) as caught:
        graph(One(function).cuda(), warmup=0, strict=True)(torch.randn(3, 4, device="cuda"))
    assert __file__ in caught.value.where


def marked(module, input, output):
    output.requires_grad_(True)


@OLD_TRACER
def test_a_hook_that_only_marks_is_captured():
    found = []
    for wrap in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Linear(4, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 4)
        ).cuda()
        module[0].register_forward_hook(marked)
        model = graph(module, strict=True) if wrap else module
        outs = [model(torch.randn(3, 4, device="cuda")) for _ in range(5)]
        for out in outs:
            out.pow(2).sum().backward()
        found.append([*outs, module[2].weight.grad])
    assert model.stats.replayed == 3 and same(*found)
