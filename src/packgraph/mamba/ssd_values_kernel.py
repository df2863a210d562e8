"""Kernels that make the gradients of x and of the step of mamba/ssd.py, as a factor of x, and of d.

_values         a tile of rows by one head: what the gradient of the state that leaves the chunk
                adds, then tiles of
                later rows, with scores from memory
_values_groups  a tile of rows by several heads of a group: their scores are made once and stay in
registers, then
                heads follow one another, each with all rows of the chunk in one product
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from packgraph.mamba.ssd_configs import EVERYWHERE, Values, launched, share_of
from packgraph.mamba.ssd_kernel import (
    Sizes,
    decay_between,
    decay_within,
    load_ids,
    load_tile,
    load_two,
    padded,
    precision_of,
    scores_of,
)


@triton.jit
def _values(  # type: ignore[no-untyped-def]
    x,
    dy,
    b,
    d,
    ids,
    tables,
    scores,
    states,
    dx,
    direct,
    products,
    of_skip,
    rows,
    x_stride,
    dy_stride,
    b_stride,
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
    """dx [T, H, P]; `direct` [H, N Q]: gradient of the step but for decays; `products`: its part
    that the state has."""
    head, tile, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group, first, size = head // PER_GROUP, chunk * Q, HEADS * width.to(tl.int64)
    j, p = tile * TILE + tl.arange(0, TILE), tl.arange(0, WIDE)
    table = tables + head.to(tl.int64) * width + first
    column_ids = load_ids(ids, first + j, rows)
    live = column_ids >= 0
    found = tl.zeros([TILE, WIDE], tl.float32)
    for part in tl.static_range(STATE // PART):
        s = part * PART + tl.arange(0, PART)
        key = load_tile(b + first * b_stride + group * S, j, b_stride, s, live, S)
        of_state = tl.load(
            states + (chunk * HEADS + head) * (P * S) + (p[None, :] * S + s[:, None]),
            mask=(p < P)[None, :] & (s < S)[:, None],
            other=0.0,
        )
        found = tl.dot(key, of_state, found, input_precision=PRECISION)
    found = found * tl.load(table + 3 * size + j)[:, None]
    own = load_tile(x + first * x_stride + head * P, j, x_stride, p, live, P)
    step, decay = tl.load(table + j), tl.load(table + size + j)
    here = head.to(tl.int64) * width + first + j
    tl.store(products + here, step * tl.sum(own.to(tl.float32) * found, 1))
    score = scores + (chunk * (HEADS // PER_GROUP) + group) * Q * Q
    for later in range(tile, Q // TILE):
        i = later * TILE + tl.arange(0, TILE)
        row_ids = load_ids(ids, first + i, rows)
        same = (
            (row_ids[None, :] == column_ids[:, None]) & live[:, None] & (i[None, :] >= j[:, None])
        )
        weight = decay_between(same, tl.load(table + size + i)[None, :], decay[:, None])
        weight *= tl.load(score + (i[None, :] * Q + j[:, None])).to(tl.float32)
        outcome = load_tile(dy + first * dy_stride + head * P, i, dy_stride, p, row_ids >= 0, P)
        found = tl.dot(weight.to(outcome.dtype), outcome, found, input_precision=PRECISION)
    tl.store(direct + here, tl.sum(own.to(tl.float32) * found, 1))
    result = found * step[:, None]
    if SKIP:
        outcome = load_tile(dy + first * dy_stride + head * P, j, dy_stride, p, live, P).to(
            tl.float32
        )
        result += tl.load(d + head).to(tl.float32) * outcome
        place = (chunk * tl.num_programs(1) + tile) * HEADS + head
        tl.store(of_skip + place, tl.sum(tl.sum(own.to(tl.float32) * outcome, 1), 0))
    place = j[:, None] * (HEADS * P) + p[None, :]
    inside = (first + j < rows)[:, None] & (p < P)[None, :]
    tl.store(dx + (first * HEADS + head) * P + place, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _values_groups(  # type: ignore[no-untyped-def]
    x,
    dy,
    b,
    c,
    d,
    ids,
    tables,
    states,
    dx,
    direct,
    products,
    of_skip,
    rows,
    x_stride,
    dy_stride,
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
    """Variant of `_values` that goes tile after tile of a chunk for SHARE heads of a group."""
    tiles, parts = Q // TILE, HEADS // GROUPS // SHARE
    unit = tl.program_id(0) // (tiles * parts)
    tile, part = tl.program_id(0) // parts % tiles, tl.program_id(0) % parts
    chunk, group = (unit // GROUPS).to(tl.int64), unit % GROUPS
    first, size = chunk * Q, HEADS * width.to(tl.int64)
    j, i, p, s = (
        tile * TILE + tl.arange(0, TILE),
        tl.arange(0, Q),
        tl.arange(0, WIDE),
        tl.arange(0, STATE),
    )
    column_ids, row_ids = load_ids(ids, first + j, rows), load_ids(ids, first + i, rows)
    live, row_live = column_ids >= 0, row_ids >= 0
    same = (row_ids[None, :] == column_ids[:, None]) & live[:, None] & (i[None, :] >= j[:, None])
    key = load_tile(b + first * b_stride + group * S, j, b_stride, s, live, S)
    query = load_tile(c + first * c_stride + group * S, i, c_stride, s, row_live, S)
    score = tl.where(same, tl.dot(key, tl.trans(query), input_precision=PRECISION), 0.0).to(
        key.dtype
    )
    for turn in range(SHARE):
        head = group * (HEADS // GROUPS) + part * SHARE + turn
        table = tables + head.to(tl.int64) * width + first
        step, decay = load_two(table, j, size)
        leaving = tl.load(table + 3 * size + j)
        row_decay, _ = load_two(table + size, i, size)
        of_state = tl.load(
            states + (chunk * HEADS + head) * (P * S) + (p[None, :] * S + s[:, None]),
            mask=(p < P)[None, :] & (s < S)[:, None],
            other=0.0,
        )
        outcome = load_tile(dy + first * dy_stride + head * P, i, dy_stride, p, row_live, P)
        own = load_tile(x + first * x_stride + head * P, j, x_stride, p, live, P)
        of_own, factor = outcome, 0.0
        if SKIP:
            factor = tl.load(d + head).to(tl.float32)
        if SKIP and TILE < Q:
            of_own = load_tile(dy + first * dy_stride + head * P, j, dy_stride, p, live, P)
        found = tl.dot(key, of_state, input_precision=PRECISION) * leaving[:, None]
        here = head.to(tl.int64) * width + first + j
        tl.store(products + here, step * tl.sum(own.to(tl.float32) * found, 1))
        weight = decay_within(row_decay[None, :], decay[:, None]) * score.to(tl.float32)
        found = tl.dot(weight.to(outcome.dtype), outcome, found, input_precision=PRECISION)
        tl.store(direct + here, tl.sum(own.to(tl.float32) * found, 1))
        result = found * step[:, None]
        if SKIP:
            result += factor * of_own.to(tl.float32)
            skipped = tl.sum(tl.sum(own.to(tl.float32) * of_own.to(tl.float32), 1), 0)
            tl.store(of_skip + (chunk * tiles + tile) * HEADS + head, skipped)
        place = j[:, None] * (HEADS * P) + p[None, :]
        inside = (first + j < rows)[:, None] & (p < P)[None, :]
        tl.store(
            dx + (first * HEADS + head) * P + place, result.to(dx.dtype.element_ty), mask=inside
        )


def value_gradients(
    x: Tensor,
    dy: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    ids: Tensor,
    tables: Tensor,
    scores: Tensor | None,
    of_leaving: Tensor,
    sizes: Sizes,
    way: Values = EVERYWHERE.values,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, direct and products of `_values`, and pieces of the gradient of d, float32 [N, tiles, H].

    of_leaving: [N, H, P, S], gradients of states that leave each chunk; scores as of `scores_of`,
    None to make them.
    """
    tile, per_group = min(sizes.chunk, way.tile), sizes.heads // sizes.groups
    tiles, skip = sizes.chunk // tile, tables if d is None else d
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    direct, products = torch.empty(2, *tables.shape[1:], dtype=torch.float32, device=x.device)
    of_skip = torch.empty(sizes.chunks, tiles, sizes.heads, dtype=torch.float32, device=x.device)
    if way.kernel == "groups":
        share = share_of(way.share, per_group)
        _values_groups[(sizes.chunks * sizes.groups * tiles * (per_group // share),)](
            x,
            dy,
            b,
            c,
            skip,
            ids,
            tables,
            of_leaving,
            dx,
            direct,
            products,
            of_skip,
            sizes.rows,
            x.stride(0),
            dy.stride(0),
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
        return dx, direct, products, of_skip
    if tile > sizes.tile:
        raise ValueError(
            f"scores are written in tiles of {sizes.tile} rows, so Values(kernel='heads') takes no "
            f"larger ones, got tile={way.tile}"
        )
    _values[(sizes.heads, tiles, sizes.chunks)](
        x,
        dy,
        b,
        skip,
        ids,
        tables,
        scores_of(b, c, ids, sizes) if scores is None else scores,
        of_leaving,
        dx,
        direct,
        products,
        of_skip,
        sizes.rows,
        x.stride(0),
        dy.stride(0),
        b.stride(0),
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
    return dx, direct, products, of_skip
