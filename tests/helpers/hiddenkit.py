"""Modules whose forward reads state that is easily overlooked: of one thread, of a metaclass, by a
name in a string, beneath torch's own layers. Each with a change of it and the same value set once
more."""

import collections
import contextlib
import enum
import gc
import importlib
import logging
import multiprocessing
import sys
import threading
import types

import torch
import torch.nn.functional as F
from statekit import One
from torch import nn

AGAIN = float("1.0")  # an equal value in another object
HERE = sys.modules[__name__]
BY_NAME = SCALE_0 = 1.0
LOCAL = threading.local()
LOG = logging.getLogger("packgraph_of_a_test")
OF_OP, OF_GRADIENT, OF_CONTEXT = [1.0], [1.0], [1.0]
named = types.ModuleType("named_of_a_test")
sys.modules["named_of_a_test"] = named
named.inner = types.SimpleNamespace()
LINEAR, CALL = F.linear, nn.Module.__call__


class Meta(type):
    scale = 1.0

    @property
    def computed(cls):
        return cls.scale


class WithMeta(metaclass=Meta):
    pass


class Mode(enum.Enum):
    SOFT = 1


class Number(float):
    pass


class Derived(Number):
    pass


@torch.library.custom_op("packgraph_of_a_test::scale", mutates_args=())
def scale_op(x: torch.Tensor) -> torch.Tensor:
    return x * OF_OP[0]


@scale_op.register_kernel("cuda")
def _(x):
    return x * OF_OP[0]


scale_op.register_autograd(lambda ctx, grad: grad * OF_GRADIENT[0])


def put_back():
    """Give everything here the value that it had."""
    HERE.BY_NAME = HERE.SCALE_0 = LOCAL.scale = Meta.scale = Mode.SOFT.scale = 1.0
    named.scale = named.scale_0 = named.inner.scale = 1.0
    OF_ITS_OWN["hidden"] = 1.0
    vars(HERE).pop("LATE_0", None)
    OF_OP[0] = OF_GRADIENT[0] = OF_CONTEXT[0] = 1.0
    LOG.setLevel(logging.NOTSET)
    LOG.disabled = False
    F.linear, nn.Module.__call__ = LINEAR, CALL
    if "relu" in vars(torch.Tensor):
        del torch.Tensor.relu


def scaled(read, **attributes):
    """A module that multiplies by what `read` finds on it."""
    return lambda: One(
        lambda m, x: m.linear(x) * read(m), **{k: make() for k, make in attributes.items()}
    )


def setting(holder, name):
    """The change of an attribute, and the same value once more."""
    return lambda m: setattr(holder, name, 2.0), lambda m: setattr(holder, name, AGAIN)


def held(change, again):
    return lambda m: change(m.held), lambda m: again(m.held)


def derived():
    made = Derived(1.0)
    made.scale = 1.0
    return made


def with_context(m, x):
    with m.held as scale:
        return m.linear(x) * scale


@contextlib.contextmanager
def casting(when):
    with torch.autocast("cpu", torch.bfloat16, enabled=when[0] > 1):
        yield


def decorated():
    return One(casting(OF_CONTEXT)(lambda m, x: m.linear(x)))


def views(kind):
    def make():
        values = collections.OrderedDict(a=1.0) if kind == "ordered" else {"a": 1.0}
        return One(lambda m, x: m.linear(x) * next(iter(m.held))[1], held=values.items())

    return make


def put(value):
    return lambda m: gc.get_referents(m.held)[0].__setitem__("a", value)


def by_import(m, x):
    found = importlib.import_module("named_of_a_test")
    return m.linear(x) * found.scale


def from_modules():
    return sys.modules.get("named_of_a_test")


def executed(m, x):
    found = {}
    exec("scale = BY_NAME", globals(), found)
    return m.linear(x) * found["scale"]


def by_vars(m, x):
    return m.linear(x) * vars(named)[m.held]


def by_dict(m, x):
    return m.linear(x) * named.__dict__[m.held]


def doubled_linear(m):
    F.linear = lambda *args: LINEAR(*args) * 2


def with_own_linear():
    F.linear = lambda *args: LINEAR(*args) * BY_NAME
    return One()


def doubled_call(m):
    nn.Module.__call__ = lambda self, *args: (
        CALL(self, *args) * (2 if isinstance(self, nn.Linear) else 1)
    )


def other_relu(m):
    torch.Tensor.relu = torch.Tensor.tanh


class Several:
    def factor(self, which):
        return getattr(self, f"factor_{which}")()

    def factor_one(self):
        return BY_NAME


OF_ITS_OWN = {"__name__": "own_of_a_test", "hidden": 1.0, "source": ["hid", "den"]}
exec("def of_its_own(m, x):\n    return m.linear(x) * eval(''.join(source))", OF_ITS_OWN)
of_its_own = OF_ITS_OWN["of_its_own"]

CASES = {
    "an attribute of the thread": (scaled(lambda m: LOCAL.scale), *setting(LOCAL, "scale")),
    "an attribute of the thread, held": (
        scaled(lambda m: getattr(m.held, "scale", 1.0), held=threading.local),
        *held(lambda h: setattr(h, "scale", 2.0), lambda h: None),
    ),
    "a number in a custom operator": (
        lambda: One(lambda m, x: scale_op(m.linear(x))),
        lambda m: OF_OP.__setitem__(0, 2.0),
        lambda m: OF_OP.__setitem__(0, AGAIN),
    ),
    "a number in a custom operator's backward": (
        lambda: One(lambda m, x: scale_op(m.linear(x))),
        lambda m: OF_GRADIENT.__setitem__(0, 2.0),
        lambda m: OF_GRADIENT.__setitem__(0, AGAIN),
    ),
    "a number in a custom operator called by its name": (
        lambda: One(lambda m, x: torch.ops.packgraph_of_a_test.scale(m.linear(x))),
        lambda m: OF_OP.__setitem__(0, 2.0),
        lambda m: OF_OP.__setitem__(0, AGAIN),
    ),
    "what a context gives": (
        lambda: One(with_context, held=contextlib.nullcontext(1.0)),
        *held(
            lambda h: setattr(h, "enter_result", 2.0), lambda h: setattr(h, "enter_result", AGAIN)
        ),
    ),
    "the argument of a context that decorates": (
        decorated,
        lambda m: OF_CONTEXT.__setitem__(0, 2.0),
        lambda m: OF_CONTEXT.__setitem__(0, AGAIN),
    ),
    "a data set's tensors": (
        scaled(
            lambda m: m.held.tensors[0].to(m.linear.weight.device),
            held=lambda: torch.utils.data.TensorDataset(torch.ones(4)),
        ),
        *held(
            lambda h: setattr(h, "tensors", (torch.full((4,), 2.0),)),
            lambda h: setattr(h, "tensors", h.tensors),
        ),
    ),
    "the level of a logger": (
        scaled(lambda m: 2.0 if LOG.isEnabledFor(logging.DEBUG) else 1.0),
        lambda m: LOG.setLevel(logging.DEBUG),
        lambda m: LOG.setLevel(logging.NOTSET),
    ),
    "a metaclass's attribute": (scaled(lambda m: WithMeta.scale), *setting(Meta, "scale")),
    "a metaclass's attribute, computed": (
        scaled(lambda m: WithMeta.computed),
        *setting(Meta, "scale"),
    ),
    "an attribute of an Enum's member": (
        scaled(lambda m: Mode.SOFT.scale),
        *setting(Mode.SOFT, "scale"),
    ),
    "an attribute of a held member": (
        scaled(lambda m: m.held.scale, held=lambda: Mode.SOFT),
        *setting(Mode.SOFT, "scale"),
    ),
    "an attribute of a number": (
        scaled(lambda m: m.held.scale, held=derived),
        *held(lambda h: setattr(h, "scale", 2.0), lambda h: setattr(h, "scale", AGAIN)),
    ),
    "a dictionary's items": (views("plain"), put(2.0), put(AGAIN)),
    "an ordered dictionary's items": (views("ordered"), put(2.0), put(AGAIN)),
    "an event of processes": (
        scaled(lambda m: 2.0 if m.held.is_set() else 1.0, held=multiprocessing.Event),
        *held(lambda h: h.set(), lambda h: h.clear()),
    ),
}
# What everybody in the process calls, until it is put back.
BENEATH = {
    "torch.nn.functional.linear": (One, doubled_linear, lambda m: setattr(F, "linear", LINEAR)),
    "a global of a function put into torch.nn.functional": (
        with_own_linear,
        *setting(HERE, "BY_NAME"),
    ),
    "the call of all modules": (One, doubled_call, lambda m: setattr(nn.Module, "__call__", CALL)),
    "a tensor's method": (lambda: One(lambda m, x: m.linear(x).relu()), other_relu, None),
}
CASES.update(
    {
        "a global by globals()": (
            scaled(lambda m: globals()["BY_NAME"]),
            *setting(HERE, "BY_NAME"),
        ),
        "a global by globals().get": (
            scaled(lambda m: globals().get("BY_NAME", 3.0)),
            *setting(HERE, "BY_NAME"),
        ),
        "a global by eval": (scaled(lambda m: eval("BY_NAME * 1.0")), *setting(HERE, "BY_NAME")),
        "a global by exec": (lambda: One(executed), *setting(HERE, "BY_NAME")),
        "a module by its name": (lambda: One(by_import), *setting(named, "scale")),
        "a module by __import__": (
            scaled(lambda m: __import__("named_of_a_test").scale),
            *setting(named, "scale"),
        ),
        "a module of sys.modules": (
            scaled(lambda m: sys.modules["named_of_a_test"].scale),
            *setting(named, "scale"),
        ),
        "a module of sys.modules, handed on": (
            scaled(lambda m: from_modules().scale),
            *setting(named, "scale"),
        ),
        "a module's attribute, name computed": (
            scaled(lambda m: getattr(named, f"scale_{m.held}"), held=lambda: 0),
            *setting(named, "scale_0"),
        ),
        "a global, name computed": (
            scaled(lambda m: globals()[f"SCALE_{m.held}"], held=lambda: 0),
            *setting(HERE, "SCALE_0"),
        ),
        "a new global, name computed": (
            scaled(lambda m: globals().get("LATE_" + m.held, 1.0), held=lambda: "0"),
            lambda m: setattr(HERE, "LATE_0", 2.0),
            None,
        ),
        "code that is not known": (
            lambda: One(of_its_own),
            lambda m: OF_ITS_OWN.update(hidden=2.0),
            lambda m: OF_ITS_OWN.update(hidden=AGAIN),
        ),
        "a global of a method, name computed": (
            scaled(lambda m: m.held.factor("one"), held=Several),
            *setting(HERE, "BY_NAME"),
        ),
        "a module's vars, name computed": (
            lambda: One(by_vars, held="scale_0"),
            *setting(named, "scale_0"),
        ),
        "a module's __dict__, name computed": (
            lambda: One(by_dict, held="scale_0"),
            *setting(named, "scale_0"),
        ),
    }
)
CASES_OF_ONE_MODULE = dict(CASES)
# What is not watched: any global of the program may be read.
BOTH_NAMES_COMPUTED = scaled(
    lambda m: getattr(importlib.import_module(m.held), m.held[:0] + "scale"),
    held=lambda: "named_of_a_test",
)
CASES_REFUSED = {
    "an attribute of a module, both names computed": (BOTH_NAMES_COMPUTED, *setting(named, "scale"))
}
CASES.update(BENEATH)
put_back()
