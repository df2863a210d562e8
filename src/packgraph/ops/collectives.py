"""Two collectives of torch.distributed that have other names from torch 2.13 on, where the old ones
warn.

    all_gather_flat(out, mine)        out [ranks * n] = the parts [n] of all ranks, in their order
    reduce_scatter_flat(out, whole)   out [n] = this rank's part of the sum of `whole` [ranks * n]
                                      over the ranks

Arguments are torch's: a process group, and `async_op` for a handle to wait for.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

all_gather_flat: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_flat: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
