"""What must hold so that a captured call may be replayed: read by the tracer, checked before every
replay.

    traces of the call's pieces ─▶ Dynamo's guards      objects that forward has read, in C++
                               └─▶ tensors from outside the same objects, the same memory, hooks

A guard knows type, form and requires_grad of a tensor, but not which one it is: graphs have baked
addresses, so identity and memory are compared here.
"""

import contextlib
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from packgraph.graphs import parameters
from packgraph.graphs.errors import CaptureError, forward_line, user_line
from packgraph.graphs.key import neutral, row_major
from packgraph.graphs.parameters import has_hooks, hooks_made, local_tensor

if TYPE_CHECKING:  # loads torch's tracer, which takes seconds
    from packgraph.graphs.traces import Trace

_IN_PLACE = (
    "change parameters and other tensors in place (copy_, load_state_dict) to keep the graphs"
)
_ARGUMENT = (
    "pass what changes often to forward as an argument, as a tensor if it may have any value"
)
_NOTHING = contextlib.nullcontext()
_SHAPE = torch.Tensor.size
_NEEDS_GRADIENT = operator.attrgetter("requires_grad")
_HOOKS, _LATE_HOOKS = (
    operator.attrgetter("_backward_hooks"),
    operator.attrgetter("_post_accumulate_grad_hooks"),
)


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
    """

    def __init__(
        self,
        used: Sequence[tuple["Trace", Any]],
        parameters: Mapping[str, torch.nn.Parameter],
        whole: bool = False,
    ) -> None:
        self._used, self._whole = list[_Used](), whole
        self._around = dict["Trace", dict[str, Any]]()  # variables of a call of each
        self._lists = list[tuple["Trace", Any, tuple[torch.nn.Module, ...]]]()
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
        self._free = [tensor for tensor in tensors if not has_hooks(tensor)]
        self._hooked = [tensor for tensor in tensors if has_hooks(tensor)]
        self._hooks_made = hooks_made()

    @property
    def recomputes(self) -> bool:
        """Whether a backward runs code of a forward again."""
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

    def add(self, trace: "Trace", owner: Any) -> None:
        """One more trace has to hold, by which pieces are found: the modules that it has read have
        to be the same ones."""
        self._use(trace, owner)
        self._lists.append((trace, owner, trace.modules(owner)))

    def holds(self, args: tuple[Any, ...] | None = None, kwargs: Any = None) -> bool:
        """Whether nothing has changed that the graphs have baked. args, kwargs: Of a call."""
        whole = self._whole and args is not None
        if whole:
            first, state = self._used[0], row_major({"args": args, "kwargs": kwargs})
            if not first.trace.holds_of(first.scope | {"state": state}):
                return False
        for classes in self._classes:
            if not classes.hold():
                return False
        for kept in self._kept:
            if not kept.holds():
                return False
        with neutral() if torch._C._is_any_autocast_enabled() else _NOTHING:
            if not self._traces_hold():
                return False
        return self._memory_holds() and (not self._lists or self._lists_hold())

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
        made = hooks_made()
        if parameters.COUNT_HOOKS and self._hooks_made == made:  # there are no more than there were
            return not self._hooked or all(map(has_hooks, self._hooked))
        holds = (
            not any(map(_HOOKS, self._free))
            and not any(map(_LATE_HOOKS, self._free))
            and all(map(has_hooks, self._hooked))
        )
        if holds:
            self._hooks_made = made
        return holds
