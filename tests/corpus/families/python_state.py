"""Python state of a module that forward reads, in every kind of container, changed between
calls."""

import dataclasses
import enum
import fractions
import itertools
import queue
import random
import types
import weakref
from collections import (
    ChainMap,
    Counter,
    UserDict,
    UserList,
    defaultdict,
    deque,
    namedtuple,
)
from decimal import Decimal

import numpy as np
import torch
from corpus.entry import Own, add
from torch import nn

GROUP = "python state"
Pair = namedtuple("Pair", "scale shift")


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    inner: object = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 1.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


class Plain:
    def __init__(self, scale=1.0):
        self.scale = scale


class Computed:
    """The value is behind a property."""

    def __init__(self):
        self._scale = 1.0

    @property
    def scale(self):
        return self._scale


class Callable:
    def __init__(self):
        self.scale = 1.0

    def __call__(self, x):
        return x * self.scale


class Mode(enum.Enum):
    SOFT = "soft"
    HARD = "hard"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


class Flags(enum.Flag):
    A = 1
    B = 2


class Attributes(dict):
    """A dict whose keys are attributes, as many libraries have for their configs."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


def holder(name, make, read, change):
    """`held` is what make gives; forward multiplies by read(held); change gets the model."""
    add(
        GROUP,
        name,
        lambda: Own(lambda m, x: m.linear(x) * read(m.held), held=make()),
        mutate=change,
    )


def put(name, value):
    return lambda m: setattr(m.held, name, value)


for label, make in {
    "SimpleNamespace": lambda: types.SimpleNamespace(scale=1.0),
    "dataclass": Settings,
    "slots": Slotted,
    "plain object": Plain,
    "class with a method": Callable,
    "dict with attributes": lambda: Attributes(scale=1.0),
}.items():
    holder(f"{label}, attribute assigned", make, lambda held: held.scale, put("scale", 2.0))
for name, parts in {
    "plain object, __dict__ updated": (
        Plain,
        lambda held: held.scale,
        lambda m: vars(m.held).update(scale=2.0),
    ),
    "plain object, replaced": (
        Plain,
        lambda held: held.scale,
        lambda m: setattr(m, "held", Plain(2.0)),
    ),
    "frozen dataclass replaced": (
        Frozen,
        lambda held: held.scale,
        lambda m: setattr(m, "held", dataclasses.replace(m.held, scale=2.0)),
    ),
    "frozen dataclass written by force": (
        Frozen,
        lambda held: held.scale,
        lambda m: object.__setattr__(m.held, "scale", 2.0),
    ),
    "property of an object": (Computed, lambda held: held.scale, put("_scale", 2.0)),
    "object called": (Callable, lambda held: held(1.0), put("scale", 3.0)),
    "two levels of objects": (
        lambda: Settings(inner=Settings()),
        lambda held: held.inner.scale,
        lambda m: setattr(m.held.inner, "scale", 2.0),
    ),
    "three levels of objects": (
        lambda: Settings(inner=Settings(inner=Plain())),
        lambda held: held.inner.inner.scale,
        lambda m: setattr(m.held.inner.inner, "scale", 2.0),
    ),
    "five levels of objects": (
        lambda: Plain(Plain(Plain(Plain(Plain())))),
        lambda held: held.scale.scale.scale.scale.scale,
        lambda m: setattr(m.held.scale.scale.scale.scale, "scale", 2.0),
    ),
    "object in a list": (
        lambda: [Plain()],
        lambda held: held[0].scale,
        lambda m: setattr(m.held[0], "scale", 2.0),
    ),
    "object in a dict": (
        lambda: {"a": Plain()},
        lambda held: held["a"].scale,
        lambda m: setattr(m.held["a"], "scale", 2.0),
    ),
    "list in an object": (
        lambda: types.SimpleNamespace(scales=[1.0]),
        lambda held: held.scales[0],
        lambda m: m.held.scales.__setitem__(0, 2.0),
    ),
    "list, entry": (lambda: [1.0, 2.0], lambda held: held[0], lambda m: m.held.__setitem__(0, 2.0)),
    "list, longer than most": (
        lambda: [1.0] * 200,
        lambda held: held[150],
        lambda m: m.held.__setitem__(150, 2.0),
    ),
    "list, appended": (lambda: [1.0], lambda held: sum(held), lambda m: m.held.append(2.0)),
    "list, reversed in place": (
        lambda: [1.0, 2.0, 3.0],
        lambda held: held[0],
        lambda m: m.held.reverse(),
    ),
    "list of lists": (
        lambda: [[1.0], [2.0]],
        lambda held: held[1][0],
        lambda m: m.held[1].__setitem__(0, 3.0),
    ),
    "list of 100 tuples": (
        lambda: [(1.0, 2.0)] * 100,
        lambda held: held[99][0],
        lambda m: m.held.__setitem__(99, (4.0, 2.0)),
    ),
    "tuple of ints becomes floats": (
        lambda: (1,),
        lambda held: 2.0 if isinstance(held[0], float) else 1.0,
        lambda m: setattr(m, "held", (1.0,)),
    ),
    "int becomes bool": (
        lambda: 1,
        lambda held: 2.0 if held is True else 1.0,
        lambda m: setattr(m, "held", True),
    ),
    "zero becomes minus zero": (
        lambda: 0.0,
        lambda held: 1.0 / torch.tensor(held),
        lambda m: setattr(m, "held", -0.0),
    ),
    "list of ints becomes floats": (
        lambda: [1],
        lambda held: 2.0 if isinstance(held[0], float) else 1.0,
        lambda m: m.held.__setitem__(0, 1.0),
    ),
    "number": (lambda: 1.0, lambda held: held, lambda m: setattr(m, "held", 2.0)),
    "string": (lambda: "a", lambda held: 1.0 + (held == "b"), lambda m: setattr(m, "held", "b")),
    "bytearray": (
        lambda: bytearray(b"\x01"),
        lambda held: held[0],
        lambda m: m.held.__setitem__(0, 2),
    ),
    "dict, value": (lambda: {"s": 1.0}, lambda held: held["s"], lambda m: m.held.update(s=2.0)),
    "dict, key exchanged for another": (
        lambda: {"a": 1.0},
        lambda held: 2.0 if "b" in held else 1.0,
        lambda m: (m.held.pop("a"), m.held.update(b=1.0)),
    ),
    "dict, order": (
        lambda: {"a": 1.0, "b": 2.0},
        lambda held: next(iter(held.values())),
        lambda m: m.held.update(a=m.held.pop("a")),
    ),
    "defaultdict": (
        lambda: defaultdict(float, s=1.0),
        lambda held: held["s"],
        lambda m: m.held.update(s=2.0),
    ),
    "Counter": (lambda: Counter(a=1), lambda held: held["a"], lambda m: m.held.update(a=1)),
    "ChainMap": (
        lambda: ChainMap({}, {"s": 1.0}),
        lambda held: held["s"],
        lambda m: m.held.maps[1].update(s=2.0),
    ),
    "UserDict": (lambda: UserDict(s=1.0), lambda held: held["s"], lambda m: m.held.update(s=2.0)),
    "UserList": (
        lambda: UserList([1.0]),
        lambda held: held[0],
        lambda m: m.held.__setitem__(0, 2.0),
    ),
    "mapping proxy": (
        lambda: types.MappingProxyType(_fresh(SHARED, s=1.0)),
        lambda held: held["s"],
        lambda m: SHARED.update(s=2.0),
    ),
    "set, added to": (lambda: {1, 2}, lambda held: float(sum(held)), lambda m: m.held.add(5)),
    "set, element exchanged": (
        lambda: {1, 2},
        lambda held: float(sum(held)),
        lambda m: (m.held.discard(1), m.held.add(7)),
    ),
    "frozenset replaced": (
        lambda: frozenset({1}),
        lambda held: float(sum(held)),
        lambda m: setattr(m, "held", frozenset({2})),
    ),
    "deque rotated": (lambda: deque([1.0, 2.0]), lambda held: held[0], lambda m: m.held.rotate()),
    "namedtuple replaced": (
        lambda: Pair(1.0, 0.0),
        lambda held: held.scale,
        lambda m: setattr(m, "held", m.held._replace(scale=2.0)),
    ),
    "namedtuple with a list inside": (
        lambda: Pair([1.0], 0.0),
        lambda held: held.scale[0],
        lambda m: m.held.scale.__setitem__(0, 2.0),
    ),
    "Enum": (
        lambda: Mode.SOFT,
        lambda held: 1.0 + (held is Mode.HARD),
        lambda m: setattr(m, "held", Mode.HARD),
    ),
    "IntEnum": (
        lambda: Level.LOW,
        lambda held: float(held),
        lambda m: setattr(m, "held", Level.HIGH),
    ),
    "Flag": (
        lambda: Flags.A,
        lambda held: float(held.value),
        lambda m: setattr(m, "held", Flags.A | Flags.B),
    ),
    "Enum in an object": (
        lambda: Plain(Mode.SOFT),
        lambda held: 1.0 + (held.scale is Mode.HARD),
        put("scale", Mode.HARD),
    ),
    "slice": (
        lambda: slice(0, 1),
        lambda held: float(held.stop),
        lambda m: setattr(m, "held", slice(0, 2)),
    ),
    "range": (
        lambda: range(2),
        lambda held: float(len(held)),
        lambda m: setattr(m, "held", range(4)),
    ),
    "Fraction": (
        lambda: fractions.Fraction(1, 2),
        float,
        lambda m: setattr(m, "held", fractions.Fraction(3, 2)),
    ),
    "Decimal": (lambda: Decimal("0.5"), float, lambda m: setattr(m, "held", Decimal("1.5"))),
    "complex number": (
        lambda: 1 + 1j,
        lambda held: held.imag,
        lambda m: setattr(m, "held", 1 + 2j),
    ),
    "torch.Size": (
        lambda: torch.Size([1, 2]),
        lambda held: float(held[1]),
        lambda m: setattr(m, "held", torch.Size([1, 3])),
    ),
    "numpy scalar": (lambda: np.float32(1.0), float, lambda m: setattr(m, "held", np.float32(2.0))),
    "numpy array in place": (
        lambda: np.ones(2),
        lambda held: float(held[0]),
        lambda m: m.held.__setitem__(0, 2.0),
    ),
    "numpy array replaced": (
        lambda: np.ones(2),
        lambda held: float(held[0]),
        lambda m: setattr(m, "held", np.full(2, 2.0)),
    ),
    "numpy array behind a tensor": (
        lambda: np.ones(4, dtype=np.float32),
        lambda held: torch.as_tensor(held).sum().item(),
        lambda m: m.held.__setitem__(0, 2.0),
    ),
    "array of an object": (
        lambda: Plain(np.ones(2)),
        lambda held: float(held.scale[1]),
        lambda m: m.held.scale.__setitem__(1, 2.0),
    ),
    "memoryview": (
        lambda: memoryview(bytearray(b"\x01\x02")),
        lambda held: float(held[0]),
        lambda m: m.held.__setitem__(0, 3),
    ),
    "weak reference": (
        lambda: weakref.ref(_fresh_kept()),
        lambda held: held().scale,
        lambda m: setattr(KEPT, "scale", 2.0),
    ),
    "class as a value": (
        lambda: type("Made", (), {"scale": 1.0}),
        lambda held: held.scale,
        put("scale", 2.0),
    ),
    "module of Python as a value": (
        lambda: types.ModuleType("made"),
        lambda held: getattr(held, "scale", 1.0),
        put("scale", 2.0),
    ),
    "queue": (
        lambda: _queue(),
        lambda held: held.queue[0],
        lambda m: m.held.queue.__setitem__(0, 2.0),
    ),
    "attribute added later": (Plain, lambda held: getattr(held, "extra", 1.0), put("extra", 2.0)),
    "None becomes an object": (
        lambda: None,
        lambda held: 1.0 if held is None else held.scale,
        lambda m: setattr(m, "held", Plain(2.0)),
    ),
    "object holds a tensor, replaced": (
        lambda: Plain(torch.ones(4)),
        lambda held: held.scale,
        lambda m: setattr(m.held, "scale", m.held.scale * 2),
    ),
    "object holds a tensor, in place": (
        lambda: Plain(torch.ones(4)),
        lambda held: held.scale,
        lambda m: m.held.scale.mul_(2),
    ),
    "list holds a tensor, replaced": (
        lambda: [torch.ones(4)],
        lambda held: held[0],
        lambda m: m.held.__setitem__(0, m.held[0] * 2),
    ),
    "set of one tensor": (
        lambda: {torch.ones(4)},
        lambda held: next(iter(held)),
        lambda m: (
            m.held.clear(),
            m.held.add(torch.full((4,), 2.0, device=m.linear.weight.device)),
        ),
    ),
    "deque holds a tensor, in place": (
        lambda: deque([torch.ones(4)]),
        lambda held: held[0],
        lambda m: m.held[0].mul_(2),
    ),
}.items():
    holder(name, *parts)

SHARED = {"s": 1.0}
KEPT = Plain()


def _fresh(shared, **values):
    shared.update(values)
    return shared


def _fresh_kept():
    KEPT.scale = 1.0
    return KEPT


def _queue():
    made = queue.Queue()
    made.put(1.0)
    return made


class Child(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.settings, self.depth = nn.Linear(4, 4), Settings(), 1

    def forward(self, x):
        for _ in range(self.depth):
            x = self.linear(x) * self.settings.scale
        return x


def parent():
    return Own(lambda m, x: m.child(m.linear(x)), child=Child())


add(GROUP, "child's settings", parent, mutate=lambda m: setattr(m.child.settings, "scale", 2.0))
add(GROUP, "child's depth", parent, mutate=lambda m: setattr(m.child, "depth", 2))


class Shared(nn.Module):
    """One config object for the module and its children, as transformers has it."""

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(scale=1.0, drop=0.0, bias=True)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        for layer in self.layers:
            layer.config = self.config

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.dropout(
                layer(x) * layer.config.scale, self.config.drop, self.training
            )
        return x + self.layers[0].bias if self.config.bias else x


add(GROUP, "shared config, scale", Shared, mutate=lambda m: setattr(m.config, "scale", 2.0))
add(
    GROUP,
    "shared config, dropout switched on",
    Shared,
    mutate=lambda m: setattr(m.config, "drop", 0.5),
)
add(GROUP, "shared config, flag", Shared, mutate=lambda m: setattr(m.config, "bias", False))
add(GROUP, "shared config, nothing changes", Shared)
add(
    GROUP,
    "dropout's p",
    lambda: Own(lambda m, x: m.drop(m.linear(x)), drop=nn.Dropout(0.1)),
    mutate=lambda m: setattr(m.drop, "p", 0.6),
)
add(
    GROUP,
    "LayerNorm's eps",
    lambda: Own(lambda m, x: m.norm(m.linear(x)), norm=nn.LayerNorm(4)),
    mutate=lambda m: setattr(m.norm, "eps", 1.0),
)
add(
    GROUP,
    "BatchNorm's momentum",
    lambda: Own(lambda m, x: m.norm(m.linear(x)), norm=nn.BatchNorm1d(4)),
    mutate=lambda m: setattr(m.norm, "momentum", 0.9),
)
add(
    GROUP,
    "value of a float that changes in every call",
    lambda: Own(lambda m, x: m.linear(x) * m.scale, scale=1.0),
    call=lambda m, arguments: _counted(m, *arguments),
)


def _counted(model, x):
    model.scale = model.scale + 0.5
    return model(x)


# Hidden state: what a replay cannot move on.
def hidden(name, make, draw):
    add("hidden state", name, lambda: Own(lambda m, x: m.linear(x) * draw(m.held), held=make()))


for name, parts in {
    "random.Random": (lambda: random.Random(3), lambda held: held.random()),
    "random.Random in a list": (lambda: [random.Random(3)], lambda held: held[0].random()),
    "random.Random in an object": (
        lambda: Plain(random.Random(3)),
        lambda held: held.scale.random(),
    ),
    "numpy Generator": (lambda: np.random.default_rng(3), lambda held: float(held.random())),
    "numpy RandomState": (lambda: np.random.RandomState(3), lambda held: float(held.rand())),
    "numpy Generator in a dict": (
        lambda: {"rng": np.random.default_rng(3)},
        lambda held: float(held["rng"].normal()),
    ),
    "itertools.count": (lambda: itertools.count(1), lambda held: float(next(held))),
    "itertools.cycle": (lambda: itertools.cycle([1.0, 2.0]), lambda held: next(held)),
    "list iterator": (lambda: iter([float(n) for n in range(1, 100)]), lambda held: next(held)),
    "generator": (lambda: (float(n) for n in range(1, 100)), lambda held: next(held)),
    "bound method of a generator": (lambda: random.Random(3).random, lambda held: held()),
    "partial over a generator": (lambda: _partial(), lambda held: held()),
}.items():
    hidden(name, *parts)
add(
    "hidden state",
    "torch.Generator",
    lambda: Own(
        lambda m, x: m.linear(x) + torch.rand(x.shape, generator=m.held, device=x.device),
        held=torch.Generator(torch.get_default_device()).manual_seed(3),
    ),
)
for name, parts in {
    "deque that forward rotates": (
        lambda: deque([1.0, 2.0]),
        lambda held: (held.rotate(), held[0])[1],
    ),
    "list that forward pops": (lambda: [float(n) for n in range(1, 100)], lambda held: held.pop()),
    "dict that forward counts in": (
        lambda: {"n": 0},
        lambda held: held.update(n=held["n"] + 1) or float(held["n"]),
    ),
    "object that forward counts in": (
        Plain,
        lambda held: setattr(held, "scale", held.scale + 1) or held.scale,
    ),
    "object counted by a method": (lambda: Counting(), lambda held: held.next()),
    "queue that forward takes from": (lambda: _long_queue(), lambda held: held.get()),
    "set that forward grows": (set, lambda held: (held.add(len(held)), float(len(held)))[1]),
    "memoised by a cache": (dict, lambda held: held.setdefault("k", 2.0)),
}.items():
    hidden(name, *parts)


class Counting:
    def __init__(self):
        self._n = 0

    def next(self):
        self._n += 1
        return float(self._n)


def _partial():
    import functools

    return functools.partial(random.Random(3).uniform, 0.5, 1.5)


def _long_queue():
    made = queue.SimpleQueue()
    for number in range(200):
        made.put(float(number))
    return made


for name, make in {
    "module's counter": lambda: Own(_count, n=0),
    "global random": lambda: Own(lambda m, x: m.linear(x) * random.random()),
    "global numpy random": lambda: Own(lambda m, x: m.linear(x) * float(np.random.rand())),
    "random.choice of a branch": lambda: Own(
        lambda m, x: m.linear(x) if random.random() < 0.5 else m.linear(x) * 2
    ),
    "torch random to a branch on the host": lambda: Own(
        lambda m, x: m.linear(x) if torch.rand(()).item() < 0.5 else m.linear(x) * 2
    ),
    "layer drop by torch.rand on the CPU": lambda: Own(
        lambda m, x: m.linear(x) if bool(torch.rand(1, device="cpu") < 0.5) else x * m.linear.bias
    ),
}.items():
    add("hidden state", name, make)


def _count(m, x):
    m.n += 1
    return m.linear(x) * m.n
