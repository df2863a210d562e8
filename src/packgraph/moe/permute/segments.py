"""Rows that arrive from several ranks, each sorted by expert, put in order of experts: all on the
device.

    arrived from rank 0   e0 e0 e1 .     rows by expert   e0 e0 | e0 || e1 | e1 e1 || . .
    arrived from rank 1   e0 e1 e1 .                      from 0  from 1

A segment is what one rank sent for one expert: a count and the place where its rows begin. Within
an expert rows lie in order of the ranks that sent them, within a segment in order of tokens: the
order that one process would give to the tokens of all ranks. The naive twin is `plan_rows` of the
experts of all places.
"""

import torch
from torch import Tensor

from packgraph.moe.permute.api import RowPlan


def place_segments(counts: Tensor, starts: Tensor, places: int, rows: int) -> RowPlan:
    """The map between places [places] of a receive buffer and `rows` rows by expert. No host sync.

    counts, starts: int64 [ranks, experts here], rows of each segment and its first place; no more
    than `rows` together. In the plan a pair is a place: pair_of_row is int32 [rows], row_of_pair
    int32 [places, 1].
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
