"""What leaves a captured forward other than through its outputs, and what it does to autograd:
refused, and undone."""

import collections
import contextvars
import functools
import sys
import threading
import types
import warnings

import pytest
import torch
from statekit import Staged, doing, train
from torch import nn
from torch.utils.checkpoint import checkpoint

from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.graphed import graph

AUX = []
KEPT = types.SimpleNamespace()
LATEST = contextvars.ContextVar("latest", default=None)
OUTSIDE = nn.Linear(2, 2)
TABLE = torch.arange(6.0)
last = None


class Two(nn.Module):
    """Two linear layers and a forward given from outside."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.other, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function
        self.register_buffer("counter", torch.ones(()))

    def forward(self, x):
        return self.function(self, x)


def note(tensor):
    AUX.append(tensor)


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class Leaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        AUX.append(gradient * 2)
        return gradient * 3


class Counts(Leaks):
    @staticmethod
    def backward(ctx, gradient):
        KEPT.count += 1
        return gradient * 3


# What is called in a forward: of module, input and hidden values.
CALLS = {
    "to a list": lambda m, x, h: AUX.append(h.pow(2).mean()),
    "through a helper": lambda m, x, h: note(h.mean()),
    "the output": lambda m, x, h: AUX.append(h),
    "a view of the output": lambda m, x, h: AUX.append(h[0]),
    "the input": lambda m, x, h: AUX.append(x),
    "a view of the input": lambda m, x, h: AUX.append(x.view(-1)),
    "the input, detached": lambda m, x, h: AUX.append(x.detach()),
    "a parameter": lambda m, x, h: AUX.append(m.linear.weight),
    "data of a parameter": lambda m, x, h: AUX.append(m.linear.weight.data),
    "a view of a global": lambda m, x, h: AUX.append(TABLE[1:]),
    "a node": lambda m, x, h: AUX.append(h.sum().grad_fn),
    "a number": lambda m, x, h: AUX.append(1),
    "to a deque": lambda m, x, h: KEPT.deque.append(h.detach()),
    "to a context variable": lambda m, x, h: LATEST.set(h.mean()),
    "through a thread": lambda m, x, h: in_a_thread(lambda: AUX.append(h.detach())),
    "a backward inside": lambda m, x, h: m.other(x).pow(2).mean().backward(),
    "a backward of torch": lambda m, x, h: torch.autograd.backward(m.other(x).pow(2).mean()),
    "the storage of a weight": lambda m, x, h: m.linear.weight.data.set_(m.linear.weight.data * 2),
    "a hook on an output": lambda m, x, h: h.register_hook(lambda gradient: gradient * 2),
    "a hook on a weight": lambda m, x, h: m.linear.weight.register_hook(lambda g: g * 2),
    "a hook on an input": lambda m, x, h: x.register_hook(lambda g: g * 2),
    "a hook after accumulation": lambda m, x, h: m.linear.weight.register_post_accumulate_grad_hook(
        lambda p: AUX.append(1)
    ),
    "a gradient is kept": lambda m, x, h: h.retain_grad(),
}
HOOKS = {
    "a hook on a tensor": lambda m, x, h: h.register_hook(lambda g: AUX.append(1)),
    "a hook on a node": lambda m, x, h: h.grad_fn.register_hook(lambda a, b: AUX.append(1)),
    "a hook before a node": lambda m, x, h: h.grad_fn.register_prehook(lambda a: AUX.append(1)),
    "a hook on several": lambda m, x, h: torch.autograd.graph.register_multi_grad_hook(
        [h], lambda g: AUX.append(1)
    ),
}


# What is assigned: each kind of target has an instruction of its own.
def to_an_object(m, x, h):
    KEPT.log = h.mean()


def counted_in_an_object(m, x, h):
    KEPT.count += 1


def to_another_module(m, x, h):
    OUTSIDE.saved = h.mean()


def to_a_parameter(m, x, h):
    m.linear.weight.aux = h.mean()


def to_an_input(m, x, h):
    x.cached = h.mean()


def to_a_module_of_python(m, x, h):
    sys.modules["math"].leak = h.mean()


def to_a_global(m, x, h):
    global last
    last = h.mean()


def data_of_a_weight(m, x, h):
    m.linear.weight.data = m.linear.weight.data * 0.9


def data_of_a_buffer(m, x, h):
    m.counter.data = m.counter.data + 1


def deletes_a_gradient(m, x, h):
    del m.linear.weight.grad


def data_of_the_input(m, x):
    x.data = x.data * 2
    return m.linear(x)


def gradient_read(m, x):
    g = m.linear.weight.grad
    return m.linear(x) + (0 if g is None else 1e-3 * g.mean())


def gradient_cleared(m, x):
    m.other.weight.grad = None
    return m.linear(x) + m.other(x)


def a_weight_frozen(m, x):
    m.other.weight.requires_grad_(False)
    return m.linear(x) + m.other(x)


ASSIGNED = (
    to_an_object,
    counted_in_an_object,
    to_another_module,
    to_a_parameter,
    to_an_input,
    to_a_module_of_python,
    to_a_global,
    data_of_a_weight,
    data_of_a_buffer,
    deletes_a_gradient,
)
FORWARDS = {
    **{name: doing(effect) for name, effect in CALLS.items()},
    **{name: doing(effect, lambda hidden: hidden * 2) for name, effect in HOOKS.items()},
    **{effect.__name__: doing(effect) for effect in ASSIGNED},
    "from a backward": lambda m, x: Leaks.apply(m.linear(x)),
    "counted in a backward": lambda m, x: Counts.apply(m.linear(x)),
    "asks for a leaf": lambda m, x: m.linear(x) * (2.0 if x.contiguous().is_leaf else 3.0),
    "data_of_the_input": data_of_the_input,
    "gradient_read": gradient_read,
    "gradient_cleared": gradient_cleared,
}


@pytest.fixture(autouse=True)
def reset():
    clear()


def clear():
    global last
    AUX.clear()
    KEPT.__dict__.clear()
    KEPT.__dict__.update(deque=collections.deque(maxlen=10), count=0, log=None)
    LATEST.set(None)
    last = None
    for holder in (OUTSIDE, sys.modules["math"]):
        for name in ("saved", "leak"):
            vars(holder).pop(name, None)


def shown(value):
    """A copy of what can be compared."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple | collections.deque):
        return [shown(entry) for entry in value]
    return value if isinstance(value, int | float | None) else type(value)


def facts(module, x, out):
    """Everything that a call and its backward can have touched."""
    tensors = [out, x, x.grad, *module.parameters(), *(p.grad for p in module.parameters())]
    python = [
        AUX,
        KEPT.deque,
        KEPT.count,
        KEPT.log,
        LATEST.get(),
        last,
        getattr(OUTSIDE, "saved", None),
        getattr(module.linear.weight, "aux", None),
        getattr(x, "cached", None),
        getattr(sys.modules["math"], "leak", None),
        [p.requires_grad for p in module.parameters()],
    ]
    return shown([*tensors, *python, torch.get_rng_state()])


def loop(module, model, calls=6):
    torch.manual_seed(5)
    seen = []
    for _ in range(calls):
        x = torch.randn(3, 4, requires_grad=module.function is not data_of_the_input)
        out = model(x)
        out.pow(2).square().sum().backward()
        seen.append(facts(module, x, out))
    return seen


def same(one, other):
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and (isinstance(one, torch.Tensor) or one == other)


def both(function, warmup=2):
    """The facts of an eager loop and of a graphed one, the graphed module, and the warnings."""
    module = Two(function)
    eager = loop(module, module)
    clear()
    module = Two(function)
    graphed = graph(module, warmup=warmup)
    with warnings.catch_warnings(record=True, action="always") as caught:
        got = loop(module, graphed)
    return eager, got, graphed, [str(w.message) for w in caught if w.category is PackgraphWarning]


# Named, but out of reach.
NOT_UNDONE = ("from a backward", "through a thread", "to_a_module_of_python")


@pytest.mark.parametrize("warmup", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", FORWARDS)
def test_what_a_replay_would_not_do_falls_back_with_one_warning_and_equals_eager(name, warmup):
    eager, got, graphed, told = both(FORWARDS[name], warmup)
    assert graphed.stats.replayed == 0
    assert graphed.stats.fallbacks["capture failed"] >= 1
    failed = [message for message in told if message.startswith("running eagerly")]
    assert len(failed) == 1 and f"{__file__}:" in failed[0]
    assert same(eager, got) or name in NOT_UNDONE


@pytest.mark.parametrize(
    "function", [*FORWARDS.values(), a_weight_frozen], ids=[*FORWARDS, "a_weight_frozen"]
)
def test_strict_raises_at_the_users_line(function):
    with pytest.raises(CaptureError) as caught:
        loop(module := Two(function), graph(module, warmup=0, strict=True), calls=2)
    assert __file__ in caught.value.where and caught.value.remedy


def test_the_line_is_that_of_the_assignment():
    graphed = graph(Two(doing(to_a_global)), warmup=0, strict=True)
    with pytest.raises(CaptureError, match="forward changes a module") as caught:
        graphed(torch.randn(3, 4))
    assert f":{to_a_global.__code__.co_firstlineno + 2} in to_a_global" in caught.value.where


@functools.lru_cache
def cached_table(size):
    return torch.arange(size).float() * 2


class KeepsOnItself(Leaks):
    @staticmethod
    def forward(ctx, x):
        ctx.factor = x * 2
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor


def writes_in_place(m, x):
    m.other.weight.data.mul_(0.9)
    return m.linear(x) + m.other(x.detach()).detach()


def switches_off_nothing(m, x):
    m.other.weight.requires_grad_(True)
    return m.linear(x) + m.other(x)


def forks_the_generator(m, x):
    with torch.random.fork_rng(devices=[]):
        noise = torch.rand(4)
    return m.linear(x) + noise


def gradient_of_an_energy(m, x):
    point = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(m.linear(point).pow(2).sum(), point, create_graph=True)
    return m.other(x) + slope


def gradient_of_a_parameter(m, x):
    h = m.linear(x)
    (slope,) = torch.autograd.grad(h.pow(2).sum(), m.linear.weight, create_graph=True)
    return h * slope.norm()


FINE = {
    "a cached constant": lambda m, x: m.linear(x) + cached_table(4),
    "kept on the context": lambda m, x: KeepsOnItself.apply(m.linear(x)),
    "recomputed": lambda m, x: checkpoint(
        lambda v: torch.dropout(m.linear(v), 0.5, True), x, use_reentrant=False
    ),
    "written in place": writes_in_place,
    "switches off nothing": switches_off_nothing,
    "the gradient of an energy": gradient_of_an_energy,
    "the gradient of a parameter": gradient_of_a_parameter,
}


def test_a_fork_of_the_generator_equals_eager():
    eager, got, graphed, _ = both(forks_the_generator)
    assert same(eager, got)
    assert graphed.stats.replayed + graphed.stats.fallbacks["capture failed"] == 4


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("function", FINE.values(), ids=FINE)
def test_what_a_replay_does_as_well_is_captured(function, warmup):
    cached_table.cache_clear()
    eager, got, graphed, told = both(function, warmup)
    assert same(eager, got) and not told
    assert graphed.stats.replayed == 6 - warmup


def test_effects_of_eager_stages_are_theirs():
    kept = types.SimpleNamespace(seen=[], gradients=[])

    def between(module, state):
        kept.seen.append(state["x"])
        state["x"].register_hook(kept.gradients.append)
        return state

    graphed = graph(Staged(between), warmup=0, scope=["attn", "mlp"], strict=True)
    train(graphed, torch.linspace(-1, 1, 12).reshape(3, 4), 3)
    assert graphed.stats.replayed == 3 and len(kept.seen) >= 3 and len(kept.gradients) == 3


def test_what_captured_stages_beside_eager_ones_keep_is_refused():
    def between(module, state):
        return state

    model = Staged(between)
    model.layers[0].forward = lambda x: kept_by_a_stage(model.layers[0], x)
    with pytest.raises(CaptureError, match="replay"):
        graph(model, warmup=0, scope=["attn", "mlp"], strict=True)(torch.randn(3, 4))


def kept_by_a_stage(layer, x):
    h = torch.nn.functional.linear(x, layer.weight)
    OUTSIDE.saved = h
    return h
