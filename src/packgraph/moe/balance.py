"""How many tokens each expert gets, and the bias that moves the choice against the load, without an
auxiliary loss.

    each forward of training:    load += expert_counts(experts)              int64, in place, in the graph
    once per step:               load summed over ranks (by the caller), then update_bias: load is 0
                                 again

Sums of integers: the same bits in every order, so atomics do no harm here.
"""  # noqa: E501

import torch
from torch import Tensor


def expert_counts(experts: Tensor, num_experts: int) -> Tensor:
    """Tokens of each expert: int64 [E]. experts: int [T, k], -1 = padding, which is not counted. No
    host sync."""
    return count_keys(experts, experts >= 0, num_experts).long()


@torch.no_grad()
def update_bias(bias: Tensor, counts: Tensor, rate: float | Tensor) -> None:
    """One step of auxiliary-loss-free balancing (arXiv 2408.15664), in place: bias += rate *
    sign(mean - counts).

    bias: float32 [E]. counts: int64 [E], of the whole step over all ranks; zeroed here for the next
    step. A step without tokens leaves the bias as it is. No host sync.
    """
    # in integers: a mean rounded to float32 would move experts that are exactly balanced
    direction = torch.sign(counts.sum() - counts * counts.numel())
    bias.add_(direction.to(bias.dtype) * rate)
    counts.zero_()


def count_keys(keys: Tensor, live: Tensor, size: int) -> Tensor:
    """How often each of 0 ... size - 1 stands in `keys` where `live`: int32 [size]. keys: int,
    live: bool, any shape.

    int32, which Inductor adds atomically inside its kernels (int64 it does not). What is not live
    adds nothing, but somewhere: spread over all places, since additions to one place wait for each
    other.
    """
    flat, counted = keys.reshape(-1), live.reshape(-1)
    elsewhere = torch.arange(flat.numel(), device=flat.device) % size
    place = torch.where(counted, flat.long(), elsewhere)
    return torch.zeros(size, dtype=torch.int32, device=flat.device).scatter_add(
        0, place, counted.int()
    )
