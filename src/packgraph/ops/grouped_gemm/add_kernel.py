"""Kernels for total[e] += left[rows of e]^T @ right[rows of e]: what `add_matrices_gradient`
(products.py) means.

By pointers, `add_products`: one program makes one tile of one expert. It goes over the expert's
rows in order, so the sum has a fixed order, and reads and writes its tile of `total` once. Programs
of experts without rows end at once. Tiles of one expert follow each other in groups, so that rows
are read from the second-level cache. It takes what any memory holds, and float32 as such (not as
TF32); descriptors are chosen where the table in configs.py says so.

By descriptors (the TMA unit of Hopper), `add_by_descriptors`:

    steps of one program:  tile 0: rows 0.. 64..  | tile 132: rows 0.. 64.. | tile 264: ...      one flat loop
    loads, some ahead:     x0 y0  x1 y1           | x0 y0  x1 y1            |
    products:                     p0     p1       |        p0     p1        |
    leaves for memory:                            | tile 0                  | tile 132

A step is a product of some rows; the loop goes over steps and not over tiles, so the loads of a
tile are under way while the one before is finished: with a hundred rows per expert a tile has two
steps, and most of the time is memory's. A tile leaves as an addition that the second-level cache
makes (`reduce`): nothing waits for what was there. Each element is added to once, so the result
does not depend on who comes first; it is rounded as a product first and as a sum then, as a product
and an addition are. Without `reduce` the tile is read, added to and written, rounded once.

Rows beyond the end of an expert are another expert's, or nobody's and perhaps NaN. They are kept
out by bounds of the descriptors that lie where the expert ends ("ragged" descriptors: two more
dimensions whose strides add up to 2 ** 64 bytes and more and so to nothing; from Triton's tools),
which gives zeros on both sides of the product. An expert without rows costs one step of zeros; its
tile is sent out of bounds, where nothing is written.
"""  # noqa: E501

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged
from triton.tools.tensor_descriptor import TensorDescriptor

from packgraph.ops.grouped_gemm.configs import Added, added_way, aligned, programs_at_once


@triton.jit
def _leave(total, value, expert, i, j, REDUCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile or a part of one goes to memory, [LEFT, RIGHT] in float32."""
    shape: tl.constexpr = [1, value.shape[0], value.shape[1]]
    if REDUCE:
        total.atomic_add([expert, i, j], tl.reshape(value.to(total.dtype), shape))
    else:
        there = total.load([expert, i, j]).to(tl.float32)
        total.store([expert, i, j], (there + tl.reshape(value, shape)).to(total.dtype))


@triton.jit
def _ask(memory, expert, i, j, of_left, of_right, LEFT: tl.constexpr, RIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bring a tile [LEFT, RIGHT] of total to the second-level cache: one request for each 128
    bytes."""
    line: tl.constexpr = 64
    row = i + tl.arange(0, LEFT)
    column = j + line * tl.arange(0, RIGHT // line)
    row, column = tl.minimum(row, of_left - 1), tl.minimum(column, of_right - 1)
    place = (expert.to(tl.int64) * of_left + row[:, None]) * of_right + column[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [memory + place],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _steps(offsets, experts, each, ROWS: tl.constexpr, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of steps of this program, when it makes every num_programs-th of experts * each
    tiles."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    expert = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + expert, mask=expert < experts, other=0)
    starts = tl.load(offsets + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    before = (expert * each - program + programs - 1) // programs  # its tiles of earlier experts
    upto = (expert * each + each - program + programs - 1) // programs
    steps = (upto - before) * tl.maximum(tl.cdiv(ends - starts, ROWS), 1)
    return tl.sum(tl.where(expert < experts, steps, 0), 0)


@triton.jit
def _add_tiles(  # type: ignore[no-untyped-def]
    total,
    memory,
    left,
    right,
    offsets,
    experts,
    of_left,
    of_right,
    ROWS: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    EXPERTS: tl.constexpr,
    PARTS: tl.constexpr,
    REDUCE: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    high, wide = tl.cdiv(of_left, LEFT), tl.cdiv(of_right, RIGHT)
    each = high * wide
    tile = tl.program_id(0) - tl.num_programs(0)
    step, steps_of_tile, expert, end, size, i, j = -1, 0, 0, 0, 0, 0, 0
    acc = tl.zeros((LEFT, RIGHT), dtype=tl.float32)
    for _ in tl.range(0, _steps(offsets, experts, each, ROWS, EXPERTS)):
        step += 1
        if step == steps_of_tile:
            step = 0
            tile += tl.num_programs(0)
            expert = tile // each
            end = tl.load(offsets + expert)
            size = end - tl.load(offsets + expert - 1, mask=expert > 0, other=0)
            steps_of_tile = tl.maximum(tl.cdiv(size, ROWS), 1)
            group = (tile % each) // (GROUP * wide)
            tall = tl.minimum(high - group * GROUP, GROUP)
            inside = (tile % each) % (GROUP * wide)
            i = (group * GROUP + inside % tall) * LEFT
            j = (inside // tall) * RIGHT
            if PREFETCH:
                _ask(memory, expert, i, j, of_left, of_right, LEFT, RIGHT)
        x = load_ragged(left, end - size, size, [step * ROWS, i])
        y = load_ragged(right, end - size, size, [step * ROWS, j])
        acc = tl.dot(tl.trans(x), y, acc)
        if step == steps_of_tile - 1:
            place = tl.where(size > 0, expert, experts)
            if PARTS == 1:
                _leave(total, acc, place, i, j, REDUCE)
            else:
                first, second = tl.split(
                    tl.permute(tl.reshape(acc, (LEFT, 2, RIGHT // 2)), (0, 2, 1))
                )
                _leave(total, first, place, i, j, REDUCE)
                _leave(total, second, place, i, j + RIGHT // 2, REDUCE)
            acc = tl.zeros((LEFT, RIGHT), dtype=tl.float32)


def add_by_descriptors(
    total: Tensor, left: Tensor, right: Tensor, offsets: Tensor, way: Added, programs: int
) -> None:
    """total [E, I, J] += left[rows of e]^T @ right[rows of e], all of 2 bytes a number.

    left: [R, I]; right: [R, J]; offsets: int32 [E], contiguous; R up to 2 ** 30. total contiguous.
    `describable` (ops/grouped_gemm/configs.py) must hold for all three. programs: how many run at
    the same time. The descriptors are parameters of the launch, by value: a captured graph has its
    own.
    """
    experts, of_left, of_right = total.shape
    tiles = experts * triton.cdiv(of_left, way.left) * triton.cdiv(of_right, way.right)
    result = TensorDescriptor.from_tensor(total, [1, way.left, way.right // way.parts])
    rows = [
        create_ragged_descriptor(x, [way.rows, width])
        for x, width in ((left, way.left), (right, way.right))
    ]
    _add_tiles[(min(programs, tiles),)](
        result,
        total,
        *rows,
        offsets,
        experts,
        of_left,
        of_right,
        ROWS=way.rows,
        LEFT=way.left,
        RIGHT=way.right,
        GROUP=way.group,
        PARTS=way.parts,
        EXPERTS=triton.next_power_of_2(experts),
        REDUCE=way.reduce,
        PREFETCH=way.prefetch and not way.reduce,
        num_warps=way.warps,
        num_stages=way.stages,
    )


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
