"""Documents → packs: every document lands whole in exactly one pack, each pack in the smallest
capacity for it.

    documents ─▶ parts that fit (`overlong`) ─▶ all at once, or a window (bins.py) ─▶ packs
                          └───────────── counted in a PackReport ─────────────┘

Nothing is dropped or cut in silence, and no document waits for ever. The state of a stream is how
many items it has read and which parts of them wait; parts are read again when a stream goes on, but
for those of a source that keeps its own position.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast, get_args

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from packgraph.packing.batch import PackedBatch
from packgraph.packing.bins import OpenPack, PackingWindow, best_fit
from packgraph.packing.buckets.lengths import Overlong
from packgraph.packing.capacity import Capacity, CapacitySet
from packgraph.packing.document import Document, PackableDocument, items_of, read_item

VERSION = 1  # of the state of a stream
Part = TypeVar("Part", bound=PackableDocument)


@dataclass
class PackReport:
    """Totals of one or several packing runs, for the `report` of `packgraph.pack`.

    Attributes:
        documents: Packed documents; a piece of a split document counts as one.
        tokens: Packed tokens.
        packs: Packed batches.
        places: Tokens that these have room for.
        split_documents: Documents that were split.
        dropped_documents: Documents that were left out, being too long.
        dropped_tokens: Their tokens.

    Examples:
        >>> report = packgraph.PackReport()
        >>> _ = packgraph.pack([[1, 2, 3]], packgraph.Capacity(4, 1), report=report)
        >>> report.padding_fraction
        0.25
    """

    documents: int = 0
    tokens: int = 0
    packs: int = 0
    places: int = 0
    split_documents: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0

    @property
    def padding_fraction(self) -> float:
        """Share of all places that hold no token."""
        return 1 - self.tokens / self.places if self.places else 0.0

    def count_pack(self, documents: int, tokens: int, places: int) -> None:
        """Add one pack."""
        self.documents += documents
        self.tokens += tokens
        self.packs += 1
        self.places += places

    def state_dict(self) -> dict[str, int]:
        """The counts, JSON-able."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over counts from `state_dict`. Raises TypeError for unknown ones."""
        self.__dict__.update(PackReport(**state).__dict__)


def check_choice(overlong: str) -> None:
    """Raise ValueError unless `overlong` is one of the choices."""
    if overlong not in get_args(Overlong):
        raise ValueError(
            f"overlong must be one of {', '.join(get_args(Overlong))}, got {overlong!r}"
        )


def fitting_parts(
    document: Part, limit: int, overlong: str, report: PackReport, name: str
) -> Iterator[Part]:
    """`document` itself when it has at most `limit` tokens; else nothing, its pieces, or a
    ValueError, as chosen.

    Pieces have `limit` tokens each, the last one the rest; no piece predicts the first token of the
    next.
    """
    if len(document) <= limit:
        yield document
    elif overlong == "error":
        raise ValueError(
            f"{name} has {len(document)} tokens, the largest capacity takes documents of {limit}; "
            "add a "
            'larger Capacity, or choose overlong="split" or overlong="drop"'
        )
    elif overlong == "drop":
        report.dropped_documents += 1
        report.dropped_tokens += len(document)
    else:
        report.split_documents += 1
        for start in range(0, len(document), limit):
            yield cast(Part, document.part(start, min(start + limit, len(document))))


@dataclass(frozen=True)
class PlannedPack:
    """Plan of a pack before its tokens are read: its documents and its capacity.

    What all ranks need to know of each other's packs follows from it; `load` is for those that run
    it. num_pairs: as `PackedBatch.num_pairs`.
    """

    capacity: Capacity
    num_documents: int
    num_tokens: int
    num_loss_tokens: int
    num_pairs: int
    read: Callable[[], list[Document]] = field(compare=False, repr=False)

    def load(self) -> PackedBatch:
        """The packed batch, on the host. Raises what reading its documents raises."""
        return PackedBatch.of_documents(self.read(), self.capacity)


def pack(
    documents: Any,
    capacities: Capacity | Iterable[Capacity],
    *,
    overlong: Overlong = "error",
    window: int | None = None,
    report: PackReport | None = None,
    multiple: int = 1,
) -> list[PackedBatch]:
    """Packs documents into static shapes by best-fit decreasing.

    Without a window, the emptiest rows are packed again into the capacities that leave least
    padding. Documents stand in a pack in their given order, packs in the order of their first
    documents (with a window: of the longest waiting ones).

    Args:
        documents: Sequences of token ids (lists, tuples, arrays, CPU tensors), mappings with
            `input_ids` and optionally `labels`, masks or `seq_lengths`, or the output of
            transformers' `DataCollatorWithFlattening`.
        capacities: The static shape or shapes that a pack may have.
        overlong: What to do with a document longer than every capacity: `error`, `split` it into
            pieces, or `drop` it.
        window: Number of documents packed at a time. None packs all of them together.
        report: Gets the counts (split and dropped documents, padding) added.
        multiple: Room is counted as if the tokens of every document were a multiple of this: 2c for
            rows that c ranks share in zigzag.

    Returns:
        Packed batches on the host.

    Raises:
        ValueError: If a document is empty, negative, overlong or on a device; names the document.

    Examples:
        >>> capacity = packgraph.Capacity(tokens=8, documents=2)
        >>> batch, = packgraph.pack([[5, 6, 7], [8, 9]], [capacity])
        >>> batch.tokens.tolist(), batch.cu_seqlens.tolist()
        ([5, 6, 7, 8, 9, 0, 0, 0], [0, 3, 5])
    """
    stream = PackStream(
        documents, capacities, 1 if window is None else window, overlong, report, multiple
    )
    return list(stream) if window is not None else stream.take_all()


def pack_stream(
    documents: Any,
    capacities: Capacity | Iterable[Capacity],
    *,
    window: int = 256,
    overlong: Overlong = "error",
    report: PackReport | None = None,
    multiple: int = 1,
) -> "PackStream":
    """Packs a stream of documents lazily.

    Args:
        documents: Iterable of documents as `packgraph.pack` takes them.
        capacities: The static shape or shapes that a pack may have.
        window: Maximum number of documents that wait to be combined.
        overlong: As in `packgraph.pack`.
        report: As in `packgraph.pack`.
        multiple: As in `packgraph.pack`.

    Returns:
        An iterator of packed batches on the host, whose position `state_dict` and `load_state_dict`
        save and restore.

    Raises:
        ValueError: At once if `window`, `capacities` or `overlong` is illegal; while iterating if a
            document is.

    Examples:
        >>> capacity = packgraph.Capacity(tokens=8, documents=2)
        >>> stream = packgraph.pack_stream(([n] * 4 for n in range(1, 5)), [capacity])
        >>> [batch.tokens.tolist() for batch in stream]
        [[1, 1, 1, 1, 2, 2, 2, 2], [3, 3, 3, 3, 4, 4, 4, 4]]
    """
    return PackStream(documents, capacities, window, overlong, report, multiple)


class _Part(NamedTuple):
    """A document, and where it comes from: which part of which item."""

    item: int
    number: int
    document: Document


class PackStream(IterableDataset[PackedBatch], Iterator[PackedBatch]):
    """Iterator of packed batches, returned by `packgraph.pack_stream`, whose arguments it takes.

    Its position can be saved between any two batches, and restored in another process: the next
    batches are then, bit by bit, those of a stream that was never interrupted. The methods are
    those that torchdata's `StatefulDataLoader` looks for, and `torch.distributed.checkpoint`. A
    streamed data set of Hugging Face is as exact as its own position: rows that wait in the buffer
    of its `shuffle` are lost, as its warning says; shuffle before.

    Attributes:
        report: Counts of what was packed so far.

    Examples:
        >>> documents, capacity = [[n] * 4 for n in range(1, 7)], packgraph.Capacity(8, 2)
        >>> stream = packgraph.pack_stream(documents, capacity)
        >>> _ = next(stream)
        >>> position = stream.state_dict()
        >>> again = packgraph.pack_stream(documents, capacity)
        >>> again.load_state_dict(position)
        >>> next(again).tokens.tolist()
        [3, 3, 3, 3, 4, 4, 4, 4]
    """

    def __init__(
        self,
        documents: Any,
        capacities: Capacity | Iterable[Capacity],
        window: int,
        overlong: Overlong,
        report: PackReport | None,
        multiple: int,
    ) -> None:
        check_choice(overlong)
        if window < 1:
            raise ValueError(f"window must be at least 1 document, got {window}")
        self._given, self._size, self._overlong = documents, window, overlong
        self._capacities = CapacitySet(capacities, multiple)
        self._has_position = all(
            hasattr(documents, name) for name in ("state_dict", "load_state_dict")
        )
        self._settings = {
            "capacities": [
                [one.tokens, one.documents, one.bound] for one in self._capacities.sorted
            ],
            "window": window,
            "overlong": overlong,
            "multiple": multiple,
            "documents.state_dict": self._has_position,
        }
        self.report = PackReport() if report is None else report
        self._window = PackingWindow[_Part](self._capacities)
        self._pending = deque[_Part]()  # read, but the window is full
        self._items: Iterator[Any] | None = None
        self._read, self._ended = 0, False

    def __iter__(self) -> "PackStream":
        """Returns itself. Raises RuntimeError if it is the data set of several workers, which would
        pack the same documents each."""
        info = get_worker_info()
        if info is not None and info.dataset is self and info.num_workers > 1:
            raise RuntimeError(
                f"{info.num_workers} workers of a DataLoader would each pack all documents: use "
                "one worker, or an IterableDataset whose __iter__ returns packgraph.pack_stream"
                "(...) of the documents of its worker (torch.utils.data.get_worker_info)"
            )
        return self

    def __next__(self) -> PackedBatch:
        """Returns the next batch. Raises ValueError for a document that cannot be packed."""
        while len(self._window) < self._size and (self._pending or self._read_item()):
            if self._pending:
                part = self._pending.popleft()
                self._window.extend([len(part.document)], [part])
        if not len(self._window):
            raise StopIteration
        return self._batch(*self._window.take())

    def take_all(self) -> list[PackedBatch]:
        """Returns all batches, packed together instead of a window at a time."""
        while self._read_item():
            pass
        parts = [*self._pending]
        packs = best_fit([len(part.document) for part in parts], self._capacities)
        return [self._batch([parts[number] for number in one.members], one) for one in packs]

    def state_dict(self) -> dict[str, Any]:
        """Returns the position: numbers, lists and dicts of them, which JSON and `torch.save` keep.

        Documents that wait are named by their place in `documents`, which are read again. Where
        `documents` has `state_dict` and `load_state_dict` itself (a streamed data set of Hugging
        Face, a `StatefulDataLoader`), its state is part of this one, as are the tokens of documents
        that wait: it is never read from its beginning.
        """
        waiting = [
            [
                item,
                number,
                one.tokens.tolist(),
                None if one.targets is None else one.targets.tolist(),
            ]
            if self._has_position
            else [item, number, len(one)]
            for item, number, one in (*self._window.items(), *self._pending)
        ]
        return {
            "version": VERSION,
            "settings": self._settings,
            "read": self._read,
            "ended": self._ended,
            "waiting": waiting,
            "report": self.report.state_dict(),
        } | ({"documents": self._given.state_dict()} if self._has_position else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken; before the first batch is asked for.

        The stream must have been made as that one: of the same documents from their beginning, and
        with the same options.

        Raises:
            ValueError: If the state is that of another stream; names what differs.
            RuntimeError: If documents have been read from an iterator, which cannot go back.
        """
        if not self._has_position and self._items is self._given:
            raise RuntimeError(
                "documents is an iterator that was read from: make another stream, of the same "
                "documents from their beginning, and load the state before its first batch"
            )
        if not isinstance(state, Mapping) or state.get("version") != VERSION:
            raise ValueError(
                f"the state is none of packgraph.pack_stream, version {VERSION}: {state!r:.80}"
            )
        differences = [
            f"{name} was {state['settings'].get(name)!r}, is {value!r}"
            for name, value in self._settings.items()
            if state["settings"].get(name) != value
        ]
        if differences:
            raise ValueError(
                "the stream cannot go on with other arguments than before: "
                + "; ".join(differences)
            )
        if self._has_position:
            self._items = None
            self._given.load_state_dict(state["documents"])
            waiting = [
                _Part(item, number, Document(*(ids and np.array(ids, np.int64) for ids in lists)))
                for item, number, *lists in state["waiting"]
            ]
        else:
            waiting = self._read_again(state["read"], state["waiting"])
        self._window, self._pending = PackingWindow[_Part](self._capacities), deque(waiting)
        self._read, self._ended = state["read"], state["ended"]
        self.report.load_state_dict(state["report"])

    def _read_item(self) -> bool:
        """Read the parts of the next item; False at the end."""
        if self._items is None:
            self._items = iter(items_of(self._given))
        for item in () if self._ended else self._items:
            self._read += 1
            self._pending += self._parts(self._read - 1, item)
            return True
        self._ended = True  # a loader that is asked again would begin again
        return False

    def _batch(self, parts: Sequence[_Part], packed: OpenPack) -> PackedBatch:
        """Packs these parts; counted."""
        batch = PackedBatch.of_documents(
            [part.document for part in parts], packed.capacity(self._capacities)
        )
        self.report.count_pack(batch.num_documents, batch.num_tokens, batch.capacity.tokens)
        return batch

    def _parts(self, index: int, item: Any) -> list[_Part]:
        """Parts of an item that go into packs; counted."""
        name = "documents" if isinstance(self._given, Mapping) else f"document {index}"
        given = self._capacities.longest, self._overlong, self.report, name
        found = (
            part for document in read_item(item, name) for part in fitting_parts(document, *given)
        )
        return [_Part(index, number, part) for number, part in enumerate(found)]

    def _read_again(self, read: int, waiting: Iterable[Sequence[int]]) -> list[_Part]:
        """Reads waiting parts again, [item, number, tokens] each; what is read next comes after the
        first `read` items."""
        documents, wanted = items_of(self._given), {item for item, *_ in waiting}
        if isinstance(documents, Sequence) or hasattr(documents, "__getitems__"):  # by its place
            places: Sequence[int] = [one for one in sorted(wanted) if one < len(documents)]
            source: Iterator[Any] = map(documents.__getitem__, places)
            items: Iterator[Any] = map(documents.__getitem__, range(read, len(documents)))
        else:
            places, source = range(read), iter(documents)
            items = source
        parts = {
            (index, part.number, len(part.document)): part
            for index, item in zip(places, source)
            if index in wanted
            for part in self._parts(index, item)
        }
        if missing := [one for one in map(tuple, waiting) if one not in parts]:
            raise ValueError(
                f"document {missing[0][0]} is not the one that the state was saved with, of which "
                f"{missing[0][2]} tokens waited: pass the same documents, from their beginning"
            )
        self._items = items
        return [parts[item, number, length] for item, number, length in waiting]
