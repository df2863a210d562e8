"""Rows of the experts' input for routed tokens, decided on the device; and moving rows there and
back.

    experts [T, k]     token 0: 2 0   token 1: 0 -   token 2: 2 1            (-: padding, routed nowhere)
    rows [R]           expert 0: (0,1) (1,0) | expert 1: (2,1) | expert 2: (0,0) (2,0) | empty ...
    offsets [E]                              2                3                       5

Rows lie expert by expert, within an expert in the order of tokens. Both directions of the map are
kept, so that moving there and back are gathers: every result is a sum in a fixed order, the same
bits in every run, and the backward of one direction is the other one. Rows from offsets[-1] on are
empty: gathers fill them with zeros, and nothing reads them. Plan, gather and sum are one operation
each, kernels on CUDA; the naive twins are loops over tokens and experts on the host.
"""  # noqa: E501

from typing import Any, NamedTuple

import torch
from torch import Tensor

from packgraph.ops.kernels import HAS_TRITON, by_rows, has_kernel, tl, triton

PAIRS = 128  # of a block of the plan
EXPERTS = 64  # of a tile of counts
SCAN = 1024  # blocks that are added up at once
TILE_ROWS, TILE_COLUMNS = 4, 1024
PICKED = 1024


class RowPlan(NamedTuple):
    """The map between routed pairs (token t, place j), numbered t * k + j, and rows.

    pair_of_row: int32 [R], -1 for empty rows. row_of_pair: int32 [T, k], -1 for pairs that have no
    row. offsets: int32 [E], one past the last row of each expert. needed: int64 [], rows that all
    pairs need; more than R is an overflow, in which the pairs beyond have no row.
    """

    pair_of_row: Tensor
    row_of_pair: Tensor
    offsets: Tensor
    needed: Tensor


def naive_plan_rows(experts: Tensor, num_experts: int, rows: int) -> RowPlan:
    """The specification of `plan_rows`: one expert after the other takes its tokens in their
    order."""
    tokens, places = experts.shape
    pair_of_row, offsets, needed = [-1] * rows, [], 0
    row_of_pair = [[-1] * places for _ in range(tokens)]
    chosen = experts.tolist()
    for expert in range(num_experts):
        for token in range(tokens):
            for place in range(places):
                if chosen[token][place] != expert:
                    continue
                if needed < rows:
                    pair_of_row[needed] = token * places + place
                    row_of_pair[token][place] = needed
                needed += 1
        offsets.append(min(needed, rows))
    maps = [
        torch.tensor(x, dtype=torch.int32, device=experts.device)
        for x in (pair_of_row, row_of_pair, offsets)
    ]
    return RowPlan(
        maps[0], maps[1].view(tokens, places), maps[2], torch.tensor(needed, device=experts.device)
    )


def naive_gather_rows(x: Tensor, plan: RowPlan) -> Tensor:
    """The specification of `gather_rows`, outputs and (by autograd) gradients."""
    places = plan.row_of_pair.shape[1]
    return torch.stack(
        [
            x[pair // places] if pair >= 0 else torch.zeros_like(x[0])
            for pair in plan.pair_of_row.tolist()
        ]
    )


def naive_combine_rows(y: Tensor, plan: RowPlan) -> Tensor:
    """The specification of `combine_rows`, outputs and (by autograd) gradients."""
    wide = torch.promote_types(y.dtype, torch.float32)
    totals = []
    for rows in plan.row_of_pair.tolist():
        total = torch.zeros(y.shape[1], dtype=wide, device=y.device)
        for row in rows:
            if row >= 0:
                total = total + y[row].to(wide)
        totals.append(total.to(y.dtype))
    return torch.stack(totals)


def naive_gather_pairs(weights: Tensor, plan: RowPlan) -> Tensor:
    """The specification of `gather_pairs`, outputs and (by autograd) gradients."""
    flat = weights.reshape(-1)
    return torch.stack(
        [flat[pair] if pair >= 0 else flat.new_zeros(()) for pair in plan.pair_of_row.tolist()]
    )


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
    experts, counts, totals, pair_of_row, row_of_pair, offsets, needed, pairs, blocks, rows,
    COUNT: tl.constexpr, PAIRS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
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
    """The fields of a RowPlan. experts: int [T, k]; as `plan_rows`.

    Planning sorts nothing. Pairs are cut into blocks, and a pair's row is the sum of three counts:
    pairs of smaller experts (a sum over totals), pairs of its expert in earlier blocks (a scan over
    blocks, `_scan`), and those before it in its own block (comparing all with all, `_assign`).
    Nothing is atomic, no choice of tiles is left to a search: the first call of a shape compiles,
    later ones (captures among them) launch.
    """
    experts = experts.contiguous()
    pairs = experts.numel()
    blocks = triton.cdiv(pairs, PAIRS)
    counts = experts.new_empty(num_experts, blocks, dtype=torch.int32)
    totals = experts.new_empty(num_experts, dtype=torch.int32)
    outputs = _plan_shapes(experts, num_experts, rows)
    if blocks:
        _count[(blocks,)](
            experts, counts, pairs, blocks, COUNT=num_experts, PAIRS=PAIRS, EXPERTS=EXPERTS
        )
    _scan[(num_experts,)](counts, totals, blocks, TILES=triton.cdiv(blocks, SCAN), SCAN=SCAN)
    _assign[(max(blocks, triton.cdiv(rows, PAIRS)),)](
        experts,
        counts,
        totals,
        *outputs,
        pairs,
        blocks,
        rows,
        COUNT=num_experts,
        PAIRS=PAIRS,
        EXPERTS=EXPERTS,
    )
    return outputs


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    x, pair_of_row, out, tokens, rows, width, stride,
    PLACES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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
    """[T, H] -> [R, H]: the token of each row's pair, zeros in rows without one. places: k.

    Moves copy tiles of a few rows by a few hundred columns, with 64-bit offsets; empty rows are
    written and not read. What is no expert is routed nowhere, and a number outside a map's range
    counts as none: no address follows from data alone.
    """
    x, pair_of_row = by_rows(x), pair_of_row.contiguous()
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
    y, row_of_pair, out, tokens, rows, width, stride,
    PLACES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
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
    y, row_of_pair = by_rows(y), row_of_pair.contiguous()
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


def plan_rows(experts: Tensor, num_experts: int, rows: int) -> RowPlan:
    """experts: int [T, k], -1 = routed nowhere, like any other number that is no expert. rows: R,
    the static number of rows. No host sync.

    Raises ValueError for another shape or dtype of experts, and for counts that are not positive.
    """
    if experts.dim() != 2 or experts.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "plan_rows needs the experts of every token, int32 or int64 [T, k], got "
            f"{experts.dtype} "
            f"{list(experts.shape)}"
        )
    if num_experts < 1 or rows < 1:
        raise ValueError(
            f"plan_rows needs at least one expert and one row, got num_experts={num_experts}, "
            f"rows={rows}"
        )
    return RowPlan(*_planned(experts, num_experts, rows))


def gather_rows(x: Tensor, plan: RowPlan) -> Tensor:
    """Rows of tokens: [T, H] -> [R, H], zero in empty rows. Differentiable: the backward is
    `combine_rows`."""
    return _gathered(x, plan.pair_of_row, plan.row_of_pair)


def combine_rows(y: Tensor, plan: RowPlan) -> Tensor:
    """Sum of each token's rows, in the order of its places, in float32: [R, H] -> [T, H]. Its
    backward is a gather.

    y is float32 or narrower, or float64, which is summed as such. Rows from offsets[-1] on are not
    read.
    """
    return _combined(y, plan.pair_of_row, plan.row_of_pair)


def gather_pairs(weights: Tensor, plan: RowPlan) -> Tensor:
    """Each row's entry of weights [T, k]: [R], zero in empty rows. Differentiable."""
    return _picked(weights.reshape(-1), plan.pair_of_row, plan.row_of_pair.reshape(-1))


@torch.library.custom_op("packgraph::plan_rows", mutates_args=())
def _planned(experts: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of a RowPlan."""
    if HAS_TRITON and experts.is_cuda:
        return plan(experts, num_experts, rows)
    pairs = experts.numel()
    flat = experts.reshape(-1).long()
    key = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add(0, key, torch.ones_like(key))[:num_experts]
    ends = counts.cumsum(0)
    order = torch.argsort(key, stable=True)
    place = torch.arange(pairs, device=flat.device)  # sorted by expert, pairs lie as rows do
    live = (place < ends[-1]) & (place < rows)
    pair_of_row = torch.full((rows,), -1, dtype=torch.int32, device=flat.device)
    pair_of_row[:pairs] = torch.where(live, order, -1)[:rows].int()
    row_of_pair = torch.empty(pairs, dtype=torch.int32, device=flat.device)
    row_of_pair = row_of_pair.scatter(0, order, torch.where(live, place, -1).int())
    return (
        pair_of_row,
        row_of_pair.view(experts.shape),
        ends.clamp(max=rows).int(),
        ends[-1].clone(),
    )


@_planned.register_fake
def _plan_shapes(
    experts: Tensor, num_experts: int, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def empty(*shape: int) -> Tensor:
        return experts.new_empty(shape, dtype=torch.int32)

    return (
        empty(rows),
        empty(*experts.shape),
        empty(num_experts),
        experts.new_empty((), dtype=torch.int64),
    )


@torch.library.custom_op("packgraph::gather_rows", mutates_args=())
def _gathered(x: Tensor, pair_of_row: Tensor, row_of_pair: Tensor) -> Tensor:
    """[T, H] -> [R, H]."""
    if HAS_TRITON and x.is_cuda:
        return gather(x, pair_of_row, row_of_pair.shape[1])
    taken = x[pair_of_row.clamp(min=0).long() // row_of_pair.shape[1]]
    return torch.where((pair_of_row >= 0)[:, None], taken, 0)


@torch.library.custom_op("packgraph::combine_rows", mutates_args=())
def _combined(y: Tensor, pair_of_row: Tensor, row_of_pair: Tensor) -> Tensor:
    """[R, H] -> [T, H]."""
    if has_kernel(y):
        return combine(y, row_of_pair)
    wide = torch.promote_types(y.dtype, torch.float32)
    total = torch.zeros(row_of_pair.shape[0], y.shape[1], dtype=wide, device=y.device)
    for rows in row_of_pair.unbind(1):
        total = total + torch.where((rows >= 0)[:, None], y[rows.clamp(min=0).long()].to(wide), 0)
    return total.to(y.dtype)


@torch.library.custom_op("packgraph::pick", mutates_args=())
def _picked(values: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """values[index], 0 where index is -1: [N] -> [M]. index: int32 [M]; inverse: int32 [N], where
    each value goes."""
    if HAS_TRITON and values.is_cuda:
        return pick(values, index)
    return torch.where(index >= 0, values[index.clamp(min=0).long()], 0)


_gathered.register_fake(lambda x, pair_of_row, *_: x.new_empty(pair_of_row.shape[0], x.shape[1]))


_combined.register_fake(
    lambda y, pair_of_row, row_of_pair: y.new_empty(row_of_pair.shape[0], y.shape[1])
)


_picked.register_fake(lambda values, index, *_: values.new_empty(index.shape[0]))


def _save_maps(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


_gathered.register_autograd(
    lambda ctx, grad: (_combined(grad, *ctx.saved_tensors), None, None), setup_context=_save_maps
)
_combined.register_autograd(
    lambda ctx, grad: (_gathered(grad, *ctx.saved_tensors), None, None), setup_context=_save_maps
)
_picked.register_autograd(
    lambda ctx, grad: (_picked(grad, *reversed(ctx.saved_tensors)), None, None),
    setup_context=_save_maps,
)


def place_segments(counts: Tensor, starts: Tensor, places: int, rows: int) -> RowPlan:
    """The map between places [places] of a receive buffer and `rows` rows by expert. No host sync.

    counts, starts: int64 [ranks, experts here], rows of each segment and its first place; no more
    than `rows` together. In the plan a pair is a place: pair_of_row is int32 [rows], row_of_pair
    int32 [places, 1].

    Rows that arrive from several ranks, each sorted by expert, are put in order of experts:

        arrived from rank 0   e0 e0 e1 .     rows by expert   e0 e0 | e0 || e1 | e1 e1 || . .
        arrived from rank 1   e0 e1 e1 .                      from 0  from 1

    A segment is what one rank sent for one expert: a count and the place where its rows begin.
    Within an expert rows lie in order of the ranks that sent them, within a segment in order of
    tokens: the order that one process would give to the tokens of all ranks. The naive twin is
    `plan_rows` of the experts of all places.
    """
    sizes, first = counts.t().reshape(-1), starts.t().reshape(-1)
    ends = sizes.cumsum(0)
    row = torch.arange(rows, device=counts.device)
    segment = torch.searchsorted(ends, row, right=True).clamp(max=ends.numel() - 1)
    live = row < ends[-1]
    place = torch.where(live, first[segment] + row - (ends - sizes)[segment], -1)
    # One place more, for rows that have none.
    row_of_place = torch.full((places + 1,), -1, dtype=torch.int32, device=counts.device)
    row_of_place = row_of_place.scatter(
        0, torch.where(live, place, places), torch.where(live, row, -1).int()
    )
    offsets = ends.view(counts.shape[1], counts.shape[0])[:, -1]
    return RowPlan(place.int(), row_of_place[:places, None], offsets.int(), ends[-1])


def before(counts: Tensor) -> Tensor:
    """Sums of the entries before each one along the last dimension: where segments begin that lie
    side by side."""
    return counts.cumsum(-1) - counts


def count_rows(ends: Tensor) -> Tensor:
    """Rows of each expert, int64, of the ends of experts (RowPlan.offsets) [E]."""
    return torch.diff(ends.long(), prepend=ends.new_zeros(1, dtype=torch.int64))
