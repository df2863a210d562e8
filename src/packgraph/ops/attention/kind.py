"""Choice of how the ranks of a context share attention, and the rows it takes: pure functions of
counts and lengths.

    ulysses   the row is cut evenly as it is packed; in attention a rank has all rows of some heads
    zigzag    each document is padded to a multiple of 2c and cut into 2c parts, rank r has parts r
              and 2c - 1 - r; in
              attention a rank has all heads of its own rows, and keys and values of all rows

Ulysses sends each rank the queries, keys, values and outputs of its rows once and keeps attention
exactly balanced, but shares out heads: there must be a multiple of c of them. Zigzag sends keys and
values of all rows to everybody, and keeps them for the backward. So zigzag is taken where there is
no other way, or by hand.
"""

from collections.abc import Iterable
from itertools import accumulate
from typing import Literal, NamedTuple

from packgraph.packing.capacity import places

ContextKind = Literal["ulysses", "zigzag"]
ContextWish = Literal["auto", "ulysses", "zigzag"]


class ContextChoice(NamedTuple):
    """kind: how attention is shared. reason: why."""

    kind: ContextKind
    reason: str


def choose_context_kind(ranks: int, heads: int, wish: ContextWish = "auto") -> ContextChoice:
    """Chooses how `ranks` ranks share attention of `heads` query heads (of a tensor parallel rank).

    wish: what was asked for. Raises ValueError where that cannot be.
    """
    if wish == "zigzag":
        return ContextChoice("zigzag", "asked for")
    if heads % ranks == 0:
        return ContextChoice(
            "ulysses", "asked for" if wish == "ulysses" else f"{ranks} ranks divide {heads} heads"
        )
    if wish == "ulysses":
        raise ValueError(
            f"ulysses shares the heads among the ranks of a context, so their number ({heads}) "
            "must be a "
            f"multiple of the ranks ({ranks}); use zigzag, or auto"
        )
    return ContextChoice("zigzag", f"{ranks} ranks do not divide {heads} heads")


def document_multiple(kind: ContextKind, ranks: int) -> int:
    """Documents take up multiples of so many places in a row that is spread over `ranks` ranks."""
    return 2 * ranks if kind == "zigzag" and ranks > 1 else 1


def row_problems(
    lengths: Iterable[int] | None, tokens: int, kind: ContextKind, ranks: int
) -> list[str]:
    """Every reason why a row of `tokens` places with documents of `lengths` cannot be spread over
    `ranks` ranks.

    lengths: None where they are not known.
    """
    multiple = document_multiple(kind, ranks)
    if tokens % ranks:
        return [
            f"a row of {tokens} tokens cannot be spread evenly over {ranks} ranks; use capacities "
            "whose tokens are "
            "a multiple of them"
        ]
    if tokens % multiple:
        return [
            f"a row of {tokens} tokens cannot be cut into the {multiple} parts that zigzag needs "
            f"with {ranks} "
            "ranks; use capacities whose tokens are a multiple of them"
        ]
    if lengths is None or multiple == 1:
        return []
    known = list(lengths)
    if (
        -multiple * sum([-length // multiple for length in known]) <= tokens
    ):  # asked for every microbatch: microseconds
        return []
    ends = list(accumulate(places(length, multiple) for length in known))
    first = next(number for number, end in enumerate(ends) if end > tokens)
    return [
        f"its documents take up {ends[-1]} places, each a multiple of {multiple} with zigzag over "
        f"{ranks} ranks, "
        f"but the row has {tokens}: from document {first} ({known[first]} tokens) on they do not "
        "fit; pack with "
        f"multiple={multiple}"
    ]
