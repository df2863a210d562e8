"""State that forward's code reaches by itself: globals, closures, classes, defaults, functions that
are exchanged."""

import ctypes
import functools
import os
import types
from os import environ, getenv

import torch
from corpus.entry import Own, add
from torch import nn

GROUP = "code state"
SCALE = 1.0
TABLE = {"scale": 1.0}
ITEMS = [1.0]
SETTINGS = types.SimpleNamespace(scale=1.0, deep=types.SimpleNamespace(scale=1.0))
SHIFT = torch.ones(4)
MASK = [torch.ones(4)]


def reset():
    globals().update(SCALE=1.0, SHIFT=torch.ones(4), helper=first_helper, activation=torch.tanh)
    TABLE.clear()
    TABLE["scale"] = 1.0
    ITEMS[:] = [1.0]
    MASK[:] = [torch.ones(4)]
    SETTINGS.scale = SETTINGS.deep.scale = Record.scale = 1.0
    Classy.scale = Base.inherited = 1.0
    Classy.table = {"scale": 1.0}
    defaults.__defaults__ = (1.0,)
    attributed.scale = 1.0
    Classy.factor = staticmethod(lambda: 1.0)
    Classy.method = _method
    os.environ["PACKGRAPH_CORPUS_SCALE"] = "1.0"


def first_helper(x):
    return x * 1.0


def second_helper(x):
    return x * 2.0


helper, activation = first_helper, torch.tanh


def _getenv_inside():
    from os import getenv as read

    return read("PACKGRAPH_CORPUS_SCALE")


def defaults(x, scale=1.0):
    return x * scale


def attributed(x):
    return x * attributed.scale


def nested(x):
    def inner(y):
        return y * SCALE

    return inner(x)


class Base(nn.Module):
    inherited = 1.0


def _method(self, x):
    return x


class Classy(Base):
    scale = 1.0
    table = {"scale": 1.0}
    factor = staticmethod(lambda: 1.0)
    method = _method

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x) * self.scale * self.inherited * self.table["scale"] * self.factor()
        return self.method(x)


def made(function, **parts):
    def make():
        reset()
        return Own(function, **parts)

    return make


def classy():
    reset()
    return Classy()


def case(name, function, mutate):
    add(GROUP, name, made(function), mutate=mutate)


def setter(name, value):
    return lambda m: globals().__setitem__(name, value)


for name, parts in {
    "global number": (lambda m, x: m.linear(x) * SCALE, setter("SCALE", 2.0)),
    "global number, in a function called": (lambda m, x: nested(m.linear(x)), setter("SCALE", 2.0)),
    "global dict": (lambda m, x: m.linear(x) * TABLE["scale"], lambda m: TABLE.update(scale=2.0)),
    "global list": (lambda m, x: m.linear(x) * ITEMS[0], lambda m: ITEMS.__setitem__(0, 2.0)),
    "global object": (
        lambda m, x: m.linear(x) * SETTINGS.scale,
        lambda m: setattr(SETTINGS, "scale", 2.0),
    ),
    "global object, two levels": (
        lambda m, x: m.linear(x) * SETTINGS.deep.scale,
        lambda m: setattr(SETTINGS.deep, "scale", 2.0),
    ),
    "global tensor replaced": (
        lambda m, x: m.linear(x) * SHIFT.to(x.device),
        setter("SHIFT", torch.full((4,), 2.0)),
    ),
    "global tensor in place": (
        lambda m, x: m.linear(x) * SHIFT.to(x.device),
        lambda m: SHIFT.mul_(2),
    ),
    "global list of a tensor, replaced": (
        lambda m, x: m.linear(x) * MASK[0].to(x.device),
        lambda m: MASK.__setitem__(0, torch.full((4,), 3.0)),
    ),
    "global function replaced": (lambda m, x: helper(m.linear(x)), setter("helper", second_helper)),
    "global activation replaced": (
        lambda m, x: activation(m.linear(x)),
        setter("activation", torch.sigmoid),
    ),
    "default of an argument": (
        lambda m, x: defaults(m.linear(x)),
        lambda m: setattr(defaults, "__defaults__", (2.0,)),
    ),
    "attribute of a function": (
        lambda m, x: attributed(m.linear(x)),
        lambda m: setattr(attributed, "scale", 2.0),
    ),
    "environment variable": (
        lambda m, x: m.linear(x) * float(os.environ["PACKGRAPH_CORPUS_SCALE"]),
        lambda m: os.environ.__setitem__("PACKGRAPH_CORPUS_SCALE", "2.0"),
    ),
}.items():
    case(name, *parts)
for reading, value in (
    ("getenv by name", lambda: getenv("PACKGRAPH_CORPUS_SCALE")),
    ("environ by name", lambda: environ["PACKGRAPH_CORPUS_SCALE"]),
    ("environ.get kept", lambda get=os.environ.get: get("PACKGRAPH_CORPUS_SCALE")),
    ("getenv kept", lambda get=os.getenv: get("PACKGRAPH_CORPUS_SCALE")),
    ("getenv in the function", lambda: _getenv_inside()),
):
    case(
        f"environment variable, {reading}",
        lambda m, x, value=value: m.linear(x) * float(value()),
        lambda m: os.environ.__setitem__("PACKGRAPH_CORPUS_SCALE", "2.0"),
    )
case("code of a function exchanged", lambda m, x: helper(m.linear(x)), lambda m: _exchange_code())
for name, (make, mutate) in {
    "class attribute": (classy, lambda m: setattr(Classy, "scale", 2.0)),
    "class attribute of a base": (classy, lambda m: setattr(Base, "inherited", 2.0)),
    "class attribute, inside a dict": (classy, lambda m: Classy.table.update(scale=2.0)),
    "class attribute shadowed on the module": (classy, lambda m: setattr(m, "scale", 2.0)),
    "static method of the class": (
        classy,
        lambda m: setattr(Classy, "factor", staticmethod(lambda: 2.0)),
    ),
    "method of the class": (classy, lambda m: setattr(Classy, "method", lambda self, x: x * 2)),
    "method of the module patched": (classy, lambda m: setattr(m, "method", lambda x: x * 2)),
    "forward of a child patched": (
        lambda: Own(lambda m, x: m.child(m.linear(x)), child=nn.Linear(4, 4)),
        lambda m: setattr(m.child, "forward", lambda x: x * 3),
    ),
    "forward of a child's class patched": (
        lambda: _patched_class(),
        lambda m: setattr(type(m.child), "forward", lambda self, x: x * 3),
    ),
    "__class__ of a child": (
        lambda: _patched_class(),
        lambda m: setattr(m.child, "__class__", _Other),
    ),
}.items():
    add(GROUP, name, make, mutate=mutate)


def _exchange_code():
    globals()["helper"] = types.FunctionType(second_helper.__code__, globals())


class _Other(nn.Module):
    def forward(self, x):
        return x * 5


def _patched_class():
    kind = type("Made", (nn.Module,), {"forward": lambda self, x: x * 2})
    return Own(lambda m, x: m.child(m.linear(x)), child=kind())


def closure(kind):
    def make():
        scale, table, items = 1.0, {"scale": 1.0}, [torch.ones(4)]

        def change(value):
            nonlocal scale
            if kind == "cell":
                scale = value
            elif kind == "dict in a cell":
                table["scale"] = value
            else:
                items[0] = items[0] * value

        def deeper(y):
            return y * scale

        model = Own(lambda m, x: deeper(m.linear(x)) * scale * table["scale"] * items[0])
        model.__dict__["change"] = change
        return model

    return make


for kind in ("cell", "dict in a cell", "tensor of a list in a cell"):
    add(GROUP, f"closure, {kind}", closure(kind), mutate=lambda m: m.change(2.0))


def partials():
    options = {"scale": 1.0}
    return Own(
        lambda m, x: m.apply_to(m.linear(x)),
        options=options,
        apply_to=functools.partial(lambda options, x: x * options["scale"], options),
    )


add(GROUP, "dict inside a partial", partials, mutate=lambda m: m.apply_to.args[0].update(scale=2.0))
add(
    GROUP,
    "keywords of a partial",
    lambda: Own(
        lambda m, x: m.apply_to(m.linear(x)), apply_to=functools.partial(defaults, scale=1.0)
    ),
    mutate=lambda m: m.apply_to.keywords.update(scale=2.0),
)


class Remembered:
    """A function whose result is cached, over state that changes."""

    def __init__(self):
        self.scale = 1.0
        self.read = functools.lru_cache(lambda: self.scale)


add(
    GROUP,
    "cache cleared",
    lambda: Own(lambda m, x: m.linear(x) * m.held.read(), held=Remembered()),
    mutate=lambda m: (setattr(m.held, "scale", 2.0), m.held.read.cache_clear()),
)
add(
    GROUP,
    "bound method of an object",
    lambda: Own(lambda m, x: m.read(m.linear(x)), read=_Scaler().apply),
    mutate=lambda m: setattr(m.read.__self__, "scale", 2.0),
)
add(
    GROUP,
    "function replaced on the module",
    lambda: Own(lambda m, x: m.act(m.linear(x)), act=torch.tanh),
    mutate=lambda m: setattr(m, "act", torch.relu),
)


class _Scaler:
    def __init__(self):
        self.scale = 1.0

    def apply(self, x):
        return x * self.scale


def executed(names):
    """A module whose source was executed, in a namespace with these further names."""

    def make():
        namespace = {"nn": nn, "SCALE": 1.0, **names}
        exec(SOURCE, namespace)
        return namespace["Made"]()

    return make


SOURCE = """
class Made(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x) * SCALE
    def change(self):
        globals()["SCALE"] = 2.0
"""
add(GROUP, "global of executed code", executed({"__name__": "made"}), mutate=lambda m: m.change())
add(
    GROUP,
    "global of executed code that belongs to no module",
    executed({}),
    mutate=lambda m: m.change(),
)


class Record(ctypes.Structure):
    """A class whose dictionary is of a kind of its own."""

    _fields_ = (("value", ctypes.c_int),)
    scale = 1.0


case(
    "attribute of a class of ctypes",
    lambda m, x: m.linear(x) * Record.scale,
    lambda m: setattr(Record, "scale", 2.0),
)
