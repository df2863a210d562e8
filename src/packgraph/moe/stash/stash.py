"""The paged stash: what experts save for backward lies in pages, not in tensors of worst-case size.

A layer's expert tensors have R rows, static and enough for the worst routing, of which n are live:
a number on the device. Kept from forward to backward they cost R rows per layer and microbatch in
flight. With the stash

    forward     experts run on [R, w] tensors; what autograd saves is copied, n rows of it, to pages
                the [R, w] tensors are free again: one layer's worst case, reused by the next layer
    backward    pages -> [R, w] tensors with zeros behind row n; the pages go back to the pool

so memory is one worst case plus the sum of what is live, over all layers and microbatches.

Decisions, with reasons:

* Pages are data. Which page a row is in is decided on the device at every replay, so graphs of all
  slots share one pool and their forwards and backwards may replay in any order. What a graph's
  backward must know (the record) is an ordinary tensor in the graphs' own memory, written by its
  forward.
* One record per layer and microbatch for all tensors, see `pages.py`.
* Two forms. `saving` is a block around ordinary code: saved-tensor hooks do the work, the code
  knows nothing of it. It works eagerly and in captures (hooks are Python: they run when a graph is
  captured, what they launch is in the graph), not inside code that torch.compile traces. `keep` and
  `back` are for an explicit autograd function and are fit for torch.compile, and so are the
  operations that this library's experts use (`experts.py`). All are the same on the same pages.
* Only row-major floating [R, w] tensors with w >= 8 go to pages; vectors (a weight per row) are
  left: they are small. A tensor saved twice is stashed once. A view of wider rows (one half of a
  gated product) takes the whole rows with it and shares them with the other views: what comes back
  has the layout it had, so kernels compute the same bits. Leaves that need a gradient stay:
  something else holds them (parameters; inputs of a captured region).
* Pages go back with the last tensor of a record that the backward asks for. A forward without
  backward, or whose backward leaves out some of what the block saved, keeps its pages until the
  next `reset`, which belongs at the beginning of every step.
* What a checkpoint around the block drops is not stashed, nor what a backward computes again.
* A layer whose backward follows its forward at once (the last layer of the last chunk) need not be
  stashed: call it outside of `saving`.

    stash = Stash(device)                   # measures: notes what is saved, counts demand
    with stash.saving(offsets, rows): ...   # warm-up steps
    stash.allocate(pages)                   # from now on it stashes; before the first capture
    stash.attach(model)                     # captures leave the pool as it was

`Stash.saving` stashes what autograd saves in a block of ordinary code, by saved-tensor hooks:

    forward     autograd saves x   ─▶ pack:   the first one reserves a record; x goes to its pages;
                                              a handle is kept
    backward    autograd wants x   ─▶ unpack: pages -> a new tensor; with the last handle the record's pages go back

Hooks are Python. In a capture they run once, and what they launch is in the graph: the order in
which a replay copies and releases is that of the capture. See `stash.py` for what is stashed.
"""  # noqa: E501

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from packgraph.graphs import fallback
from packgraph.graphs.saved_tensors import (
    Given,
    Staying,
    are_others,
    in_backward,
    staying,
    was_changed,
)
from packgraph.moe.stash.pages import (
    DEMAND,
    NEED_HI,
    OVERFLOW,
    SPILLED_HI,
    Pages,
    keep,
    put,
    reserve,
    take,
)
from packgraph.torch_internals import identity, storage_id, version_of

NARROWEST = 8
OWNER = "a block of the stash"
Column = tuple[torch.dtype, int]  # of a saved tensor: dtype and width


class PagePool(Protocol):
    """Part of a stash that a block needs, see `Stash`."""

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
    """Tensors that one run of a `saving` block has stashed, in one record."""

    def __init__(
        self, stash: PagePool, offsets: Tensor, rows: int, leave: Sequence[Tensor]
    ) -> None:
        self.stash, self.rows, self.pages, self.measures = stash, rows, stash.pages, stash.measures
        self.offsets: Tensor | None = offsets
        self.left = {storage_id(tensor) for tensor in leave}
        self.record: Tensor | None = None
        self.used: Counter[Column] = Counter()
        self.known: dict[Any, tuple[weakref.ref[torch.UntypedStorage], _Saved]] = {}
        self.waiting: set[int] = set()
        self.packed = 0

    def pack(self, tensor: Tensor) -> Any:
        """Returns the object that autograd keeps for a tensor it wants to save."""
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
        if (
            # somebody else holds it, to give it its gradient: a parameter, or an input of a region
            (tensor.is_leaf and tensor.requires_grad)
            or not tensor.is_floating_point()
            or tensor.dim() != 2
            or tensor.device != self.pages.state.device
            or storage_id(tensor) in self.left
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
            identity(storage),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            version_of(tensor),
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
            version_of(tensor),
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
        if self.tensor is not None and version_of(self.tensor) != self.version:
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
    """Stand-in that autograd holds for a saved tensor: the columns [first, first + width) of what
    is stashed. asked: whether a backward has. given: what came back for it."""

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
    """Returns whether the rows [R, w] lie side by side, or in wider rows that lie side by side in
    memory that is all there."""
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


class Stash:
    """One pool of pages for all layers and microbatches of a rank.

    page_rows: rows of a page. identity: leave everything as it is (to compare with).

    columns: how many tensors of each dtype and width one layer saves at most; noted until
    `allocate`.
    """

    def __init__(
        self, device: torch.device | str, page_rows: int = 64, identity: bool = False
    ) -> None:
        """Raises ValueError for a page that is no multiple of 16 rows: copies go 16 rows at a
        time."""
        if page_rows < 1 or page_rows % 16:
            raise ValueError(f"a page of {page_rows} rows: it must be a positive multiple of 16")
        self.device, self.page_rows, self.identity = torch.device(device), page_rows, identity
        self.columns: dict[Column, int] = {}
        self.pages = Pages(0, 0, self.device)
        self.buffers: dict[Column, list[Tensor]] = {}
        self.hosts: dict[Column, list[Tensor]] = {}
        self.measures = True

    def allocate(
        self, pages: int, host_pages: int = 0, columns: Mapping[Column, int] | None = None
    ) -> None:
        """Make the pool; tensors are stashed from now on. columns: instead of those that were
        noted.

        Graphs captured before go on without pages, or with those they were captured with, unless
        the new pool is attached to their module: then they are captured again. Nothing may be in
        flight. Raises ValueError without pages, or when nothing is known of what there is to stash.
        """
        self.columns = dict(self.columns if columns is None else columns)
        if pages < 1 or not self.columns:
            raise ValueError(
                f"a stash of {pages} pages for {len(self.columns)} kinds of tensors cannot be "
                "made: run a "
                "forward within `saving` first, under no checkpoint, or say which columns there are"
            )
        self.buffers, self.hosts = {}, {}  # the old ones go before there are new ones
        self.pages = Pages(pages, host_pages, self.device)
        self.buffers = {column: self._memory(column, pages, self.device) for column in self.columns}
        self.hosts = {
            column: self._memory(column, host_pages, torch.device("cpu")) if host_pages else []
            for column in self.columns
        }
        self.measures = False

    def attach(self, module: torch.nn.Module) -> None:
        """Tell graphs of `module` of the pool, once it is allocated: its state becomes a buffer of
        `module`, not saved.

        Buffers are put back when a capture is over. Without that, a capture that runs a forward and
        not its backward (it failed in between; on CUDA also when an eager stage follows) keeps its
        pages until the next reset. And a pool that is replaced is seen: the graphs are captured
        again.
        """
        module.register_buffer("stash_state", self.pages.state, persistent=False)

    def _memory(self, column: Column, pages: int, device: torch.device) -> list[Tensor]:
        dtype, width = column
        pinned = (
            device.type == "cpu" and self.device.type == "cuda"
        )  # the kernels write to it over the bus
        return [
            torch.empty(
                pages * self.page_rows + 1, width, dtype=dtype, device=device, pin_memory=pinned
            )
            for _ in range(self.columns[column])
        ]

    def nbytes(self, host: bool = False) -> int:
        """Bytes of all pages on the device (or on the host)."""
        tiers = (self.hosts if host else self.buffers).values()
        return sum(memory.nbytes for memories in tiers for memory in memories)

    @contextlib.contextmanager
    def saving(self, offsets: Tensor, rows: int, leave: Sequence[Tensor] = ()) -> Iterator[None]:
        """Within the block [rows, w] tensors saved for backward are stashed, offsets[-1] rows of
        them.

        offsets: int [E], its last entry at most `rows`, unchanged until the block ends. leave:
        tensors that stay where they are, because something else keeps them anyway. What is behind
        the live rows comes back as zeros, so the block must only hold code that does not care.
        Raises RuntimeError inside code that torch.compile traces.
        """
        if torch.compiler.is_compiling() and not (self.identity or fallback.READING):
            raise RuntimeError(
                "Stash.saving works by saved-tensor hooks, which compiled code does not call: use "
                "Stash.keep and Stash.back in an autograd function, or leave the stage uncompiled"
            )
        reads = torch.compiler.is_compiling() and fallback.READING
        if reads:
            assert self.identity or self.measures or self.pages is not None  # a graph bakes them
        if self.identity or reads or are_others():
            yield
            return
        block = SavedRecord(self, offsets, rows, leave)
        with torch.autograd.graph.saved_tensors_hooks(block.pack, unpack):
            yield
        block.close()

    def keep(self, offsets: Tensor, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Stash `sources`, [R, w] each, and return what to save for backward in their place.

        For the forward of an autograd function; `back` undoes it. Such a forward runs without
        gradients too, where pages that nobody brings back are lost until the next reset: ask
        torch.is_grad_enabled() before the function is applied. offsets: int [E], offsets[-1] rows
        are live. Raises RuntimeError where the pool has no column for a source. Under a checkpoint,
        or other hooks of saved tensors, it returns `sources` (but for compiled code, which cannot
        know).
        """
        memory = self.memory([(source.dtype, source.shape[1]) for source in sources])
        if memory is None:
            return tuple(sources)
        (buffers, hosts), pages = memory, self.pages
        record = keep(
            pages.state,
            buffers,
            hosts,
            list(sources),
            offsets,
            self.page_rows,
            pages.pages,
            pages.host_pages,
        )
        return record, pages.state, *buffers, *hosts

    def back(self, kept: Sequence[Tensor], rows: int) -> list[Tensor]:
        """The tensors that `keep` was given, [rows, w], zero behind the live rows. Once: their
        pages are free then.

        In compiled code some of them must be used: a compiler leaves out what nobody reads, and
        their release with it.
        """
        if self.identity or self.measures or kept[0].is_floating_point():  # no record of pages
            return list(kept)
        record, state, *memories = kept
        count = len(memories) // 2 if self.pages.host_pages else len(memories)
        return take(
            state,
            memories[:count],
            memories[count:],
            record,
            record,
            rows,
            self.page_rows,
            self.pages.pages,
            self.pages.host_pages,
            True,
        )[:-1]

    def overflow_flag(self) -> Tensor:
        """Returns whether something did not fit since the last `clear`: bool [], on the device, a
        tensor of its own."""
        return self.pages.state[OVERFLOW] != 0

    def need_hi(self) -> Tensor:
        """Most pages that were in demand at once since the last `clear`, there or not: int64 []."""
        return self.pages.state[NEED_HI].clone()

    def spilled_hi(self) -> Tensor:
        """Most host pages in use at once since the last `clear`: int64 []."""
        return self.pages.state[SPILLED_HI].clone()

    def in_use(self) -> Tensor:
        """Pages in demand now: int64 []. 0 when every forward has had its backward."""
        return self.pages.state[DEMAND].clone()

    def reset(self) -> None:
        """All pages are free again: for the beginning of a step, when nothing is in flight. The
        overflow flag stays."""
        self.pages.reset()

    def clear(self) -> None:
        """Forget overflow flag and high-water marks: once somebody has read them and acted on
        them."""
        self.pages.clear()

    def reserve(self, offsets: Tensor, rows: int) -> Tensor:
        """A record for the first offsets[-1] of `rows` rows."""
        return reserve(
            self.pages.state, offsets, rows, self.page_rows, self.pages.pages, self.pages.host_pages
        )

    def memory(self, columns: Sequence[Column]) -> tuple[list[Tensor], list[Tensor]] | None:
        """The pages for a layer's tensors of these columns, in order: on the device, and on the
        host if there are any.

        None where nothing is stashed: while the stash measures, which notes the columns, with
        identity, and where what is saved is somebody else's. Raises RuntimeError where the pool has
        no column for one.
        """
        if self.identity or (not torch.compiler.is_compiling() and are_others()):
            return None
        used: Counter[Column] = Counter()
        places = []
        for column in columns:
            places.append((column, used[column]))
            used[column] += 1
        if self.measures:
            self.note(used)
            return None
        for column, number in places:
            self.check(column, number)
        return [self.buffers[column][number] for column, number in places], self.host_memory(places)

    def host_memory(self, places: Sequence[tuple[Column, int]]) -> list[Tensor]:
        """The host memory of these columns; none where there is no such tier."""
        return (
            [self.hosts[column][number] for column, number in places]
            if self.pages.host_pages
            else []
        )

    def note(self, used: Mapping[Column, int]) -> None:
        """A layer saves `used[column]` tensors of each column."""
        for column, count in used.items():
            self.columns[column] = max(count, self.columns.get(column, 0))

    def check(self, column: Column, number: int) -> None:
        """Raise RuntimeError unless there are pages for the `number`-th tensor of a column."""
        if number >= self.columns.get(column, 0):
            raise RuntimeError(
                f"a layer saves {number + 1} tensors of {column[0]} and width {column[1]}, but the "
                f"stash has pages for {self.columns.get(column, 0)}: it was allocated for other "
                "layers. "
                "Measure with these, or give their columns to Stash.allocate"
            )
