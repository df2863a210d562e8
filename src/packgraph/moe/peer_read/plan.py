"""Where every routed pair of a group of ranks lies in the rows of experts: each rank finds out all
of it by itself.

    experts of all ranks [ranks * T, k]   --plan_rows-->   rows of all experts, one after the other
    e0 e1 | e2 e3                         cut by ranks     rows of rank 0 | rows of rank 1

One all-gather of the chosen experts is all that ranks tell each other. Within an expert rows lie in
the order of ranks, within a rank in the order of tokens: as one process would lay the tokens of all
ranks. A rank has room for R rows; pairs beyond have none, and every rank knows which. No host sync;
the naive twin is in moe/peer_read/naive.py.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from packgraph.moe.permute.api import RowPlan, plan_rows
from packgraph.ops.attention.context import group_of
from packgraph.ops.collectives import all_gather_flat
from packgraph.ops.loss import HAS_TRITON


class PeerReadPlan(NamedTuple):
    """What a rank reads of the others, pairs (token t, place j) of rank q being numbered (q * T +
    t) * k + j.

    row_of_pair: int32 [ranks * T, k], this rank's row of every rank's pairs, -1 where another
    rank's expert is chosen, in padding and beyond R. place_of_pair: int32 [T, k], rank * R + row of
    each own pair, -1 where it has none. offsets: int32 [experts of this rank], one past the last
    row of each. needed: int64 [], the most rows that any rank of the group needs.
    """

    row_of_pair: Tensor
    place_of_pair: Tensor
    offsets: Tensor
    needed: Tensor


def plan_peer_read(
    experts: Tensor, num_experts: int, ranks: int, rank: int, rows: int, group: str
) -> PeerReadPlan:
    """The plan of `rank`, one of `ranks` that share `num_experts` experts in equal parts, in order.
    Collective.

    experts: int32 [T, k], -1 = routed nowhere; T is the same on all ranks. rows: R. group: name of
    the process group, "" = this process alone. Raises ValueError where places do not fit into 32
    bits.
    """
    if max(ranks * rows, ranks * experts.numel()) >= 2**31:
        raise ValueError(
            f"{ranks} ranks with {rows} rows for {experts.numel()} routed pairs each cannot be "
            "numbered "
            "in 32 bits: use fewer tokens per microbatch"
        )
    return PeerReadPlan(*_plan(experts, num_experts, ranks, rank, rows, group))


def of_all(x: Tensor, group: str) -> Tensor:
    """[ranks * N, ...]: x [N, ...] of all ranks of the group of that name, bit by bit; "" = x
    itself. Collective."""
    if not group:
        return x
    members, mine = group_of(group), x.contiguous().view(-1).view(torch.uint8)
    out = mine.new_empty(dist.get_world_size(members) * mine.numel())
    all_gather_flat(out, mine, group=members)
    return out.view(x.dtype).view(-1, *x.shape[1:])


def locate(
    everyone: Tensor, ordered: RowPlan, ranks: int, rank: int, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of a PullPlan. everyone: int32 [ranks * T, k]; ordered: their plan, with a row for
    every pair."""
    if HAS_TRITON and everyone.is_cuda:
        from packgraph.moe.peer_read.kernel import locate as by_kernel

        return by_kernel(everyone, ordered.row_of_pair, ordered.offsets, ranks, rank, rows)
    ends = ordered.offsets.view(ranks, -1)
    last = ends[:, -1]
    first = torch.cat((last.new_zeros(1), last[:-1]))
    owner = (everyone // ends.shape[1]).clamp(0, ranks - 1)
    row = ordered.row_of_pair - first[owner]
    fits = (ordered.row_of_pair >= 0) & (row < rows)
    place = torch.where(fits, owner * rows + row, -1).view(ranks, -1, everyone.shape[1])[rank]
    here = torch.where(fits & (owner == rank), row, -1)
    return (
        here,
        place.clone(),
        (ends[rank] - first[rank]).clamp(max=rows),
        (last - first).amax().long(),
    )


@torch.library.custom_op("packgraph::plan_pull", mutates_args=())
def _plan(
    experts: Tensor, num_experts: int, ranks: int, rank: int, rows: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    everyone = of_all(experts.int(), group)
    return locate(everyone, plan_rows(everyone, num_experts, everyone.numel()), ranks, rank, rows)


@_plan.register_fake
def _plan_shapes(
    experts: Tensor, num_experts: int, ranks: int, rank: int, rows: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, places = experts.shape

    def empty(*shape: int) -> Tensor:
        return experts.new_empty(shape, dtype=torch.int32)

    return (
        empty(ranks * tokens, places),
        empty(tokens, places),
        empty(num_experts // ranks),
        experts.new_empty((), dtype=torch.int64),
    )
