"""Modules and tensors that a module holds without registering them: frozen teachers, tables,
caches."""

import types

import torch
from corpus.entry import Own, add
from torch import nn

GROUP = "frozen teachers"


def teacher():
    made = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    made[2].running_mean += 0.3
    return made.requires_grad_(False)


HOLDERS = {
    "list": (lambda t: [t], lambda held: held[0]),
    "tuple": (lambda t: (t,), lambda held: held[0]),
    "dict": (lambda t: {"t": t}, lambda held: held["t"]),
    "object": (lambda t: types.SimpleNamespace(t=t), lambda held: held.t),
    "function": (lambda t: lambda: t, lambda held: held()),
    "set": (lambda t: {t}, lambda held: next(iter(held))),
}


def _scale(module):
    with torch.no_grad():
        module[0].weight.mul_(2)


CHANGES = {
    "eval": lambda t: t.eval(),
    "weights in place": _scale,
    "weights replaced": lambda t: setattr(
        t[0], "weight", nn.Parameter(t[0].weight * 2, requires_grad=False)
    ),
    "weight data": lambda t: setattr(t[0].weight, "data", t[0].weight.data * 2),
    "buffer replaced": lambda t: setattr(t[2], "running_mean", t[2].running_mean + 1),
    "layer replaced": lambda t: t.__setitem__(1, nn.Identity()),
    "unfrozen": lambda t: t.requires_grad_(True),
    "hook on a layer": lambda t: t[0].register_forward_hook(lambda module, args, out: out * 2),
    "attribute": lambda t: setattr(t[1], "p", 0.0),
}


def forward(read):
    return lambda m, x: (m.linear(x), read(m.held)(x))


for where, (hold, read) in HOLDERS.items():
    for what, change in CHANGES.items():
        if where in ("list", "object") or what in ("eval", "weights replaced"):
            add(
                GROUP,
                f"in a {where}, {what}",
                lambda hold=hold, read=read: Own(forward(read), held=hold(teacher())),
                mutate=lambda m, read=read, change=change: change(read(m.held)),
            )
add(
    GROUP,
    "in a list, trained through",
    lambda: Own(forward(lambda held: held[0]), held=[nn.Linear(4, 4)]),
    observe=lambda m: m.held[0].weight.grad,
)
add(GROUP, "in a list, under no_grad", lambda: Own(_without_gradients, held=[teacher()]))
add(
    GROUP,
    "moving average of the student",
    lambda: Own(
        lambda m, x: (m.linear(x), m.held[0](x)), held=[nn.Linear(4, 4).requires_grad_(False)]
    ),
    call=lambda m, arguments: _averaged(m, *arguments),
)


def _without_gradients(m, x):
    with torch.no_grad():
        target = m.held[0](x)
    return (m.linear(x) - target).square()


def _averaged(m, x):
    with torch.no_grad():
        m.held[0].weight.lerp_(m.linear.weight, 0.5)
    return m(x)
