"""Which row of the experts' input each routed token takes, decided on the device; and moving rows there and back.

    experts [T, k]     token 0: 2 0   token 1: 0 -   token 2: 2 1            (-: padding, routed nowhere)
    rows [R]           expert 0: (0,1) (1,0) | expert 1: (2,1) | expert 2: (0,0) (2,0) | empty ...
    offsets [E]                              2                3                       5

Rows lie expert by expert, within an expert in the order of tokens. Both directions of the map are kept, so that moving
there and back are gathers: every result is a sum in a fixed order, the same bits in every run. Rows from offsets[-1] on
are empty: gathers fill them with zeros, and nothing reads them.
"""
from typing import NamedTuple

import torch
from torch import Tensor


class RowPlan(NamedTuple):
    """The map between routed pairs (token t, place j), numbered t * k + j, and rows.

    pair_of_row: int32 [R], -1 for empty rows. row_of_pair: int32 [T, k], -1 for pairs that have no row. offsets: int32
    [E], one past the last row of each expert. needed: int64 [], rows that all pairs need; more than R is an overflow,
    in which the pairs beyond have no row.
    """

    pair_of_row: Tensor
    row_of_pair: Tensor
    offsets: Tensor
    needed: Tensor


def plan_rows(experts: Tensor, num_experts: int, rows: int) -> RowPlan:
    """experts: int [T, k], -1 = routed nowhere. rows: R, the static number of rows. No host sync."""
    pairs = experts.numel()
    flat = experts.reshape(-1).long()
    key = torch.where(flat < 0, num_experts, flat)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add(0, key, torch.ones_like(key))[:num_experts]
    ends = counts.cumsum(0)
    order = torch.argsort(key, stable=True)
    place = torch.arange(pairs, device=flat.device)  # sorted by expert, pairs lie as rows do
    live = (place < ends[-1]) & (place < rows)
    pair_of_row = torch.full((max(rows, pairs),), -1, dtype=torch.int32, device=flat.device)
    pair_of_row[:pairs] = torch.where(live, order, -1).int()
    row_of_pair = torch.empty(pairs, dtype=torch.int32, device=flat.device)
    row_of_pair = row_of_pair.scatter(0, order, torch.where(live, place, -1).int())
    return RowPlan(pair_of_row[:rows], row_of_pair.view(experts.shape), ends.clamp(max=rows).int(), ends[-1])


def gather_rows(x: Tensor, plan: RowPlan) -> Tensor:
    """Rows of tokens: [T, H] -> [R, H], zero in empty rows. Differentiable: the backward is `combine_rows`."""
    places = plan.row_of_pair.shape[1]
    taken = x[plan.pair_of_row.clamp(min=0).long() // places]
    return torch.where((plan.pair_of_row >= 0)[:, None], taken, 0)


def combine_rows(y: Tensor, plan: RowPlan) -> Tensor:
    """Sum of each token's rows, in the order of its places, in float32: [R, H] -> [T, H]. Its backward is a gather."""
    total = torch.zeros(plan.row_of_pair.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for rows in plan.row_of_pair.unbind(1):
        total = total + torch.where((rows >= 0)[:, None], y[rows.clamp(min=0).long()].float(), 0)
    return total.to(y.dtype)


def gather_pairs(weights: Tensor, plan: RowPlan) -> Tensor:
    """Each row's entry of weights [T, k]: [R], zero in empty rows. Differentiable."""
    taken = weights.reshape(-1)[plan.pair_of_row.clamp(min=0).long()]
    return torch.where(plan.pair_of_row >= 0, taken, 0)
