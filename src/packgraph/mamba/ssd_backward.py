r"""Kernels of the backward of mamba/ssd.py. Nothing but the inputs is kept from the forward: what it made
is made again.

With w_ij the weight of row j in row i (score, decay between them, step of j), per head and chunk:

    _pairs     dy_i . x_j of every pair of rows, times decay and step: summed over heads the
               gradient of the score, and
               times the score that of the log of every decay between the two rows
    carry      the forward's kernel, backwards through the chunks: gradients of the states that
               leave each chunk
    _shared    gradients of c and b, for all heads of a group together: from scores, then what the
               states add
    _values    gradients of x, and of the step as a factor of x, and of d: a tile of rows by one
               head, what the gradient of the state that leaves the chunk adds, then tiles of later
               rows, with scores from memory; _values_groups by several heads of a group, whose
               scores are made once and stay in registers, as in _mix_groups
    _steps     gradients of decays of a chunk's rows, put together, and with them those of dt and a

The gradient of the log of row k's decay is the sum over all pairs i >= k > j. It is added up from
these pairs alone, tile by tile; as a difference of sums over rows (gradient of the decay up to i,
minus that up to j) it would drown in the rounding of pairs that do not straddle k. A state that
enters is one more row before the chunk, the gradient of one that leaves is one more behind it:

          j  1 2 3 4 | 5 6 7 8
    i 1..4   \ tile             columns[I, j]  of a tile: sum of pairs (i', j') with j' <= j < i', for k = j + 1
      5..8   tile | \           rowsums[J, i]  of a tile below the diagonal: sum over its columns,
                                               for later k

Where a group's heads are shared out among programs, sums over parts follow in a fixed order;
nothing is atomic.
"""  # noqa: E501

import torch
from torch import Tensor

from packgraph.mamba.ssd_forward import (
    EVERYWHERE,
    KernelConfigs,
    ScanLaunch,
    Sizes,
    carry,
    decay_between,
    decay_within,
    launched,
    load_ids,
    load_tile,
    load_two,
    padded,
    precision_of,
    scores_of,
    share_of,
    sizes_of,
    tables_of,
    ways_of,
)
from packgraph.ops.kernels import tl, triton

ENOUGH_PROGRAMS = 256  # about two for every multiprocessor


@triton.jit
def _values(  # type: ignore[no-untyped-def]
    x, dy, b, d, ids, tables, scores, states, dx, direct, products, of_skip, rows, x_stride,
    dy_stride, b_stride, width,
    Q: tl.constexpr, P: tl.constexpr, S: tl.constexpr, HEADS: tl.constexpr, PER_GROUP: tl.constexpr,
    TILE: tl.constexpr, WIDE: tl.constexpr, STATE: tl.constexpr, PART: tl.constexpr,
    SKIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
    x, dy, b, c, d, ids, tables, states, dx, direct, products, of_skip, rows, x_stride, dy_stride,
    b_stride, c_stride, width,
    Q: tl.constexpr, P: tl.constexpr, S: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    SHARE: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, STATE: tl.constexpr,
    SKIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
    way: ScanLaunch = EVERYWHERE.values,
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
            f"scores are written in tiles of {sizes.tile} rows, so kernel='heads' takes no "
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


@triton.jit
def sums_along_rows(  # type: ignore[no-untyped-def]
    value, DTYPE: tl.constexpr, TILE: tl.constexpr, PRODUCTS: tl.constexpr, PRECISION: tl.constexpr
):
    """Running sums of value [TILE, TILE], float32, along its rows: by shuffles, or by products with
    a triangle of ones.

    Of bfloat16 there are two such products, of each number's first 8 bits and of the next 8; the
    ones are exact.
    """
    if PRODUCTS:
        until = tl.where(tl.arange(0, TILE)[:, None] <= tl.arange(0, TILE)[None, :], 1.0, 0.0)
        if tl.bfloat16 == DTYPE:
            high = value.to(tl.bfloat16)
            low = (value - high.to(tl.float32)).to(tl.bfloat16)
            sums = tl.dot(low, until.to(tl.bfloat16))
            sums = tl.dot(high, until.to(tl.bfloat16), sums)
        else:
            sums = tl.dot(value, until, input_precision=PRECISION)
    else:
        sums = tl.cumsum(value, 1)
    return sums


@triton.jit
def _pairs(  # type: ignore[no-untyped-def]
    x, dy, ids, tables, scores, of_scores, columns, rowsums, rows, x_stride, dy_stride, width,
    Q: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    SHARE: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, PRODUCTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Tile (I, J) of one chunk for SHARE heads of a group; of_scores: [parts, N, G, Q, Q]."""
    row_tile, column_tile = tl.program_id(1) // (Q // TILE), tl.program_id(1) % (Q // TILE)
    if column_tile <= row_tile:
        chunk, group = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS
        first, size = chunk * Q, HEADS * width.to(tl.int64)
        i, j = row_tile * TILE + tl.arange(0, TILE), column_tile * TILE + tl.arange(0, TILE)
        p = tl.arange(0, WIDE)
        row_ids, column_ids = load_ids(ids, first + i, rows), load_ids(ids, first + j, rows)
        same = (
            (row_ids[:, None] == column_ids[None, :])
            & (row_ids >= 0)[:, None]
            & (i[:, None] >= j[None, :])
        )
        place = i[:, None] * Q + j[None, :]
        score = tl.load(scores + tl.program_id(0).to(tl.int64) * Q * Q + place).to(tl.float32)
        score = tl.where(same & (i[:, None] > j[None, :]), score, 0.0)
        total = tl.zeros([TILE, TILE], tl.float32)
        for turn in range(SHARE):
            head = group * (HEADS // GROUPS) + tl.program_id(2) * SHARE + turn
            table = head.to(tl.int64) * width + first
            step, decay = load_two(tables + table, j, size)
            row_decay = tl.load(tables + size + table + i)
            outcome = load_tile(dy + first * dy_stride + head * P, i, dy_stride, p, row_ids >= 0, P)
            value = load_tile(x + first * x_stride + head * P, j, x_stride, p, column_ids >= 0, P)
            product = tl.dot(outcome.to(value.dtype), tl.trans(value), input_precision=PRECISION)
            product *= decay_within(row_decay[:, None], decay[None, :]) * step[None, :]
            total += product
            straddling = product * score
            sums = sums_along_rows(straddling, x.dtype.element_ty, TILE, PRODUCTS, PRECISION)
            # `turn` on both sides: what is the same for all heads would be kept, a register for
            # every pair
            of_columns = tl.sum(tl.where((i + turn)[:, None] > (j + turn)[None, :], sums, 0.0), 0)
            tl.store(columns + row_tile * size + table + j, of_columns)
            tl.store(rowsums + column_tile * size + table + i, tl.sum(straddling, 1))
        total = tl.where(same, total, 0.0)
        part = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        tl.store(of_scores + part * (Q * Q) + place, total.to(of_scores.dtype.element_ty))


@triton.jit
def _shared(  # type: ignore[no-untyped-def]
    value, key, of_scores, states, ids, tables, out, products, rows, value_stride, key_stride,
    query, query_stride, width,
    Q: tl.constexpr, P: tl.constexpr, S: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    SHARE: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, STATE: tl.constexpr,
    QUERIES: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of c (QUERIES: value = dy, key = b, query = c) or b (value = x, key = c): [parts, T,
    G, S].

    states: [N, H, P, S], what enters each chunk, or the gradient of what leaves it. With QUERIES
    also `products` [H, N Q]: what each row takes from the state, times its gradient.
    """
    chunk, group = (tl.program_id(0) // GROUPS).to(tl.int64), tl.program_id(0) % GROUPS
    tile, part = tl.program_id(1), tl.program_id(2)
    first, size = chunk * Q, HEADS * width.to(tl.int64)
    i, p, s = tile * TILE + tl.arange(0, TILE), tl.arange(0, WIDE), tl.arange(0, STATE)
    live = load_ids(ids, first + i, rows) >= 0
    total = tl.zeros([TILE, STATE], tl.float32)
    if part == 0:
        score = of_scores + tl.program_id(0).to(tl.int64) * Q * Q
        for other in range(0 if QUERIES else tile, tile + 1 if QUERIES else Q // TILE):
            j = other * TILE + tl.arange(0, TILE)
            place = i[:, None] * Q + j[None, :] if QUERIES else j[None, :] * Q + i[:, None]
            theirs = load_tile(
                key + first * key_stride + group * S,
                j,
                key_stride,
                s,
                load_ids(ids, first + j, rows) >= 0,
                S,
            )
            of_score = tl.load(score + place)
            if MASKED:  # above the diagonal's own tiles of gradients nothing is written
                below = i[:, None] >= j[None, :] if QUERIES else i[:, None] <= j[None, :]
                of_score = tl.where(below, of_score, 0.0)
            total = tl.dot(of_score.to(theirs.dtype), theirs, total, input_precision=PRECISION)
    if QUERIES:
        mine = load_tile(query + first * query_stride + group * S, i, query_stride, s, live, S)
    for turn in range(SHARE):
        head = group * (HEADS // GROUPS) + part * SHARE + turn
        table = tables + head.to(tl.int64) * width + first
        if QUERIES:
            weight = tl.load(table + 2 * size + i)
        else:
            weight = tl.load(table + 3 * size + i) * tl.load(table + i)
        own = load_tile(value + first * value_stride + head * P, i, value_stride, p, live, P)
        state = tl.load(
            states + (chunk * HEADS + head) * (P * S) + (p[:, None] * S + s[None, :]),
            mask=(p < P)[:, None] & (s < S)[None, :],
            other=0.0,
        )
        found = tl.dot(own.to(state.dtype), state, input_precision=PRECISION) * weight[:, None]
        if QUERIES:
            tl.store(
                products + head.to(tl.int64) * width + first + i,
                tl.sum(found * mine.to(tl.float32), 1),
            )
        total += found
    place = i[:, None] * (GROUPS * S) + s[None, :]
    here = out + ((part.to(tl.int64) * rows + first) * GROUPS + group) * S
    tl.store(
        here + place,
        total.to(out.dtype.element_ty),
        mask=(first + i < rows)[:, None] & (s < S)[None, :],
    )


@triton.jit
def _steps(  # type: ignore[no-untyped-def]
    a, tables, columns, rowsums, entered, left, direct, carried, ddt, of_rate, rows, width, chunks,
    pieces,
    Q: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """ddt [T, H] and of_rate [N, H], the chunk's share of the gradient of a, for BLOCK heads.

    Sums over rows on either side of k are scans. For k in a tile, `later` has what rows have of all
    tiles before it.
    """
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, size = chunk * Q, HEADS * width.to(tl.int64)
    k, piece = tl.arange(0, Q)[None, :], tl.arange(0, PIECES)[None, :]
    known = (head < HEADS)[:, None]
    here = head.to(tl.int64)[:, None] * width + first + k
    inside = known & (k >= 0)
    rate = tl.load(a + head, mask=head < HEADS, other=0.0).to(tl.float32)
    whole = tl.sum(
        tl.load(
            carried + (head.to(tl.int64)[:, None] * chunks + chunk) * pieces + piece,
            mask=known & (piece < pieces),
            other=0.0,
        ),
        1,
    )
    later = tl.load(entered + here, mask=inside, other=0.0)
    total = whole[:, None] + tl.cumsum(tl.load(left + here - 1, mask=known & (k > 0), other=0.0), 1)
    for tile in tl.static_range(Q // TILE):
        total += tl.load(
            columns + tile * size + here - 1,
            mask=known & (k % TILE > 0) & (k // TILE <= tile),
            other=0.0,
        )
        total += tl.where(k // TILE == tile, tl.cumsum(later, 1, reverse=True), 0.0)
        if tile + 1 < Q // TILE:
            later += tl.load(
                rowsums + tile * size + here, mask=known & (k >= (tile + 1) * TILE), other=0.0
            )
    step = tl.load(tables + here, mask=inside, other=0.0)
    of_step = tl.load(direct + here, mask=inside, other=0.0) + rate[:, None] * total
    tl.store(ddt + (first + k) * HEADS + head[:, None], of_step, mask=known & (first + k < rows))
    tl.store(of_rate + chunk * HEADS + head, tl.sum(step * total, 1), mask=head < HEADS)


def parts_of(programs: int, heads: int) -> int:
    """Into how many equal parts `heads` heads of a group are shared out, so that there are enough
    programs."""
    divisors = [parts for parts in range(1, heads + 1) if heads % parts == 0]
    return next((parts for parts in divisors if programs * parts >= ENOUGH_PROGRAMS), heads)


def parts_for(share: int, programs: int, heads: int) -> int:
    """Parts of `heads` heads of a group, `share` to a part; with share = 0 as `parts_of` has it."""
    return heads // share_of(share, heads) if share else parts_of(programs, heads)


def backward(
    dy: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    ids: Tensor,
    chunk: int,
    ways: KernelConfigs | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of x [T, H, P], dt [T, H], a [H], b and c [T, G, S] and d [H], in their dtypes.

    dy: [T, H, P], the gradient of y; the others as in `forward`; columns of dy, x, b and c lie side
    by side.
    """
    ways = ways_of(x, b, chunk) if ways is None else ways
    sizes = sizes_of(x, b, chunk)
    tables, through = tables_of(dt, a, ids, sizes, ways.tables)
    scores = scores_of(b, c, ids, sizes, ways.scores)
    entering, _ = carry(x, b, ids, tables, through, sizes, way=ways.carry)
    of_leaving, carried = carry(dy.to(x.dtype), c, ids, tables, through, sizes, entering, ways.back)
    of_scores, columns, rowsums = pair_gradients(x, dy, ids, tables, scores, sizes, ways.pairs)
    dc, entered = shared_gradient(dy, b, of_scores, entering, ids, tables, sizes, c, ways.of_c)
    db, _ = shared_gradient(x, c, of_scores, of_leaving, ids, tables, sizes, None, ways.of_b)
    dx, direct, left, of_skip = value_gradients(
        x, dy, b, c, d, ids, tables, scores, of_leaving, sizes, ways.values
    )
    ddt, of_rate = step_gradients(
        a, tables, columns, rowsums, entered, left, direct, carried, sizes, dt.dtype, ways.steps
    )
    dd = None if d is None else of_skip.sum((0, 1)).to(d.dtype)
    return dx, ddt, of_rate.sum(0).to(a.dtype), db, dc, dd


def pair_gradients(
    x: Tensor,
    dy: Tensor,
    ids: Tensor,
    tables: Tensor,
    scores: Tensor,
    sizes: Sizes,
    way: ScanLaunch = EVERYWHERE.pairs,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the scores [N, G, Q, Q], dtype of x, and columns and rowsums, float32 [tiles, H,
    N Q]."""
    tiles, per_group = sizes.tiles, sizes.heads // sizes.groups
    parts = parts_for(way.share, sizes.chunks * sizes.groups * tiles * (tiles + 1) // 2, per_group)
    partial = torch.empty(
        parts, *scores.shape, dtype=x.dtype if parts == 1 else torch.float32, device=x.device
    )
    columns, rowsums = torch.empty(
        2, tiles, *tables.shape[1:], dtype=torch.float32, device=x.device
    )
    _pairs[(sizes.chunks * sizes.groups, tiles * tiles, parts)](
        x,
        dy,
        ids,
        tables,
        scores,
        partial,
        columns,
        rowsums,
        sizes.rows,
        x.stride(0),
        dy.stride(0),
        tables.shape[2],
        Q=sizes.chunk,
        P=sizes.columns,
        HEADS=sizes.heads,
        GROUPS=sizes.groups,
        SHARE=per_group // parts,
        TILE=sizes.tile,
        WIDE=padded(sizes.columns),
        PRODUCTS=way.products,
        PRECISION=precision_of(x.dtype),
        **launched(way),
    )
    return _added(partial, x.dtype), columns, rowsums


def shared_gradient(
    value: Tensor,
    key: Tensor,
    of_scores: Tensor,
    states: Tensor,
    ids: Tensor,
    tables: Tensor,
    sizes: Sizes,
    query: Tensor | None = None,
    way: ScanLaunch = EVERYWHERE.of_c,
) -> tuple[Tensor, Tensor]:
    """Gradient of `query`, or without one of b: [T, G, S], dtype of key; and what `_shared` says of
    products."""
    per_group = sizes.heads // sizes.groups
    tile = min(sizes.chunk, way.tile)
    parts = parts_for(way.share, sizes.chunks * sizes.groups * (sizes.chunk // tile), per_group)
    out = torch.empty(
        parts,
        sizes.rows,
        sizes.groups,
        sizes.state,
        device=key.device,
        dtype=key.dtype if parts == 1 else torch.float32,
    )
    products = torch.empty(
        () if query is None else tables.shape[1:], dtype=torch.float32, device=key.device
    )
    own = key if query is None else query
    _shared[(sizes.chunks * sizes.groups, sizes.chunk // tile, parts)](
        value,
        key,
        of_scores,
        states,
        ids,
        tables,
        out,
        products,
        sizes.rows,
        value.stride(0),
        key.stride(0),
        own,
        own.stride(0),
        tables.shape[2],
        Q=sizes.chunk,
        P=sizes.columns,
        S=sizes.state,
        HEADS=sizes.heads,
        GROUPS=sizes.groups,
        SHARE=per_group // parts,
        TILE=tile,
        WIDE=padded(sizes.columns),
        STATE=padded(sizes.state),
        QUERIES=query is not None,
        MASKED=tile > sizes.tile,
        PRECISION=precision_of(key.dtype),
        **launched(way),
    )
    return _added(out, key.dtype), products


def step_gradients(
    a: Tensor,
    tables: Tensor,
    columns: Tensor,
    rowsums: Tensor,
    entered: Tensor,
    left: Tensor,
    direct: Tensor,
    carried: Tensor,
    sizes: Sizes,
    dtype: torch.dtype,
    way: ScanLaunch = EVERYWHERE.steps,
) -> tuple[Tensor, Tensor]:
    """ddt [T, H] in `dtype`, and of_rate, float32 [N, H], whose sum over chunks is the gradient of
    a."""
    ddt = torch.empty(sizes.rows, sizes.heads, dtype=dtype, device=tables.device)
    of_rate = torch.empty(sizes.chunks, sizes.heads, dtype=torch.float32, device=tables.device)
    _steps[(sizes.chunks, triton.cdiv(sizes.heads, way.heads))](
        a,
        tables,
        columns,
        rowsums,
        entered,
        left,
        direct,
        carried,
        ddt,
        of_rate,
        sizes.rows,
        tables.shape[2],
        sizes.chunks,
        carried.shape[2],
        Q=sizes.chunk,
        HEADS=sizes.heads,
        TILE=sizes.tile,
        BLOCK=way.heads,
        PIECES=triton.next_power_of_2(carried.shape[2]),
        num_warps=way.warps,
    )
    return ddt, of_rate


def _added(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of [parts, ...], in the order of the parts."""
    return parts[0] if parts.shape[0] == 1 else parts.sum(0).to(dtype)
