"""Kernels that make y of mamba/ssd.py from tables, scores and states (mamba/ssd_kernel.py), and the
forward as a whole.

    _mix         a tile of rows by one head: what the state adds, then tiles of earlier rows, with
                 scores from memory
    _mix_groups  a tile of rows by several heads of a group: their scores are made once and stay in
                 registers, then heads follow one another, each with all rows of the chunk in one
                 product

Both sum in a fixed order, see mamba/ssd_kernel.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from packgraph.mamba.ssd_configs import KernelConfigs, launched, share_of
from packgraph.mamba.ssd_kernel import (
    Sizes,
    carry,
    decay_between,
    decay_within,
    load_ids,
    load_tile,
    load_two,
    padded,
    precision_of,
    scores_of,
    sizes_of,
    tables_of,
    ways_of,
)


@triton.jit
def _mix(  # type: ignore[no-untyped-def]
    x,
    c,
    d,
    ids,
    tables,
    scores,
    states,
    y,
    rows,
    x_stride,
    c_stride,
    width,
    Q: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    STATE: tl.constexpr,
    PART: tl.constexpr,
    SKIP: tl.constexpr,
    PRECISION: tl.constexpr,
):
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
    x,
    b,
    c,
    d,
    ids,
    tables,
    states,
    y,
    rows,
    x_stride,
    b_stride,
    c_stride,
    width,
    Q: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARE: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    STATE: tl.constexpr,
    SKIP: tl.constexpr,
    PRECISION: tl.constexpr,
):
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
            f"scores are written in tiles of {sizes.tile} rows, so Mix(kernel='heads') takes no "
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
