"""Matrix products by quack-kernels: on Hopper faster than cuBLAS's where matrices are large.

    product             left [M, K] @ right [K, N]                        -> [M, N]
    grouped_product     rows of expert e @ matrices[e]                    -> [R, N]
    add_grouped         left[rows of e]^T @ right[rows of e]              -> added to total[e]

All take bfloat16 or float16, sum in float32 and round once (what is added: as a product and as a
sum), in an order that follows from shapes alone. One tile is used: 128 x 128, two consumer
warpgroups that take turns (`pingpong`), clusters of two. It was the best or within 2 % of it for
every layer of Qwen3-0.6B and 4B and for experts of Moonlight's shape on an H200 (docs/LOG.md).
Kernels compile when a layout is first seen (2 s each): an eager call before a capture does that.

Interface: quack-kernels 0.6.5, https://github.com/Dao-AILab/quack (Apache-2.0), which flash-attn-4
depends on.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from packgraph.kernels.alignment import ALIGNMENT, aligned

DTYPES = (torch.bfloat16, torch.float16)
HOPPER = 9  # major compute capability; the tile was measured on no other one
ROWS, COLUMNS = 128, 128  # of a tile
CLUSTER = 2  # tiles, one under the other, that read the same columns once
LEAST_TILES = 256  # from how many tiles of the result on products are faster than cuBLAS's
_MODULE = "quack.gemm"
_NEEDS = frozenset(
    {
        "A",
        "B",
        "D",
        "C",
        "tile_count_semaphore",
        "tile_M",
        "tile_N",
        "cluster_M",
        "cluster_N",
        "pingpong",
        "cu_seqlens_m",
        "cu_seqlens_k",
        "add_to_output",
    }
)


class QuackLibrary(NamedTuple):
    """quack-kernels as it was found: its product, or why there is none."""

    gemm: Callable[..., Any] | None
    reason: str | None


@functools.cache
def library() -> QuackLibrary:
    """Import quack-kernels, once per process (about a second)."""
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "quack"
        why = "is not installed" if absent else f"cannot be imported ({error})"
        return QuackLibrary(None, f"quack-kernels {why}")
    gemm = getattr(module, "gemm", None)
    missing = _NEEDS - set(inspect.signature(gemm).parameters if callable(gemm) else ())
    if missing:
        return QuackLibrary(
            None,
            "this version of quack-kernels has another interface (0.6.5 is known to work): its "
            f"product does not take {', '.join(sorted(missing))}",
        )
    return QuackLibrary(gemm, None)


def is_faster(left: Tensor, right: Tensor) -> bool:
    """Whether `product` takes these and was measured to be faster than cuBLAS.

    Looks at shapes, strides, dtype and device only, so it may be asked about fake tensors.
    """
    tiles = -(-left.shape[0] // ROWS) * -(-right.shape[1] // COLUMNS)
    return tiles >= LEAST_TILES and takes(left, right)


def takes(*matrices: Tensor) -> bool:
    """Whether kernels can read these [..., A, B]: none empty, of one dtype, on Hopper, one of the
    last two dimensions dense and the other stride in whole units of 16 bytes."""
    first = matrices[0]
    return (
        first.dtype in DTYPES
        and first.device.type == "cuda"
        and all(x.dtype == first.dtype and x.device == first.device for x in matrices)
        and all(map(_is_readable, matrices))
        and torch.cuda.get_device_capability(first.device)[0] == HOPPER
        and library().gemm is not None
    )


def _is_readable(x: Tensor) -> bool:
    dense, other = sorted(x.stride()[-2:])
    unit = ALIGNMENT // x.element_size()
    further = x.stride()[:-2]
    return (
        x.numel() > 0
        and dense == 1
        and all(stride > 0 and stride % unit == 0 for stride in (other, *further))
        and (x.stride(-1) == 1 or x.stride(-2) == 1)
    )


@torch.library.custom_op("packgraph::large_product", mutates_args=())
def product(left: Tensor, right: Tensor) -> Tensor:
    """[M, N] = left [M, K] @ right [K, N], both as `takes` asks for."""
    left, right = aligned(left), aligned(right)
    out = left.new_empty(left.shape[0], right.shape[1])
    _launch(left, right.mT, out)
    return out


@product.register_fake
def _product_shape(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


def grouped_product(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """[R, N] = rows [R, K] of expert e @ matrices[e], [E, K, N]; undefined from offsets[-1] on.

    offsets: int32 [E], where the rows of each expert end. Nothing reads rows behind the last.
    """
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    _launch(rows, matrices.mT, out, cu_seqlens_m=_bounds(offsets))
    return out


def add_grouped(total: Tensor, left: Tensor, right: Tensor, offsets: Tensor) -> None:
    """total [E, I, J] += left [R, I]^T @ right [R, J] over the rows of each expert; offsets: int32
    [E]."""
    _launch(left.mT, right.mT, total, cu_seqlens_k=_bounds(offsets), add_to_output=True)


def _bounds(offsets: Tensor) -> Tensor:
    """int32 [E + 1]: with where the first expert's rows begin."""
    return F.pad(offsets, (1, 0))


def _launch(left: Tensor, right: Tensor, out: Tensor, **options: Any) -> None:
    """out = left @ right^T."""
    gemm, reason = library()
    assert gemm is not None, reason
    gemm(left, right, out, None, None, ROWS, COLUMNS, CLUSTER, 1, pingpong=True, **options)
