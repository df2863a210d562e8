"""What to do with a document that is longer than every capacity allows."""

from collections.abc import Iterator
from typing import Literal, get_args

from packgraph.packing.document import Document
from packgraph.packing.report import PackReport

Overlong = Literal["error", "split", "drop"]


def check_choice(overlong: str) -> None:
    """Raise ValueError unless `overlong` is one of the choices."""
    if overlong not in get_args(Overlong):
        raise ValueError(
            f"overlong must be one of {', '.join(get_args(Overlong))}, got {overlong!r}"
        )


def fitting_parts(
    document: Document, limit: int, overlong: str, report: PackReport, name: str
) -> Iterator[Document]:
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
            yield document.part(start, min(start + limit, len(document)))
