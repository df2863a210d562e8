"""Kernels of the forward of mamba/ssd.py, some of which the backward runs again, and their tiles.

    tables   [4, H, N Q]   per row and head: step, log of the decay since document or chunk began,
                           and two factors: `arriving`, of the state that enters the chunk,
                           `leaving`, into the one that leaves it
    scores   [N, G, Q, Q]  c_i . b_j of rows of a chunk, for all heads of a group; tiles on and
                           below the diagonal only
    states   [N, H, P, S]  what enters each chunk: one program carries a piece of a head's state
                           through all chunks in float32 registers, and writes it down once per
                           chunk, in the dtype of x
    y        by _mix, a tile of rows by one head: what the state adds, then tiles of earlier rows,
             with scores from memory; or by _mix_groups, a tile of rows by several heads of a group:
             their scores are made once and stay in registers, then heads follow one another, each
             with all rows of the chunk in one product

What stands in padding is not loaded. Sums run over rows in a fixed order and nothing is atomic, so
results repeat bitwise; a pair of rows of two documents has the weight 0 exactly, and sums of decays
start anew with each document. Products are of x's dtype (float32: three products of tf32) and added
up in float32. Offsets are 64-bit. Algorithm: Dao and Gu 2024, arXiv:2405.21060, section 6.

Tiles stand in a table, by rows; nothing is searched for: the first call of a shape compiles, later
ones launch. Figures come from `benchmarks/ssd_tiles.py`. Every way gives the same numbers but for
rounding. What the table says holds for 16-bit numbers, states of at most [64, 128] and chunks of at
most 128 rows; larger ones, and float32, might not fit into shared memory with its tiles, and take
the ways that fit everywhere.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from packgraph.ops.kernels import tl, triton


class ScanLaunch(NamedTuple):
    """Launch configuration of a kernel; of what decides its tiles each has some.

    warps: of a program. stages: of loads that are under way in its loop. registers: of a thread at
    most, which decides how many programs run on a multiprocessor at once; 0 = as many as there are.
    kernel: of y and gradients of x, "heads", a program for a tile of rows by one head, reads
    scores; "groups", a program for a tile by `share` heads of a group, makes their scores itself,
    once. tile: rows. share: heads of one program, 0 = as many as leave enough programs. products:
    whether running sums along rows are products with a triangle of ones, in tf32 for 16-bit
    numbers. heads: of one program, a power of two, for tables at least 16. rows: summed over or
    added in one product. columns: of a state [P, S] in one program.
    """

    warps: int = 4
    stages: int = 3
    registers: int = 0
    kernel: str = "heads"
    tile: int = 64
    share: int = 1
    products: bool = False
    heads: int = 8
    rows: int = 64
    columns: int = 32


class KernelConfigs(NamedTuple):
    """Launch configuration of each piece. tables: of decays. scores: of a chunk's rows, for kernels
    that read them. carry: states through all chunks; back: the same backwards. mix: y from scores
    and states. pairs: gradients of scores and of decays between rows. of_c, of_b: gradients of c
    and b. values: of x. steps: of the step and of decays, put together."""

    tables: ScanLaunch = ScanLaunch(heads=16)
    scores: ScanLaunch = ScanLaunch()
    carry: ScanLaunch = ScanLaunch(rows=128)
    mix: ScanLaunch = ScanLaunch()
    back: ScanLaunch = ScanLaunch(rows=128)
    pairs: ScanLaunch = ScanLaunch(share=0)
    of_c: ScanLaunch = ScanLaunch(share=0, warps=8)
    of_b: ScanLaunch = ScanLaunch(share=0, warps=8)
    values: ScanLaunch = ScanLaunch()
    steps: ScanLaunch = ScanLaunch()


EVERYWHERE = KernelConfigs()
HOPPER = 9  # major compute capability of what the table was measured on
MOST_HEAD_SIZE, MOST_STATE_SIZE, MOST_CHUNK = 64, 128, 128  # of what the table is for


# (from how many rows on, how): descending. The best at 16,384, 4,096 and 1,024 rows of 64 heads in
# 8 groups on an H200.
WAYS = (
    (
        8192,
        KernelConfigs(
            tables=ScanLaunch(heads=32),
            scores=ScanLaunch(warps=8),
            mix=ScanLaunch(kernel="groups", tile=128, share=8, warps=8),
            pairs=ScanLaunch(share=0, products=True),
            of_c=ScanLaunch(tile=128, share=8, warps=8),
            of_b=ScanLaunch(tile=128, share=8, warps=8),
            values=ScanLaunch(kernel="groups", share=8, stages=2),
        ),
    ),
    (
        2048,
        KernelConfigs(
            mix=ScanLaunch(kernel="groups", tile=128, share=8, warps=8),
            pairs=ScanLaunch(share=8, products=True),
            of_c=ScanLaunch(tile=128, share=8, warps=8),
            of_b=ScanLaunch(tile=128, share=8, warps=8),
            values=ScanLaunch(kernel="groups", share=8, stages=2),
            steps=ScanLaunch(heads=16, warps=8),
        ),
    ),
    (
        0,
        KernelConfigs(
            tables=ScanLaunch(heads=16, rows=128),
            scores=ScanLaunch(warps=8),
            carry=ScanLaunch(rows=128, stages=2),
            mix=ScanLaunch(kernel="groups", share=4, stages=2),
            back=ScanLaunch(rows=128, columns=64),
            pairs=ScanLaunch(share=8, products=True),
            of_c=ScanLaunch(share=8, warps=8, stages=2),
            of_b=ScanLaunch(share=8, warps=8, stages=2),
            values=ScanLaunch(kernel="groups", tile=128, share=4, warps=8),
        ),
    ),
)
MOST_TILE_ROWS = 64
TABLES = 4


def ways_for(
    rows: int, head_size: int, state_size: int, chunk: int, dtype: torch.dtype
) -> KernelConfigs:
    """The ways for T rows of heads with P columns and states of S, in chunks of Q rows."""
    if (
        dtype.itemsize != 2
        or head_size > MOST_HEAD_SIZE
        or state_size > MOST_STATE_SIZE
        or chunk > MOST_CHUNK
    ):
        return EVERYWHERE
    return next(ways for least, ways in WAYS if rows >= least)


def launched(way: ScanLaunch) -> dict[str, int | None]:
    """Launch options of warps, stages and registers."""
    return {"num_warps": way.warps, "num_stages": way.stages, "maxnreg": way.registers or None}


def share_of(wanted: int, per_group: int) -> int:
    """Number of heads of a program: at most `wanted`, and a divisor of the heads of a group."""
    return max(1, math.gcd(wanted, per_group))


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
    dt, a, ids, tables, through, rows, dt_stride, width, chunks,
    Q: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
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
    b, c, ids, scores, rows, b_stride, c_stride,
    Q: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
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
    x, b, ids, tables, through, states, other, products, rows, x_stride, b_stride, width, chunks,
    Q: tl.constexpr, P: tl.constexpr, S: tl.constexpr, HEADS: tl.constexpr, PER_GROUP: tl.constexpr,
    WIDE: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, BACKWARD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
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
    dt: Tensor, a: Tensor, ids: Tensor, sizes: Sizes, way: ScanLaunch = EVERYWHERE.tables
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
    b: Tensor, c: Tensor, ids: Tensor, sizes: Sizes, way: ScanLaunch = EVERYWHERE.scores
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
    way: ScanLaunch = EVERYWHERE.carry,
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


@triton.jit
def _mix(  # type: ignore[no-untyped-def]
    x, c, d, ids, tables, scores, states, y, rows, x_stride, c_stride, width,
    Q: tl.constexpr, P: tl.constexpr, S: tl.constexpr, HEADS: tl.constexpr, PER_GROUP: tl.constexpr,
    TILE: tl.constexpr, WIDE: tl.constexpr, STATE: tl.constexpr, PART: tl.constexpr,
    SKIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, tile, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group, first = head // PER_GROUP, chunk * Q
    i, p = tile * TILE + tl.arange(0, TILE), tl.arange(0, WIDE)
    size = HEADS * width.to(tl.int64)
    table = tables + head.to(tl.int64) * width + first
    row_ids = load_ids(ids, first + i, rows)
    live = row_ids >= 0
    mixed = tl.zeros([TILE, WIDE], tl.float32)
    for part in tl.static_range(STATE // PART):
        s = part * PART + tl.arange(0, PART)
        query = load_tile(c + first * c_stride + group * S, i, c_stride, s, live, S)
        entering = tl.load(
            states + (chunk * HEADS + head) * (P * S) + (p[None, :] * S + s[:, None]),
            mask=(p < P)[None, :] & (s < S)[:, None],
            other=0.0,
        )
        mixed = tl.dot(query, entering, mixed, input_precision=PRECISION)
    arriving = tl.load(table + 2 * size + i)
    mixed = tl.where((arriving > 0)[:, None], mixed * arriving[:, None], 0.0)
    decay = tl.load(table + size + i)
    score = scores + (chunk * (HEADS // PER_GROUP) + group) * Q * Q
    for earlier in range(tile + 1):
        j = earlier * TILE + tl.arange(0, TILE)
        column_ids = load_ids(ids, first + j, rows)
        same = (
            (row_ids[:, None] == column_ids[None, :]) & live[:, None] & (i[:, None] >= j[None, :])
        )
        weight = decay_between(same, decay[:, None], tl.load(table + size + j)[None, :])
        weight *= (
            tl.load(score + (i[:, None] * Q + j[None, :])).to(tl.float32)
            * tl.load(table + j)[None, :]
        )
        value = load_tile(x + first * x_stride + head * P, j, x_stride, p, column_ids >= 0, P)
        mixed = tl.dot(weight.to(value.dtype), value, mixed, input_precision=PRECISION)
    if SKIP:
        own = load_tile(x + first * x_stride + head * P, i, x_stride, p, live, P).to(tl.float32)
        mixed += tl.load(d + head).to(tl.float32) * own
    place = i[:, None] * (HEADS * P) + p[None, :]
    inside = (first + i < rows)[:, None] & (p < P)[None, :]
    tl.store(y + (first * HEADS + head) * P + place, mixed.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _mix_groups(  # type: ignore[no-untyped-def]
    x, b, c, d, ids, tables, states, y, rows, x_stride, b_stride, c_stride, width,
    Q: tl.constexpr, P: tl.constexpr, S: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    SHARE: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, STATE: tl.constexpr,
    SKIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tile of a chunk for SHARE heads of a group; tiles and parts of one chunk and group run side
    by side."""
    tiles, parts = Q // TILE, HEADS // GROUPS // SHARE
    unit = tl.program_id(0) // (tiles * parts)
    tile, part = tl.program_id(0) // parts % tiles, tl.program_id(0) % parts
    chunk, group = (unit // GROUPS).to(tl.int64), unit % GROUPS
    first, size = chunk * Q, HEADS * width.to(tl.int64)
    i, j, p, s = (
        tile * TILE + tl.arange(0, TILE),
        tl.arange(0, Q),
        tl.arange(0, WIDE),
        tl.arange(0, STATE),
    )
    row_ids, column_ids = load_ids(ids, first + i, rows), load_ids(ids, first + j, rows)
    live, column_live = row_ids >= 0, column_ids >= 0
    same = (row_ids[:, None] == column_ids[None, :]) & live[:, None] & (i[:, None] >= j[None, :])
    query = load_tile(c + first * c_stride + group * S, i, c_stride, s, live, S)
    key = load_tile(b + first * b_stride + group * S, j, b_stride, s, column_live, S)
    score = tl.where(same, tl.dot(query, tl.trans(key), input_precision=PRECISION), 0.0).to(
        key.dtype
    )
    for turn in range(SHARE):
        head = group * (HEADS // GROUPS) + part * SHARE + turn
        table = tables + head.to(tl.int64) * width + first
        decay, arriving = load_two(table + size, i, size)
        column_step, column_decay = load_two(table, j, size)
        entering = tl.load(
            states + (chunk * HEADS + head) * (P * S) + (p[None, :] * S + s[:, None]),
            mask=(p < P)[None, :] & (s < S)[:, None],
            other=0.0,
        )
        value = load_tile(x + first * x_stride + head * P, j, x_stride, p, column_live, P)
        own, factor = value, 0.0
        if SKIP:
            factor = tl.load(d + head).to(tl.float32)
        if SKIP and TILE < Q:
            own = load_tile(x + first * x_stride + head * P, i, x_stride, p, live, P)
        mixed = tl.dot(query, entering, input_precision=PRECISION)
        mixed = tl.where((arriving > 0)[:, None], mixed * arriving[:, None], 0.0)
        weight = (
            decay_within(decay[:, None], column_decay[None, :])
            * score.to(tl.float32)
            * column_step[None, :]
        )
        mixed = tl.dot(weight.to(value.dtype), value, mixed, input_precision=PRECISION)
        if SKIP:
            mixed += factor * own.to(tl.float32)
        place = i[:, None] * (HEADS * P) + p[None, :]
        inside = (first + i < rows)[:, None] & (p < P)[None, :]
        tl.store(y + (first * HEADS + head) * P + place, mixed.to(y.dtype.element_ty), mask=inside)


def mix(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    ids: Tensor,
    tables: Tensor,
    states: Tensor,
    sizes: Sizes,
    ways: KernelConfigs,
) -> Tensor:
    """y [T, H, P] from states [N, H, P, S] that enter each chunk, by a kernel that reads them."""
    way, y = ways.mix, torch.empty(x.shape, dtype=x.dtype, device=x.device)
    per_group, skip = sizes.heads // sizes.groups, tables if d is None else d
    tile = min(sizes.chunk, way.tile)
    tiles = sizes.chunk // tile
    if way.kernel == "groups":
        share = share_of(way.share, per_group)
        _mix_groups[(sizes.chunks * sizes.groups * tiles * (per_group // share),)](
            x,
            b,
            c,
            skip,
            ids,
            tables,
            states,
            y,
            sizes.rows,
            x.stride(0),
            b.stride(0),
            c.stride(0),
            tables.shape[2],
            Q=sizes.chunk,
            P=sizes.columns,
            S=sizes.state,
            HEADS=sizes.heads,
            GROUPS=sizes.groups,
            SHARE=share,
            TILE=tile,
            WIDE=padded(sizes.columns),
            STATE=padded(sizes.state),
            SKIP=d is not None,
            PRECISION=precision_of(x.dtype),
            **launched(way),
        )
        return y
    if tile > sizes.tile:
        raise ValueError(
            f"scores are written in tiles of {sizes.tile} rows, so kernel='heads' takes no "
            "larger "
            f"ones, got tile={way.tile}"
        )
    _mix[(sizes.heads, tiles, sizes.chunks)](
        x,
        c,
        skip,
        ids,
        tables,
        scores_of(b, c, ids, sizes, ways.scores),
        states,
        y,
        sizes.rows,
        x.stride(0),
        c.stride(0),
        tables.shape[2],
        Q=sizes.chunk,
        P=sizes.columns,
        S=sizes.state,
        HEADS=sizes.heads,
        PER_GROUP=per_group,
        TILE=tile,
        WIDE=padded(sizes.columns),
        STATE=padded(sizes.state),
        PART=min(64, padded(sizes.state)),
        SKIP=d is not None,
        PRECISION=precision_of(x.dtype),
        **launched(way),
    )
    return y


def forward(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    ids: Tensor,
    chunk: int,
    ways: KernelConfigs | None = None,
) -> Tensor:
    """y [T, H, P]. Arguments as of `ssd`; columns of x, b and c must lie side by side. ways: those
    of the table."""
    ways = ways_of(x, b, chunk) if ways is None else ways
    sizes = sizes_of(x, b, chunk)
    tables, through = tables_of(dt, a, ids, sizes, ways.tables)
    states, _ = carry(x, b, ids, tables, through, sizes, way=ways.carry)
    return mix(x, b, c, d, ids, tables, states, sizes, ways)
