"""Objects among a call's outputs: taken apart for graphs, and made anew at every replay.

Language models of transformers return a cache of keys and values unless told otherwise: an object
of a class of its own, with tensors in it. A graph makes tensors. So such an object becomes a node
of the tree of outputs, which knows how to build an object of the same class with other tensors:

    forward ─▶ {"loss": tensor, "cache": Cache} ─▶ {"loss": tensor, "cache": Opened([tensor,
    tensor])} ─▶ {..., Cache}

Only objects that forward makes, and nobody keeps, are taken apart: the dry run sees to that.
"""

import sys
import types
import weakref
from enum import Enum
from typing import Any

import torch
from torch.utils._pytree import register_pytree_node, tree_map

from packgraph.graphs.checks.state_kinds import PLAIN
from packgraph.graphs.errors import is_user_file

_HEAP_TYPE = 1 << 9  # of Python's own flags: a class statement has made it
_FIXED = (*PLAIN, Enum, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


class _Closed(Exception):
    """Something in an object cannot be made anew."""


class Opened:
    """An object taken apart. build: how it is made, nested tuples with places in `tensors`."""

    def __init__(
        self, tensors: list[Any], build: Any, origins: tuple["weakref.ref[Any]", ...] = ()
    ) -> None:
        self.tensors, self.build, self.origins = tensors, build, origins

    def is_kept(self) -> bool:
        """Whether somebody holds the object that was taken apart, or one within it."""
        return any(origin() is not None for origin in self.origins)

    def close(self) -> Any:
        """An object of the same class, with these tensors."""
        return _make(self.build, self.tensors, [])


register_pytree_node(
    Opened,
    lambda opened: (opened.tensors, opened.build),
    lambda tensors, build: Opened(list(tensors), build),
    serialized_type_name=f"{__name__}.Opened",
)


def open_objects(tree: Any) -> Any:
    """The tree, with the objects among its leaves taken apart; those that cannot be are left."""
    return tree_map(_opened, tree)


def close_objects(tree: Any) -> Any:
    """The tree, with the objects that were taken apart."""
    return tree_map(
        lambda leaf: leaf.close() if isinstance(leaf, Opened) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, Opened),
    )


def opened_in(tree: Any) -> list[Opened]:
    """The objects of a tree that were taken apart."""
    found: list[Opened] = []
    tree_map(
        lambda leaf: found.append(leaf) if isinstance(leaf, Opened) else None,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, Opened),
    )
    return found


def _opened(leaf: Any) -> Any:
    if isinstance(leaf, (torch.Tensor, *_FIXED)) or not _is_simple(leaf):
        return leaf
    tensors: list[torch.Tensor] = []
    seen: dict[int, int] = {}
    try:
        build = _take(leaf, tensors, seen, origins := list[Any]())
    except _Closed:
        return leaf
    return Opened(list(tensors), build, tuple(map(weakref.ref, origins)))


def _is_simple(value: Any) -> bool:
    """Whether the value is an object whose whole state is in its attributes."""
    kind = type(value)
    return (
        isinstance(getattr(value, "__dict__", None), dict)
        and not isinstance(value, torch.nn.Module)
        and all(base is object or base.__flags__ & _HEAP_TYPE for base in kind.__mro__)
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
        and "__del__" not in dir(kind)
        and kind.__new__ is object.__new__
        and is_user_file(_file_of(kind))
    )


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or "<unknown>"


def _take(value: Any, tensors: list[torch.Tensor], seen: dict[int, int], origins: list[Any]) -> Any:
    """How to make `value` anew. seen: numbers of the objects met, by identity."""
    if isinstance(value, torch.Tensor):
        number = next((i for i, tensor in enumerate(tensors) if tensor is value), len(tensors))
        if number == len(tensors):
            tensors.append(value)
        return "tensor", number
    if isinstance(value, _FIXED):
        return "value", value
    if type(value) in (list, tuple):
        return (
            "list" if type(value) is list else "tuple",
            tuple(_take(v, tensors, seen, origins) for v in value),
        )
    if type(value) is dict:
        if not all(isinstance(key, PLAIN) for key in value):
            raise _Closed
        return "dict", tuple(
            (key, _take(entry, tensors, seen, origins)) for key, entry in value.items()
        )
    if not _is_simple(value):
        raise _Closed
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    origins.append(value)
    return (
        "object",
        type(value),
        tuple((name, _take(entry, tensors, seen, origins)) for name, entry in vars(value).items()),
    )


def _make(build: Any, tensors: list[Any], made: list[Any]) -> Any:
    """What `build` says. made: the objects so far."""
    kind, what = build[0], build[1]
    if kind == "tensor":
        return tensors[what]
    if kind == "value":
        return what
    if kind == "again":
        return made[what]
    if kind in ("list", "tuple"):
        entries = [_make(entry, tensors, made) for entry in what]
        return entries if kind == "list" else tuple(entries)
    if kind == "dict":
        return {key: _make(entry, tensors, made) for key, entry in what}
    new = object.__new__(what)
    made.append(new)
    vars(new).update((name, _make(entry, tensors, made)) for name, entry in build[2])
    return new
