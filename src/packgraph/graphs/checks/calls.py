"""What captured code calls and uses of the world outside: the log of a run's operations.

A graph holds the operations of the one run that was captured. So they are compared between runs
with the same arguments: two dry runs, which may not differ at all, and the capture, whose code
could ask whether it is captured and go another way than in eager calls. Tensors count by their
form, and those of the module by where they lie, too: so another expert of the same shape is another
call.
"""

import contextlib
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Placement

from packgraph.graphs.checks.constants import Constants
from packgraph.graphs.checks.host_calls import Unseen
from packgraph.graphs.checks.host_sync import CodeWatcher, shapes_only
from packgraph.graphs.checks.operations import (
    PLAIN_TENSORS,
    PLAIN_VALUES,
    Operation,
    flat,
    operands_of,
    operation_of,
    storages,
    tensors_of,
)
from packgraph.graphs.errors import PACKAGE, CaptureError, is_user_file, user_line
from packgraph.graphs.parameters import local_tensor

_OFFLOADING = str(PACKAGE / "offloading") + os.sep
VARIES = (
    "pass what changes from call to call to forward as an argument, as a tensor if it may have any "
    "value"
)
_TWICE = ("two runs of forward with the same arguments", "a replay would always do the same")
_CAPTURED = (
    "a run of forward and its capture, with the same arguments,",
    "it may ask whether it is captured, which an eager call is not",
)


class Line(NamedTuple):
    """A place in the user's code, cheap to take."""

    code: CodeType
    number: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.number} in {self.code.co_name}"


class _Tensor(NamedTuple):
    """A tensor that an operation gets. place: storage, offset and strides of one that is the
    module's own."""

    place: tuple[int, int, tuple[int, ...]] | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_Call = tuple[tuple[Any, ...], Line | str]


class OperationLog:
    """What one run has called.

    Attributes:
        draws: Whether an operation may draw random numbers.
    """

    def __init__(self) -> None:
        self.draws = False
        self._calls: list[_Call] = []
        self._digest: tuple[int, int] | None = None
        self._path: int | None = None
        self._owned: set[int] = set()
        self._files: dict[str, bool] = {}
        self._base: tuple[FrameType, Line | str] | None = None

    def tell_apart(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are parameters and buffers of the module: operations on them differ by which they
        are given."""
        self._owned = {
            tensor.untyped_storage()._cdata
            for tensor in map(local_tensor, tensors)
            if tensor.layout is torch.strided
        }

    def called(self, operation: Operation, operands: Sequence[Any]) -> None:
        """The code of a forward calls an operation."""
        self.draws = self.draws or operation.may_draw
        facts = (operation.shown, *map(self._fact, operands))
        if (
            operation.function is torch.ops.aten.lift_fresh.default
            and operands[0].device.type == "cpu"
        ):
            with (
                torch._C.DisableTorchFunction()
            ):  # ours: it reads no tensor that an operation has made
                facts += (repr(operands[0].tolist()),)
        self._calls.append((facts, self.line()))

    def note(self, facts: tuple[Any, ...]) -> None:
        """Something else that has to be the same in every run."""
        self._calls.append((facts, user_line()))

    def same_as(self, other: "OperationLog") -> bool:
        """Whether both runs called the same."""
        return self.digest() == other.digest()

    def digest(self) -> tuple[int, int]:
        """A number for all that was called."""
        if self._digest is not None:
            return self._digest
        return len(self._calls), hash(tuple([call for call, _ in self._calls]))

    def path(self) -> int:
        """A number for the operations without what they were given, and for the lines that called
        them: for two shapes it is the same."""
        if self._path is not None:
            return self._path
        return hash(tuple([(call[0], line) for call, line in self._calls]))

    @property
    def is_short(self) -> bool:
        """Whether a capture has called the same."""
        return self._digest is not None

    def shorten(self) -> None:
        """A capture has called the same: keep numbers alone, enough to tell whether another run is
        the same."""
        self._digest, self._path = self.digest(), self.path()
        self._calls = []

    def difference(self, other: "OperationLog") -> CaptureError | None:
        """The error that says where this run differs from an earlier one."""
        return _difference(self._calls, other._calls, operator.eq, *_TWICE)

    def difference_of_capture(self, other: "OperationLog") -> CaptureError | None:
        """The error that says where this run, which is captured, differs from an earlier one, which
        was not."""
        return _difference(self._operations(), other._operations(), _same_fact, *_CAPTURED)

    def _operations(self) -> list[_Call]:
        return [
            call
            for call in self._calls
            if call[0][0] != "returns" and not is_of_offloading(call[1])
        ]

    def _fact(self, operand: Any) -> Any:
        if type(operand) not in PLAIN_TENSORS and not isinstance(operand, torch.Tensor):
            return _fact(operand)
        place = None
        if (
            operand.layout is torch.strided
            and (storage := operand.untyped_storage()._cdata) in self._owned
        ):
            place = storage, operand.storage_offset(), operand.stride()
        return _Tensor(place, tuple(operand.shape), operand.dtype, operand.device)

    @contextlib.contextmanager
    def above(self) -> Iterator[None]:
        """Within the block the user's code that calls the caller stays where it is: frames above
        it are looked through once."""
        with Unseen():
            frame = sys._getframe(2)
            self._base = frame, self._line_from(frame)
        try:
            yield
        finally:
            self._base = None

    def line(self) -> Line | str:
        """Where the user's code is now."""
        return self._line_from(sys._getframe(2))

    def _line_from(self, frame: FrameType | None) -> Line | str:
        base, found = self._base or (None, "")
        while frame is not None:
            if frame is base:
                return found
            name = frame.f_code.co_filename
            if name not in self._files:
                self._files[name] = is_user_file(name)
            if self._files[name]:
                return Line(frame.f_code, frame.f_lineno)
            frame = frame.f_back
        return "the autograd engine"


def _fact(operand: Any) -> Any:
    """What of an operand that is no tensor has to be the same in both dry runs."""
    if type(operand) in PLAIN_VALUES:
        return type(operand), operand
    if isinstance(operand, float | complex):
        return type(operand), repr(operand)  # NaN is not equal to itself
    if isinstance(
        operand, int | str | None | torch.dtype | torch.device | torch.layout | torch.memory_format
    ):
        return type(operand), operand
    return type(operand)


def is_of_offloading(line: Line | str) -> bool:
    """Whether it is the engine's that copies to the host and back: those are operations of its own,
    elsewhere in a capture than in other runs."""
    return isinstance(line, Line) and line.code.co_filename.startswith(_OFFLOADING)


def _difference(
    later: Sequence[_Call],
    earlier: Sequence[_Call],
    same: Callable[[Any, Any], bool],
    runs: str,
    why: str,
) -> CaptureError | None:
    """In words how one run's calls differ from those of an earlier one. same: whether two facts
    are."""
    for (mine, line), (theirs, other) in zip(later, earlier, strict=False):
        if mine != theirs and not (len(mine) == len(theirs) and all(map(same, mine, theirs))):
            line = line if mine[0] != "returns" else other  # no operation, so of no line of forward
            return CaptureError(
                f"{runs} {_different_calls(theirs, mine, same)}: {why}", str(line), VARIES
            )
    if len(later) != len(earlier):
        longer, shared = max(later, earlier, key=len), min(len(later), len(earlier))
        return CaptureError(
            f"of {runs} one went on with {longer[shared][0][0]}, the other did not: {why}",
            str(longer[shared][1]),
            VARIES,
        )
    return None


def _same_fact(captured: Any, dry: Any) -> bool:
    """A capture may have a copy of what is the module's own: of what an eager stage before it hands
    over."""
    if isinstance(captured, _Tensor) and isinstance(dry, _Tensor) and captured.place is None:
        return captured[1:] == dry[1:]
    return bool(captured == dry)


def _different_calls(
    mine: tuple[Any, ...], theirs: tuple[Any, ...], same: Callable[[Any, Any], bool]
) -> str:
    if mine[0] == theirs[0] and len(mine) == len(theirs):
        one, other = next((a, b) for a, b in zip(mine, theirs, strict=True) if not same(b, a))
        if isinstance(one, _Tensor) and isinstance(other, _Tensor) and one[1:] == other[1:]:
            return f"gave {mine[0]} another parameter or buffer of the same form"
        shown = (
            f"{one[-1]} and then {other[-1]}"
            if isinstance(one, tuple) and isinstance(other, tuple)
            else f"{one} and then {other}"
        )
        return f"gave {mine[0]} other values, {shown}"
    return f"called {mine[0]} and then {theirs[0]}"


class DryRun(NamedTuple):
    """What a dry run has shown: what captured code uses and calls.

    Attributes:
        read: Tensors that were there before; whoever keeps the graphs must keep them, since a graph
            knows only their addresses. Emptied where the backend sees and keeps all itself, as is
            `written`.
        written: Those that forwards write to, and buffers among them.
        constants: Tensors that forwards make of numbers.
        calls: The operations of forwards.
        placements: Of gradients that are DTensors, by the number of their parameter among the
            module's.
        has_host_steps: Whether host functions run within.
        unpacks: Whether forwards have hooks around that make saved tensors anew in backwards, as
            checkpoints do.
        is_confirmed: Whether a second run has called the same. Else the capture has to.
    """

    read: list[torch.Tensor]
    written: list[torch.Tensor]
    constants: Constants
    calls: OperationLog
    placements: dict[int, tuple[Placement, ...]]
    has_host_steps: bool = False
    unpacks: bool = False
    is_confirmed: bool = True


Place = tuple[int, int]  # storage and address


class Uses(CodeWatcher):
    """Watches the operations of one captured graph.

    Attributes:
        reads: Tensors from outside that operations read or write, without their autograd graph, by
            storage and address.
        writes: Those that operations write to.
        uncounted: The places of those whose versions do not count that.
        storages: Of all that operations read or write, the window's own among them.
        addresses: Where all that is written begins.
        draws: Whether an operation draws random numbers.
        calls: Gets the operations; None = nobody asks.
    """

    def __init__(self, made: set[int], calls: OperationLog | None = None) -> None:
        """made: Storages that were made in the same window; those of this graph are added."""
        super().__init__()
        self._made, self.calls = made, calls
        self.reads: dict[Place, torch.Tensor] = {}
        self.writes: dict[Place, torch.Tensor] = {}
        self.uncounted: set[Place] = set()
        self.storages: set[int] = set()
        self.addresses: set[int] = set()
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and not PLAIN_TENSORS.issuperset(types):
            return func(*args, **kwargs) if shapes_only(types) else NotImplemented
        operation = operation_of(func)
        if operation is None:
            return func(*args, **kwargs)
        with Unseen():
            self.draws = self.draws or operation.draws
            operands = operands_of(args, kwargs)
            if self.calls is not None:
                self.calls.called(operation, operands)
            if not operation.is_view:
                self.storages.update(storages(operands))
                self._note(self.reads, operands)
            if written := operation.written_of(args, kwargs):
                self._note(self.writes, written)
                self.uncounted.update(
                    (tensor.untyped_storage()._cdata, tensor.data_ptr())
                    for tensor in operation.uncounted_of(args, kwargs)
                )
                self.addresses.update(
                    tensor.data_ptr() for tensor in written if tensor.layout is torch.strided
                )
        result = func(*args, **kwargs)
        with Unseen():
            self._made.update(storages(flat((result,))).keys() - storages(operands).keys())
        return result

    def _note(self, found: dict[Place, torch.Tensor], values: Sequence[Any]) -> None:
        for tensor in tensors_of(values):
            if (
                tensor.layout is not torch.strided
                or (cdata := tensor.untyped_storage()._cdata) in self._made
            ):
                continue
            if (place := (cdata, tensor.data_ptr())) in found:
                continue
            found[place] = tensor
            if (
                tensor.requires_grad
            ):  # below autograd, so that it has a version of its own; parameters stand for those
                with torch._C._DisableTorchDispatch(), torch.no_grad():  # type: ignore[attr-defined]
                    found[place] = tensor.detach()
