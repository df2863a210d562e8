"""What a rehearsal of captured code has made and called: tensors that leave it, numbers that vary.

A replay hands out the outputs of forward and runs no Python. So a tensor that captured code has put anywhere else (a
global list, an attribute of a plain object, a contextvar) would be there once, never again; and a number that Python
computes anew at every call (a clock, an iterator) would be that of the capture for ever. Neither can be read off the
code. Both show when it runs:

    rehearse, forward and backward ─▶ drop all that it returned ─▶ whatever is alive yet has left
    rehearse again, forward alone  ─▶ the same operations with the same numbers, and nothing alive

It is the rehearsal that is looked at, on every backend, not the capture: tensors are ordinary there, no machinery holds
them, and a cache that code fills when it first runs is filled by then, with memory that no pool takes back.
"""
import gc
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten

from packgraph.graphs.constants import Constants
from packgraph.graphs.errors import CaptureError, is_user_file, user_line
from packgraph.graphs.guard import PLAIN_TENSORS, Journal, Watch, shapes_only, written_tensors
from packgraph.graphs.output_objects import opened_in

_RETURN = "return it from forward, or register a buffer and copy_ into it"
_RETURN_FRESH = "make the object in every call, or return its tensors"
_VARIES = "pass what changes from call to call to forward as an argument, as a tensor if it may have any value"
_OFFLOADING = str(Path(__file__).parent.parent / "offload") + os.sep
_MOST_SHOWN = 20  # tensors whose holder is looked for
_PATIENCE = 0.5  # seconds; a thread of a collective may hold what it has sent for a moment yet


_RELOADS = str(Path(__file__).parents[1] / "offload")


class _Line(NamedTuple):
    """A place in the user's code, cheap to take."""

    code: CodeType
    number: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.number} in {self.code.co_name}"


class _Made(NamedTuple):
    """A tensor that was made. tainted: its values are not the same at every call."""

    tensor: "weakref.ref[torch.Tensor]"
    storage: "weakref.ref[torch.UntypedStorage] | None"
    shape: tuple[int, ...]
    line: _Line | str
    tainted: bool

    def is_alive(self) -> bool:
        if isinstance(self.line, _Line) and self.line.code.co_filename.startswith(_OFFLOADING):
            return False  # the engine's own memory, for the next pass
        return self.tensor() is not None or (self.storage is not None and self.storage() is not None)


class Observation:
    """One rehearsal: the tensors it made, its calls, and the constants it made of Python numbers.

    is_first: it is the first of several, in which code may fill caches with values that are the same at every call.
    """

    def __init__(self, constants: Constants, is_first: bool = False) -> None:
        self.constants, self.is_first = constants, is_first
        self._made: list[_Made] = []
        self._latest: dict[int, _Made] = {}  # by identity
        self._calls: list[tuple[tuple[Any, ...], _Line | str]] = []
        self._tainted: set[int] = set()
        self._files: dict[str, bool] = {}

    def hand(self, tensors: Iterable[torch.Tensor], line: str) -> None:
        """Captured code is given these tensors, which live no longer than it runs. line: where it begins."""
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self._tainted.add(_storage(tensor))
            self._made.append(_Made(weakref.ref(tensor), None, tuple(tensor.shape), line, True))

    def called(self, func: Any, operands: Sequence[Any]) -> None:
        """Captured code of a forward calls an operation."""
        facts = (str(func), *(_fact(operand) for operand in operands))
        if func is torch.ops.aten.lift_fresh.default and operands[0].device.type == "cpu":
            with torch._C.DisableTorchFunction():  # ours: it reads no tensor that an operation has made
                facts += (repr(operands[0].tolist()),)
        self._calls.append((facts, self._line()))

    def made(self, func: Any, operands: Sequence[Any], written: Sequence[torch.Tensor], results: Sequence[Any]) -> None:
        """An operation has run. written: what it has written to."""
        inputs = {_storage(t) for t in operands if _is_plain(t)}
        tainted = torch.Tag.nondeterministic_seeded in func.tags or not inputs.isdisjoint(self._tainted)
        if tainted:
            self._tainted.update(_storage(tensor) for tensor in written if _is_plain(tensor))
        line: _Line | str | None = None
        for result in results:
            if not isinstance(result, torch.Tensor) or any(result is operand for operand in operands):
                continue
            line = line or self._line()
            if isinstance(line, _Line) and line.code.co_filename.startswith(_RELOADS):
                continue  # what a reload brings back belongs to its engine, and goes with the backward
            storage = None
            if _is_plain(result) and _storage(result) not in inputs:
                storage = weakref.ref(result.untyped_storage())
                (self._tainted.add if tainted else self._tainted.discard)(_storage(result))
            self._latest[id(result)] = _Made(weakref.ref(result), storage, tuple(result.shape), line, tainted)
            self._made.append(self._latest[id(result)])

    def returned(self, result: Any) -> None:
        """Captured code has returned this. Raises CaptureError for an object in it that somebody keeps."""
        for opened in opened_in(result):
            if opened.is_kept() and gc.collect() >= 0 and opened.is_kept():
                raise CaptureError(f"forward returns a {opened.build[1].__name__} that it keeps, too: a replay would "
                                   "return another one", user_line(), _RETURN_FRESH)
            self._calls.append((("returns", repr(opened.build)), user_line()))

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether captured code has made this tensor."""
        made = self._latest.get(id(tensor))
        return made is not None and made.tensor() is tensor

    def storages(self) -> set[int]:
        """The storages that captured code has made and that live yet."""
        living = (made.storage() for made in self._made if made.storage is not None)
        return {storage._cdata for storage in living if storage is not None}

    def check_gone(self) -> None:
        """Raise CaptureError if a tensor of the rehearsal lives on, though nothing that it returned does."""
        left = self._left()
        if not left:
            return
        held = [(made, holder) for made in left[-_MOST_SHOWN:] if (holder := _holder(made.tensor()))]
        named = [made for made in left if isinstance(made.line, _Line)]
        alive = [made for made in named if made.tensor() is not None]
        first, holder = held[0] if held else ((alive or named or left)[-1], "")
        raise CaptureError(f"a tensor of shape {list(first.shape)} leaves forward other than through its outputs"
                           f"{holder}: a replay would not put it there again", str(first.line), _RETURN)

    def has_called_as(self, other: "Observation") -> bool:
        """Whether both rehearsals called the same operations with the same numbers."""
        return [call for call, _ in self._calls] == [call for call, _ in other._calls] \
            and self.constants.same_as(other.constants)

    def difference(self, other: "Observation") -> CaptureError:
        """The error that says where two rehearsals differ."""
        for (mine, line), (theirs, _) in zip(self._calls, other._calls, strict=False):
            if mine != theirs:
                return CaptureError(_difference(theirs, mine), str(line), _VARIES)
        if len(self._calls) != len(other._calls):
            longer, shared = max(self._calls, other._calls, key=len), min(len(self._calls), len(other._calls))
            return CaptureError("one of two runs of forward with the same arguments went on with "
                                f"{longer[shared][0][0]}, the other did not: a replay would always do the same",
                                str(longer[shared][1]), _VARIES)
        return CaptureError("two runs of forward with the same arguments made tensors of other numbers: a graph would "
                            "freeze them", self.constants.first_difference(other.constants), _VARIES)

    def _left(self) -> list[_Made]:
        """Who is alive yet."""
        ends = 0.0
        while True:
            left = [made for made in self._made if made.is_alive() and (made.tainted or not self.is_first)]
            if not left:
                return []
            if not ends:
                threads = torch.distributed.is_initialized() or torch.cuda.is_initialized()
                ends = time.monotonic() + (_PATIENCE if threads else 0.0)
                _let_engine_go()
                gc.collect()  # a cycle may hold it
            elif time.monotonic() > ends:
                return left
            else:
                time.sleep(0.01)

    def _line(self) -> _Line | str:
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name not in self._files:
                self._files[name] = is_user_file(name)
            if self._files[name]:
                return _Line(frame.f_code, frame.f_lineno)
            frame = frame.f_back  # type: ignore[assignment]
        return "the autograd engine"


class ObservingWatch(Watch):
    """A watch that tells `seen` what captured code does. forward: whether it is a forward, whose calls are compared."""

    def __init__(self, journal: Journal, device: str | None, seen: Observation, forward: bool) -> None:
        super().__init__(journal, refuse=True, device=device)
        self.seen, self.forward = seen, forward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        looked_at = not shapes_only(types) and all(t in PLAIN_TENSORS for t in types) \
            and not isinstance(func, torch._ops.HigherOrderOperator)
        operands = tree_flatten((args, kwargs or {}))[0]
        written = written_tensors(func, args, kwargs or {}) if looked_at else []
        if looked_at and self.forward:
            self.seen.called(func, operands)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made = tree_flatten(result)[0]
        if looked_at and not shapes_only(type(out) for out in made):
            self.seen.made(func, operands, written, made)
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN_TENSORS and value.layout is torch.strided


def _fact(operand: Any) -> Any:
    """What of an operand has to be the same in both rehearsals."""
    if isinstance(operand, torch.Tensor):
        return tuple(operand.shape), operand.dtype, operand.device
    if isinstance(operand, float | complex):
        return type(operand), repr(operand)  # NaN is not equal to itself
    if isinstance(operand, int | str | None | torch.dtype | torch.device | torch.layout | torch.memory_format):
        return type(operand), operand
    return type(operand)


def _difference(mine: tuple[Any, ...], theirs: tuple[Any, ...]) -> str:
    """In words how a call differs between two rehearsals."""
    if mine[0] == theirs[0] and len(mine) == len(theirs):
        one, other = next((a, b) for a, b in zip(mine, theirs, strict=True) if a != b)
        shown = f"{one[-1]} and then {other[-1]}" if isinstance(one, tuple) and isinstance(other, tuple) else \
            f"{one} and then {other}"
        return f"two runs of forward with the same arguments gave {mine[0]} other values, {shown}: a graph would " \
               "freeze them"
    return f"two runs of forward with the same arguments called {mine[0]} and then {theirs[0]}: a replay would " \
           "always do the same"


def _holder(tensor: torch.Tensor | None) -> str:
    """`, into ...` if it can be told who holds `tensor`, otherwise empty: frozen objects are not looked through."""
    if tensor is None:
        return ""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is tensor:
                    return f", into the global {name!r} of {module.__name__}"
    for holder in gc.get_referrers(tensor):
        if isinstance(holder, dict):
            names = [name for name, value in holder.items() if value is tensor]
            if names:
                return f", into an entry or attribute called {names[0]!r}"
        elif isinstance(holder, list | deque | set):
            return f", into a {type(holder).__name__} of {len(holder)} entries"
    return ""


def _let_engine_go() -> None:
    """Give autograd's thread of the device another backward: it holds on to its last one until then."""
    if torch.cuda.is_initialized():
        with torch.enable_grad():
            torch.zeros(1, device="cuda", requires_grad=True).sum().backward()
