"""total[e] += left[rows of e]^T @ right[rows of e] in one kernel: what `add_matrices_gradient`
(products.py) means.

One program makes one tile of one expert: it goes over the expert's rows in order, so the sum has a
fixed order, and reads and writes its tile of `total` once. Programs of experts without rows end at
once. Tiles of one expert follow each other in groups, so that rows are read from the second-level
cache. It takes what any memory holds, and float32 as such (not as TF32); the one in
added_kernel.py, by descriptors, is chosen where the table in ways.py says so.
"""

import triton
import triton.language as tl
from torch import Tensor

from packgraph.moe.grouped_gemm.added_kernel import add_by_descriptors
from packgraph.moe.grouped_gemm.configs import Added, added_way, aligned, programs_at_once


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    total,
    left,
    right,
    offsets,
    of_left,
    of_right,
    left_stride,
    right_stride,
    ROWS: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    GROUP: tl.constexpr,
):
    expert = tl.program_id(1)
    end = tl.load(offsets + expert)
    start = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    if start < end:
        high, wide = tl.cdiv(of_left, LEFT), tl.cdiv(of_right, RIGHT)
        group = tl.program_id(0) // (GROUP * wide)
        size = min(high - group * GROUP, GROUP)
        inside = tl.program_id(0) % (GROUP * wide)
        i = (group * GROUP + inside % size) * LEFT + tl.arange(0, LEFT)
        j = (inside // size) * RIGHT + tl.arange(0, RIGHT)
        in_left, in_right = i < of_left, j < of_right
        row = start.to(tl.int64) + tl.arange(0, ROWS)
        from_left = left + row[:, None] * left_stride + i[None, :]
        from_right = right + row[:, None] * right_stride + j[None, :]
        place = (
            expert.to(tl.int64) * of_left * of_right
            + i.to(tl.int64)[:, None] * of_right
            + j[None, :]
        )
        mask = in_left[:, None] & in_right[None, :]
        acc = tl.load(total + place, mask=mask, other=0.0).to(
            tl.float32
        )  # beside the first rows, not after the last
        for first in range(start, end, ROWS):
            live = (first + tl.arange(0, ROWS)) < end
            x = tl.load(from_left, mask=live[:, None] & in_left[None, :], other=0.0)
            y = tl.load(from_right, mask=live[:, None] & in_right[None, :], other=0.0)
            acc = tl.dot(tl.trans(x), y, acc, input_precision="ieee")
            from_left += ROWS * left_stride
            from_right += ROWS * right_stride
        tl.store(total + place, acc, mask=mask)


def add_products(
    total: Tensor, left: Tensor, right: Tensor, offsets: Tensor, way: Added | None = None
) -> None:
    """total [E, I, J] += left[rows of e]^T @ right[rows of e]. left: [R, I]; right: [R, J];
    offsets: int32 [E].

    total: contiguous. way: how; by default what the table says.
    """
    left, right = (aligned(x if x.stride(1) == 1 else x.contiguous()) for x in (left, right))
    offsets = offsets.contiguous()
    if (there := aligned(total)) is not total:
        add_products(there, left, right, offsets, way)
        total.copy_(there)
        return
    way = added_way(total, left, right) if way is None else way
    if way.kernel == "descriptors":
        add_by_descriptors(
            total, left, right, offsets, way, programs_at_once(total.device, way.programs)
        )
        return
    experts, of_left, of_right = total.shape
    tiles = triton.cdiv(of_left, way.left) * triton.cdiv(of_right, way.right)
    _add[(tiles, experts)](
        total,
        left,
        right,
        offsets,
        of_left,
        of_right,
        left.stride(0),
        right.stride(0),
        ROWS=way.rows,
        LEFT=way.left,
        RIGHT=way.right,
        GROUP=way.group,
        num_warps=way.warps,
        num_stages=way.stages,
    )
