"""Choice of kernel and tiles for the grouped products of experts, by rows per expert: one table for
each product.

Figures come from `benchmarks/moe_grouped.py`. Kernels by descriptors (the TMA unit of compute
capability 9.0) stand beside those by pointers, which run everywhere, and beside torch's grouped
product; a way that cannot take a shape is passed over for the one that always can. What is for
everywhere was measured nowhere: it fits into the shared memory of every GPU since compute
capability 8.0, in float32 too.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from packgraph.ops.triton_found import HAS_TRITON

HOPPER = (9, 0)  # with 9 alone descriptors were tried, and their tiles fit into shared memory
ALIGNMENT = 16  # bytes, of what a descriptor begins with and of its strides


class Added(NamedTuple):
    """Launch configuration of `total += left^T @ right` per expert: ops/grouped_gemm/add_kernel.py.

    kernel: "pointers" or "descriptors". rows: summed over in one step. left, right: the tile of the
    result. programs: per multiprocessor ("descriptors" only, as all that follow). parts: pieces
    that a tile leaves in, 1 or 2. reduce: the second-level cache adds what it gets; else tiles are
    read, added to and written. prefetch: tiles that will be read are asked for when their first
    rows are. group: tiles of left that are made one after another for one of right.
    """

    kernel: str
    rows: int
    left: int
    right: int
    warps: int = 8
    stages: int = 4
    programs: int = 1
    parts: int = 1
    reduce: bool = True
    prefetch: bool = False
    group: int = 8


class Multiplied(NamedTuple):
    """Launch configuration of `a @ matrix` per expert (ops/grouped_gemm/multiply_kernel.py, torch).

    kernel: "torch", "descriptors", or "pointers" (multiply_kernel.py). rows, columns: the tile of
        the result.
    inner: summed over in one step. programs: per multiprocessor ("descriptors" only).
    """

    kernel: str
    rows: int = 128
    columns: int = 128
    inner: int = 64
    warps: int = 8
    stages: int = 4
    programs: int = 1


# (from how many rows per expert on, how): descending. The best on an H200 at 96, 384 and 1536 rows
# for 64 experts of Moonlight's shape, both matrices together; torch is ahead for one product in
# four at 384 and 1536, by 3 %.
ADDED = (
    (192, Added("descriptors", 64, 128, 256, warps=8, stages=4, parts=2)),
    (0, Added("descriptors", 32, 128, 128, warps=4, stages=3, programs=2, reduce=False)),
)
MULTIPLIED = (
    (768, Multiplied("descriptors", 128, 256, warps=8, stages=3)),
    (0, Multiplied("descriptors", 64, 256, warps=4, stages=4)),
)
MULTIPLIED_ANYWHERE = (
    (64, Multiplied("pointers", 64, 64, 32, warps=4, stages=2)),
    (0, Multiplied("pointers", 16, 64, 32, warps=4, stages=2)),
)
ADDED_ANYWHERE = Added("pointers", 32, 64, 64, warps=4, stages=2)
BY_POINTERS = ((1024, Added("pointers", 64, 128, 256)), (0, Added("pointers", 32, 128, 128)))


def added_way(total: Tensor, left: Tensor, right: Tensor) -> Added:
    """The way to add to `total` [E, I, J] products of rows of left [R, I] and right [R, J]."""
    per_expert = left.shape[0] // total.shape[0]
    way = next(way for least, way in ADDED if per_expert >= least)
    if way.kernel == "descriptors" and describable(total, left, right):
        return way
    if left.element_size() > 2 or not on_hopper(total.device):
        return ADDED_ANYWHERE
    return next(way for least, way in BY_POINTERS if per_expert >= least)


def multiplied_way(a: Tensor, matrices: Tensor) -> Multiplied:
    """The way to multiply rows a [R, K] with contiguous matrices [E, K, N] or [E, N, K], of 2 bytes
    a number, on a device that has torch's grouped product; "torch" where in doubt."""
    per_expert = a.shape[0] // matrices.shape[0]
    way = next(way for least, way in MULTIPLIED if per_expert >= least)
    return way if way.kernel == "torch" or describable(a, matrices) else Multiplied("torch")


def multiplied_anywhere(a: Tensor, matrices: Tensor) -> Multiplied:
    """The way to do so with any numbers, on any device."""
    per_expert = a.shape[0] // matrices.shape[0]
    return next(way for least, way in MULTIPLIED_ANYWHERE if per_expert >= least)


def on_hopper(device: torch.device) -> bool:
    """Returns whether this is a CUDA device of compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER[0]


def describable(*tensors: Tensor) -> bool:
    """Returns whether descriptors can stand for these: numbers of 2 bytes on compute capability
    9.0, none empty, aligned, last dimension dense."""
    return HAS_TRITON and all(
        on_hopper(x.device)
        and x.numel() > 0
        and x.element_size() == 2
        and x.data_ptr() % ALIGNMENT == 0
        and x.stride(-1) == 1
        and all(
            stride > 0 and stride * x.element_size() % ALIGNMENT == 0 for stride in x.stride()[:-1]
        )
        for x in tensors
    )


def aligned(x: Tensor) -> Tensor:
    """x, or a copy that begins where kernels like it. So which kernel makes a product follows from
    shapes and strides and never from where a tensor lies: eager calls and replays, which have
    copies of their own, choose alike."""
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def programs_at_once(device: torch.device, each: int) -> int:
    """Number of programs that run at the same time with `each` on every multiprocessor of a CUDA
    device."""
    return each * torch.cuda.get_device_properties(device).multi_processor_count
