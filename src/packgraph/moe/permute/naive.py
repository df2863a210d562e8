"""What `moe/permute/api.py` means, as loops over tokens and experts that read everything on the
host."""

import torch
from torch import Tensor

from packgraph.moe.permute.api import RowPlan


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
