r"""y of mamba/ssd.py by one kernel that carries states through all chunks and never writes one
down.

A program has some columns of P of one head. Chunk by chunk it forms the scores, adds what its piece
of the state holds for the chunk's rows, stores their y, and takes the rows into the state, which
stays in float32 registers:

    rows     | chunk 0 | chunk 1 | chunk 2 |
    program    y, state ▸ y, state ▸ y, state          for every head and piece of its columns

That saves writing and reading states, and launches, and pays where heads and pieces are as many as
there are multiprocessors; scores are made by every program anew. The backward makes its states
itself, so nothing is lost.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from packgraph.mamba.ssd_configs import Mix, launched
from packgraph.mamba.ssd_kernel import (
    Sizes,
    decay_within,
    load_ids_once,
    load_tile,
    load_two,
    padded,
    precision_of,
)


@triton.jit
def _through(  # type: ignore[no-untyped-def]
    x,
    b,
    c,
    d,
    ids,
    tables,
    through,
    y,
    rows,
    x_stride,
    b_stride,
    c_stride,
    width,
    chunks,
    Q: tl.constexpr,
    P: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    STATE: tl.constexpr,
    SKIP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """COLUMNS of a head's P; the state is [S, COLUMNS], so that the wider side is the first of a
    product."""
    piece, head = tl.program_id(0), tl.program_id(1)
    group, size = head // PER_GROUP, HEADS * width.to(tl.int64)
    i, p, s = tl.arange(0, Q), piece * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STATE)
    factor = 0.0
    if SKIP:
        factor = tl.load(d + head).to(tl.float32)
    state = tl.zeros([STATE, COLUMNS], tl.float32)
    kept = tl.load(through + head * chunks)
    for chunk in range(chunks):
        first = chunk * tl.full([], Q, tl.int64)
        table = tables + head.to(tl.int64) * width + first
        row_ids = load_ids_once(ids, first + i, rows)
        live = row_ids >= 0
        key = load_tile(b + first * b_stride + group * S, i, b_stride, s, live, S)
        query = load_tile(c + first * c_stride + group * S, i, c_stride, s, live, S)
        value = load_tile(x + first * x_stride + head * P, i, x_stride, p, live, P)
        step, decay = load_two(table, i, size)
        arriving, leaving = load_two(table + 2 * size, i, size)
        next_kept = tl.load(through + head * chunks + tl.minimum(chunk + 1, chunks - 1))
        mixed = tl.dot(query, state.to(query.dtype), input_precision=PRECISION)
        mixed = tl.where((arriving > 0)[:, None], mixed * arriving[:, None], 0.0)
        row = (
            chunk * Q + i
        )  # not i alone: what is the same for all chunks would be kept, a register for every pair
        same = (
            (row_ids[:, None] == row_ids[None, :]) & live[:, None] & (row[:, None] >= row[None, :])
        )
        weight = tl.where(same, tl.dot(query, tl.trans(key), input_precision=PRECISION), 0.0)
        weight *= decay_within(decay[:, None], decay[None, :]) * step[None, :]
        mixed = tl.dot(weight.to(value.dtype), value, mixed, input_precision=PRECISION)
        if SKIP:
            mixed += factor * value.to(tl.float32)
        place = i[:, None] * (HEADS * P) + p[None, :]
        inside = (first + i < rows)[:, None] & (p < P)[None, :]
        tl.store(y + (first * HEADS + head) * P + place, mixed.to(y.dtype.element_ty), mask=inside)
        weighted = (value.to(tl.float32) * (leaving * step)[:, None]).to(value.dtype)
        state = tl.dot(tl.trans(key), weighted, state * kept, input_precision=PRECISION)
        kept = next_kept  # the compiler loads ahead what products need, and nothing else


def mix_through(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    ids: Tensor,
    tables: Tensor,
    through: Tensor,
    sizes: Sizes,
    way: Mix,
) -> Tensor:
    """y [T, H, P] from tables [4, H, N Q] and `through` [H, N] of the same chunks; other arguments
    as of `forward`."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = min(way.columns, padded(sizes.columns))
    _through[(triton.cdiv(sizes.columns, columns), sizes.heads)](
        x,
        b,
        c,
        tables if d is None else d,
        ids,
        tables,
        through,
        y,
        sizes.rows,
        x.stride(0),
        b.stride(0),
        c.stride(0),
        tables.shape[2],
        sizes.chunks,
        Q=sizes.chunk,
        P=sizes.columns,
        S=sizes.state,
        HEADS=sizes.heads,
        PER_GROUP=sizes.heads // sizes.groups,
        COLUMNS=columns,
        STATE=padded(sizes.state),
        SKIP=d is not None,
        PRECISION=precision_of(x.dtype),
        **launched(way),
    )
    return y
