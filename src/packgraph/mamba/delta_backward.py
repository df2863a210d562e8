"""Kernels of the backward of mamba/gated_delta.py. Nothing but the inputs is kept from the forward:
what it made is made again.

Of a chunk that gets `state` and leaves another one, whose gradient is `of_state`:

    made = inverse r,  r = beta v - (beta k entering) state      what every row writes
    of_made = scores^T dy + leaving (k of_state)                 gradient of `made`, by _carry_back
    of_r = inverse^T of_made                                     and of r, by _gradients
    of_L = -of_r made^T                                          of L, below the diagonal

and with these the gradients of q, k, v, beta and of decays follow by products, one program for a
chunk of one head. States go backwards along the chains of delta_forward.py: what enters a chunk
that begins one needs no gradient of what leaves it.

The gradient of the log of row t's decay is the sum over all pairs of rows i >= t > j of a document,
as in ssd_backward.py, over rows from t on that read the state which enters, over rows before t that
write into the one which leaves, and over what passes through. Heads that share keys are added up
in a fixed order; nothing is atomic.
"""

import torch
from torch import Tensor

from packgraph.mamba.delta_forward import (
    DeltaConfigs,
    DeltaSizes,
    Prepared,
    carry,
    chains_of,
    columns_of,
    delta_sizes,
    delta_ways,
    ids_around,
    load_block,
    prepare,
    store_block,
    store_rows,
)
from packgraph.mamba.ssd_forward import (
    ScanLaunch,
    decay_between,
    launched,
    load_ids,
    load_tile,
    precision_of,
)
from packgraph.ops.kernels import tl, triton


@triton.jit
def _carry_back(  # type: ignore[no-untyped-def]
    q, k, w, dy, ids, tables, scores, back, of_states, of_made, rows, q_stride, k_stride, dy_stride,
    width, chunks,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chain of chunks backwards, for a piece of the columns of one head's state.

    The first chunk is written down by the chain that ends with it; none ends with the last one.
    """
    piece, head = tl.program_id(0) % PIECES, tl.program_id(0) // PIECES % HEADS
    start = tl.program_id(0) // (PIECES * HEADS)
    i, n, c = tl.arange(0, Q), tl.arange(0, WIDE), piece * COLUMNS + tl.arange(0, COLUMNS)
    size, table = HEADS * width.to(tl.int64), tables + head.to(tl.int64) * width
    of_state = tl.zeros([WIDE, COLUMNS], tl.float32)
    for turn in range(tl.load(back + start)):
        chunk = (start - turn).to(tl.int64)
        first, tile = chunk * Q, chunk * HEADS + head
        kept, mine = of_state.to(of_states.dtype.element_ty), (turn > 0) | (start == chunks - 1)
        store_block(of_states, tile, n, c, kept, mine, K, V)
        live = load_ids(ids, first + i, rows) >= 0
        outcome = load_tile(dy + first * dy_stride + head * V, i, dy_stride, c, live, V)
        key = load_tile(k + first * k_stride + head // GROUP * K, i, k_stride, n, live, K)
        query = load_tile(q + first * q_stride + head // GROUP * K, i, q_stride, n, live, K)
        score, weight = load_block(scores, tile, i, i, Q, Q), load_block(w, tile, i, n, Q, K)
        spot = table + size + first + i
        entering, leaving = tl.load(spot), tl.load(spot + size)
        later = tl.dot(key, kept, input_precision=PRECISION)
        later = tl.where((leaving > 0)[:, None], later * leaving[:, None], 0.0)
        of_new = tl.dot(tl.trans(score), outcome.to(score.dtype), later, input_precision=PRECISION)
        store_block(of_made, tile, i, c, of_new, mine, Q, V)
        outcome = (outcome.to(tl.float32) * entering[:, None]).to(query.dtype)
        of_state *= tl.load(table + size + first + (Q - 1))
        of_state = tl.dot(tl.trans(query), outcome, of_state, input_precision=PRECISION)
        of_state = tl.dot(
            tl.trans(weight), (-of_new).to(key.dtype), of_state, input_precision=PRECISION
        )


@triton.jit
def _of_states(  # type: ignore[no-untyped-def]
    dy, states, of_states, made, of_made, tile, n, live, dy_stride,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, BROAD: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dy state^T, of_made state^T, made of_state^T, all [Q, KEYS], and per row n of the state its
    product with its gradient."""
    i = tl.arange(0, Q)
    reads, writes = tl.zeros([Q, KEYS], tl.float32), tl.zeros([Q, KEYS], tl.float32)
    lost, passed = tl.zeros([Q, KEYS], tl.float32), tl.zeros([KEYS], tl.float32)
    for piece in range(BROAD // COLUMNS):
        c = piece * COLUMNS + tl.arange(0, COLUMNS)
        new, of_new = load_block(made, tile, i, c, Q, V), load_block(of_made, tile, i, c, Q, V)
        outcome = load_tile(dy, i, dy_stride, c, live, V).to(new.dtype)
        state = load_block(states, tile, n, c, K, V)
        of_state = load_block(of_states, tile, n, c, K, V)
        reads = tl.dot(outcome, tl.trans(state), reads, input_precision=PRECISION)
        lost = tl.dot(of_new, tl.trans(state), lost, input_precision=PRECISION)
        writes = tl.dot(new, tl.trans(of_state), writes, input_precision=PRECISION)
        passed += tl.sum(state.to(tl.float32) * of_state.to(tl.float32), 1)
    return reads, lost, writes, passed


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    q, k, v, dy, ids, tables, scores, inverses, states, of_states, made, of_made, dq, dk, dv, dg,
    dbeta, rows, q_stride, k_stride, v_stride, dy_stride, width,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, BROAD: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of one head; dq, dk: [T, H, K], of value heads."""
    head, chunk = tl.program_id(0) % HEADS, (tl.program_id(0) // HEADS).to(tl.int64)
    first, tile, i = chunk * Q, chunk * HEADS + head, tl.arange(0, Q)
    q, k = q + first * q_stride + head // GROUP * K, k + first * k_stride + head // GROUP * K
    v, dy = v + first * v_stride + head * V, dy + first * dy_stride + head * V
    size, here = HEADS * width.to(tl.int64), tables + head.to(tl.int64) * width + first + i
    row_ids, live, last, before = ids_around(ids, first, chunk, rows, Q)
    written = first + i < rows
    below, strict = i[:, None] >= i[None, :], i[:, None] > i[None, :]
    same = (row_ids[:, None] == row_ids[None, :]) & live[:, None] & below
    decay, rate = tl.load(here), tl.load(here + 3 * size)
    score = load_block(scores, tile, i, i, Q, Q).to(tl.float32)
    inverse = tl.trans(load_block(inverses, tile, i, i, Q, Q))
    of_score, of_lower = tl.zeros([Q, Q], tl.float32), tl.zeros([Q, Q], tl.float32)
    of_rate = tl.zeros([Q], tl.float32)
    for part in range(BROAD // COLUMNS):
        c = part * COLUMNS + tl.arange(0, COLUMNS)
        new, of_new = load_block(made, tile, i, c, Q, V), load_block(of_made, tile, i, c, Q, V)
        outcome = load_tile(dy, i, dy_stride, c, live, V).to(new.dtype)
        value = load_tile(v, i, v_stride, c, live, V).to(tl.float32)
        right = tl.dot(inverse, of_new, input_precision=PRECISION)
        of_score = tl.dot(outcome, tl.trans(new), of_score, input_precision=PRECISION)
        of_lower = tl.dot(right.to(new.dtype), tl.trans(new), of_lower, input_precision=PRECISION)
        of_rate += tl.sum(right * value, 1)
        store_rows(dv, right * rate[:, None], first, head, c, written, Q, V, HEADS)
    pairs = tl.where(same & strict, of_score * score, 0.0)
    between = decay_between(same, decay[:, None], decay[None, :])
    of_score = tl.where(same, of_score * between, 0.0).to(inverse.dtype)
    of_lower = tl.where(same & strict, -of_lower * between, 0.0)
    weighted = of_lower * rate[:, None]
    weighted = (weighted + tl.trans(weighted)).to(inverse.dtype)
    product, passed = tl.zeros([Q, Q], tl.float32), tl.zeros([KEYS], tl.float32)
    of_entering, of_leaving = tl.zeros([Q], tl.float32), tl.zeros([Q], tl.float32)
    for part in range(WIDE // KEYS):
        n = part * KEYS + tl.arange(0, KEYS)
        reads, lost, writes, through = _of_states(
            dy, states, of_states, made, of_made, tile, n, live, dy_stride,
            Q, K, V, KEYS, BROAD, COLUMNS, PRECISION,
        )  # fmt: skip
        passed += through
        query, key = load_tile(q, i, q_stride, n, live, K), load_tile(k, i, k_stride, n, live, K)
        entering, leaving = tl.load(here + size), tl.load(here + 2 * size)
        lost = -tl.dot(inverse, lost.to(inverse.dtype), input_precision=PRECISION)
        reads = tl.where((entering > 0)[:, None], reads * entering[:, None], 0.0)
        lost = tl.where((entering > 0)[:, None], lost * entering[:, None], 0.0)
        writes = tl.where((leaving > 0)[:, None], writes * leaving[:, None], 0.0)
        along = tl.sum(lost * key.to(tl.float32), 1)
        of_rate += along
        of_entering += rate * along + tl.sum(reads * query.to(tl.float32), 1)
        of_leaving += tl.sum(writes * key.to(tl.float32), 1)
        of_key = writes + lost * rate[:, None]
        of_query = tl.dot(of_score, key, reads, input_precision=PRECISION)
        of_key = tl.dot(tl.trans(of_score), query, of_key, input_precision=PRECISION)
        of_key = tl.dot(weighted, key, of_key, input_precision=PRECISION)
        product = tl.dot(key, tl.trans(key), product, input_precision=PRECISION)
        store_rows(dq, of_query, first, head, n, written, Q, K, HEADS)
        store_rows(dk, of_key, first, head, n, written, Q, K, HEADS)
    product *= of_lower
    of_rate += tl.sum(product, 1)
    through = tl.load(tables + size + head.to(tl.int64) * width + first + (Q - 1))
    until = tl.sum(tl.where(strict, of_leaving[None, :], 0.0), 1)
    until += tl.where(through > 0, through * tl.sum(passed, 0), 0.0)
    since = tl.sum(tl.where(below, of_entering[:, None], 0.0), 0)
    pairs += product * rate[:, None]
    of_log = tl.where(row_ids == before, since, 0.0) + tl.where(row_ids == last, until, 0.0)
    of_log += tl.sum(tl.where(below, tl.cumsum(pairs, 1) - pairs, 0.0), 0)
    place = (first + i) * HEADS + head
    of_log = tl.where(live, of_log, 0.0)
    tl.store(dg + place, of_log.to(dg.dtype.element_ty), mask=written)
    tl.store(dbeta + place, of_rate.to(dbeta.dtype.element_ty), mask=written)


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ids: Tensor,
    chunk: int,
    ways: DeltaConfigs | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k [T, Hk, K], v [T, H, V], g and beta [T, H], in their dtypes.

    dy: [T, H, V], the gradient of y; the others as in `forward`.
    """
    sizes = delta_sizes(k, v, chunk)
    ways = ways or delta_ways(sizes, v.dtype)
    prepared = prepare(q, k, v, g, beta, ids, sizes, ways.prepare)
    ahead, back = chains_of(ids, sizes)
    states, made = carry(k, ids, prepared, ahead, sizes, ways.carry)
    of_states, of_made = carry_back(q, k, dy, ids, prepared, back, sizes, ways.back)
    wide, broad, way = columns_of(sizes.keys), columns_of(sizes.columns), ways.gradients
    kind = k.dtype if sizes.group == 1 else torch.float32
    dq, dk = (x.new_empty(*v.shape[:2], sizes.keys, dtype=kind) for x in (q, k))
    dv, dg, dbeta = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (v, g, beta))
    _gradients[(sizes.chunks * sizes.heads,)](
        q,
        k,
        v,
        dy,
        ids,
        *prepared[:3],
        states,
        of_states,
        made,
        of_made,
        dq,
        dk,
        dv,
        dg,
        dbeta,
        sizes.rows,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        dy.stride(0),
        prepared[0].shape[2],
        **sizes.constants,
        WIDE=wide,
        BROAD=broad,
        KEYS=min(wide, way.rows),
        COLUMNS=min(broad, way.columns),
        PRECISION=precision_of(v.dtype),
        **launched(way),
    )
    if sizes.group > 1:
        dq, dk = (x.unflatten(1, (-1, sizes.group)).sum(2).to(k.dtype) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta


def carry_back(
    q: Tensor,
    k: Tensor,
    dy: Tensor,
    ids: Tensor,
    prepared: Prepared,
    back: Tensor,
    sizes: DeltaSizes,
    way: ScanLaunch,
) -> tuple[Tensor, Tensor]:
    """Gradients of the states that leave each chunk [N, H, K, V], and of what rows write [N, H, Q,
    V], dtype of k."""
    tables, scores, _, w, u = prepared
    of_states = k.new_empty(sizes.chunks, sizes.heads, sizes.keys, sizes.columns)
    of_made = torch.empty_like(u)
    pieces = triton.cdiv(sizes.columns, way.columns)
    _carry_back[(sizes.chunks * sizes.heads * pieces,)](
        q,
        k,
        w,
        dy,
        ids,
        tables,
        scores,
        back,
        of_states,
        of_made,
        sizes.rows,
        q.stride(0),
        k.stride(0),
        dy.stride(0),
        tables.shape[2],
        sizes.chunks,
        **sizes.constants,
        WIDE=columns_of(sizes.keys),
        COLUMNS=way.columns,
        PIECES=pieces,
        PRECISION=precision_of(k.dtype),
        **launched(way),
    )
    return of_states, of_made
