"""Modules whose children, buffers, parameters and attributes are called what the wrapper's own are
called."""

import torch
from corpus.entry import Own, add, one_grad
from torch import nn

GROUP = "names"
NAMES = (
    "stats",
    "device",
    "strict",
    "capacities",
    "consensus",
    "lends",
    "backend",
    "failures",
    "frozen",
    "build",
    "acquire",
    "compiles",
    "slots",
    "program",
    "signature",
)


def child(name):
    return Own(lambda m, x: getattr(m, name)(m.linear(x)), **{name: nn.Linear(4, 4)})


def attribute(name):
    return Own(lambda m, x: m.linear(x) * getattr(m, name), **{name: 1.0})


def buffer(name):
    made = Own(lambda m, x: m.linear(x) * getattr(m, name))
    made.register_buffer(name, torch.ones(4))
    return made


for name in NAMES:
    add(
        GROUP,
        f"child {name}, frozen",
        lambda name=name: child(name),
        one_grad,
        mutate=lambda m, name=name: getattr(m, name).requires_grad_(False),
    )
    add(
        GROUP,
        f"attribute {name}, set",
        lambda name=name: attribute(name),
        one_grad,
        mutate=lambda m, name=name: setattr(m, name, 5.0),
    )
    add(
        GROUP,
        f"buffer {name}, written",
        lambda name=name: buffer(name),
        one_grad,
        mutate=lambda m, name=name: getattr(m, name).mul_(2),
    )
