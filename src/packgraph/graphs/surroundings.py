"""What captured code changes in Python beside the module's own attributes: globals, closures, plain objects.

    COUNTS.append(1)        self.config.step += 1        global last; last = 7

A replay does none of it. What can be changed is found as the code would find it: from the module's attributes, and from
the globals and closures that its functions name, through containers, through objects of the user's classes to a small
depth, and through the functions that these functions name. It is copied, and compared when the code has run.
"""
import dis
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch

from packgraph.graphs.errors import CaptureError, is_user_file
from packgraph.graphs.fingerprint import PLAIN, owners

_DEEPEST = 3  # objects within objects
_MOST_ENTRIES = 64  # of a container are followed; all are compared
_MISSING = object()
_OURS = __name__.split(".")[0]
_RETURN = "return what changes from forward, or keep it in a buffer that is written in place"


@dataclass(frozen=True)
class _Place:
    """A container as it was: `now` is it, `old` a copy. names: the entries of a dict that count, None = all."""

    now: Any
    old: Any
    name: str
    where: str
    names: tuple[str, ...] | None = None

    def differs(self) -> str | None:
        """The name of what is another thing now."""
        if isinstance(self.now, dict):
            for key in self.names or [*self.now, *(key for key in self.old if key not in self.now)]:
                if not _same(dict.get(self.now, key, _MISSING), self.old.get(key, _MISSING)):
                    return f"{self.name}{key}" if self.names is not None or self.name.endswith(".") \
                        else f"{self.name}[{key!r}]"
            return None
        if isinstance(self.now, set):
            return self.name if self.now != self.old else None
        same = len(self.now) == len(self.old) and all(map(_same, self.now, self.old))
        return None if same else self.name

    def restore(self) -> None:
        """Put the old entries back, if one is another now."""
        if self.differs() is None:
            return
        if isinstance(self.now, dict):
            for key in self.names or [*self.now, *(key for key in self.old if key not in self.now)]:
                if key in self.old:
                    dict.__setitem__(self.now, key, self.old[key])
                else:
                    dict.pop(self.now, key, None)
        elif isinstance(self.now, list):
            self.now[:] = self.old
        else:
            self.now.clear()
            (self.now.update if isinstance(self.now, set) else self.now.extend)(self.old)


class Surroundings:
    """What code of `module` can change, as it is now."""

    def __init__(self, module: torch.nn.Module, where: str) -> None:
        """where: the line to name when no better one is known."""
        self._places: dict[int, _Place] = {}
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self._seen: set[int] = set()
        for _, owner in owners(module):
            self._seen.add(id(owner))
        for prefix, owner in owners(module):
            for name, value in vars(owner).items():
                if name not in ("_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"):
                    self._walk(value, f"{prefix}.{name}" if prefix else name, where, 0)
            for function in _methods(type(owner)):
                self._walk(function, function.__name__, where, 0)
        self._places |= {index: _Place(table, {name: table[name]} if name in table else {}, "", line, (name,))
                         for index, ((_, name), (table, line)) in enumerate(self._globals.items())}

    def check(self) -> None:
        """Raise CaptureError if something is another thing now."""
        for place in self._places.values():
            name = place.differs()
            if name is not None:
                raise CaptureError(f"forward changes {name!r}: that would happen at capture only, never at a replay",
                                   place.where, _RETURN)

    def restore(self) -> None:
        """Put everything back as it was."""
        for place in self._places.values():
            place.restore()

    def _walk(self, value: Any, name: str, where: str, depth: int) -> None:
        if isinstance(value, torch.Tensor) or id(value) in self._seen:
            return
        if isinstance(value, type):  # an autograd function, say, whose backward is code too
            self._seen.add(id(value))
            for function in _functions(value) if _is_at_home(value) else ():
                self._walk(function, function.__name__, where, depth)
            return
        if isinstance(value, list | dict | set | deque):
            self._seen.add(id(value))
            self._places[-id(value)] = _Place(value, _copy(value), name, where)
            for entry in _first(dict.values(value) if isinstance(value, dict) else value):
                self._walk(entry, name, where, depth)
        elif isinstance(value, tuple | partial | MethodType):
            for entry in _parts(value):
                self._walk(entry, name, where, depth)
        elif isinstance(value, FunctionType):
            self._seen.add(id(value))
            if is_user_file(value.__code__.co_filename):
                self._walk_function(value, where, depth)
        elif depth < _DEEPEST and _is_users(value):
            self._seen.add(id(value))
            self._places[-id(vars(value))] = _Place(vars(value), dict(vars(value)), f"{name}.", where)
            for attribute, entry in list(vars(value).items()):
                self._walk(entry, f"{name}.{attribute}", where, depth + 1)

    def _walk_function(self, function: FunctionType, where: str, depth: int) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._walk(value, name, where, depth)
        self._walk(function.__defaults__ or (), function.__name__, where, depth)
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self._walk(wrapped, function.__name__, where, depth)
        for code in _codes(function.__code__):
            for name in code.co_names:
                if name in function.__globals__ or _stores(code, name):
                    value = function.__globals__.get(name)
                    line = _line_of(code, name) if _is_mutable(value) else where
                    self._globals.setdefault((id(function.__globals__), name), (function.__globals__, line))
                    self._walk(value, name, line, depth)


def _methods(kind: type) -> Iterator[FunctionType]:
    """The functions of a module's class that are the user's."""
    for base in kind.__mro__[: kind.__mro__.index(torch.nn.Module)]:
        yield from _functions(base)


def _functions(kind: type) -> Iterator[FunctionType]:
    """Those that the class itself defines, but for what makes objects."""
    for value in list(vars(kind).values()):
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(function, FunctionType) and function.__name__ not in ("__init__", "__new__"):
            yield function


def _codes(code: CodeType) -> Iterator[CodeType]:
    """`code` and those of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _stores(code: CodeType, name: str) -> bool:
    return any(step.opname == "STORE_GLOBAL" and step.argval == name for step in dis.get_instructions(code))


def _line_of(code: CodeType, name: str) -> str:
    """The line of `code` that names a global."""
    number = next((step.positions.lineno for step in dis.get_instructions(code) if step.argval == name
                   and step.positions is not None), code.co_firstlineno)
    return f"{code.co_filename}:{number} in {code.co_name}"


def _is_mutable(value: Any) -> bool:
    return isinstance(value, list | dict | set | deque) or _is_users(value)


def _is_users(value: Any) -> bool:
    """Whether `value` is an object of a class of the user's, with attributes of its own."""
    if isinstance(value, SimpleNamespace | Namespace):
        return True
    if not isinstance(getattr(value, "__dict__", None), dict) or isinstance(value, FunctionType | type):
        return False
    return isinstance(value, torch.nn.Module) or _is_at_home(type(value))


def _is_at_home(kind: type) -> bool:
    """Whether a class is the user's: not torch's, Python's or ours, which know of graphs."""
    if kind.__module__.split(".")[0] == _OURS:
        return False
    home = sys.modules.get(kind.__module__)
    return is_user_file(getattr(home, "__file__", None) or "<unknown>")


def _first(entries: Iterable[Any]) -> list[Any]:
    return [entry for entry, _ in zip(entries, range(_MOST_ENTRIES), strict=False)]


def _parts(value: Any) -> list[Any]:
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    return [value.__func__, value.__self__] if isinstance(value, MethodType) else _first(value)


def _copy(container: Any) -> Any:
    """The entries, past the methods of a subclass, which may make what they return."""
    return dict(dict.items(container)) if isinstance(container, dict) else set(container) if isinstance(container, set) \
        else list(container)


def _same(now: Any, old: Any) -> bool:
    return now is old or (isinstance(now, PLAIN) and type(now) is type(old) and bool(now == old))
