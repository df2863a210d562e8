"""The plan of rows and the moves of rows as kernels; what they compute is moe/permute.py's, bit
for bit.

Planning sorts nothing. Pairs are cut into blocks, and a pair's row is the sum of three counts:

    pairs of smaller experts  +  pairs of its expert in earlier blocks  +  those before it in its
    own block
          sum over totals                scan over blocks (_scan)              comparing all with all (_assign)

Moves copy tiles of a few rows by a few hundred columns, with 64-bit offsets; empty rows are written
and not read. What is no expert is routed nowhere, and a number outside a map's range counts as
none: no address follows from data alone. Nothing is atomic, no choice of tiles is left to a search:
the first call of a shape compiles, later ones (captures among them) launch. One warning for who
changes tiles: sums over places go in their order, one place after another.
"""  # noqa: E501

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS = 128  # of a block of the plan
EXPERTS = 64  # of a tile of counts
SCAN = 1024  # blocks that are added up at once
TILE_ROWS, TILE_COLUMNS = 4, 1024
PICKED = 1024


@triton.jit
def _known(expert, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32, -1 for what is no expert; 64-bit numbers are compared before they are cut."""
    return tl.where((expert >= 0) & (expert < COUNT), expert, -1).to(tl.int32)


@triton.jit
def _count(  # type: ignore[no-untyped-def]
    experts, counts, pairs, blocks, COUNT: tl.constexpr, PAIRS: tl.constexpr, EXPERTS: tl.constexpr
):
    """counts [E, blocks]: pairs of each expert in this block."""
    block = tl.program_id(0)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    chosen = _known(tl.load(experts + pair, mask=pair < pairs, other=-1), COUNT)
    for first in range(0, COUNT, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        found = tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
        tl.store(counts + expert.to(tl.int64) * blocks + block, found, mask=expert < COUNT)


@triton.jit
def _scan(counts, totals, blocks, TILES: tl.constexpr, SCAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Prefix sums of one expert: counts become what earlier blocks have, totals what all have."""
    expert = tl.program_id(0).to(tl.int64)
    before = 0
    for tile in range(TILES):
        block = tile * SCAN + tl.arange(0, SCAN)
        here = counts + expert * blocks + block
        found = tl.load(here, mask=block < blocks, other=0)
        tl.store(here, before + tl.cumsum(found, 0) - found, mask=block < blocks)
        before += tl.sum(found, 0)
    tl.store(totals + expert, before)


@triton.jit
def _assign(  # type: ignore[no-untyped-def]
    experts,
    counts,
    totals,
    pair_of_row,
    row_of_pair,
    offsets,
    needed,
    pairs,
    blocks,
    rows,
    COUNT: tl.constexpr,
    PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Both maps for the pairs of this block, -1 for as many empty rows, and (the first program) the
    offsets."""
    block = tl.program_id(0)
    place = tl.arange(0, PAIRS)
    pair = block * PAIRS + place
    chosen = _known(tl.load(experts + pair, mask=pair < pairs, other=-1), COUNT)
    row = tl.zeros([PAIRS], tl.int32)
    before = 0
    for first in range(0, COUNT, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        total = tl.load(totals + expert, mask=expert < COUNT, other=0)
        ends = before + tl.cumsum(total, 0)
        inside = (expert < COUNT) & (block < blocks)
        earlier = tl.load(counts + expert.to(tl.int64) * blocks + block, mask=inside, other=0)
        own = chosen[:, None] == expert[None, :]
        row += tl.sum(tl.where(own, (ends - total + earlier)[None, :], 0), 1)
        if block == 0:
            tl.store(offsets + expert, tl.minimum(ends, rows), mask=expert < COUNT)
        before += tl.sum(total, 0)
    if block == 0:
        tl.store(needed, before)
    same = (chosen[:, None] == chosen[None, :]) & (place[None, :] < place[:, None])
    row += tl.sum(same.to(tl.int32), 1)
    live = (chosen >= 0) & (row < rows)
    tl.store(row_of_pair + pair, tl.where(live, row, -1), mask=pair < pairs)
    tl.store(pair_of_row + row, pair, mask=live)
    # The same numbers, as rows: those that no pair takes are empty.
    tl.store(
        pair_of_row + pair, tl.full([PAIRS], -1, tl.int32), mask=(pair >= before) & (pair < rows)
    )


def plan(experts: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of a RowPlan. experts: int [T, k]; as `plan_rows`."""
    experts = experts.contiguous()
    pairs, device = experts.numel(), experts.device
    blocks = triton.cdiv(pairs, PAIRS)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    counts, totals = empty(num_experts, blocks), empty(num_experts)
    pair_of_row, row_of_pair, offsets = empty(rows), empty(*experts.shape), empty(num_experts)
    needed = torch.empty((), dtype=torch.int64, device=device)
    if blocks:
        _count[(blocks,)](
            experts, counts, pairs, blocks, COUNT=num_experts, PAIRS=PAIRS, EXPERTS=EXPERTS
        )
    _scan[(num_experts,)](counts, totals, blocks, TILES=triton.cdiv(blocks, SCAN), SCAN=SCAN)
    _assign[(max(blocks, triton.cdiv(rows, PAIRS)),)](
        experts,
        counts,
        totals,
        pair_of_row,
        row_of_pair,
        offsets,
        needed,
        pairs,
        blocks,
        rows,
        COUNT=num_experts,
        PAIRS=PAIRS,
        EXPERTS=EXPERTS,
    )
    return pair_of_row, row_of_pair, offsets, needed


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    x,
    pair_of_row,
    out,
    tokens,
    rows,
    width,
    stride,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pair = tl.load(pair_of_row + row, mask=row < rows, other=-1)
    token = tl.maximum(pair, 0) // PLACES
    here = x + token.to(tl.int64)[:, None] * stride + column[None, :]
    inside = (column < width)[None, :]
    taken = tl.load(here, mask=((pair >= 0) & (token < tokens))[:, None] & inside, other=0.0)
    tl.store(
        out + row.to(tl.int64)[:, None] * width + column[None, :],
        taken,
        mask=(row < rows)[:, None] & inside,
    )


def gather(x: Tensor, pair_of_row: Tensor, places: int) -> Tensor:
    """[T, H] -> [R, H]: the token of each row's pair, zeros in rows without one. places: k."""
    x, pair_of_row = x if x.stride(1) == 1 else x.contiguous(), pair_of_row.contiguous()
    rows, width = pair_of_row.shape[0], x.shape[1]
    out = x.new_empty(rows, width)
    columns = min(TILE_COLUMNS, triton.next_power_of_2(width))
    _gather[(triton.cdiv(rows, TILE_ROWS), triton.cdiv(width, columns))](
        x,
        pair_of_row,
        out,
        x.shape[0],
        rows,
        width,
        x.stride(0),
        PLACES=places,
        ROWS=TILE_ROWS,
        COLUMNS=columns,
    )
    return out


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    y,
    row_of_pair,
    out,
    tokens,
    rows,
    width,
    stride,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < width)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for place in tl.static_range(PLACES):
        row = tl.load(
            row_of_pair + token.to(tl.int64) * PLACES + place, mask=token < tokens, other=-1
        )
        here = y + tl.maximum(row, 0).to(tl.int64)[:, None] * stride + column[None, :]
        total += tl.load(here, mask=((row >= 0) & (row < rows))[:, None] & inside, other=0.0).to(
            tl.float32
        )
    tl.store(
        out + token.to(tl.int64)[:, None] * width + column[None, :],
        total,
        mask=(token < tokens)[:, None] & inside,
    )


def combine(y: Tensor, row_of_pair: Tensor) -> Tensor:
    """[R, H] -> [T, H]: the sum of each token's rows, place after place in float32, rounded
    once."""
    y, row_of_pair = y if y.stride(1) == 1 else y.contiguous(), row_of_pair.contiguous()
    (tokens, places), width = row_of_pair.shape, y.shape[1]
    out = y.new_empty(tokens, width)
    columns = min(
        TILE_COLUMNS // 2, triton.next_power_of_2(width)
    )  # all places' tiles are in flight at once
    if tokens:
        _combine[(triton.cdiv(tokens, TILE_ROWS), triton.cdiv(width, columns))](
            y,
            row_of_pair,
            out,
            tokens,
            y.shape[0],
            width,
            y.stride(0),
            PLACES=places,
            ROWS=TILE_ROWS,
            COLUMNS=columns,
        )
    return out


@triton.jit
def _pick(values, index, out, count, size, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + place, mask=place < size, other=-1)
    taken = tl.load(
        values + tl.maximum(source, 0).to(tl.int64) * stride,
        mask=(source >= 0) & (source < count),
        other=0.0,
    )
    tl.store(out + place, taken, mask=place < size)


def pick(values: Tensor, index: Tensor) -> Tensor:
    """values[index], 0 where index is -1. values: [N]; index: int32 [M]."""
    index, out = index.contiguous(), values.new_empty(index.shape[0])
    if index.shape[0]:
        _pick[(triton.cdiv(index.shape[0], PICKED),)](
            values, index, out, values.shape[0], index.shape[0], values.stride(0), BLOCK=PICKED
        )
    return out
