"""Stashing what autograd saves in a block of ordinary code, by saved-tensor hooks.

    forward     autograd saves x   ─▶ pack:   the first one reserves a record; x goes to its pages;
                                              a handle is kept
    backward    autograd wants x   ─▶ unpack: pages -> a new tensor; with the last handle the record's pages go back

Hooks are Python. In a capture they run once, and what they launch is in the graph: the order in
which a replay copies and releases is that of the capture. See `stash.py` for what is stashed.
"""  # noqa: E501

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from packgraph.graphs.saved_tensors import Given, Staying, in_backward, staying, was_changed
from packgraph.moe.stash.ops import put, take
from packgraph.moe.stash.pages import Pages

NARROWEST = 8
OWNER = "a block of the stash"
Column = tuple[torch.dtype, int]  # of a saved tensor: dtype and width


class PagePool(Protocol):
    """What a block needs of its stash, see `Stash`."""

    pages: Pages
    page_rows: int
    measures: bool

    @property
    def buffers(self) -> Mapping[Column, Sequence[Tensor]]: ...

    def reserve(self, offsets: Tensor, rows: int) -> Tensor: ...

    def note(self, used: Mapping[Column, int]) -> None: ...

    def check(self, column: Column, number: int) -> None: ...

    def host_memory(self, places: Sequence[tuple[Column, int]]) -> list[Tensor]: ...


class SavedRecord:
    """What one run of a `saving` block has stashed: one record, several tensors."""

    def __init__(
        self, stash: PagePool, offsets: Tensor, rows: int, leave: Sequence[Tensor]
    ) -> None:
        self.stash, self.rows, self.pages, self.measures = stash, rows, stash.pages, stash.measures
        self.offsets: Tensor | None = offsets
        self.left = {tensor.untyped_storage()._cdata for tensor in leave}
        self.record: Tensor | None = None
        self.used: Counter[Column] = Counter()
        self.known: dict[Any, tuple[weakref.ref[torch.UntypedStorage], _Saved]] = {}
        self.waiting: set[int] = set()
        self.packed = 0

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps of a tensor it wants to save."""
        if not self._wanted(tensor):
            return staying(tensor, OWNER)
        with torch.no_grad():
            if self.record is None and self.offsets is not None:
                self.record = self.stash.reserve(self.offsets.detach(), self.rows)
            saved = self._saved(_whole_rows(tensor.detach()))
        handle = _Handle(self, saved, self.packed, tensor)
        self.waiting.add(self.packed)
        self.packed += 1
        return handle

    def close(self) -> None:
        """No more tensors come."""
        if self.measures:
            self.stash.note(self.used)
        self.offsets, self.known, self.left = None, {}, set()

    def done(self, number: int) -> bool:
        """Note that tensor `number` was asked for; whether it was the last one."""
        last = self.waiting == {number}
        self.waiting.discard(number)
        return last

    def _wanted(self, tensor: Tensor) -> bool:
        if tensor.is_leaf and tensor.requires_grad:
            # somebody else holds it, to give it its gradient: a parameter, or an input of a region
            return False
        if (
            not tensor.is_floating_point()
            or tensor.dim() != 2
            or tensor.device != self.pages.state.device
            or tensor.untyped_storage()._cdata in self.left
        ):
            return False
        rows, width = tensor.shape
        return (
            rows == self.rows
            and width >= NARROWEST
            and tensor.stride(1) == 1
            and _has_whole_rows(tensor)
        )

    def _saved(self, tensor: Tensor) -> "_Saved":
        """The tensor in its pages; the same one if the same memory was saved before and has not
        changed since."""
        storage = tensor.untyped_storage()
        key = (
            storage._cdata,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor._version,
        )
        if key in self.known and self.known[key][0]() is not None:
            return self.known[key][1]
        column = (tensor.dtype, tensor.shape[1])
        number = self.used[column]
        self.used[column] += 1
        saved = _Saved(self, column, number, tensor)
        self.known[key] = (weakref.ref(storage), saved)
        return saved


class _Saved:
    """A tensor in pages; while the stash only measures, the tensor itself."""

    def __init__(self, block: SavedRecord, column: Column, number: int, tensor: Tensor) -> None:
        self.block, self.tensor, self.version = (
            block,
            tensor if block.measures else None,
            tensor._version,
        )
        self.buffers: list[Tensor] = []
        self.hosts: list[Tensor] = []
        self.restored: weakref.ref[Tensor] | None = None
        self.token = block.record
        if not block.measures and block.record is not None:
            stash = block.stash
            stash.check(column, number)
            self.buffers, self.hosts = (
                [stash.buffers[column][number]],
                stash.host_memory([(column, number)]),
            )
            self.token = put(self.buffers, self.hosts, [tensor], block.record, stash.page_rows)

    def back(self, release: bool) -> Tensor:
        """The tensor. release: its record's pages are not needed any more. Raises RuntimeError when
        it was changed in place."""
        if self.tensor is not None and self.tensor._version != self.version:
            raise was_changed(tuple(self.tensor.shape), OWNER)
        block, pages = self.block, self.block.pages
        restored = self.tensor if self.restored is None else self.restored()
        if restored is not None and not release:
            return restored
        again = [] if restored is not None else self.buffers
        with torch.no_grad():
            taken = take(
                pages.state,
                again,
                self.hosts if again else [],
                block.record,
                self.token,
                block.rows,
                block.stash.page_rows,
                pages.pages,
                pages.host_pages,
                release,
            )
        if restored is None:
            restored = taken[0]
            self.restored = weakref.ref(restored)
        return restored


class _Handle:
    """What autograd holds in place of a saved tensor: the columns [first, first + width) of what is
    stashed. asked: whether a backward has. given: what came back for it."""

    def __init__(self, block: SavedRecord, saved: _Saved, number: int, tensor: Tensor) -> None:
        self.block, self.saved, self.number = block, saved, number
        self.first, self.width = tensor.storage_offset() % tensor.stride(0), tensor.shape[1]
        self.asked, self.given = False, Given()

    def back(self) -> Tensor:
        """The tensor, in the layout it had. Raises RuntimeError when its pages are gone."""
        again = self.given.again()
        if again is not None:
            return again
        if self.asked and not self.block.waiting:
            raise RuntimeError(
                "backward through stashed tensors a second time: their pages went back to the pool "
                "after the first (retain_graph=True has no effect on a stash). Add the losses "
                "before "
                "backward, or run the forward again"
            )
        release = False
        if in_backward():  # and not a debugger who looks
            self.asked, release = True, self.block.done(self.number)
        rows = self.saved.back(release)
        return self.given.keep(rows.narrow(1, self.first, self.width))


def _has_whole_rows(tensor: Tensor) -> bool:
    """Whether the rows [R, w] lie side by side, or in wider rows that lie side by side in memory
    that is all there."""
    (rows, width), pitch = tensor.shape, tensor.stride(0)
    if pitch < width:
        return False
    first = tensor.storage_offset() % pitch
    end = (tensor.storage_offset() - first + rows * pitch) * tensor.element_size()
    return first + width <= pitch and end <= tensor.untyped_storage().nbytes()


def _whole_rows(tensor: Tensor) -> Tensor:
    """The rows that `tensor` [R, w] is a part of: itself, or [R, its row stride]."""
    pitch = tensor.stride(0)
    return tensor.as_strided(
        (tensor.shape[0], pitch), (pitch, 1), tensor.storage_offset() // pitch * pitch
    )


def unpack(packed: Any) -> Tensor:
    """The tensor that `SavedRecord.pack` was given."""
    return packed.back() if isinstance(packed, _Handle | Staying) else packed
