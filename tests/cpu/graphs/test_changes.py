"""A module is changed between two calls in a way that its code shows only indirectly: graphs see
it, or run eagerly. Beside each change an eager twin is changed alike."""

import copy
import functools
import gc
import weakref

import pytest
import torch
from graphkit import Stages
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from packgraph.graphs.graphed import graph
from packgraph.graphs.stages import Stage

CHANGED = 4  # the first call after the change


class Plain(nn.Module):
    """A linear layer, and attributes."""

    def __init__(self, **attributes):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.layer(x)


class Doing(Plain):
    """A forward from outside."""

    def __init__(self, function, **attributes):
        super().__init__(**attributes)
        self.function = function

    def forward(self, *args):
        return self.function(self, *args)


class Two(Stages, Plain):
    """Two captured stages; the first state has a number of the module."""

    def __init__(self, scale=1.0, rows=3):
        super().__init__(scale=scale, rows=rows)
        self.other = nn.Linear(4, 4)

    def begin(self, x):
        return {"x": x[: self.rows], "scale": self.scale}

    def first(self, state):
        return {**state, "x": self.layer(state["x"])}

    def second(self, state):
        return {"x": self.other(state["x"]) * state["scale"]}

    def stages(self):
        return [Stage("attn", 0, self.first), Stage("mlp", 1, self.second)]


class HandedOn(Two):
    """A stage puts a number of the module into the state."""

    def begin(self, x):
        return {"x": x}

    def first(self, state):
        return {"x": self.layer(state["x"]), "scale": self.scale}


class ToTheEnd(HandedOn):
    """As does the last, for `end`."""

    def second(self, state):
        return {"x": self.other(state["x"]), "scale": self.scale}

    def end(self, state):
        return state["x"] * state["scale"]


class Positions(Two):
    """A stage reads the last row of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(24.0).reshape(6, 4))

    def first(self, state):
        return {**state, "x": self.layer(state["x"]) + self.table[-1]}


class Base(Plain):
    eps = 1.0

    def forward(self, x):
        return self.layer(x) * self.eps


class Hides(Base):
    """May get an attribute that hides that of its base."""


class Asks(Plain):
    """Answers for its inner module."""

    def __init__(self):
        super().__init__(inner=Plain(scale=1.0))

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.layer(x) * self.scale


class Held:
    scale = 1.0

    def __repr__(self):
        return f"Held({self.scale})"


class Bare:
    """Has no attribute at first."""


@functools.lru_cache
def kept_object(number):
    return Held()


@functools.lru_cache
def kept_tensor(number):
    return torch.full((4,), float(number))


@functools.lru_cache(maxsize=1)
def rotary_table(length):
    return torch.arange(float(length)).cos()


@functools.lru_cache
def kept_number(number):
    return 2.0 * number


def tries(module, x):
    try:
        return module.layer(x) * Bare.scale
    except AttributeError:
        return module.layer(x)


def in_its_names(module, x):
    return module.layer(x) * (2.0 if "scale" in module.__dict__ else 1.0)


def of_its_names(module, x):
    return module.layer(x) * module.__dict__.get("scale", 1.0)


def signs(read):
    return lambda m, x: torch.copysign(m.layer(x), torch.ones(4) * read(m.value))


def sets(name, value):
    return lambda m: setattr(m, name, value)


def cut(module):
    module.table.data = module.table.data[:2]


def turn(module):
    module.table.data = module.table.data.t()


def restart_cache(module):
    kept_tensor.cache_clear()
    kept_tensor(4).fill_(2.0)


HOOKS = []


def doubles(module, *given):
    return given[-1] * 2 if isinstance(module, nn.Linear) and torch.is_tensor(given[-1]) else None


def doubles_before(module, args):
    return tuple(arg * 2 for arg in args) if isinstance(module, nn.Linear) else None


# What is made, what changes it, and how it is graphed.
CHANGES = {
    "a number that is only returned": (
        lambda: Doing(lambda m, x: (m.layer(x), m.coefficient), coefficient=0.1),
        sets("coefficient", 0.5),
    ),
    "a dict that is only returned": (
        lambda: Doing(lambda m, x: (m.layer(x), m.log), log={"n": 0}),
        lambda m: m.log.update(n=5),
    ),
    "a number in a list that is returned": (
        lambda: Doing(lambda m, x: [m.layer(x), [m.held.scale]], held=Held()),
        lambda m: setattr(m.held, "scale", 3.0),
    ),
    "an object that is returned": (
        lambda: Doing(lambda m, x: (m.layer(x), m.held.scale, m.held), held=Held()),
        lambda m: setattr(m.held, "scale", 3.0),
    ),
    "a number of the first state": (Two, sets("scale", 2.0)),
    "rows of the first state": (Two, sets("rows", 1)),
    "other rows of the first state": (Two, sets("rows", 2)),
    "a number that a stage hands on": (HandedOn, sets("scale", 2.0)),
    "a number that the end reads": (ToTheEnd, sets("scale", 2.0)),
    "fewer rows of a buffer in place": (Positions, cut),
    "an attribute that hides that of a base": (Hides, lambda m: setattr(Hides, "eps", 2.0)),
    "an attribute in place of an answer": (Asks, sets("scale", 2.0)),
    "a hook of all modules": (
        Plain,
        lambda m: HOOKS or HOOKS.append(register_module_forward_hook(doubles)),
    ),
    "a hook before all modules": (
        Plain,
        lambda m: HOOKS or HOOKS.append(register_module_forward_pre_hook(doubles_before)),
    ),
    "an object in a cache": (
        lambda: Doing(lambda m, x: m.layer(x) * kept_object(4).scale),
        lambda m: setattr(kept_object(4), "scale", 2.0),
    ),
    "a tensor in a cache": (
        lambda: Doing(lambda m, x: m.layer(x) * kept_tensor(4)),
        restart_cache,
    ),
    "an attribute that a class gets": (lambda: Doing(tries), lambda m: setattr(Bare, "scale", 2.0)),
    "a name that an object gets": (lambda: Doing(in_its_names), sets("scale", 2.0)),
    "a name that is asked for": (lambda: Doing(of_its_names), sets("scale", 2.0)),
    "the sign of zero beside a dtype": (
        lambda: Doing(signs(lambda v: v[0]), value=(0.0, torch.float32)),
        sets("value", (-0.0, torch.float32)),
    ),
    "the sign of an imaginary zero": (
        lambda: Doing(signs(lambda v: v.imag), value=complex(0.0, 0.0)),
        sets("value", complex(0.0, -0.0)),
    ),
    "the sign of zero in a list in a tuple": (
        lambda: Doing(signs(lambda v: v[0][0]), value=([0.0],)),
        lambda m: m.value[0].__setitem__(0, -0.0),
    ),
    "the sign of zero in a set": (
        lambda: Doing(signs(lambda v: next(iter(v))), value=frozenset({0.0})),
        sets("value", frozenset({-0.0})),
    ),
}


@pytest.fixture(autouse=True)
def as_before():
    yield
    while HOOKS:
        HOOKS.pop().remove()
    kept_object.cache_clear()
    kept_tensor.cache_clear()
    for kind, name in ((Hides, "eps"), (Bare, "scale")):
        if name in vars(kind):
            delattr(kind, name)


def bits(tree):
    """All of a result, numbers bit by bit."""
    return repr(tree_map(lambda t: t.tolist() if torch.is_tensor(t) else t, tree))


def compare(make, change, **options):
    """Calls before and after a change, of a module and of its twin in graphs; its stats."""
    torch.manual_seed(0)
    eager = make()
    module = copy.deepcopy(eager)
    graphed = graph(module, warmup=1, **options)
    for number in range(CHANGED + 2):
        if number == CHANGED:
            change(eager)
            change(module)
        found = []
        for call, own in ((eager, eager), (graphed, module)):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
            x.requires_grad_()
            result = call(x)
            first = result[0] if isinstance(result, tuple | list) else result
            shown = bits(result)
            first.square().sum().backward()
            found.append((shown, bits([x.grad, *(p.grad for p in own.parameters())])))
            own.zero_grad()
        assert found[0] == found[1], f"call {number}"
    return graphed.stats


@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(make, change):
    compare(make, change)


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_numbers_between_stages_are_seen(granularity):
    for kind in (Two, HandedOn, ToTheEnd):
        stats = compare(kind, sets("scale", 2.0), granularity=granularity)
        assert stats.replayed >= CHANGED - 1


def test_a_number_from_a_cache_is_captured():
    stats = compare(lambda: Doing(lambda m, x: m.layer(x) * kept_number(3)), lambda m: None)
    assert stats.replayed == CHANGED + 1


def test_a_rotary_table_lives_as_long_as_the_graphs_that_read_it():
    graphed = graph(Doing(lambda m, x: m.layer(x) * rotary_table(4)), warmup=0)
    graphed(torch.ones(3, 4)).sum().backward()
    table, _ = weakref.ref(rotary_table(4)), rotary_table(5)  # the cache drops the other one
    assert graphed.stats.replayed == 1 and table() is not None
    del graphed
    gc.collect()
    assert table() is None


def late_hook(module):
    module.layer.register_forward_hook(lambda m, args, out: out * 2)


def other_tables(module):
    twice = {name: nn.Parameter(each * 2) for name, each in module.layer._parameters.items()}
    module.layer.__setstate__({**vars(module.layer), "_parameters": twice})


@pytest.mark.parametrize("change", [turn, cut, late_hook, other_tables], ids=lambda c: c.__name__)
def test_trust_looks_at_memory_hooks_and_tables(change):
    def make():
        module = Doing(lambda m, x: m.layer(x) + m.table[-1, :1] * m.table.sum())
        module.register_buffer("table", torch.arange(16.0).reshape(4, 4))
        return module

    compare(make, change, trust=True)


def test_trust_asks_between_forward_and_backward():
    def forward(module, x):
        return checkpoint(
            lambda y: (module.layer(y) * (2.0 if module.training else 1.0)).tanh(),
            x,
            use_reentrant=False,
        )

    module = Doing(forward)
    graphed = graph(module, warmup=1, trust=True)
    for _ in range(3):
        graphed(torch.ones(3, 4)).sum().backward()
    out = graphed(torch.ones(3, 4))
    module.eval()
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        out.sum().backward()


@pytest.mark.parametrize("kind", [HandedOn, ToTheEnd])
def test_numbers_that_compiled_stages_hand_on_are_seen(kind):
    torch.manual_seed(0)
    module = kind()
    graphed = graph(module, warmup=1, compile="aot_eager")
    for _ in range(3):
        graphed(torch.ones(3, 4)).sum().backward()
    module.scale = 2.0
    torch.testing.assert_close(graphed(torch.ones(3, 4)), module(torch.ones(3, 4)))
