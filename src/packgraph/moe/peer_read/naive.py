"""What api.py beside this file means, for all ranks of a group in one process, as loops
that read the host.

Lists have an entry for every rank. The tensors may require gradients: autograd of these loops is
what the backwards of the operations mean.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from packgraph.moe.peer_read.api import PeerReadPlan


def naive_plans(experts: Sequence[Tensor], num_experts: int, rows: int) -> list[PeerReadPlan]:
    """The specification of `plan_peer_read`. experts: int [T, k] of every rank."""
    ranks, (tokens, places) = len(experts), experts[0].shape
    here = torch.full((ranks, ranks, tokens, places), -1, dtype=torch.int32)  # by owner and sender
    place_of_pair = torch.full((ranks, tokens, places), -1, dtype=torch.int32)
    offsets, needed = torch.zeros(ranks, num_experts // ranks, dtype=torch.int32), [0] * ranks
    chosen = [rank.tolist() for rank in experts]
    for expert in range(num_experts):
        owner, own = divmod(expert, num_experts // ranks)
        for sender in range(ranks):
            for token in range(tokens):
                for place in range(places):
                    if chosen[sender][token][place] != expert:
                        continue
                    row = needed[owner]
                    needed[owner] += 1
                    if row < rows:
                        here[owner, sender, token, place] = row
                        place_of_pair[sender, token, place] = owner * rows + row
        offsets[owner, own] = min(needed[owner], rows)
    return [
        PeerReadPlan(
            here[rank].view(-1, places),
            place_of_pair[rank],
            offsets[rank],
            torch.tensor(max(needed)),
        )
        for rank in range(ranks)
    ]


def naive_to_experts(
    x: Sequence[Tensor], weights: Sequence[Tensor], plan: PeerReadPlan, rows: int
) -> tuple[Tensor, Tensor]:
    """The specification of `to_experts` on one rank. x: [T, H] and weights: [T, k] of every
    rank."""
    values: list[Tensor] = [x[0].new_zeros(x[0].shape[1])] * rows
    of_rows: list[Tensor] = [weights[0].new_zeros(())] * rows
    tokens = x[0].shape[0]
    for number, row_of_place in enumerate(plan.row_of_pair.tolist()):
        for place, row in enumerate(row_of_place):
            if row >= 0:
                values[row] = x[number // tokens][number % tokens]
                of_rows[row] = weights[number // tokens][number % tokens, place]
    return torch.stack(values), torch.stack(of_rows)


def naive_from_experts(y: Sequence[Tensor], plan: PeerReadPlan) -> Tensor:
    """The specification of `from_experts` on one rank. y: [R, H] of every rank."""
    wide = torch.promote_types(y[0].dtype, torch.float32)
    sums = []
    for places in plan.place_of_pair.tolist():
        total = torch.zeros(y[0].shape[1], dtype=wide, device=y[0].device)
        for place in places:
            if place >= 0:
                total = total + y[place // y[0].shape[0]][place % y[0].shape[0]].to(wide)
        sums.append(total.to(y[0].dtype))
    return torch.stack(sums)
