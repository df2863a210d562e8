"""Record of what captured code uses: tensors from outside, and tensors that it makes of numbers.

`torch.tensor([1.0, 2.0], device=...)` copies from the host, which a graph cannot hold. Such
constants are made in the dry run and kept in the order of the calls; in a capture each call gets a
copy, which the graph makes on the device. Other numbers than in the dry run are an error. Only
plain numbers in lists and tuples are taken: an array may change where nobody looks.
"""

from collections.abc import Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Placement

from packgraph.graphs.checks.host_sync import CaptureChecker, FunctionWatcher, Journal
from packgraph.graphs.checks.operations import (
    Operation,
    operands_of,
    storages,
    tensors_of,
)
from packgraph.graphs.errors import CaptureError, user_line
from packgraph.graphs.guards import Guards
from packgraph.torch_internals import below_modes, storage_id

_MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_OUTSIDE = "make the tensor once outside, or use torch.full / new_zeros / arange"
_VARIES = "pass what changes from call to call to forward as an argument, as a tensor"


class _Kept(NamedTuple):
    """A constant. facts: the numbers it was made of, and the options."""

    facts: str
    tensor: torch.Tensor


class Constants:
    """The constants of one key, in the order in which forward makes them."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._next = 0

    def remembering(self) -> AbstractContextManager[Any]:
        """Within the block, a run of captured code in a dry run, constants are made and kept."""
        return _Making(self._remember)

    def handing_out(self) -> AbstractContextManager[Any]:
        """Within the block, a run of captured code in a capture, constants are copies of those that
        were kept.

        Where none were kept nothing is changed: compiled code would notice.
        """
        return _Making(self._hand_out) if self._kept else nullcontext()

    def start_over(self) -> None:
        """The next constant is the first again: a capture begins."""
        self._next = 0

    def _remember(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        with below_modes():  # who refuses copies need not see it
            made: torch.Tensor = func(*args, **kwargs).detach()
        self._kept.append(_Kept(_facts(func, args, kwargs), made))
        return _own(made, kwargs)

    def _hand_out(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        facts = _facts(func, args, kwargs)
        kept = self._kept[self._next] if self._next < len(self._kept) else None
        self._next += 1
        if kept is None or kept.facts != facts:
            raise CaptureError(
                f"torch.{func.__name__} is given other numbers than in the run before: a graph "
                "would "
                "freeze them",
                user_line(),
                _VARIES,
            )
        return _own(kept.tensor, kwargs)


class _Making(FunctionWatcher):
    """Has `make` make the constants of the code that runs in it."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self._make = make

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _MAKERS:
            return func(*args, **kwargs)
        data = _data(func, args, kwargs)
        if isinstance(data, torch.Tensor):
            return func(*args, **kwargs)
        if not _is_plain(data):
            raise CaptureError(
                f"torch.{func.__name__} copies host values inside a captured stage, and a graph "
                "would "
                f"freeze them: they come from a {type(data).__name__}, which may change unseen",
                user_line(),
                _OUTSIDE,
            )
        return self._make(func, args, kwargs)


def _own(kept: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """A copy that captured code may write to."""
    with torch.no_grad():
        made = kept.clone()
    return made.requires_grad_() if kwargs.get("requires_grad") else made


def _data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the data that a tensor is to be made of."""
    place = 1 if func is torch.Tensor.new_tensor else 0
    return args[place] if len(args) > place else kwargs.get("data", kwargs.get("obj"))


def _is_plain(data: Any) -> bool:
    """Returns whether `data` is a number or nested lists and tuples of numbers."""
    if isinstance(data, list | tuple | range):
        return all(map(_is_plain, data))
    return isinstance(data, int | float | complex)


def _facts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """All that decides about the constant, in a form that compares NaN and types too."""
    options = {name: value for name, value in kwargs.items() if name not in ("data", "obj")}
    place = 1 if func is torch.Tensor.new_tensor else 0
    like = (args[0].dtype, args[0].device) if place else None
    return repr(
        (func.__name__, _data(func, args, kwargs), args[place + 1 :], sorted(options.items()), like)
    )


class DryRun(NamedTuple):
    """Findings of a dry run: the tensors and features that captured code uses.

    Attributes:
        read: Tensors that were there before; whoever keeps the graphs must keep them, since a graph
            knows only their addresses. Emptied where the backend sees and keeps all itself, as is
            `written`.
        written: Those that forwards write to, and buffers among them.
        constants: Tensors that forwards make of numbers.
        placements: Of gradients that are DTensors, by the number of their parameter among the
            module's.
        draws: Whether an operation may have drawn random numbers.
        guards: What must hold so that graphs of the call may be replayed.
    """

    read: list[torch.Tensor]
    written: list[torch.Tensor]
    constants: Constants
    placements: dict[int, tuple[Placement, ...]]
    draws: bool
    guards: Guards


Place = tuple[int, int]  # storage and address


class Uses(CaptureChecker):
    """Watches the operations of one captured graph.

    Attributes:
        reads: Tensors from outside that operations read or write, without their autograd graph, by
            storage and address.
        writes: Those that operations write to.
        uncounted: The places of those whose versions do not count that.
        storages: Of all that operations read or write, the window's own among them.
        addresses: Where all that is written begins.
        draws: Whether an operation draws random numbers.
    """

    def __init__(self, made: set[int]) -> None:
        """made: Storages that were made in the same window; those of this graph are added."""
        super().__init__(Journal(), refuse=False, device=None)
        self.made = made
        self.reads: dict[Place, torch.Tensor] = {}
        self.writes: dict[Place, torch.Tensor] = {}
        self.uncounted: set[Place] = set()
        self.storages: set[int] = set()
        self.addresses: set[int] = set()
        self.draws = False

    def _before(
        self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Set[int]:
        self.draws = self.draws or operation.draws
        operands = operands_of(args, kwargs)
        given = storages(operands).keys()
        if not operation.is_view:
            self.storages.update(given)
            self._note(self.reads, operands)
        if written := operation.written_of(args, kwargs):
            self._note(self.writes, written)
            self.uncounted.update(
                (storage_id(tensor), tensor.data_ptr())
                for tensor in operation.uncounted_of(args, kwargs)
            )
            self.addresses.update(
                tensor.data_ptr() for tensor in written if tensor.layout is torch.strided
            )
        return given

    def _note(self, found: dict[Place, torch.Tensor], values: Sequence[Any]) -> None:
        for tensor in tensors_of(values):
            if tensor.layout is not torch.strided or (cdata := storage_id(tensor)) in self.made:
                continue
            if (place := (cdata, tensor.data_ptr())) in found:
                continue
            found[place] = tensor
            if (
                tensor.requires_grad
            ):  # below autograd, so that it has a version of its own; parameters stand for those
                with below_modes(), torch.no_grad():
                    found[place] = tensor.detach()
