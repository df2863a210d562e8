"""What a trace has read, and whether that is still so.

A trace has the guards that Dynamo has made, in three parts: of the call's state and modes, of the
owner (one of several like layers), and of what all owners share. Beside these it compares what
Dynamo takes for fixed: methods of classes, the process's environment, and numbers that are equal to
others.
"""

import gc
import marshal
import os
from collections.abc import Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch._C._dynamo.guards import dict_version
from torch._dynamo.guards import _get_closure_vars as _closure_vars
from torch._dynamo.hooks import Hooks

from packgraph.graphs.key import CONSTANTS, neutral
from packgraph.graphs.unguarded import refuse_compiled_method, refuse_value

_FLAG = ".READING"  # of fallback.py
_HEAP_TYPE = 1 << 9  # of Python's own flags: a class statement has made it
# Modes of a call are in its key, and are others in its backward, where guards are asked, too.
_MODES = ("GRAD_MODE", "GLOBAL_STATE")


class Trace:
    """Traced code of a function of an owner and a state.

    Attributes:
        code: The tensor operations, as text.
        run: The function that Dynamo has written; has the arguments of the traced one.
        names: Of the tensors from outside, in words.
        kept: Calls of functions with a cache: the function and its arguments.
        are_fixed: Whether numbers of which there are others alike lie in nothing that may change.
    """

    def __init__(
        self,
        function: FunctionType,
        run: FunctionType,
        code: str,
        guards: tuple[Any, Any, Any],
        classes: "Classes",
        sources: Sequence[str],
        owner: Any,
    ) -> None:
        """guards: Of the state and the modes of the call, of the owner, and of all else. classes:
        Of what was read. sources: Of tensors from outside, as expressions of L and G."""
        self.run, self.code = run, code
        self.kept: tuple[Any, ...] = ()
        # Each has weak references that tell its manager of objects that are gone.
        self._of_state, self._of_owner, self._around = guards
        self.classes = classes
        self._globals = function.__globals__
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._cells = {name: cell.cell_contents for name, cell in cells}
        # The backward of a checkpoint reads what the forward has read.
        self.recomputes = "tag_activation_checkpoint" in code
        self.names = [in_words(source) for source in sources]
        self._read = _reading([*sources, *classes.values])
        values = self.read(owner)[len(self.names) :]
        self.are_fixed = all(map(_is_fixed, values))
        self._bits = marshal.dumps(_numbers(values), 2)
        self._modules = _reading(
            [name for name in classes.modules if name.startswith("L['owner']")]
        )

    def does_as(self, other: "Trace") -> bool:
        """Whether two traces of a function compute the same."""
        return self.code == other.code

    def fits(self, owner: Any, state: Any) -> bool:
        """Whether everything that was read is as it was traced."""
        scope = self.scope(owner)
        if not self.holds_of(scope | {"state": state}):
            return False
        with neutral():
            holds = self.holds_around(scope) and self.holds(scope)
        return holds and self.is_read_as(self.read(owner)) and self.classes.hold()

    def scope(self, owner: Any) -> dict[str, Any]:
        """The variables of a call, the state left out, for `holds`, `holds_of` and `read`."""
        return {"owner": owner, **self._cells}

    def holds(self, scope: dict[str, Any]) -> bool:
        """Whether guards of the owner hold; asked within `neutral`."""
        found: bool = self._of_owner.guard_manager.check(scope)
        return found

    def holds_around(self, scope: dict[str, Any]) -> bool:
        """Whether guards hold of what is the same for all owners; asked within `neutral`."""
        found: bool = self._around.guard_manager.check(scope)
        return found

    def holds_of(self, scope: dict[str, Any]) -> bool:
        """Whether guards of the state hold, which is in `scope`, and of the modes of the call."""
        found: bool = self._of_state.guard_manager.check(scope)
        return found

    def read(self, owner: Any, scope: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """The tensors and our objects from outside as they are now, by `names`, and numbers of
        which there are others alike."""
        found: tuple[Any, ...] = self._read(scope or self.scope(owner), self._globals)
        return found

    def tensors(self, owner: Any) -> list[torch.Tensor]:
        """The tensors from outside, as they are now."""
        read = self.read(owner)[: len(self.names)]
        return [value for value in read if isinstance(value, torch.Tensor)]

    def is_read_as(self, now: tuple[Any, ...]) -> bool:
        """Whether numbers have the bits that they had."""
        return marshal.dumps(_numbers(now[len(self.names) :]), 2) == self._bits

    def modules(self, owner: Any) -> tuple[torch.nn.Module, ...]:
        """The modules that were read, as they are now."""
        found: tuple[torch.nn.Module, ...] = self._modules({"owner": owner}, self._globals)
        return found

    def difference(self, owner: Any, state: Any = None) -> str:
        """The first thing that is not as it was traced, in Dynamo's words."""
        given = self.scope(owner) | {"state": state}
        if not self.classes.hold():
            return "a method of a class that forward uses, or the environment"
        with neutral():
            found = self._around.guard_manager.check_verbose(given)
            if found.result:
                found = self._of_owner.guard_manager.check_verbose(given)
        if found.result and state is not None:
            found = self._of_state.guard_manager.check_verbose(given)
        if found.result:
            return "a number that forward reads"
        return in_words("; ".join(map(str, found.verbose_code_parts)) or "something")


def _reading(sources: Sequence[str]) -> Any:
    """A function of locals and globals that evaluates expressions of Dynamo's."""
    values = "".join(f"{source}, " for source in sources)
    return eval(f"lambda L, G: ({values})", dict(_closure_vars()))


class Classes:
    """Methods of the classes of what was read, which Dynamo takes for fixed, their names, which
    hide those of their bases, and the process's environment."""

    def __init__(self, code: Sequence[CodeType]) -> None:
        """code: That was traced."""
        self._code = code
        self._kinds = dict[type, tuple[set[str], dict[str, Any]]]()
        self.modules = dict[str, None]()  # sources of those that were read
        self.baked = dict[str, None]()  # of our objects that graphs take for the ones they were
        self.values = dict[str, None]()  # of numbers that may be equal and not the same
        self._tables: list[Any] = []
        self._versions: list[int] = []

    def note(self, entries: Sequence[Any]) -> list[bool]:
        """A filter of guards that keeps those of the state and of the modes of the call."""
        for entry in entries:
            name = name_of(entry.orig_guard)
            if isinstance(entry.value, torch.nn.Module):
                self.modules.setdefault(name)
            if getattr(type(entry.value), "BAKED", False) and "L['state']" not in name:
                self.baked.setdefault(name)
            refuse_value(in_words(name), entry.value)
            if _may_be_alike(entry.value) and "L['state']" not in name:
                self.values.setdefault(name)
            kind = entry.value if isinstance(entry.value, type) else type(entry.value)
            bases = (*kind.__mro__, *type.mro(type(kind))) if entry.has_value else ()
            for base in bases:
                if base.__flags__ & _HEAP_TYPE and base not in self._kinds:
                    methods = _methods(base)
                    self._kinds[base] = _names(base), methods
                    for method in methods.values():
                        refuse_compiled_method(method, self._code)
        self._tables = [
            held
            for kind in self._kinds
            for held in gc.get_referents(vars(kind))
            if type(held) is dict
        ]
        self._environment = dict(os.environ)
        self._tables.append(os.environ._data)  # type: ignore[attr-defined]
        self._versions = list(map(dict_version, self._tables))
        outside = _outside(entries)
        flags = [name_of(entry.orig_guard).endswith(_FLAG) for entry in entries]
        return [not one and not flag for one, flag in zip(outside, flags, strict=True)]

    def hold(self) -> bool:
        """Whether nothing has changed."""
        now = list(map(dict_version, self._tables))
        if now == self._versions:
            return True
        if dict(os.environ) != self._environment:
            return False
        for kind, (names, methods) in self._kinds.items():
            found = _methods(kind)
            if _names(kind) != names or any(
                found.get(name) is not value for name, value in methods.items()
            ):
                return False
        self._versions = now
        return True


def _methods(kind: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(kind).items()
        # torch.compile replaces the first two
        if (callable(value) or hasattr(value, "__get__") or issubclass(kind, type))
        and name not in ("__init__", "__setstate__", "__module__", "__doc__")
    }


def _names(kind: type) -> set[str]:
    # torch.compile adds some, and so does pickle.
    return {name for name in vars(kind) if not name.startswith("___") and name != "__slotnames__"}


def _may_be_alike(value: Any) -> bool:
    """Whether there are other values that Python, and so a guard, takes for this one: 0.0 and -0.0,
    (1,) and (1.0,)."""
    if type(value) is float:
        return value == 0.0
    return isinstance(value, tuple | complex | frozenset) and not isinstance(value, torch.Size)


def _is_fixed(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_is_fixed, value))
    return not isinstance(value, list | dict | set)


def _numbers(value: Any) -> Any:
    """The value with the kinds of what is no number in it: like layers have objects of their
    own."""
    if isinstance(value, tuple | list | dict):
        return tuple(map(_numbers, value.items() if isinstance(value, dict) else value))
    if type(value) in (bool, int, float, complex, str):
        return value
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return repr(value) if isinstance(value, CONSTANTS) else type(value).__name__


def in_words(source: str) -> str:
    """An expression of Dynamo's as the user would write it."""
    return source.replace("L['owner']", "module").replace("L['state']['args']", "args")


def name_of(named: Any) -> str:
    """The name of a source or guard, which is a method in some versions of torch."""
    return str(named.name() if callable(named.name) else named.name)


def _outside(entries: Sequence[Any], owned: bool | None = None) -> list[bool]:
    """A filter of guards. owned: Keeps those of the owner, or of the rest; None = both."""
    names = [name_of(entry.orig_guard) for entry in entries]
    return [
        "L['state']" not in name
        and (owned is None or ("L['owner']" in name) is owned)
        and entry.guard_type != "TENSOR_MATCH"  # which tensor it is, is compared
        and not name.endswith(_FLAG)
        and entry.guard_type not in _MODES
        for name, entry in zip(names, entries, strict=True)
    ]


OF_OWNER = Hooks(guard_filter_fn=partial(_outside, owned=True))
AROUND = Hooks(guard_filter_fn=partial(_outside, owned=False))
