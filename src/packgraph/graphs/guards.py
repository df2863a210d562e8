"""What must hold so that a captured call may be replayed: read by the tracer, checked before every
replay.

    traces of the call's pieces ─▶ Dynamo's guards      objects that forward has read, in C++
                               └─▶ tensors from outside the same objects, the same memory, hooks

A trace has Dynamo's guards in three parts: of the call's state and modes, of the owner (one of
several like layers), and of what all owners share. Beside them it compares what Dynamo takes for
fixed: methods of classes, the process's environment, and numbers that are equal to others. A guard
knows type, form and requires_grad of a tensor, but not which one it is: graphs have baked
addresses, so identity and memory are compared here.
"""

import contextlib
import gc
import itertools
import marshal
import operator
import os
from collections.abc import Callable, Container, Mapping, Sequence
from enum import Enum
from functools import partial
from types import CodeType, FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch._C._dynamo.guards import dict_version
from torch._dynamo.guards import _get_closure_vars as _closure_vars
from torch._dynamo.hooks import Hooks

from packgraph.graphs.errors import CaptureError, forward_line, user_line
from packgraph.graphs.key import CONSTANTS, neutral, row_major
from packgraph.graphs.parameters import HookedParameters, has_hooks, local_tensor
from packgraph.graphs.unguarded import refuse_compiled_method, refuse_value
from packgraph.torch_internals import any_autocast

_FLAG = ".READING"  # of fallback.py
_HEAP_TYPE = 1 << 9  # of Python's own flags: a class statement has made it
# Modes of a call are in its key, and are others in its backward, where guards are asked, too.
_MODES = ("GRAD_MODE", "GLOBAL_STATE")
_Check = Callable[[dict[str, Any]], bool]


class Trace:
    """Traced code of a function of an owner and a state.

    Attributes:
        code: The tensor operations, as text.
        run: The function that Dynamo has written; has the arguments of the traced one.
        names: Of the tensors from outside, in words.
        kept: Calls of functions with a cache: the function and its arguments.
        are_fixed: Whether numbers of which there are others alike lie in nothing that may change.
        holds_of: Tells of the variables of a call whether guards of the state, which is among
            them, and of the modes of the call hold.
        holds: Does so of guards of the owner; asked within `neutral`.
        holds_around: Does so of guards of what is the same for all owners; asked within `neutral`.
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
        self.holds_of: _Check = self._of_state.guard_manager.check
        self.holds: _Check = self._of_owner.guard_manager.check
        self.holds_around: _Check = self._around.guard_manager.check
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
        """Returns whether two traces of a function compute the same."""
        return self.code == other.code

    def fits(self, owner: Any, state: Any) -> bool:
        """Returns whether everything that was read is as it was traced."""
        scope = self.scope(owner)
        if not self.holds_of(scope | {"state": state}):
            return False
        with neutral():
            holds = self.holds_around(scope) and self.holds(scope)
        return holds and self.is_read_as(self.read(owner)) and self.classes.hold()

    def scope(self, owner: Any) -> dict[str, Any]:
        """The variables of a call, the state left out, for `holds`, `holds_of` and `read`."""
        return {"owner": owner, **self._cells}

    def read(self, owner: Any, scope: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """The tensors and our objects from outside as they are now, by `names`, and numbers of
        which there are others alike."""
        return cast(tuple[Any, ...], self._read(scope or self.scope(owner), self._globals))

    def tensors(self, owner: Any) -> list[torch.Tensor]:
        """The tensors from outside, as they are now."""
        read = self.read(owner)[: len(self.names)]
        return [value for value in read if isinstance(value, torch.Tensor)]

    def is_read_as(self, now: tuple[Any, ...]) -> bool:
        """Returns whether numbers have the bits that they had."""
        return marshal.dumps(_numbers(now[len(self.names) :]), 2) == self._bits

    def modules(self, owner: Any) -> tuple[torch.nn.Module, ...]:
        """The modules that were read, as they are now."""
        return cast(tuple[torch.nn.Module, ...], self._modules({"owner": owner}, self._globals))

    def difference(self, owner: Any, state: Any = None) -> str:
        """The first thing that is not as it was traced, in Dynamo's words."""
        given = self.scope(owner) | {"state": state}
        with neutral():
            found = self._around.guard_manager.check_verbose(given)
            if found.result:
                found = self._of_owner.guard_manager.check_verbose(given)
        if found.result and state is not None:
            found = self._of_state.guard_manager.check_verbose(given)
        if found.result and not self.classes.hold():
            return "a method or a number of a class that forward uses, or the environment"
        if found.result:
            return "a number that forward reads"
        return in_words("; ".join(map(str, found.verbose_code_parts)) or "something")


def _reading(sources: Sequence[str]) -> Any:
    """A function of locals and globals that evaluates expressions of Dynamo's."""
    values = "".join(f"{source}, " for source in sources)
    return eval(f"lambda L, G: ({values})", dict(_closure_vars()))


class Classes:
    """Methods of the classes of what was read, which Dynamo takes for fixed, their names, which
    hide those of their bases, numbers that classes hold (`Settings.scale`, which torch 2.11 takes
    for fixed), and the process's environment."""

    def __init__(self, code: Sequence[CodeType]) -> None:
        """code: That was traced."""
        self._code = code
        self._named = {name for each in code for name in (*each.co_names, *each.co_consts)}
        self._kinds = dict[type, tuple[set[str], bytes, dict[str, Any]]]()
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
                    held, methods = _held(base, self._named), _methods(base)
                    self._kinds[base] = _names(base), held, methods
                    for method in methods.values():
                        refuse_compiled_method(method, self._code)
        self._tables = [
            held
            for kind in self._kinds
            for holder in _holders(kind)
            for held in (holder, *gc.get_referents(holder))
            if isinstance(held, dict)
        ]
        self._environment = dict(os.environ)
        self._tables.append(os.environ._data)  # type: ignore[attr-defined]
        self._versions = list(map(dict_version, self._tables))
        outside = _outside(entries)
        flags = [name_of(entry.orig_guard).endswith(_FLAG) for entry in entries]
        return [not one and not flag for one, flag in zip(outside, flags, strict=True)]

    def hold(self) -> bool:
        """Returns whether nothing has changed."""
        now = list(map(dict_version, self._tables))
        if now == self._versions:
            return True
        if dict(os.environ) != self._environment:
            return False
        for kind, (names, numbers, methods) in self._kinds.items():
            found = _methods(kind)
            if (
                _names(kind) != names
                or _held(kind, self._named) != numbers
                or any(found.get(name) is not value for name, value in methods.items())
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


def _held(kind: type, names: Container[Any]) -> bytes:
    """The numbers that a class, and members of an Enum, hold under some of these names."""
    found = [
        (name, _numbers(value))
        for held in _holders(kind)
        for name, value in held.items()
        if name in names and isinstance(value, (*CONSTANTS, tuple))
    ]
    return marshal.dumps(found, 2)


def _holders(kind: type) -> list[Any]:
    """The attributes of a class, and those of an Enum's members."""
    members = kind.__members__.values() if issubclass(kind, Enum) else ()
    return [vars(each) for each in (kind, *members)]


def _names(kind: type) -> set[str]:
    # torch.compile adds some, and so does pickle.
    return {name for name in vars(kind) if not name.startswith("___") and name != "__slotnames__"}


def _may_be_alike(value: Any) -> bool:
    """Returns whether there are other values that Python, and so a guard, takes for this one: 0.0
    and -0.0, (1,) and (1.0,)."""
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


_IN_PLACE = (
    "change parameters and other tensors in place (copy_, load_state_dict) to keep the graphs"
)
_ARGUMENT = (
    "pass what changes often to forward as an argument, as a tensor if it may have any value"
)
_NOTHING = contextlib.nullcontext()
_SHAPE = torch.Tensor.size
_NEEDS_GRADIENT = operator.attrgetter("requires_grad")


class Change(NamedTuple):
    """A fact that no longer holds, in words, and what to do about it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return self.what


class _Used(NamedTuple):
    """A trace that a call has run, with its owner, its variables and what it has read."""

    trace: "Trace"
    owner: Any
    scope: dict[str, Any]
    read: tuple[Any, ...]


class _Kept(NamedTuple):
    """A call of a function with a cache, with what it has given and how full the cache was."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    found: Any
    size: int

    @classmethod
    def of(cls, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Kept":
        """The call as it is now."""
        found = function(*args, **kwargs)
        return cls(function, args, kwargs, found, function.cache_info().currsize)

    def holds(self) -> bool:
        """Tells whether the cache has the same for it; a cache that was cleared is not filled."""
        if self.function.cache_info().currsize < self.size:
            return False
        return self.function(*self.args, **self.kwargs) is self.found


def refuse_host_memory(used: Sequence[tuple["Trace", Any]], device: str | None) -> None:
    """Raises CaptureError for a tensor that is read from outside and does not lie on the device of
    the graph: kernels get its number, which a graph would keep. device: None = on the host, too."""
    for trace, owner in used if device is not None else ():
        for name, tensor in zip(trace.names, trace.read(owner), strict=False):
            if not isinstance(tensor, torch.Tensor) or tensor.device.type == device:
                continue
            if tensor.device.type != "cpu" or not tensor.is_pinned():
                raise CaptureError(
                    f"forward reads {name}, a tensor on the {tensor.device.type}: a graph would "
                    "keep its numbers",
                    forward_line(owner) if isinstance(owner, torch.nn.Module) else user_line(),
                    "move it to the device of the module (register it as a buffer), or make it a "
                    "Python number",
                )


class Guards:
    """The guards of one captured call.

    Args:
        used: The traces that it has run, each with its owner.
        parameters: Of the module, by name.
        whole: The first of the traces has the call's own arguments, which are looked at, too.
        lists: Traces by which pieces are found, which have to hold, too: the modules that they have
            read have to be the same ones.
    """

    def __init__(
        self,
        used: Sequence[tuple["Trace", Any]],
        parameters: Mapping[str, torch.nn.Parameter],
        whole: bool = False,
        lists: Sequence[tuple["Trace", Any]] = (),
    ) -> None:
        self._used, self._whole = list[_Used](), whole
        self._around = dict["Trace", dict[str, Any]]()  # variables of a call of each
        self._classes, self._kept = list[Any](), list[_Kept]()
        found = dict[int, tuple[str, torch.Tensor]]()
        for trace, owner in used:
            read = self._use(trace, owner)
            found |= {id(t): (name, t) for name, t in zip(trace.names, read, strict=False)}
        found |= {id(parameter): named for named in parameters.items() for parameter in named[1:]}
        both = [(name, t) for name, t in found.values() if isinstance(t, torch.Tensor)]
        known = [(name, t) for name, t in both if t.layout is torch.strided]
        self._names, tensors = [name for name, _ in known], [tensor for _, tensor in known]
        self._distributed = [
            (tensor, local) for tensor in tensors if (local := local_tensor(tensor)) is not tensor
        ]
        self._locals = list(map(local_tensor, tensors))
        self._pointers = list(map(torch.Tensor.data_ptr, self._locals))
        self._forms = self._forms_now()
        self._free = HookedParameters([one for one in tensors if not has_hooks(one)])
        self._hooked = [tensor for tensor in tensors if has_hooks(tensor)]
        for trace, owner in lists:
            self._use(trace, owner)
        self._lists = [(trace, owner, trace.modules(owner)) for trace, owner in lists]

    @property
    def recomputes(self) -> bool:
        """Returns whether a backward runs code of a forward again."""
        return any(used.trace.recomputes for used in self._used)

    def _use(self, trace: "Trace", owner: Any) -> tuple[Any, ...]:
        """One more trace has to hold; what it has read."""
        scope, read = trace.scope(owner), trace.read(owner)
        self._used.append(_Used(trace, owner, scope, read))
        self._around[trace] = scope
        if trace.classes not in self._classes:
            self._classes.append(trace.classes)
            self._kept += [_Kept.of(*call) for call in trace.kept]
        return read

    def holds(self, args: tuple[Any, ...] | None = None, kwargs: Any = None) -> bool:
        """Returns whether nothing has changed that the graphs have baked. args, kwargs: Of a
        call."""
        if args is not None and not self.take(args, kwargs):
            return False
        for classes in self._classes:
            if not classes.hold():
                return False
        for kept in self._kept:
            if not kept.holds():
                return False
        with neutral() if any_autocast() else _NOTHING:
            if not self._traces_hold():
                return False
        return self._memory_holds() and (not self._lists or self._lists_hold())

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns whether a call's arguments are as they were traced."""
        if not self._whole:
            return True
        first, state = self._used[0], row_major({"args": args, "kwargs": kwargs})
        return first.trace.holds_of(first.scope | {"state": state})

    def _traces_hold(self) -> bool:
        for trace, scope in self._around.items():
            if not trace.holds_around(scope):
                return False
        for trace, owner, scope, read in self._used:
            if not trace.holds(scope):
                return False
            now = trace.read(owner, scope)
            if all(map(operator.is_, now, read)) and trace.are_fixed:
                continue
            # A tuple may be the same one, and what is in it other; or another one that is alike.
            if not all(map(operator.is_, now[: len(trace.names)], read)):
                return False
            if not trace.is_read_as(now):
                return False
        return True

    def _lists_hold(self) -> bool:
        return all(
            all(map(operator.is_, trace.modules(owner), modules))
            for trace, owner, modules in self._lists
        )

    def _forms_now(self) -> list[Any]:
        shapes, strides = map(_SHAPE, self._locals), map(torch.Tensor.stride, self._locals)
        return [*strides, *shapes, *map(_NEEDS_GRADIENT, self._locals)]

    def _memory_holds(self) -> bool:
        return (
            list(map(torch.Tensor.data_ptr, self._locals)) == self._pointers
            and self._forms_now() == self._forms
            and self._hooks_hold()
            and all(local_tensor(tensor) is local for tensor, local in self._distributed)
        )

    def changed(self, args: tuple[Any, ...] | None = None, kwargs: Any = None) -> Change | None:
        """What no longer holds, in words. args, kwargs: Of a call."""
        if self._whole and args is not None:
            first = self._used[0]
            state = row_major({"args": args, "kwargs": kwargs})
            if not first.trace.fits(first.owner, state):
                return Change(first.trace.difference(first.owner, state), _ARGUMENT)
        if self.holds():
            return None
        for trace, owner, scope, read in self._used:
            with neutral():
                holds = trace.holds_around(scope) and trace.holds(scope) and trace.classes.hold()
            if not holds or not trace.is_read_as(trace.read(owner)):
                return Change(trace.difference(owner), _ARGUMENT)
            for name, now, before in zip(trace.names, trace.read(owner), read, strict=False):
                if now is not before:
                    return Change(f"{name} is another one", _IN_PLACE)
        if not all(kept.holds() for kept in self._kept):
            return Change("what a cache of functools has kept is another object", _ARGUMENT)
        if not self._lists_hold():
            return Change("a module that stages belong to was replaced", _ARGUMENT)
        return self.memory_changed()

    def memory_changed(self) -> Change | None:
        """What no longer holds about tensors, in words, whatever code would make of it."""
        if not self._hooks_hold():
            return Change("a parameter got its first hook or lost its last", _IN_PLACE)
        if self._memory_holds():
            return None
        now = map(torch.Tensor.data_ptr, self._locals)
        moved = map(operator.ne, now, self._pointers)
        name = next(itertools.compress(self._names, moved), "a parameter")
        if name == "a parameter":
            changed = map(operator.ne, self._forms_now(), self._forms)
            name = next(itertools.compress(self._names * 3, changed), name)
            return Change(f"the shape or requires_grad of {name!r} was changed", _IN_PLACE)
        return Change(f"the storage of {name!r} was replaced", _IN_PLACE)

    def _hooks_hold(self) -> bool:
        return self._free.have_none() and all(map(has_hooks, self._hooked))
