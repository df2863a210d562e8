"""Documents → packs: every document lands whole in exactly one pack, each pack in the smallest
capacity for it.

    documents ─▶ parts that fit (`overlong`) ─▶ all at once, or a window (bins.py) ─▶ packs
                          └───────────── counted in a PackReport ─────────────┘

Nothing is dropped or cut in silence, no document waits for ever, and the only state of a stream is
its window.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, cast, get_args

from packgraph.packing.batch import PackedBatch
from packgraph.packing.bins import OpenPack, WaitingLengths, pack_lengths
from packgraph.packing.capacity import Capacity, CapacitySet
from packgraph.packing.document import Document, PackableDocument, read_documents

Overlong = Literal["error", "split", "drop"]
Item = TypeVar("Item")
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


class PackingWindow(Generic[Item]):
    """Documents waiting to be packed, as items that the caller knows them by."""

    def __init__(self, capacities: CapacitySet) -> None:
        self._capacities = capacities
        self._lengths = WaitingLengths(capacities)
        self._waiting: dict[int, Item] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def items(self) -> Iterator[Item]:
        """Waiting items, longest waiting first: adding them in this order restores the window."""
        return iter(self._waiting.values())

    def extend(self, lengths: Sequence[int], items: Iterable[Item]) -> None:
        """Let documents of these lengths (within the capacities' longest) wait, in this order."""
        self._waiting.update(zip(self._lengths.extend(lengths), items, strict=True))

    def take(self) -> tuple[list[Item], OpenPack]:
        """Choose one pack of what waits, in the order it came. Raises IndexError when none
        waits."""
        chosen = self._lengths.take()
        return list(map(self._waiting.pop, chosen.members)), chosen


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
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 document, got {window}")
    return list(_packs(documents, capacities, window, overlong, report, multiple))


def pack_stream(
    documents: Any,
    capacities: Capacity | Iterable[Capacity],
    *,
    window: int = 256,
    overlong: Overlong = "error",
    report: PackReport | None = None,
    multiple: int = 1,
) -> Iterator[PackedBatch]:
    """Packs a stream of documents lazily.

    Args:
        documents: Iterable of documents as `packgraph.pack` takes them.
        capacities: The static shape or shapes that a pack may have.
        window: Maximum number of documents that wait to be combined.
        overlong: As in `packgraph.pack`.
        report: As in `packgraph.pack`.
        multiple: As in `packgraph.pack`.

    Returns:
        An iterator of packed batches on the host.

    Raises:
        ValueError: At once if `window`, `capacities` or `overlong` is illegal; while iterating if a
            document is.

    Examples:
        >>> capacity = packgraph.Capacity(tokens=8, documents=2)
        >>> stream = packgraph.pack_stream(([n] * 4 for n in range(1, 5)), [capacity])
        >>> [batch.tokens.tolist() for batch in stream]
        [[1, 1, 1, 1, 2, 2, 2, 2], [3, 3, 3, 3, 4, 4, 4, 4]]
    """
    if window < 1:
        raise ValueError(f"window must be at least 1 document, got {window}")
    return _packs(documents, capacities, window, overlong, report, multiple)


def _packs(
    documents: Any,
    capacities: Capacity | Iterable[Capacity],
    window: int | None,
    overlong: Overlong,
    report: PackReport | None,
    multiple: int,
) -> Iterator[PackedBatch]:
    """Packs of a window of documents at a time, or of all at once."""
    check_choice(overlong)
    allowed, counts = CapacitySet(capacities, multiple), PackReport() if report is None else report
    waiting, numbers = dict[int, Document](), itertools.count()

    def lengths() -> Iterator[int]:
        for index, document in enumerate(read_documents(documents)):
            name = f"document {index}"
            for part in fitting_parts(document, allowed.longest, overlong, counts, name):
                waiting[next(numbers)] = part
                yield len(part)

    def packs() -> Iterator[PackedBatch]:
        for planned in pack_lengths(lengths(), allowed, window=window):
            chosen = [waiting.pop(member) for member in planned.members]
            batch = PackedBatch.of_documents(chosen, planned.capacity(allowed))
            counts.count_pack(batch.num_documents, batch.num_tokens, batch.capacity.tokens)
            yield batch

    return packs()
