"""Further cases, after a first look at the results."""

import sys
import types
import weakref

import torch
from corpus.hostile.kit import Lin, Own, case, cases, late, train
from torch import nn

HERE = sys.modules[__name__]
SCALE = 1.0


def setg(v):
    HERE.SCALE = v


@case
def module_replaced_in_sys_modules():
    def forward(self, x):
        import hset

        return self.l(x) * hset.SCALE

    def ch(m):
        n = types.ModuleType("hset")
        n.SCALE = 2.0
        sys.modules["hset"] = n

    train(Own(forward), late(ch))


LOG = []


class Dying:
    def __del__(self):
        LOG.append(1)


@case
def effect_of_del_not_named_in_forward():
    def forward(self, x):
        Dying()
        return self.l(x)

    train(Own(forward), observe=lambda m: len(LOG))


class WithFunction(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types_, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out * SCALE if func in (torch.Tensor.mul, torch.mul) else out


@case
def parameter_subclass_with_torch_function():
    HERE.SCALE = 3.0
    train(Own(lambda m, x: m.l(x) * m.w, w=WithFunction(torch.ones(4))), late(lambda m: setg(2.0)))


class Hold:
    pass


@case
def weak_values_die():
    class M(Lin):
        def __init__(self):
            super().__init__()
            self.hold = Hold()
            self.c = weakref.WeakValueDictionary(a=self.hold)

        def forward(self, x):
            return self.l(x) * (1.0 if "a" in self.c else 5.0)

    train(M(), late(lambda m: delattr(m, "hold")))


cases(
    control_plain_global=lambda: train(Own(lambda m, x: m.l(x) * SCALE), late(lambda m: setg(2.0))),
)
