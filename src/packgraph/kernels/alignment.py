"""Where matrices may begin in memory so that kernels load whole lines of them."""

from torch import Tensor

ALIGNMENT = 16  # bytes, of where a matrix begins and of its strides


def aligned(x: Tensor) -> Tensor:
    """x, or a copy that begins where kernels like it. So which kernel makes a product follows from
    shapes and strides and never from where a tensor lies: eager calls and replays, which have
    copies of their own, choose alike."""
    return x.clone() if x.data_ptr() % ALIGNMENT else x
