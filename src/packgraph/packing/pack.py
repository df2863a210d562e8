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
    """Pack `documents` by best-fit-decreasing over all of them, or over a `window` of that many at
    a time.

    Without a window the emptiest rows are then packed again into the capacities that leave least
    padding.

    documents: sequences of token ids (lists, tuples, arrays, CPU tensors), mappings with
    `input_ids` and optionally `labels`, masks or `seq_lengths`, or the output of transformers'
    DataCollatorWithFlattening; see `document.py`. capacities: static shapes a pack may have, one or
    several. overlong: what happens to a document longer than all of them: an error, split into
    pieces, or drop. report: gets the counts (split and dropped documents, padding) added. multiple:
    places are counted as if every document took up a multiple of so many: 2c for rows that c ranks
    share in zigzag (`plan.context_kind.document_multiple`).

    Returns packs on the host; documents stand in a pack in their given order, and packs in the
    order of their first documents (with a window: of the longest waiting ones). Raises ValueError
    for empty, negative or overlong documents and for tensors on a device, naming the document.
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
    """Pack a stream of documents lazily, with at most `window` of them waiting; otherwise as
    `pack`.

    Raises ValueError at once for a bad `window`, `capacities` or `overlong`, and on the way for bad
    documents.
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
