"""Documents → packs: every document lands whole in exactly one pack, each pack in the smallest
capacity for it."""

from collections.abc import Iterable, Iterator
from typing import Any

from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity, CapacitySet
from packgraph.packing.document import Document, read_documents
from packgraph.packing.overlong import Overlong, check_choice, fitting_parts
from packgraph.packing.report import PackReport
from packgraph.packing.tighten import best_fit
from packgraph.packing.window import PackingWindow, build_pack


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

    Example:
        >>> capacity = packgraph.Capacity(tokens=8, documents=2)
        >>> batch, = packgraph.pack([[5, 6, 7], [8, 9]], [capacity])
        >>> batch.tokens.tolist(), batch.cu_seqlens.tolist()
        ([5, 6, 7, 8, 9, 0, 0, 0], [0, 3, 5])
    """
    if window is not None:
        return list(
            pack_stream(
                documents,
                capacities,
                window=window,
                overlong=overlong,
                report=report,
                multiple=multiple,
            )
        )
    allowed = CapacitySet(capacities, multiple)
    counts = PackReport() if report is None else report
    parts = list(_parts(documents, allowed, overlong, counts))
    plan = best_fit([len(part) for part in parts], allowed)
    return [
        build_pack([parts[member] for member in planned.members], planned, allowed, counts)
        for planned in plan
    ]


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

    Example:
        >>> capacity = packgraph.Capacity(tokens=8, documents=2)
        >>> stream = packgraph.pack_stream(([n] * 4 for n in range(1, 5)), [capacity])
        >>> [batch.tokens.tolist() for batch in stream]
        [[1, 1, 1, 1, 2, 2, 2, 2], [3, 3, 3, 3, 4, 4, 4, 4]]
    """
    if window < 1:
        raise ValueError(f"window must be at least 1 document, got {window}")
    allowed = CapacitySet(capacities, multiple)
    counts = PackReport() if report is None else report
    return _stream(
        _parts(documents, allowed, overlong, counts), PackingWindow(allowed, counts), window
    )


def _stream(
    parts: Iterator[Document], waiting: PackingWindow[None], window: int
) -> Iterator[PackedBatch]:
    for part in parts:
        waiting.add(part, None)
        if len(waiting) >= window:
            yield waiting.take()
    while len(waiting):
        yield waiting.take()


def _parts(
    documents: Any, capacities: CapacitySet, overlong: Overlong, report: PackReport
) -> Iterator[Document]:
    """All documents, none longer than a capacity allows."""
    check_choice(overlong)
    limit = capacities.longest
    for index, document in enumerate(read_documents(documents)):
        yield from fitting_parts(document, limit, overlong, report, f"document {index}")
