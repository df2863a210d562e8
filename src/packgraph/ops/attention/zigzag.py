"""Rows of documents cut into parts for the ranks of a context: which token stands where, decided on
the device.

    document of 11 tokens, 2 ranks    4 parts of 3 places:   0 1 2 | 3 4 5 | 6 7 8 | 9 10 .
    rank 0 has parts 0 and 3          0 1 2 9 10 .
    rank 1 has parts 1 and 2          3 4 5 6 7 8

Each document is padded to a multiple of 2c places and cut into 2c parts of h places; rank r of c
has parts r and 2c - 1 - r, one after the other, document by document. A causal document then costs
every rank the same: an early part has few keys before it, the late one that goes with it many. A
part attends to the keys from the document's beginning to the part's own end, which a kernel knows
as causal attention aligned at the end. So keys and values of all ranks are brought into the order
of *prefixes*, two for each document, each as long as the part that reads it needs:

    rank 0, prefixes      0 1 2 | 0 1 2 3 4 5 6 7 8 9 10 .       h (r + 1) and h (2c - r) places

which is T + T / 2c places together, on every rank. Padding inside a document comes after all its
tokens, so no token attends to it.

Actual boundaries say what is a token, padded ones where it stands; both are device data and all
shapes follow from the capacity. The definition in lists of Python is ops/attention/zigzag.py.
The cut is that of zigzag ring attention (Zhu 2024,
https://github.com/zhuzilin/ring-flash-attention, issue 2; also Llama 3, arXiv:2407.21783, section
3.3.2, for the gathering of keys and values).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from packgraph.ops.attention.context import ContextGroup, own_rows
from packgraph.packing.batch import PackedBatch

Token = tuple[int, int] | None  # document and position in it; None is padding


class RankRows(NamedTuple):
    """Rows of a microbatch for each of a rank's R = T / c rows.

    source: int64 [R], 0 in padding. padding: bool [R], True where no token is: in the tail, and
    behind the tokens of a document. excess: 0-d float32, 0; NaN where the documents did not fit,
    which the packer and `begin` see to.
    """

    source: Tensor
    padding: Tensor
    excess: Tensor

    def pick(self, x: Tensor, fill: int | bool) -> Tensor:
        """This rank's rows of x [T]: [R], `fill` in padding."""
        return x.index_select(0, self.source).masked_fill(self.padding, fill)


class PrefixRows(NamedTuple):
    """Keys and values as a rank's queries need them: Kx = T + T / 2c places, two prefixes for each
    document.

    cu_queries: int32 [2N+1], boundaries of the parts in the rank's rows; the tail repeats the last
    value. cu_keys: int32 [2N+1], boundaries of their prefixes. take: int64 [Kx], which of the c R
    rows of all ranks stands there, 0 in the tail. tail: bool [Kx], True behind the last prefix.
    places: int64 [c R, 2], where each row of all ranks stands in the first and the second prefix of
    its document, -1 = in none.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    take: Tensor
    tail: Tensor
    places: Tensor


class ZigzagTables(NamedTuple):
    """Tables of a row for one rank: its own rows, and the keys and values for their queries."""

    rows: RankRows
    keys: PrefixRows


def zigzag_tables(batch: PackedBatch, context: ContextGroup) -> ZigzagTables:
    """The tables of this rank for the row of `batch`; see `tables_of`."""
    return tables_of(batch.cu_seqlens, batch.capacity.tokens, context.size, context.place)


def rank_rows(
    x: Tensor, context: ContextGroup | None, rows: RankRows | None, fill: int | bool
) -> Tensor:
    """This rank's rows of x [T], however the row is cut: [T / size]. rows: the table, where it is
    cut in zigzag, whose padding inside documents holds `fill`; None where ulysses cuts it or nobody
    does."""
    return own_rows(x, context) if rows is None else rows.pick(x, fill)


def tables_of(cu_seqlens: Tensor, tokens: int, size: int, place: int) -> ZigzagTables:
    """The tables of rank `place` of `size`. cu_seqlens: int32 [N+1], the tail repeats; tokens: T.
    No host sync.

    Raises ValueError where T is no multiple of 2 * size. Documents that take up more than T places
    when padded give tables that stay inside all buffers, mean nothing, and have `excess` NaN.
    """
    if tokens % (2 * size):
        raise ValueError(
            f"a row of {tokens} tokens cannot be cut into {2 * size} equal parts for {size} ranks"
        )
    actual = cu_seqlens.long()
    lengths = actual.diff()
    parts = (lengths + (2 * size - 1)).div(2 * size, rounding_mode="floor")  # h of each document
    starts = torch.cat(
        (parts.new_zeros(1), parts.cumsum(0))
    )  # in units of parts: a rank's rows take 2 each
    source, valid, places = _every_row(actual, lengths, parts, starts, tokens, size, place)
    rows = tokens // size
    own = slice(place * rows, (place + 1) * rows)
    excess = cu_seqlens.new_zeros((), dtype=torch.float32).masked_fill(
        2 * starts[-1] > rows, torch.nan
    )
    take, tail = _prefixes(parts, starts, tokens, size, place)
    cu_queries = _interleaved(2 * starts, parts).clamp(max=rows)
    cu_keys = _interleaved((2 * size + 1) * starts, (place + 1) * parts).clamp(max=take.shape[0])
    return ZigzagTables(
        RankRows(source[own], ~valid[own], excess),
        PrefixRows(cu_queries.int(), cu_keys.int(), take, tail, places),
    )


def _every_row(
    actual: Tensor,
    lengths: Tensor,
    parts: Tensor,
    starts: Tensor,
    tokens: int,
    size: int,
    place: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tables of the rows of all ranks, one rank after the other: source [T] as in RankRows, whether
    a token is there [T], and places [T, 2] as in PrefixRows."""
    rows = tokens // size
    number = torch.arange(tokens, device=actual.device)
    rank, row = number // rows, number % rows
    document, found = _document_of(2 * starts, row)
    width, offset = parts[document], row - 2 * starts[document]
    late = offset >= width
    part = torch.where(late, 2 * size - 1 - rank, rank)
    position = part * width + offset - torch.where(late, width, 0)
    valid = found & (position < lengths[document])
    source = torch.where(valid, actual[document] + position, 0)
    base = (2 * size + 1) * starts[document] + position
    first = torch.where(found & (part <= place), base, -1)
    second = torch.where(found & (part <= 2 * size - 1 - place), base + (place + 1) * width, -1)
    return (
        source,
        valid,
        torch.stack((first, second), dim=1).clamp(max=tokens + tokens // (2 * size) - 1),
    )


def _prefixes(
    parts: Tensor, starts: Tensor, tokens: int, size: int, place: int
) -> tuple[Tensor, Tensor]:
    """take and tail as in PrefixRows."""
    rows = tokens // size
    number = torch.arange(tokens + tokens // (2 * size), device=parts.device)
    document, found = _document_of((2 * size + 1) * starts, number)
    width, offset = parts[document], number - (2 * size + 1) * starts[document]
    first = (place + 1) * width
    position = offset - torch.where(offset >= first, first, 0)
    part = position.div(width.clamp(min=1), rounding_mode="floor")
    rank = torch.minimum(part, 2 * size - 1 - part)
    row = 2 * starts[document] + position - part * width + torch.where(part >= size, width, 0)
    return torch.where(found, rank * rows + row, 0).clamp(max=tokens - 1), ~found


def _document_of(boundaries: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The document that each place is in, by boundaries [N+1] that never fall, and whether it is in
    one; 0 if not."""
    document = torch.searchsorted(boundaries[1:].contiguous(), places, right=True)
    found = document < boundaries.shape[0] - 1
    return document.masked_fill(~found, 0), found


def _interleaved(boundaries: Tensor, firsts: Tensor) -> Tensor:
    """[2N+1]: after every boundary but the last of [N+1] the one that lies `firsts` [N] behind
    it."""
    inner = torch.stack((boundaries[:-1], boundaries[:-1] + firsts), dim=1)
    return torch.cat((inner.flatten(), boundaries[-1:]))


def naive_rows(lengths: Sequence[int], tokens: int, size: int, place: int) -> list[Token]:
    """Returns the contents of the tokens / size rows of rank `place` of `size`.

    Raises ValueError where the padded documents do not fit in `tokens`.
    """
    rows: list[Token] = []
    for document, length in enumerate(lengths):
        parts = _parts(document, length, size)
        rows += parts[place] + parts[2 * size - 1 - place]
    return _filled(rows, tokens // size)


def naive_prefixes(lengths: Sequence[int], tokens: int, size: int, place: int) -> list[Token]:
    """Returns the contents of the tokens + tokens / (2 size) places of keys of rank `place` of
    `size`."""
    keys: list[Token] = []
    for document, length in enumerate(lengths):
        parts = _parts(document, length, size)
        for last in (place, 2 * size - 1 - place):
            keys += [token for part in parts[: last + 1] for token in part]
    return _filled(keys, tokens + tokens // (2 * size))


def _parts(document: int, length: int, size: int) -> list[list[Token]]:
    width = -(-length // (2 * size))
    padded: list[Token] = [(document, position) for position in range(length)]
    padded += [None] * (2 * size * width - length)
    return [padded[part * width : (part + 1) * width] for part in range(2 * size)]


def _filled(found: list[Token], room: int) -> list[Token]:
    if len(found) > room:
        raise ValueError(f"{len(found)} places do not fit in {room}")
    return found + [None] * (room - len(found))
