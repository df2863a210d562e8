"""Modules whose forward reads Python state of every kind, with a change of it and the same value
set once more."""

import argparse
import collections
import contextvars
import dataclasses
import enum
import functools
import itertools
import sys
import types
import weakref

import hiddenkit
import numpy
import torch
from statekit import One, X
from torch import nn

SCALE = 1.0
SETTINGS = types.SimpleNamespace(scale=1.0)
CURRENT = contextvars.ContextVar("CURRENT", default=1.0)
settings_module = types.ModuleType("settings_of_a_test")
settings_module.scale = 1.0
sys.modules["settings_of_a_test"] = settings_module
settings_module.inner = types.ModuleType("settings_of_a_test.inner")
settings_module.inner.scale, settings_module.inner.outer = 1.0, settings_module
HERE = sys.modules[__name__]
AGAIN = float("1.0")  # an equal value in another object


def put_back():
    """Give all globals and class attributes the values that they had."""
    HERE.SCALE, SETTINGS.scale, settings_module.scale, settings_module.inner.scale = (
        1.0,
        1.0,
        1.0,
        1.0,
    )
    CURRENT.set(1.0)
    hiddenkit.put_back()
    Classy.scale, Base.scale, Helper.scale = 1.0, 1.0, 1.0
    for kind in (Classy, Derived):
        if "late" in vars(kind):
            del kind.late


class Color(enum.Enum):
    RED = 1.0
    BLUE = 2.0


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    inner: object = None


class Slotted:
    __slots__ = ("__hidden", "scale")

    def __init__(self):
        self.scale, self.__hidden = 1.0, 1.0

    def hide(self, value):
        self.__hidden = value

    def factor(self):
        return self.scale * self.__hidden


class Helper:
    scale = 1.0

    def factor(self):
        return self.scale * SCALE


class Classy(One):
    scale = 1.0

    def forward(self, x):
        return self.linear(x) * self.scale * getattr(self, "late", 1.0)


class Base(One):
    scale = 1.0

    @property
    def factor(self):
        return self.scale


class Derived(Base):
    def forward(self, x):
        return self.linear(x) * self.factor * getattr(self, "late", 1.0)


class Other(Classy):
    def forward(self, x):
        return super().forward(x) * 2


def scaled(read, **attributes):
    """A module that multiplies by what `read` finds on it."""
    return lambda: One(
        lambda m, x: m.linear(x) * read(m), **{k: make() for k, make in attributes.items()}
    )


def attr(name, value):
    return lambda m: setattr(m, name, value() if callable(value) else value)


def deep():
    return types.SimpleNamespace(b=types.SimpleNamespace(c=types.SimpleNamespace(scale=1.0)))


def reads_a_global(m, x):
    return m.linear(x) * SCALE


def calls_a_function(m, x):
    def inner(y):
        return y * functools.reduce(lambda a, b: a * b, [twice_removed()])

    return inner(m.linear(x))


def twice_removed():
    return Helper().factor()


def imports(m, x):
    import settings_of_a_test

    return m.linear(x) * settings_of_a_test.scale


def set_global(value):
    return lambda m: setattr(HERE, "SCALE", value)


def with_closure():
    scale = 1.0

    def forward(m, x):
        return m.linear(x) * scale

    return One(forward)


def set_cell(value):
    return lambda m: setattr(m.function.__closure__[0], "cell_contents", value)


def with_default(m, x, scale=1.0, *, more=1.0):
    return m.linear(x) * scale * more


def copied(function):
    """The same function as an object of its own."""
    made = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__ and dict(function.__kwdefaults__)
    return made


def by_partial():
    box = [1.0]
    return One(functools.partial(lambda box, m, x: m.linear(x) * box[0], box), box_of=None)


def teacher_in(hold):
    def make():
        torch.manual_seed(5)
        teacher = nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0), nn.BatchNorm1d(4)).requires_grad_(
            False
        )
        teacher[1].eval()
        return One(lambda m, x: m.linear(x) + teacher_of(m)(x), held=hold(teacher))

    return make


def teacher_of(m):
    held = m.held
    held = held.teacher if isinstance(held, types.SimpleNamespace) else held
    held = (
        held["teacher"]
        if isinstance(held, dict)
        else held[0]
        if isinstance(held, list | tuple)
        else held
    )
    return held() if isinstance(held, weakref.ref) else held


KEPT = []


def weakly(teacher):
    KEPT.append(teacher)
    return weakref.ref(teacher)


def on_teacher(change):
    return lambda m: change(teacher_of(m))


def with_parameter_attribute():
    module = One(lambda m, x: m.linear(x) * getattr(m.linear.weight, "scale", 1.0))
    module.linear.weight.scale = 1.0
    return module


def replace_dict(module, value):
    module.__dict__ = {**vars(module), "alpha": value}


box = types.SimpleNamespace
# name: module, change, the same value once more
CASES = {
    "a namespace": (
        scaled(lambda m: m.c.scale, c=lambda: box(scale=1.0)),
        lambda m: setattr(m.c, "scale", 2.0),
        lambda m: setattr(m.c, "scale", AGAIN),
    ),
    "argparse": (
        scaled(lambda m: m.c.scale, c=lambda: argparse.Namespace(scale=1.0)),
        lambda m: setattr(m.c, "scale", 2.0),
        lambda m: setattr(m.c, "scale", AGAIN),
    ),
    "a new field": (
        scaled(lambda m: getattr(m.c, "scale", 1.0), c=box),
        lambda m: setattr(m.c, "scale", 2.0),
        None,
    ),
    "a dataclass": (
        scaled(lambda m: m.c.scale, c=Config),
        lambda m: setattr(m.c, "scale", 2.0),
        lambda m: setattr(m.c, "scale", AGAIN),
    ),
    "a tensor in a dataclass": (
        scaled(lambda m: m.c.inner, c=lambda: Config(inner=torch.ones(4))),
        lambda m: setattr(m.c, "inner", torch.zeros(4)),
        lambda m: setattr(m.c, "inner", m.c.inner),
    ),
    "three objects deep": (
        scaled(lambda m: m.a.b.c.scale, a=deep),
        lambda m: setattr(m.a.b.c, "scale", 2.0),
        lambda m: setattr(m.a.b.c, "scale", AGAIN),
    ),
    "slots": (
        scaled(lambda m: m.c.factor(), c=Slotted),
        lambda m: setattr(m.c, "scale", 2.0),
        lambda m: setattr(m.c, "scale", AGAIN),
    ),
    "a private slot": (
        scaled(lambda m: m.c.factor(), c=Slotted),
        lambda m: m.c.hide(2.0),
        lambda m: m.c.hide(AGAIN),
    ),
    "another object": (
        scaled(lambda m: m.c.scale, c=Config),
        lambda m: setattr(m, "c", Config(2.0)),
        None,
    ),
    "an enum": (
        scaled(lambda m: m.c.value, c=lambda: Color.RED),
        attr("c", Color.BLUE),
        attr("c", Color.RED),
    ),
    "a set": (
        scaled(lambda m: len(m.c), c=lambda: {1}),
        lambda m: m.c.add(2),
        lambda m: m.c.add(1),
    ),
    "a set of the same size": (
        scaled(lambda m: sum(m.c), c=lambda: {1, 2}),
        lambda m: (m.c.remove(1), m.c.add(3)),
        attr("c", lambda: {1, 2}),
    ),
    "a frozenset": (
        scaled(lambda m: len(m.c), c=lambda: frozenset({1})),
        attr("c", frozenset({1, 2})),
        attr("c", lambda: frozenset([1])),
    ),
    "a deque": (
        scaled(lambda m: m.c[-1], c=lambda: collections.deque([1.0], maxlen=1)),
        lambda m: m.c.append(2.0),
        lambda m: m.c.append(AGAIN),
    ),
    "a slice": (
        scaled(lambda m: X[m.c].sum(), c=lambda: slice(0, 1)),
        attr("c", slice(0, 2)),
        attr("c", lambda: slice(0, 1)),
    ),
    "a range": (
        scaled(lambda m: m.c.stop, c=lambda: range(0)),
        attr("c", range(2, 1)),
        attr("c", lambda: range(0)),
    ),
    "a numpy scalar": (
        scaled(lambda m: float(m.c), c=lambda: numpy.float64(1)),
        attr("c", numpy.float64(2)),
        attr("c", lambda: numpy.float64(1)),
    ),
    "a numpy scalar's type": (
        scaled(lambda m: m.c.itemsize, c=lambda: numpy.float64(1)),
        attr("c", numpy.float32(1)),
        attr("c", lambda: numpy.float64(1)),
    ),
    "an array in place": (
        scaled(lambda m: float(m.c.sum()), c=lambda: numpy.ones(3)),
        lambda m: m.c.__setitem__(1, 5),
        lambda m: m.c.__setitem__(1, 1),
    ),
    "another array": (
        scaled(lambda m: float(m.c.sum()), c=lambda: numpy.ones(3)),
        attr("c", lambda: numpy.zeros(3)),
        lambda m: setattr(m, "c", m.c),
    ),
    "an array's memory": (
        scaled(lambda m: torch.from_numpy(m.c), c=lambda: numpy.ones(4, numpy.float32)),
        lambda m: m.c.fill(2),
        lambda m: m.c.fill(1),
    ),
    "bytes": (
        scaled(lambda m: m.c[0], c=lambda: bytearray(b"a")),
        lambda m: m.c.__setitem__(0, 5),
        lambda m: m.c.__setitem__(0, 97),
    ),
    "a long list": (
        scaled(lambda m: m.c[99], c=lambda: [1.0] * 100),
        lambda m: m.c.__setitem__(99, 2.0),
        lambda m: m.c.__setitem__(99, AGAIN),
    ),
    "an equal list": (
        scaled(lambda m: sum(m.c), c=lambda: [1.0, 2.0]),
        attr("c", lambda: [1.0, 3.0]),
        attr("c", lambda: [1.0, 2.0]),
    ),
    "a type in a tuple": (
        scaled(lambda m: 1 + isinstance(m.c[0], float), c=lambda: (1,)),
        attr("c", (1.0,)),
        attr("c", lambda: tuple(map(int, "1"))),
    ),
    "True for 1": (
        scaled(lambda m: 1 + (m.c is True), c=lambda: 1),
        attr("c", True),
        attr("c", lambda: int("1")),
    ),
    "True for 1 in a dict": (
        scaled(lambda m: 1 + (m.c["a"] is True), c=lambda: {"a": 1}),
        lambda m: m.c.update(a=True),
        lambda m: m.c.update(a=int("1")),
    ),
    "a zero's sign": (
        scaled(lambda m: 1 + (str(m.c) == "0.0"), c=lambda: 0.0),
        attr("c", -0.0),
        attr("c", lambda: float("0")),
    ),
    "nan": (
        scaled(lambda m: 1 + (m.c != m.c), c=lambda: float("nan")),
        attr("c", 1.0),
        attr("c", lambda: float("nan")),
    ),
    "a dict's order": (
        scaled(lambda m: next(iter(m.c)), c=lambda: {1: 0, 2: 0}),
        lambda m: m.c.update({1: m.c.pop(1)}),
        lambda m: m.c.update({1: 0}),
    ),
    "a dict of a subclass": (
        scaled(lambda m: m.c["a"], c=lambda: collections.Counter(a=1)),
        lambda m: m.c.update(a=1),
        lambda m: m.c.update(a=0),
    ),
    "a class attribute": (
        Classy,
        lambda m: setattr(Classy, "scale", 2.0),
        lambda m: setattr(Classy, "scale", AGAIN),
    ),
    "a new class attribute": (Classy, lambda m: setattr(Classy, "late", 2.0), None),
    "a base class's": (
        Derived,
        lambda m: setattr(Base, "scale", 2.0),
        lambda m: setattr(Base, "scale", AGAIN),
    ),
    "a new one in between": (Derived, lambda m: setattr(Derived, "late", 2.0), None),
    "a helper's class": (
        scaled(lambda m: m.c.factor(), c=Helper),
        lambda m: setattr(Helper, "scale", 2.0),
        lambda m: setattr(Helper, "scale", AGAIN),
    ),
    "a global of a helper's method": (
        scaled(lambda m: m.c.factor(), c=Helper),
        set_global(2.0),
        set_global(AGAIN),
    ),
    "another class": (
        Classy,
        lambda m: setattr(m, "__class__", Other),
        lambda m: setattr(m, "__class__", Classy),
    ),
    "forward of one instance": (
        lambda: One(lambda m, x: m.linear(x)),
        lambda m: setattr(m.linear, "forward", lambda x: x * m.linear.weight.sum()),
        None,
    ),
    "a global": (lambda: One(reads_a_global), set_global(2.0), set_global(AGAIN)),
    "a global far away": (lambda: One(calls_a_function), set_global(2.0), set_global(AGAIN)),
    "a global's attribute": (
        scaled(lambda m: SETTINGS.scale),
        lambda m: setattr(SETTINGS, "scale", 2.0),
        lambda m: setattr(SETTINGS, "scale", AGAIN),
    ),
    "a module's attribute": (
        scaled(lambda m: settings_module.scale),
        lambda m: setattr(settings_module, "scale", 2.0),
        lambda m: setattr(settings_module, "scale", AGAIN),
    ),
    "a module's in a circle": (
        scaled(lambda m: settings_module.inner.outer.inner.scale),
        lambda m: setattr(settings_module.inner, "scale", 2.0),
        lambda m: setattr(settings_module.inner, "scale", AGAIN),
    ),
    "an import in forward": (
        lambda: One(imports),
        lambda m: setattr(settings_module, "scale", 2.0),
        lambda m: setattr(settings_module, "scale", AGAIN),
    ),
    "a context variable": (
        scaled(lambda m: CURRENT.get()),
        lambda m: CURRENT.set(2.0) and None,
        lambda m: CURRENT.set(AGAIN) and None,
    ),
    "a closure": (with_closure, set_cell(2.0), set_cell(AGAIN)),
    "a default": (
        lambda: One(copied(with_default)),
        lambda m: setattr(m.function, "__defaults__", (2.0,)),
        None,
    ),
    "a keyword's default": (
        lambda: One(copied(with_default)),
        lambda m: m.function.__kwdefaults__.update(more=2.0),
        lambda m: m.function.__kwdefaults__.update(more=AGAIN),
    ),
    "code": (
        lambda: One(copied(reads_a_global)),
        lambda m: setattr(m.function, "__code__", (lambda m, x: m.linear(x) * 2).__code__),
        lambda m: setattr(m.function, "__code__", reads_a_global.__code__),
    ),
    "an argument of a partial call": (
        by_partial,
        lambda m: m.function.args[0].__setitem__(0, 2.0),
        lambda m: m.function.args[0].__setitem__(0, AGAIN),
    ),
    "the object of a bound method": (
        scaled(lambda m: m.c(), c=lambda: Helper().factor),
        lambda m: setattr(m.c.__self__, "scale", 2.0),
        None,
    ),
    "an attribute in __dict__": (
        scaled(lambda m: m.alpha, alpha=lambda: 1.0),
        lambda m: vars(m).update(alpha=2.0),
        lambda m: vars(m).update(alpha=AGAIN),
    ),
    "another __dict__": (
        scaled(lambda m: m.alpha, alpha=lambda: 1.0),
        lambda m: replace_dict(m, 2.0),
        lambda m: replace_dict(m, AGAIN),
    ),
    "a parameter's attribute": (
        with_parameter_attribute,
        lambda m: setattr(m.linear.weight, "scale", 2.0),
        lambda m: setattr(m.linear.weight, "scale", AGAIN),
    ),
    "a parameter's first attribute": (
        lambda: One(lambda m, x: m.linear(x) * getattr(m.linear.bias, "scale", 1.0)),
        lambda m: setattr(m.linear.bias, "scale", 2.0),
        None,
    ),
}
HOLDERS = {
    "a list": lambda t: [t],
    "a tuple": lambda t: (t,),
    "a dict": lambda t: {"teacher": t},
    "an object": lambda t: types.SimpleNamespace(teacher=t),
    "a weak reference": weakly,
}
OF_TEACHER = {
    "its mode": (lambda t: t.eval(), lambda t: t.train(t.training) and t[1].eval()),
    "its weights' storage": (lambda t: setattr(t[0].weight, "data", torch.ones(4, 4)), None),
    "its submodule": (lambda t: t.__setitem__(0, nn.Identity()), None),
    "its buffer": (lambda t: setattr(t[2], "running_var", torch.full((4,), 2.0)), None),
    "its number": (lambda t: setattr(t[1], "p", 0.5), lambda t: setattr(t[1], "p", float("1.0"))),
}
for (where, hold), (what, (change, again)) in itertools.product(
    HOLDERS.items(), OF_TEACHER.items()
):
    CASES[f"a teacher in {where}: {what}"] = (
        teacher_in(hold),
        on_teacher(change),
        again and on_teacher(again),
    )
CASES.update(hiddenkit.CASES)
