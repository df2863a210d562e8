"""Kernels that forward and backward of mamba/ssd.py share; mamba/ssd_forward_kernel.py makes y from
what they make.

    tables   [4, H, N Q]   per row and head: step, log of the decay since document or chunk began,
    and two factors:
                           `arriving`, of the state that enters the chunk, `leaving`, into the one
                           that leaves it
    scores   [N, G, Q, Q]  c_i . b_j of rows of a chunk, for all heads of a group; tiles on and
    below the diagonal only states   [N, H, P, S]  what enters each chunk: one program carries a
    piece of a head's state through all chunks in
                           float32 registers, and writes it down once per chunk, in the dtype of x

What stands in padding is not loaded. Sums run over rows in a fixed order and nothing is atomic, so
results repeat bitwise; a pair of rows of two documents has the weight 0 exactly, and sums of decays
start anew with each document. Tiles and warps stand in a table (mamba/ssd_configs.py), nothing is
searched for: the first call of a shape compiles, later ones launch. Products are of x's dtype
(float32: three products of tf32) and added up in float32. Offsets are 64-bit.

Algorithm: Dao and Gu 2024, arXiv:2405.21060, section 6.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from packgraph.mamba.ssd_configs import (
    EVERYWHERE,
    HOPPER,
    Carry,
    KernelConfigs,
    Scores,
    Tables,
    launched,
    ways_for,
)

MOST_TILE_ROWS = 64
STEP, DECAY, ARRIVING, LEAVING, TABLES = 0, 1, 2, 3, 4


class Sizes(NamedTuple):
    """T rows of H heads with P columns, G groups with states of S columns, N chunks of Q rows."""

    rows: int
    heads: int
    columns: int
    groups: int
    state: int
    chunks: int
    chunk: int

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return min(self.chunk, MOST_TILE_ROWS)

    @property
    def tiles(self) -> int:
        """Tiles of rows in a chunk."""
        return self.chunk // self.tile


def sizes_of(x: Tensor, b: Tensor, chunk: int) -> Sizes:
    """x: [T, H, P]; b: [T, G, S]; chunk: Q."""
    (rows, heads, columns), (_, groups, state) = x.shape, b.shape
    return Sizes(rows, heads, columns, groups, state, triton.cdiv(rows, chunk), chunk)


def ways_of(x: Tensor, b: Tensor, chunk: int) -> KernelConfigs:
    """Ways for x [T, H, P] and b [T, G, S], in chunks of Q rows: those of the table where its tiles
    fit into shared memory, which is Hopper's."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] != HOPPER:
        return EVERYWHERE
    return ways_for(x.shape[0], x.shape[2], b.shape[2], chunk, x.dtype)


def padded(size: int) -> int:
    """Columns of a tile that holds `size` of them; products need 16."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def load_ids(ids, row, rows):  # type: ignore[no-untyped-def]
    """Document ids of rows, -1 behind the end as in padding."""
    return tl.load(ids + row, mask=row < rows, other=-1)


@triton.jit
def load_tile(start, row, stride, column, live, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """start[row * stride + column]: [rows, columns], 0 in padding and behind COUNT columns.

    row counts from the chunk's first row, so that 32 bits are enough for offsets within a tile;
    start has the rest.
    """
    inside = live[:, None] & (column < COUNT)[None, :]
    return tl.load(start + row[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def decay_between(same, decay, earlier):  # type: ignore[no-untyped-def]
    """exp(decay - earlier) where `same`, else 0. The exponent is masked first: elsewhere it may be
    anything."""
    return tl.where(same, tl.exp(tl.where(same, decay - earlier, 0.0)), 0.0)


@triton.jit
def load_two(start, index, apart):  # type: ignore[no-untyped-def]
    """start[index] and start[index + apart], by one load, which threads share out among themselves.

    A load of fewer elements than there are threads would be made by every thread for all the
    columns that it has of a product: as many instructions as the product's tile has columns.
    """
    return tl.split(tl.load(start + (index[:, None] + tl.arange(0, 2)[None, :] * apart)))


@triton.jit
def load_ids_once(ids, row, rows):  # type: ignore[no-untyped-def]
    """Does the same as `load_ids`, in the manner of `load_two`."""
    both = row[:, None] + tl.arange(0, 2)[None, :] * 0
    return tl.split(tl.load(ids + both, mask=both < rows, other=-1))[0]


@triton.jit
def decay_within(decay, earlier):  # type: ignore[no-untyped-def]
    """exp(decay - earlier), for pairs of a document; of others something finite, for a factor 0 or
    a mask to remove.

    A mask that is needed for the exponent would have to be kept beside the scores, a register for
    every pair.
    """
    return tl.exp(tl.minimum(decay - earlier, 30.0))


@triton.jit
def _tables(  # type: ignore[no-untyped-def]
    dt,
    a,
    ids,
    tables,
    through,
    rows,
    dt_stride,
    width,
    chunks,
    Q: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
):
    """A tile of rows for BLOCK heads. Sums over rows of a document are products with a matrix of
    ones and zeros.

    In three products of tf32: the ones are exact, and of a decay's log two times 11 bits are kept.
    Other documents add exactly 0.
    """
    chunk, tile = tl.program_id(0), tl.program_id(2)
    first = chunk.to(tl.int64) * Q
    i, head = tile * TILE + tl.arange(0, TILE), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rate = tl.load(a + head, mask=head < HEADS, other=0.0).to(tl.float32)
    row_ids = load_ids(ids, first + i, rows)
    last = tl.load(ids + first + (Q - 1), mask=first + (Q - 1) < rows, other=-1)
    before = tl.load(ids + first - 1, mask=chunk > 0, other=-1)
    decay, later = tl.zeros([TILE, BLOCK], tl.float32), tl.zeros([TILE, BLOCK], tl.float32)
    for part in tl.static_range(Q // PART):
        j = part * PART + tl.arange(0, PART)
        column_ids = load_ids(ids, first + j, rows)
        same = (row_ids[:, None] == column_ids[None, :]) & (column_ids >= 0)[None, :]
        step = load_tile(dt + first * dt_stride, j, dt_stride, head, column_ids >= 0, HEADS)
        log = step.to(tl.float32) * rate[None, :]
        ones = tl.where(same & (j[None, :] <= i[:, None]), 1.0, 0.0)
        decay = tl.dot(ones, log, decay, input_precision="tf32x3")
        ones = tl.where(same & (j[None, :] > i[:, None]), 1.0, 0.0)
        later = tl.dot(ones, log, later, input_precision="tf32x3")
    size = HEADS * width.to(tl.int64)
    here = tables + first + (head.to(tl.int64)[None, :] * width + i[:, None])
    inside = (head < HEADS)[None, :] & (i >= 0)[:, None]
    step = load_tile(dt + first * dt_stride, i, dt_stride, head, row_ids >= 0, HEADS).to(tl.float32)
    tl.store(here, step, mask=inside)
    tl.store(here + size, decay, mask=inside)
    arrives, leaves = (row_ids == before) & (row_ids >= 0), (row_ids == last) & (row_ids >= 0)
    tl.store(here + 2 * size, tl.where(arrives[:, None], tl.exp(decay), 0.0), mask=inside)
    tl.store(here + 3 * size, tl.where(leaves[:, None], tl.exp(later), 0.0), mask=inside)
    if tile == Q // TILE - 1:
        whole = tl.sum(tl.where((i == Q - 1)[:, None], decay, 0.0), 0)
        kept = tl.where((last == before) & (last >= 0), tl.exp(whole), 0.0)
        tl.store(through + head * chunks + chunk, kept, mask=head < HEADS)


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    b,
    c,
    ids,
    scores,
    rows,
    b_stride,
    c_stride,
    Q: tl.constexpr,
    S: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    column_tile, row_tile = tl.program_id(1), tl.program_id(2)
    if column_tile <= row_tile:
        chunk, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
        first = chunk.to(tl.int64) * Q
        i, j = row_tile * TILE + tl.arange(0, TILE), column_tile * TILE + tl.arange(0, TILE)
        column = tl.arange(0, WIDE)
        of_row = load_tile(
            c + first * c_stride + group * S,
            i,
            c_stride,
            column,
            load_ids(ids, first + i, rows) >= 0,
            S,
        )
        of_column = load_tile(
            b + first * b_stride + group * S,
            j,
            b_stride,
            column,
            load_ids(ids, first + j, rows) >= 0,
            S,
        )
        found = tl.dot(of_row, tl.trans(of_column), input_precision=PRECISION)
        here = scores + tl.program_id(0).to(tl.int64) * Q * Q
        tl.store(here + (i[:, None] * Q + j[None, :]), found.to(scores.dtype.element_ty))


@triton.jit
def _carry(  # type: ignore[no-untyped-def]
    x,
    b,
    ids,
    tables,
    through,
    states,
    other,
    products,
    rows,
    x_stride,
    b_stride,
    width,
    chunks,
    Q: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    BACKWARD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """States [P, S] through all chunks: before each one, `states` gets what was carried so far. See
    `carry`."""
    head, piece = tl.program_id(1), tl.program_id(0)
    p, s = tl.arange(0, WIDE), piece * COLUMNS + tl.arange(0, COLUMNS)
    inside = (p < P)[:, None] & (s < S)[None, :]
    place = p[:, None] * S + s[None, :]
    size = HEADS * width.to(tl.int64)
    table = tables + head.to(tl.int64) * width
    state = tl.zeros([WIDE, COLUMNS], tl.float32)
    start = chunks - 1 if BACKWARD else 0
    kept = tl.load(through + head * chunks + start)
    if BACKWARD:
        entering = tl.load(
            other + (tl.cast(start, tl.int64) * HEADS + head) * (P * S) + place,
            mask=inside,
            other=0.0,
        )
    for turn in range(chunks):
        chunk = chunks - 1 - turn if BACKWARD else turn
        first = chunk.to(tl.int64) * Q  # type: ignore[union-attr]
        here = (chunk.to(tl.int64) * HEADS + head) * (P * S)  # type: ignore[union-attr]
        tl.store(states + here + place, state.to(states.dtype.element_ty), mask=inside)
        # What no product needs is not loaded ahead by the compiler, and every chunk would wait for
        # it.
        coming = tl.maximum(chunk - 1, 0) if BACKWARD else tl.minimum(chunk + 1, chunks - 1)
        next_kept = tl.load(through + head * chunks + coming)
        if BACKWARD:
            next_entering = tl.load(
                other + (coming.to(tl.int64) * HEADS + head) * (P * S) + place,
                mask=inside,
                other=0.0,
            )
        carried = state * kept
        for part in tl.static_range(Q // PART):
            row = part * PART + tl.arange(0, PART)
            live = load_ids(ids, first + row, rows) >= 0
            if BACKWARD:
                weight = tl.load(table + 2 * size + first + row)
            else:
                weight = tl.load(table + 3 * size + first + row) * tl.load(table + first + row)
            value = load_tile(x + first * x_stride + head * P, row, x_stride, p, live, P)
            key = load_tile(b + first * b_stride + head // PER_GROUP * S, row, b_stride, s, live, S)
            if COLUMNS > WIDE:  # the smaller one is weighted
                value = (value.to(tl.float32) * weight[:, None]).to(key.dtype)
            else:
                key = (key.to(tl.float32) * weight[:, None]).to(value.dtype)
            carried = tl.dot(tl.trans(value), key, carried, input_precision=PRECISION)
        if BACKWARD:
            product = tl.sum(tl.sum(entering.to(tl.float32) * state, 1), 0)
            tl.store(
                products + (head * chunks + chunk) * tl.num_programs(0) + piece, kept * product
            )
            entering = next_entering
        kept = next_kept
        state = carried


def precision_of(dtype: torch.dtype) -> str:
    """Precision of products; of 16-bit numbers they are exact anyway."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def tables_of(
    dt: Tensor, a: Tensor, ids: Tensor, sizes: Sizes, way: Tables = EVERYWHERE.tables
) -> tuple[Tensor, Tensor]:
    """tables, float32 [4, H, N Q], and `through`, float32 [H, N]: what a state is multiplied with
    in each chunk."""
    width = sizes.chunks * sizes.chunk
    tables = torch.empty(TABLES, sizes.heads, width, dtype=torch.float32, device=dt.device)
    through = torch.empty(sizes.heads, sizes.chunks, dtype=torch.float32, device=dt.device)
    _tables[(sizes.chunks, triton.cdiv(sizes.heads, way.heads), sizes.tiles)](
        dt,
        a,
        ids,
        tables,
        through,
        sizes.rows,
        dt.stride(0),
        width,
        sizes.chunks,
        Q=sizes.chunk,
        HEADS=sizes.heads,
        TILE=sizes.tile,
        BLOCK=way.heads,
        PART=min(sizes.chunk, way.rows),
        num_warps=way.warps,
    )
    return tables, through


def scores_of(
    b: Tensor, c: Tensor, ids: Tensor, sizes: Sizes, way: Scores = EVERYWHERE.scores
) -> Tensor:
    """[N, G, Q, Q], dtype of b; tiles above the diagonal are not written."""
    scores = b.new_empty(sizes.chunks, sizes.groups, sizes.chunk, sizes.chunk)
    _scores[(sizes.chunks * sizes.groups, sizes.tiles, sizes.tiles)](
        b,
        c,
        ids,
        scores,
        sizes.rows,
        b.stride(0),
        c.stride(0),
        Q=sizes.chunk,
        S=sizes.state,
        GROUPS=sizes.groups,
        TILE=sizes.tile,
        WIDE=padded(sizes.state),
        PRECISION=precision_of(b.dtype),
        num_warps=way.warps,
    )
    return scores


def carry(
    x: Tensor,
    b: Tensor,
    ids: Tensor,
    tables: Tensor,
    through: Tensor,
    sizes: Sizes,
    entering: Tensor | None = None,
    way: Carry = EVERYWHERE.carry,
) -> tuple[Tensor, Tensor]:
    """States that enter each chunk [N, H, P, S], dtype of x; or, with `entering`, the gradients of
    those that leave.

    Backwards through the chunks, with the gradient of y for x and c for b, the same recurrence
    gives gradients of states. The second result is then, float32 [H, N, pieces], pieces of the
    gradient of log(through): the product of a state that enters with its gradient; otherwise it is
    empty.
    """
    pieces = triton.cdiv(sizes.state, way.columns)
    states = x.new_empty(sizes.chunks, sizes.heads, sizes.columns, sizes.state)
    products = torch.empty(
        0 if entering is None else (sizes.heads, sizes.chunks, pieces),
        dtype=torch.float32,
        device=x.device,
    )
    _carry[(pieces, sizes.heads)](
        x,
        b,
        ids,
        tables,
        through,
        states,
        states if entering is None else entering,
        products,
        sizes.rows,
        x.stride(0),
        b.stride(0),
        tables.shape[2],
        sizes.chunks,
        Q=sizes.chunk,
        P=sizes.columns,
        S=sizes.state,
        HEADS=sizes.heads,
        PER_GROUP=sizes.heads // sizes.groups,
        WIDE=padded(sizes.columns),
        COLUMNS=way.columns,
        PART=sizes.tile if x.dtype == torch.float32 else min(sizes.chunk, way.rows),
        BACKWARD=entering is not None,
        PRECISION=precision_of(x.dtype),
        **launched(way),
    )
    return states, products
