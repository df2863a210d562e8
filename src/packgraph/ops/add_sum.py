"""A sum of several parts in their order, added to a total.

On CUDA the last two operations are one kernel of Triton, which moves four numbers of an element
where two operations move six; its bits are those of `naive_add_sum`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from packgraph.ops.loss import HAS_TRITON

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def add_sum(total: Tensor, parts: Sequence[Tensor], kept: int) -> None:
    """total += parts[0] + parts[1] + ...

    Args:
        total: [size], contiguous.
        parts: Two or more of the same shape and dtype, added from the first on, each sum rounded to
            the dtype; their memory is used up but for one.
        kept: Which of them is not written.
    """
    *head, last = parts
    first = head[0]
    if len(head) > 1:
        first, second, *more = head
        first = second.add_(first) if kept == 0 else first.add_(second)
        for part in more:
            first.add_(part)
    if HAS_TRITON and total.is_cuda and total.dtype in DTYPES:
        from packgraph.ops.add_sum_kernel import add_sum_of_two

        add_sum_of_two(total, first, last)
    else:
        total.add_(torch.add(first, last))


def naive_add_sum(total: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The specification: a new tensor, nothing is written."""
    found = parts[0]
    for part in parts[1:]:
        found = found + part
    return total + found
