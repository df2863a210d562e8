"""Python state that forward reads, in objects of unusual classes."""

import builtins
import collections
import concurrent.futures
import contextlib
import copy
import functools
import sys
import types
import weakref
import xml.etree.ElementTree as ET

import numpy as np
import torch
import torch.fx
import torch.nn.functional as F
from corpus.hostile.kit import G, Lin, Own, X, case, cases, hset, late, rec, train
from torch import nn

HERE = sys.modules[__name__]
SCALE = 1.0
TEXT = "{0.SCALE}"
hconf = Alias = reg_instances = BUF = None  # set by cases


def setg(v):
    HERE.SCALE = v


# ---- classes
class AfterMixin:
    k = 1.0

    def scaled(self, x):
        return x * SCALE


class MAfter(nn.Module, AfterMixin):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        return self.scaled(self.l(x)) * self.k


cases(
    mixin_after_module_method_global=lambda: train(MAfter(), late(lambda m: setg(3.0))),
    mixin_after_module_method_replaced=lambda: train(
        MAfter(), late(lambda m: setattr(AfterMixin, "scaled", lambda self, x: x * 5))
    ),
)


@case
def linear_forward_patched_reads_global():
    def patched(self, x):
        return F.linear(x, self.weight, self.bias) * SCALE

    nn.Linear.forward = patched

    train(Own(lambda m, x: m.o(m.l(x))), late(lambda m: setg(2.0)))


class CopyMe2:
    v = 1.0

    def __copy__(self):
        r = object.__new__(type(self))
        r.v = SCALE
        return r

    def __deepcopy__(self, memo):
        r = object.__new__(type(self))
        r.v = SCALE
        return r


cases(
    copy_copy_of_a_config=lambda: train(
        Own(lambda m, x: m.l(x) * copy.copy(m.c).v, c=CopyMe2()), late(lambda m: setg(2.0))
    ),
)


class Shown:
    def __str__(self):
        return "hot" if SCALE > 1 else "cold"

    def __repr__(self):
        return str(SCALE)


cases(
    str_of_an_object_chooses=lambda: train(
        Own(
            lambda m, x: m.l(x) * m.table[f"{m.mode}"],
            mode=Shown(),
            table={"hot": 2.0, "cold": 1.0},
        ),
        late(lambda m: setg(2.0)),
    ),
)


class Fresh:
    def __init__(self):
        self.v = SCALE


cases(
    instance_made_by_type_of_attribute=lambda: train(
        Own(lambda m, x: m.l(x) * type(m.c)().v, c=Fresh()), late(lambda m: setg(2.0))
    ),
)


class MyPartial(functools.partial):
    def __call__(self, *a):
        return super().__call__(*a) * SCALE


cases(
    partial_subclass=lambda: train(
        Own(lambda m, x: m.f(m.l(x)), f=MyPartial(torch.tanh)), late(lambda m: setg(2.0))
    ),
)


class scaled_property(property):
    def __get__(self, o, t=None):
        return self if o is None else super().__get__(o, t) * SCALE


class HasScaled:
    @scaled_property
    def v(self):
        return 1.0


cases(
    property_subclass=lambda: train(
        Own(lambda m, x: m.l(x) * m.c.v, c=HasScaled()), late(lambda m: setg(2.0))
    ),
)


cases(
    numpy_poly1d=lambda: train(
        Own(lambda m, x: m.l(x) * float(m.p(0.5)), p=np.poly1d([1.0, 0.0])),
        late(lambda m: m.p.coeffs.__setitem__(0, 2.0)),
    ),
    numpy_frompyfunc=lambda: train(
        Own(lambda m, x: m.l(x) * float(m.f(1.0)), f=np.frompyfunc(lambda t: t * SCALE, 1, 1)),
        late(lambda m: setg(2.0)),
    ),
    future_that_gets_its_result=lambda: train(
        Own(
            lambda m, x: m.l(x) * (m.f.result() if m.f.done() else 1.0),
            f=concurrent.futures.Future(),
        ),
        late(lambda m: m.f.set_result(2.0)),
    ),
    contextlib_closing=lambda: train(
        Own(
            lambda m, x: m.l(x) * m.c.thing.scale,
            c=contextlib.closing(types.SimpleNamespace(scale=1.0, close=lambda: None)),
        ),
        late(lambda m: setattr(m.c.thing, "scale", 2.0)),
    ),
    xml_element=lambda: train(
        Own(lambda m, x: m.l(x) * float(m.e.get("scale")), e=ET.fromstring("<a scale='1.0'/>")),
        late(lambda m: m.e.set("scale", "2.0")),
    ),
)


# ---- names
@case
def builtin_function_replaced():
    def ch(m):
        builtins.max = lambda *a: 2.0

    train(Own(lambda m, x: m.l(x) * max(0.5, 1.0)), late(ch))


fetch = getattr


cases(
    getattr_by_another_name=lambda: train(
        Own(lambda m, x: m.l(x) * fetch(hset, m.key), key="SCALE"),
        late(lambda m: setattr(hset, "SCALE", 2.0)),
    ),
    frame_globals=lambda: train(
        Own(lambda m, x: m.l(x) * sys._getframe().f_globals["SCA" + "LE"]),
        late(lambda m: setg(2.0)),
    ),
)


@case
def callers_local_variable():
    def forward(self, x):
        f = sys._getframe()
        while "heat_of_the_loop" not in f.f_locals:
            f = f.f_back
        return self.l(x) * f.f_locals["heat_of_the_loop"]

    m = Own(forward)
    g = G(m)
    for i in range(8):
        heat_of_the_loop = 1.0 if i < 5 else 2.0  # noqa: F841
        out = g(X(i))
        rec(f"step {i}", out)
        out.sum().backward()


cases(
    format_string_reads_attribute=lambda: train(
        Own(lambda m, x: m.l(x) * float(TEXT.format(hset))),
        late(lambda m: setattr(hset, "SCALE", 2.0)),
    ),
)


@case
def patched_einsum_of_functional():
    old = torch.einsum
    train(
        Own(lambda m, x: torch.einsum("ij,kj->ik", m.l(x), x)),
        late(lambda m: setattr(torch, "einsum", lambda *a: old(*a) * 2)),
    )


cases(
    fx_graph_module_with_leaf_function=lambda: train(
        torch.fx.symbolic_trace(Own(lambda self, x: leaf_for_fx(self.l(x)))),
        late(lambda m: setg(2.0)),
    ),
)


def leaf_for_fx(x):
    return x * SCALE


torch.fx.wrap("leaf_for_fx")


cases(
    typed_dict_and_chainmap=lambda: train(
        Own(lambda m, x: m.l(x) * m.c["w"], c=collections.ChainMap({}, {"w": 1.0})),
        late(lambda m: m.c.maps.__setitem__(0, {"w": 2.0})),
    ),
)


@case
def descriptor_with_weak_key_storage():
    class Field:
        def __init__(self):
            self.d = weakref.WeakKeyDictionary()

        def __get__(self, o, t=None):
            return self.d.get(o, 1.0)

        def __set__(self, o, v):
            self.d[o] = v

    class C:
        w = Field()

    train(Own(lambda m, x: m.l(x) * m.c.w, c=C()), late(lambda m: setattr(m.c, "w", 2.0)))


@case
def parameter_id_key():
    class M(Lin):
        def __init__(self):
            super().__init__()
            self.scale_of = {id(self.l.weight): 2.0}

        def forward(self, x):
            return self.l(x) * self.scale_of.get(id(self.l.weight), 1.0)

    train(M())


class Scaled(nn.Parameter):
    def scaled(self):
        return self * 2


cases(
    parameter_subclass_method=lambda: train(
        Own(lambda m, x: m.l(x) * m.w.scaled(), w=Scaled(torch.ones(4)))
    ),
    version_of_a_parameter=lambda: train(
        Own(lambda m, x: m.l(x) * (2.0 if m.l.weight._version > 4 else 1.0)),
        opt=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    ),
    shared_memory_flag=lambda: train(
        Own(
            lambda m, x: m.l(x) * m.b * (2.0 if m.b.is_shared() else 1.0),
            buffers={"b": torch.ones(4)},
        ),
        late(lambda m: m.b.share_memory_()),
    ),
)
