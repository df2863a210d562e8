"""Kernels of the forward of mamba/gated_delta.py, some of which the backward runs again.

    chains   [N]           how many chunks a program walks that begins with this one, forward and
                           back; 0 = none begins here
    tables   [4, H, N Q]   per row and head: log of the decay since document or chunk began, factors
                           `entering`, of the state that enters the chunk, and `leaving`, into the
                           one that leaves it, and beta
    scores   [N, H, Q, Q]  q_i . k_j with the decay between them, 0 across documents
    inverse  [N, H, Q, Q]  (I + L)^-1, L = beta_i k_i . k_j with the decay, below the diagonal
    w, u     [N, H, Q, *]  inverse times beta k entering, and times beta v
    states   [N, H, K, V]  what enters each chunk; `made` [N, H, Q, V], what every row writes into
                           its state: u - w state
    y        what the state gives, entering (q state), and scores times `made`

Only a chunk that lies within one document hands on what it gets. All others begin a chain: the
state that leaves them does not depend on the one that enters them. A program walks from such a
chunk to the next one and holds a piece of a head's state in float32; so documents run side by side,
and the grid is that of the capacity.

Blocks of 16 rows on the diagonal of I + L are inverted by substitution, in float32, and then twice
as large ones out of them: [A, 0; C, B]^-1 has -B^-1 C A^-1 in its corner.

What stands in padding is not loaded. Sums run in a fixed order and nothing is atomic, so results
repeat bitwise. Products are of the dtype of v (float32: three products of tf32) and added up in
float32. Offsets are 64-bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from packgraph.mamba.ssd_forward import (
    ScanLaunch,
    decay_between,
    launched,
    load_ids,
    load_tile,
    padded,
    precision_of,
)
from packgraph.ops.kernels import tl, triton

STAGE_BYTES = 160 * 1024  # of shared memory, for what is loaded ahead
TABLES = 4
MOST_CHAINS = 1024  # chunks that are looked at together


class DeltaConfigs(NamedTuple):
    """Launch configuration of each piece. prepare: tables, scores, inverse, w and u. carry: states
    through all chunks; back: the same backwards. mix: y. gradients: all of them, from states.
    `columns` are those of v in one program or product, `rows` columns of k in one product."""

    prepare: ScanLaunch = ScanLaunch(columns=64, stages=2)
    carry: ScanLaunch = ScanLaunch()
    mix: ScanLaunch = ScanLaunch(columns=128, stages=2)
    back: ScanLaunch = ScanLaunch(stages=2)
    gradients: ScanLaunch = ScanLaunch(columns=64, rows=32, warps=8, stages=2)


EVERYWHERE = DeltaConfigs()
LARGE = DeltaConfigs(  # for float32, and whatever might not fit into shared memory
    prepare=ScanLaunch(columns=32, rows=32, stages=1),
    carry=ScanLaunch(stages=2),
    mix=ScanLaunch(columns=64, rows=32, stages=1),
    back=ScanLaunch(warps=8, stages=1),
    gradients=ScanLaunch(columns=32, rows=32, warps=8, stages=1),
)


class DeltaSizes(NamedTuple):
    """T rows of H heads with V columns, and of heads that `group` of them share with K columns; N
    chunks of Q rows."""

    rows: int
    heads: int
    group: int
    keys: int
    columns: int
    chunks: int
    chunk: int

    @property
    def constants(self) -> dict[str, int]:
        """What all kernels are compiled for."""
        return {
            "Q": self.chunk,
            "K": self.keys,
            "V": self.columns,
            "HEADS": self.heads,
            "GROUP": self.group,
        }


Prepared = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # tables, scores, inverse, w, u


def delta_sizes(k: Tensor, v: Tensor, chunk: int) -> DeltaSizes:
    """k: [T, Hk, K]; v: [T, H, V]; chunk: Q."""
    (rows, heads, columns), (_, shared, keys) = v.shape, k.shape
    chunks = triton.cdiv(rows, chunk)
    return DeltaSizes(rows, heads, heads // shared, keys, columns, chunks, chunk)


def columns_of(size: int) -> int:
    """Columns in a program for heads of `size`: a power of two, of at least 64. Narrower
    products came out wrong on Hopper with Triton 3.6, or read outside of their operands."""
    return max(64, padded(size))


def delta_ways(sizes: DeltaSizes, dtype: torch.dtype) -> DeltaConfigs:
    """The ways for these sizes: as much is loaded ahead as shared memory holds."""
    loaded = 3 * sizes.chunk * columns_of(sizes.keys) * dtype.itemsize  # by `back`: q, k and w
    return LARGE if 2 * loaded > STAGE_BYTES or dtype.itemsize > 2 else EVERYWHERE


@triton.jit
def load_block(start, tile, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a matrix [ROWS, COLUMNS], number `tile` of those behind `start`; 0 outside."""
    place = tile * (ROWS * COLUMNS) + (row[:, None] * COLUMNS + column[None, :])
    inside = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    return tl.load(start + place, mask=inside, other=0.0)


@triton.jit
def store_block(start, tile, row, column, value, mine, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes a block of such a matrix, if `mine`."""
    place = tile * (ROWS * COLUMNS) + (row[:, None] * COLUMNS + column[None, :])
    inside = (row < ROWS)[:, None] & ((column < COLUMNS) & mine)[None, :]
    tl.store(start + place, value.to(start.dtype.element_ty), mask=inside)


@triton.jit
def store_rows(  # type: ignore[no-untyped-def]
    start, value, first, head, column, mine, Q: tl.constexpr, COUNT: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Writes columns of a chunk's rows into one head of a tensor [T, HEADS, COUNT]."""
    place = tl.arange(0, Q)[:, None] * (HEADS * COUNT) + column[None, :]
    start += (first * HEADS + head) * COUNT
    inside = mine[:, None] & (column < COUNT)[None, :]
    tl.store(start + place, value.to(start.dtype.element_ty), mask=inside)


@triton.jit
def ids_around(ids, first, chunk, rows, Q: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ids of a chunk's rows, whether they are of documents, and the ids that the chunk and the one
    before it end with."""
    row_ids = load_ids(ids, first + tl.arange(0, Q), rows)
    last = tl.load(ids + first + (Q - 1), mask=first + (Q - 1) < rows, other=-1)
    before = tl.load(ids + first - 1, mask=chunk > 0, other=-1)
    return row_ids, row_ids >= 0, last, before


@triton.jit
def _chains(  # type: ignore[no-untyped-def]
    ids, ahead, back, rows, chunks, Q: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Numbers of chunks up to the next one that begins a chain, and back to the one before; both
    count."""
    chunk = tl.program_id(0)
    later = tl.zeros([BLOCK], tl.int32) + (chunks - 1)
    earlier, own = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for part in range(tl.cdiv(chunks, BLOCK)):
        other = part * BLOCK + tl.arange(0, BLOCK)
        first = other.to(tl.int64) * Q
        last = tl.load(ids + first + (Q - 1), mask=first + (Q - 1) < rows, other=-1)
        before = tl.load(ids + first - 1, mask=(other > 0) & (other < chunks), other=-1)
        begins = ((last != before) | (last < 0)) & (other < chunks)
        later = tl.minimum(later, tl.where(begins & (other > chunk), other, chunks - 1))
        earlier = tl.maximum(earlier, tl.where(begins & (other < chunk), other, 0))
        own = tl.maximum(own, tl.where(begins & (other == chunk), 1, 0))
    begins = tl.max(own, 0) > 0
    tl.store(ahead + chunk, tl.where(begins, tl.min(later, 0) - chunk + 1, 0))
    begins = begins | (chunk == chunks - 1)
    tl.store(back + chunk, tl.where(begins, chunk - tl.max(earlier, 0) + 1, 0))


@triton.jit
def _inverted(lower, Q: tl.constexpr, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(I + lower)^-1 in float32, of a matrix [Q, Q] that is 0 on and above its diagonal."""
    i, j = tl.arange(0, Q)[:, None], tl.arange(0, Q)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0)
    for step in range(15):
        factor = tl.sum(tl.where(j == i // 16 * 16 + step, lower, 0.0), 1)
        row = tl.sum(tl.where(i == j // 16 * 16 + step, inverse, 0.0), 0)
        inverse -= tl.where(i // 16 == j // 16, factor[:, None] * row[None, :], 0.0)
    for level in tl.static_range(LEVELS):
        size = 16 * (1 << level)
        inside = (i // (2 * size) == j // (2 * size)) & (i // size != j // size)
        corner = tl.dot(inverse, tl.where(inside, lower, 0.0), input_precision="tf32x3")
        inverse -= tl.dot(corner, inverse, input_precision="tf32x3")
    return inverse


@triton.jit
def _prepare(  # type: ignore[no-untyped-def]
    q, k, v, g, beta, ids, tables, scores, inverses, w, u, rows, q_stride, k_stride, v_stride,
    g_stride, beta_stride, width,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, BROAD: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    LEVELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head."""
    head, chunk = tl.program_id(0) % HEADS, (tl.program_id(0) // HEADS).to(tl.int64)
    first, tile, i = chunk * Q, chunk * HEADS + head, tl.arange(0, Q)
    q, k = q + first * q_stride + head // GROUP * K, k + first * k_stride + head // GROUP * K
    v += first * v_stride + head * V
    row_ids, live, last, before = ids_around(ids, first, chunk, rows, Q)
    alike = (row_ids[:, None] == row_ids[None, :]) & live[:, None]
    same = alike & (i[:, None] >= i[None, :])
    log = tl.load(g + (first + i) * g_stride + head, mask=live, other=0.0).to(tl.float32)
    rate = tl.load(beta + (first + i) * beta_stride + head, mask=live, other=0.0).to(tl.float32)
    decay = tl.sum(tl.where(same, log[None, :], 0.0), 1)
    later = tl.sum(tl.where(alike & (i[:, None] < i[None, :]), log[None, :], 0.0), 1)
    entering = tl.where(live & (row_ids == before), tl.exp(decay), 0.0)
    size, here = HEADS * width.to(tl.int64), tables + head.to(tl.int64) * width + first + i
    tl.store(here, decay)
    tl.store(here + size, entering)
    tl.store(here + 2 * size, tl.where(live & (row_ids == last), tl.exp(later), 0.0))
    tl.store(here + 3 * size, rate)
    score, lower = tl.zeros([Q, Q], tl.float32), tl.zeros([Q, Q], tl.float32)
    for part in range(WIDE // KEYS):
        n = part * KEYS + tl.arange(0, KEYS)
        query, key = load_tile(q, i, q_stride, n, live, K), load_tile(k, i, k_stride, n, live, K)
        lower = tl.dot(key, tl.trans(key), lower, input_precision=PRECISION)
        score = tl.dot(query, tl.trans(key), score, input_precision=PRECISION)
    between = decay_between(same, decay[:, None], decay[None, :])
    store_block(scores, tile, i, i, score * between, True, Q, Q)
    lower = tl.where(i[:, None] > i[None, :], lower * between * rate[:, None], 0.0)
    inverse = _inverted(lower, Q, LEVELS).to(inverses.dtype.element_ty)
    store_block(inverses, tile, i, i, inverse, True, Q, Q)
    for part in range(BROAD // COLUMNS):
        c = part * COLUMNS + tl.arange(0, COLUMNS)
        value = load_tile(v, i, v_stride, c, live, V).to(tl.float32) * rate[:, None]
        value = tl.dot(inverse, value.to(inverse.dtype), input_precision=PRECISION)
        store_block(u, tile, i, c, value, True, Q, V)
    for part in range(WIDE // KEYS):
        n = part * KEYS + tl.arange(0, KEYS)
        key = load_tile(k, i, k_stride, n, live, K).to(tl.float32) * (rate * entering)[:, None]
        key = tl.dot(inverse, key.to(inverse.dtype), input_precision=PRECISION)
        store_block(w, tile, i, n, key, True, Q, K)


@triton.jit
def _carry(  # type: ignore[no-untyped-def]
    k, w, u, ids, tables, ahead, states, made, rows, k_stride, width,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chain of chunks, for a piece of the columns of one head's state.

    The first chunk is written down by the chain that ends with it; none ends with chunk 0.
    """
    piece, head = tl.program_id(0) % PIECES, tl.program_id(0) // PIECES % HEADS
    start = tl.program_id(0) // (PIECES * HEADS)
    i, n, c = tl.arange(0, Q), tl.arange(0, WIDE), piece * COLUMNS + tl.arange(0, COLUMNS)
    size, table = HEADS * width.to(tl.int64), tables + head.to(tl.int64) * width
    state = tl.zeros([WIDE, COLUMNS], tl.float32)
    for turn in range(tl.load(ahead + start)):
        chunk = (start + turn).to(tl.int64)
        first, tile = chunk * Q, chunk * HEADS + head
        kept, mine = state.to(states.dtype.element_ty), (turn > 0) | (start == 0)
        store_block(states, tile, n, c, kept, mine, K, V)
        known = tl.dot(load_block(w, tile, i, n, Q, K), kept, input_precision=PRECISION)
        new = load_block(u, tile, i, c, Q, V).to(tl.float32)
        here = table + size + first + i
        entering, leaving = tl.load(here), tl.load(here + size)
        new = tl.where((entering > 0)[:, None], new - known, new)
        store_block(made, tile, i, c, new, mine, Q, V)
        live = load_ids(ids, first + i, rows) >= 0
        key = load_tile(k + first * k_stride + head // GROUP * K, i, k_stride, n, live, K)
        new = (new * leaving[:, None]).to(key.dtype)
        state *= tl.load(table + size + first + (Q - 1))
        state = tl.dot(tl.trans(key), new, state, input_precision=PRECISION)


@triton.jit
def _mix(  # type: ignore[no-untyped-def]
    q, ids, tables, scores, states, made, y, rows, q_stride, width,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y of a chunk, for a piece of the columns of one head."""
    piece, head = tl.program_id(0) % PIECES, tl.program_id(0) // PIECES % HEADS
    chunk = (tl.program_id(0) // (PIECES * HEADS)).to(tl.int64)
    first, tile = chunk * Q, chunk * HEADS + head
    i, c = tl.arange(0, Q), piece * COLUMNS + tl.arange(0, COLUMNS)
    live = load_ids(ids, first + i, rows) >= 0
    mixed = tl.zeros([Q, COLUMNS], tl.float32)
    for part in range(WIDE // KEYS):
        n = part * KEYS + tl.arange(0, KEYS)
        query = load_tile(q + first * q_stride + head // GROUP * K, i, q_stride, n, live, K)
        state = load_block(states, tile, n, c, K, V)
        mixed = tl.dot(query, state, mixed, input_precision=PRECISION)
    entering = tl.load(tables + (HEADS + head.to(tl.int64)) * width + first + i)
    mixed = tl.where((entering > 0)[:, None], mixed * entering[:, None], 0.0)
    score, new = load_block(scores, tile, i, i, Q, Q), load_block(made, tile, i, c, Q, V)
    mixed = tl.dot(score, new, mixed, input_precision=PRECISION)
    store_rows(y, mixed, first, head, c, first + i < rows, Q, V, HEADS)


def chains_of(ids: Tensor, sizes: DeltaSizes) -> tuple[Tensor, Tensor]:
    """Lengths of the chains that begin with each chunk, forward and back: int32 [N] each."""
    ahead, back = torch.empty(2, sizes.chunks, dtype=torch.int32, device=ids.device)
    block = min(MOST_CHAINS, padded(sizes.chunks))
    _chains[(sizes.chunks,)](ids, ahead, back, sizes.rows, sizes.chunks, Q=sizes.chunk, BLOCK=block)
    return ahead, back


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ids: Tensor,
    sizes: DeltaSizes,
    way: ScanLaunch = EVERYWHERE.prepare,
) -> Prepared:
    """Tables, scores, inverse, w and u; the first in float32, the others in the dtype of v."""
    chunks, heads, rows = sizes.chunks, sizes.heads, sizes.chunk
    found = (
        torch.empty(TABLES, heads, chunks * rows, dtype=torch.float32, device=v.device),
        v.new_empty(chunks, heads, rows, rows),
        v.new_empty(chunks, heads, rows, rows),
        v.new_empty(chunks, heads, rows, sizes.keys),
        v.new_empty(chunks, heads, rows, sizes.columns),
    )
    wide, broad = columns_of(sizes.keys), columns_of(sizes.columns)
    _prepare[(chunks * heads,)](
        q,
        k,
        v,
        g,
        beta,
        ids,
        *found,
        sizes.rows,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        g.stride(0),
        beta.stride(0),
        chunks * rows,
        **sizes.constants,
        WIDE=wide,
        BROAD=broad,
        KEYS=min(wide, way.rows),
        COLUMNS=min(broad, way.columns),
        LEVELS=rows.bit_length() - 5,
        PRECISION=precision_of(v.dtype),
        **launched(way),
    )
    return found


def carry(
    k: Tensor,
    ids: Tensor,
    prepared: Prepared,
    ahead: Tensor,
    sizes: DeltaSizes,
    way: ScanLaunch = EVERYWHERE.carry,
) -> tuple[Tensor, Tensor]:
    """States that enter each chunk [N, H, K, V], and what rows write [N, H, Q, V], dtype of k."""
    tables, _, _, w, u = prepared
    states = k.new_empty(sizes.chunks, sizes.heads, sizes.keys, sizes.columns)
    made = torch.empty_like(u)
    pieces = triton.cdiv(sizes.columns, way.columns)
    _carry[(sizes.chunks * sizes.heads * pieces,)](
        k,
        w,
        u,
        ids,
        tables,
        ahead,
        states,
        made,
        sizes.rows,
        k.stride(0),
        tables.shape[2],
        **sizes.constants,
        WIDE=columns_of(sizes.keys),
        COLUMNS=way.columns,
        PIECES=pieces,
        PRECISION=precision_of(k.dtype),
        **launched(way),
    )
    return states, made


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ids: Tensor,
    chunk: int,
    ways: DeltaConfigs | None = None,
) -> Tensor:
    """y [T, H, V]. Arguments as of `gated_delta`; q, k and v are of one dtype, and columns of all
    lie side by side. ways: those of `delta_ways`."""
    sizes = delta_sizes(k, v, chunk)
    ways = ways or delta_ways(sizes, v.dtype)
    prepared = prepare(q, k, v, g, beta, ids, sizes, ways.prepare)
    states, made = carry(k, ids, prepared, chains_of(ids, sizes)[0], sizes, ways.carry)
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    wide, columns = columns_of(sizes.keys), min(columns_of(sizes.columns), ways.mix.columns)
    pieces = triton.cdiv(sizes.columns, columns)
    _mix[(sizes.chunks * sizes.heads * pieces,)](
        q,
        ids,
        *prepared[:2],
        states,
        made,
        y,
        sizes.rows,
        q.stride(0),
        prepared[0].shape[2],
        **sizes.constants,
        WIDE=wide,
        KEYS=min(wide, ways.mix.rows),
        COLUMNS=columns,
        PIECES=pieces,
        PRECISION=precision_of(v.dtype),
        **launched(ways.mix),
    )
    return y
