"""The sum of two parts, added to a total.

On CUDA this is one kernel of Triton, which moves four numbers of an element where two operations
move six. Its bits are those of `naive_add_sum`.
"""

import torch
from torch import Tensor

from packgraph.ops.triton_found import HAS_TRITON

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def add_sum(total: Tensor, one: Tensor, other: Tensor) -> None:
    """total += one + other, the sum rounded to the dtype before it is added.

    All are [size], contiguous and of one dtype.
    """
    if HAS_TRITON and total.is_cuda and total.dtype in DTYPES:
        from packgraph.ops.add_sum_kernel import add_sum_of_two

        add_sum_of_two(total, one, other)
    else:
        total.add_(torch.add(one, other))


def naive_add_sum(total: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The specification: a new tensor, nothing is written."""
    return total + (one + other)
