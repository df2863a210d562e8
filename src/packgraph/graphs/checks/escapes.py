"""What a dry run of captured code has made and called: tensors that leave it, numbers that vary.

A replay hands out the outputs of forward and runs no Python. So a tensor that captured code has put
anywhere else (a global list, an attribute of a plain object, a contextvar) would be there once,
never again; and a number that Python computes anew at every call (a clock, an iterator) would be
that of the capture for ever. Neither can be read off the code. Both show when it runs:

    dry-run, forward and backward ─▶ drop all that it returned ─▶ whatever is alive yet has left
    dry-run again, forward alone  ─▶ the same operations with the same numbers, and nothing alive

It is the dry run that is looked at, on every backend, not the capture: tensors are ordinary there,
no machinery holds them, and a cache that code fills when it first runs is filled by then, with
memory that no pool takes back.

Outputs that share memory with each other, or with what was there before the call.

Whoever changes such an output in place changes the other tensor, too. A replay hands out copies, so
it would not. What has a memory of its own, or is the same tensor in several places, is fine; so are
parts of one tensor that do not overlap (`chunk`, `split`).
"""

import gc
import sys
import time
import weakref
from collections import deque
from collections.abc import Container, Iterable, Sequence, Set
from types import ModuleType
from typing import Any, NamedTuple

import torch

from packgraph.graphs.checks.calls import VARIES, Line, OperationLog, is_of_offloading
from packgraph.graphs.checks.constants import Constants
from packgraph.graphs.checks.host_sync import LEAVE_OUT, CaptureChecker, Journal, shapes_only
from packgraph.graphs.checks.operations import PLAIN_TENSORS, Operation, tensors_of
from packgraph.graphs.errors import CaptureError, user_line
from packgraph.graphs.program import opened_in

_RETURN = "return it from forward, or register a buffer and copy_ into it"
_RETURN_FRESH = "make the object in every call, or return its tensors"
_MOST_SHOWN = 20  # tensors whose holder is looked for
_PATIENCE = 0.5  # seconds; a thread of a collective may hold what it has sent for a moment yet


class _Made(NamedTuple):
    """A tensor that was made. tainted: its values are not the same at every call."""

    tensor: "weakref.ref[torch.Tensor]"
    storage: "weakref.ref[torch.UntypedStorage] | None"
    shape: tuple[int, ...]
    line: Line | str
    tainted: bool

    def is_alive(self) -> bool:
        if is_of_offloading(self.line):
            return False  # the engine's own memory, for the next pass
        return self.tensor() is not None or (
            self.storage is not None and self.storage() is not None
        )


class Observation:
    """One dry run: the tensors it made, its calls, and the constants it made of Python numbers.

    is_first: it is the first of several, in which code may fill caches with values that are the
    same at every call.
    """

    def __init__(self, constants: Constants, is_first: bool = False) -> None:
        self.constants, self.is_first = constants, is_first
        self._made: list[_Made] = []
        self._latest: dict[int, _Made] = {}  # by identity
        self.calls = OperationLog()
        self._tainted: set[int] = set()

    def hand(self, tensors: Iterable[torch.Tensor], line: str) -> None:
        """Captured code is given these tensors, which live no longer than it runs. line: where it
        begins."""
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self._tainted.add(_storage(tensor))
            self._made.append(_Made(weakref.ref(tensor), None, tuple(tensor.shape), line, True))

    def made(
        self,
        operation: Operation,
        inputs: Set[int],
        operands: Sequence[Any],
        written: Set[int],
        results: Sequence[Any],
    ) -> None:
        """An operation has run. inputs: the storages of its operands. written: those it has written
        to."""
        tainted = operation.draws or not self._tainted.isdisjoint(inputs)
        if tainted:
            self._tainted.update(written)
        line: Line | str | None = None
        for result in tensors_of(results):
            if _is_among(result, operands):
                continue
            line = line or self.calls.line()
            if is_of_offloading(line):
                # what a reload brings back belongs to its engine, and goes with the backward
                continue
            storage = None
            if _is_plain(result) and (whole := result.untyped_storage())._cdata not in inputs:
                storage = weakref.ref(whole)
                (self._tainted.add if tainted else self._tainted.discard)(whole._cdata)
            made = _Made(weakref.ref(result), storage, tuple(result.shape), line, tainted)
            self._latest[id(result)] = made
            self._made.append(made)

    def returned(self, result: Any) -> None:
        """Captured code has returned this. Raises CaptureError for an object in it that somebody
        keeps."""
        for opened in opened_in(result):
            if opened.is_kept() and gc.collect() >= 0 and opened.is_kept():
                raise CaptureError(
                    f"forward returns a {opened.build[1].__name__} that it keeps, too: a replay "
                    "would "
                    "return another one",
                    user_line(),
                    _RETURN_FRESH,
                )
            self.calls.note(("returns", repr(opened.build)))

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether captured code has made this tensor."""
        made = self._latest.get(id(tensor))
        return made is not None and made.tensor() is tensor

    def storages(self) -> set[int]:
        """The storages that captured code has made and that live yet."""
        living = (made.storage() for made in self._made if made.storage is not None)
        return {storage._cdata for storage in living if storage is not None}

    def check_gone(self) -> None:
        """Raise CaptureError if a tensor of the dry run lives on, though nothing that it returned
        does."""
        left = self._left()
        if not left:
            return
        named = [made for made in left if isinstance(made.line, Line)]
        alive = [made for made in named if made.tensor() is not None]
        first, holder = _first_held(left[-_MOST_SHOWN:]) or ((alive or named or left)[-1], "")
        raise CaptureError(
            f"a tensor of shape {list(first.shape)} leaves forward other than through its outputs"
            f"{holder}: a replay would not put it there again",
            str(first.line),
            _RETURN,
        )

    def has_called_as(self, other: "Observation") -> bool:
        """Whether both dry runs called the same operations with the same numbers."""
        return self.calls.same_as(other.calls) and self.constants.same_as(other.constants)

    def difference(self, other: "Observation") -> CaptureError:
        """The error that says where two dry runs differ."""
        return self.calls.difference(other.calls) or CaptureError(
            "two runs of forward with the same arguments made tensors of other numbers: a graph "
            "would freeze them",
            self.constants.first_difference(other.constants),
            VARIES,
        )

    def _left(self) -> list[_Made]:
        """Who is alive yet."""
        ends = 0.0
        while True:
            left = [
                made
                for made in self._made
                if made.is_alive() and (made.tainted or not self.is_first)
            ]
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


class ObservingChecker(CaptureChecker):
    """A watch that tells `seen` what captured code does. forward: whether it is a forward, whose
    calls are compared."""

    def __init__(
        self, journal: Journal, device: str | None, seen: Observation, forward: bool
    ) -> None:
        super().__init__(journal, refuse=True, device=device)
        self.seen, self.forward = seen, forward

    def begins(self, operation: Operation, operands: Sequence[Any]) -> None:
        """See CaptureChecker."""
        if self.forward:
            self.seen.calls.called(operation, operands)

    def has_run(
        self,
        operation: Operation,
        inputs: Set[int],
        operands: Sequence[Any],
        written: Set[int],
        results: Sequence[Any],
    ) -> None:
        """See CaptureChecker."""
        if not shapes_only(map(type, results)):
            self.seen.made(operation, inputs, operands, written, results)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN_TENSORS and value.layout is torch.strided


def _is_among(tensor: torch.Tensor, operands: Sequence[Any]) -> bool:
    for operand in operands:  # noqa: SIM110  # no generator: this runs for every operation
        if tensor is operand:
            return True
    return False


def _first_held(left: Sequence[_Made]) -> tuple[_Made, str] | None:
    """The first tensor of which it can be told who holds it, and `, into ...`."""
    alive = {id(tensor): made for made in left if (tensor := made.tensor()) is not None}
    globals_ = {
        id(value): f", into the global {name!r} of {module.__name__}"
        for module in list(sys.modules.values())
        if alive and isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if id(value) in alive
    }
    held = ((made, globals_.get(key) or _holder(made.tensor())) for key, made in alive.items())
    return next(((made, holder) for made, holder in held if holder), None)


def _holder(tensor: torch.Tensor | None) -> str:
    """`, into ...` if it can be told what holds `tensor`, otherwise empty: frozen objects are not
    looked through."""
    for holder in gc.get_referrers(tensor):
        if isinstance(holder, dict):
            names = [name for name, value in holder.items() if value is tensor]
            if names:
                return f", into an entry or attribute called {names[0]!r}"
        elif isinstance(holder, list | deque | set):
            return f", into a {type(holder).__name__} of {len(holder)} entries"
    return ""


def _let_engine_go() -> None:
    """Give autograd's thread of the device another backward: it holds on to its last one until
    then."""
    if torch.cuda.is_initialized():
        with torch.enable_grad():
            torch.zeros(1, device="cuda", requires_grad=True).sum().backward()


_REMEDY = "return a copy (.clone()) in its place. " + LEAVE_OUT


def refuse_shared_memory(
    leaves: Sequence[Any], made: Container[int], captured: Container[int]
) -> None:
    """Raise CaptureError for outputs whose memory is not theirs alone.

    Args:
        leaves: The outputs of a call that is captured.
        made: Storages that captured code has made.
        captured: Identities of tensors that captured code returns. Others are handed through as
            they are, or made by eager code, which runs at every replay.
    """
    outputs = list(
        {
            id(leaf): leaf
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel()
        }.values()
    )
    by_storage: dict[int, list[torch.Tensor]] = {}
    for output in outputs:
        storage = output.untyped_storage()._cdata
        if storage not in made and id(output) not in captured:
            continue
        if storage not in made:
            raise CaptureError(
                f"an output of shape {tuple(output.shape)} shares its memory with a tensor that "
                "was "
                "there before the call (an input, a parameter, a buffer): a replay returns a copy, "
                "and "
                "changes in place would not be seen through the other",
                user_line(),
                _REMEDY,
            )
        for other in by_storage.setdefault(storage, []):
            if _overlap(output, other):
                raise CaptureError(
                    f"two outputs, of shapes {tuple(other.shape)} and {tuple(output.shape)}, share "
                    "memory: a replay returns copies, and changes in place of one would not be "
                    "seen "
                    "through the other",
                    user_line(),
                    _REMEDY,
                )
        by_storage[storage].append(output)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    (start, stop), (first, last) = _extent(one), _extent(other)
    if stop <= first or last <= start:
        return False
    if one.dtype != other.dtype:
        return True
    mask = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    mask.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(mask.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte (exclusive) within the storage."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    last = sum(
        int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start, start + (last + 1) * tensor.element_size()
