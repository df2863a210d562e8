"""Record of the tensors from outside that captured code reads and writes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Placement

from packgraph.graphs.checks.constants import Constants
from packgraph.graphs.checks.host_sync import CodeWatcher, shapes_only
from packgraph.graphs.checks.operations import (
    PLAIN_TENSORS,
    flat,
    operands_of,
    operation_of,
    storages,
    tensors_of,
)
from packgraph.graphs.guards import Guards


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
    draws: bool = False
    guards: Guards | None = None

    @property
    def recomputes(self) -> bool:
        """True if a backward runs code of a forward again."""
        return self.guards is not None and self.guards.recomputes


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
    """

    def __init__(self, made: set[int]) -> None:
        """made: Storages that were made in the same window; those of this graph are added."""
        super().__init__()
        self._made = made
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
        self.draws = self.draws or operation.draws
        operands = operands_of(args, kwargs)
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
