"""Products of rows with the matrix of their expert, sizes on the device.

    rows     a [R, K]   | expert 0 | expert 1 | ... | tail          offsets [E]: where each expert's
                                                                    rows end
    result     [R, N]   | a @ b[0] | a @ b[1] | ... | undefined     (whatever the memory held, NaN
                                                                    among it)

                   bfloat16, CUDA from 9.0 on     other numbers, widths, CUDA devices    CPU          float64
    product        torch, or by descriptors       by pointers                            torch        masked
    gradient of b  torch; added: by descriptors   by pointers                            torch        masked

The invariant: nothing reads rows from offsets[-1] on, neither of a nor of an incoming gradient; an
expert without rows has a gradient of exactly 0. The gradient of b has the layout that b has in
memory. `ops/linear.py` makes the products differentiable, and calls them without autocast. Masked is
one product of all rows per expert, with E times the work: for checks in float64, and for widths that
do not fill 16 bytes on a CPU. `torch.nn.functional.grouped_mm` has no host sync on CUDA in bfloat16
from compute capability 9.0 on; on the CPU it may read the offsets.
"""  # noqa: E501

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from packgraph.ops.kernels import ALIGNMENT, FLOATS, HAS_TRITON, aligned, by_rows, tl, triton

if HAS_TRITON:
    from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged, to_ragged_indices
    from triton.tools.tensor_descriptor import TensorDescriptor

HOPPER = (9, 0)  # with 9 alone descriptors were tried, and their tiles fit into shared memory


class Added(NamedTuple):
    """Launch configuration of `total += left^T @ right` per expert.

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
    """Launch configuration of `a @ matrix` per expert.

    kernel: "torch", "descriptors" or "pointers". rows, columns: the tile of the result. inner:
    summed over in one step. programs: per multiprocessor ("descriptors" only).
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
    """The way to add to `total` [E, I, J] products of rows of left [R, I] and right [R, J].

    Tables by rows per expert say which kernel runs with which tiles; figures come from
    `benchmarks/moe_grouped.py`. Kernels by descriptors (the TMA unit of compute capability 9.0)
    stand beside those by pointers, which run everywhere; a way that cannot take a shape is passed
    over for the one that always can. What is for everywhere was measured nowhere: it fits into the
    shared memory of every GPU since compute capability 8.0, in float32 too.
    """
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


def programs_at_once(device: torch.device, each: int) -> int:
    """Number of programs that run at the same time with `each` on every multiprocessor of a CUDA
    device."""
    return each * torch.cuda.get_device_properties(device).multi_processor_count


def naive_grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """The specification: one product after the other, sizes read on the host. Zero in the tail."""
    ends = offsets.tolist()
    parts = [a[start:end] @ matrix for start, end, matrix in zip([0, *ends], ends, b)]
    return torch.cat([*parts, a.new_zeros(a.shape[0] - ends[-1], b.shape[2])])


@triton.jit
def _tiles(offsets, experts, wide, ROWS: tl.constexpr, EXPERTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of tiles of the result."""
    expert = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + expert, mask=expert < experts, other=0)
    starts = tl.load(offsets + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    return tl.sum(tl.where(expert < experts, tl.cdiv(ends - starts, ROWS), 0), 0) * wide


@triton.jit
def _multiply_tiles(  # type: ignore[no-untyped-def]
    out, a, matrices, offsets, experts, inner, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    wide, steps_of_tile = tl.cdiv(columns, COLUMNS), tl.cdiv(inner, INNER)
    program, programs = tl.program_id(0), tl.num_programs(0)
    mine = tl.cdiv(tl.maximum(_tiles(offsets, experts, wide, ROWS, EXPERTS) - program, 0), programs)
    tile, step = program - programs, steps_of_tile - 1
    expert, before, start, end, row, j = -1, 0, 0, 0, 0, 0  # before: tiles of earlier experts
    high = 0
    acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in tl.range(0, mine * steps_of_tile):
        step += 1
        if step == steps_of_tile:
            step = 0
            tile += programs
            while tile >= before + high * wide:
                before += high * wide
                expert += 1
                start = end
                end = tl.load(offsets + expert)
                high = tl.cdiv(end - start, ROWS)
            row = (tile - before) % high * ROWS
            j = (tile - before) // high * COLUMNS
        x = a.load([start + row, step * INNER])
        if TRANSPOSED:
            y = tl.trans(tl.reshape(matrices.load([expert, j, step * INNER]), (COLUMNS, INNER)))
        else:
            y = tl.reshape(matrices.load([expert, step * INNER, j]), (INNER, COLUMNS))
        acc = tl.dot(x, y, acc)
        if step == steps_of_tile - 1:
            beyond, bound, place = to_ragged_indices(start, end - start, row)
            out.store(
                [beyond, bound, place, j], tl.reshape(acc.to(out.dtype), (1, 1, ROWS, COLUMNS))
            )
            acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)


def multiply_by_descriptors(
    a: Tensor, matrices: Tensor, offsets: Tensor, transposed: bool, way: Multiplied, programs: int
) -> Tensor:
    """[R, N] from a [R, K] and matrices [E, K, N], or [E, N, K] if `transposed`; undefined from
    offsets[-1] on.

    offsets: int32 [E], contiguous; R up to 2 ** 30. `describable` must hold for a and matrices, and
    a row of the result fill a multiple of 16 bytes. programs: how many run at the same time.

    Tiles are counted on the device: expert e has ceil(rows / ROWS) * columns of them. They are as
    high as most experts have rows, so a matrix is read about once; where an expert has more, its
    tiles of the same columns are made side by side and share what the second-level cache has.
    Programs go from tile to tile in one flat loop over steps, as in `add_by_descriptors`. Rows read
    beyond an expert's end fill a tile and reach no other row; they are not written, because the
    descriptor of the result has its bounds where the expert ends ("ragged").
    """
    experts, inner, columns = matrices.shape[0], a.shape[1], matrices.shape[1 if transposed else 2]
    out = a.new_empty(a.shape[0], columns)
    rows = TensorDescriptor.from_tensor(a, [way.rows, way.inner])
    block = [1, way.columns, way.inner] if transposed else [1, way.inner, way.columns]
    _multiply_tiles[(programs,)](
        create_ragged_descriptor(out, [way.rows, way.columns]),
        rows,
        TensorDescriptor.from_tensor(matrices, block),
        offsets,
        experts,
        inner,
        columns,
        ROWS=way.rows,
        COLUMNS=way.columns,
        INNER=way.inner,
        EXPERTS=triton.next_power_of_2(experts),
        TRANSPOSED=transposed,
        num_warps=way.warps,
        num_stages=way.stages,
    )
    return out


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]
    out, a, matrices, offsets, experts, inner, columns, a_stride, of_expert, of_inner, of_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    wide = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0) // wide
    each = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + each, mask=each < experts, other=0)
    starts = tl.load(offsets + each - 1, mask=(each > 0) & (each < experts), other=0)
    tiles = tl.where(each < experts, tl.cdiv(ends - starts, ROWS), 0)
    upto = tl.cumsum(tiles, 0)
    if tile < tl.sum(tiles, 0):
        expert = tl.sum((upto <= tile).to(tl.int32), 0)
        mine = each == expert
        end = tl.sum(tl.where(mine, ends, 0), 0)
        first = tl.sum(tl.where(mine, starts + (tile - upto + tiles) * ROWS, 0), 0)
        row = first.to(tl.int64) + tl.arange(0, ROWS)
        column = tl.program_id(0) % wide * COLUMNS + tl.arange(0, COLUMNS)
        k = tl.arange(0, INNER)
        live, there = row < end, column < columns
        from_a = a + row[:, None] * a_stride + k[None, :]
        matrix = matrices + expert.to(tl.int64) * of_expert
        from_matrix = matrix + k[:, None] * of_inner + column[None, :] * of_column
        acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for done in range(0, inner, INNER):
            within = k < inner - done
            x = tl.load(from_a, mask=live[:, None] & within[None, :], other=0.0)
            y = tl.load(from_matrix, mask=within[:, None] & there[None, :], other=0.0)
            acc = tl.dot(x, y, acc, input_precision="ieee")
            from_a += INNER
            from_matrix += INNER * of_inner
        tl.store(
            out + row[:, None] * columns + column[None, :], acc, mask=live[:, None] & there[None, :]
        )


def multiply_by_pointers(
    a: Tensor, matrices: Tensor, offsets: Tensor, transposed: bool, way: Multiplied
) -> Tensor:
    """[R, N] from a [R, K] and matrices [E, K, N], or [E, N, K] if `transposed`; undefined from
    offsets[-1] on.

    a: of any stride between rows. matrices: contiguous, of a's dtype. offsets: int32 [E],
    contiguous.

    Takes any widths, float32 (as such, not as TF32), float16 and bfloat16, on every GPU that Triton
    compiles for. One program makes one tile of rows of one expert. How many tiles there are only
    the device knows; so there are programs for as many as there can be, and each looks up in the
    running sum of tiles whether it has one, and whose:

        rows of experts    70   0   10   64    tiles of 64    2  0  1  1    program 0 1 | 2 | 3 ...
                                               running sum    2  2  3  4            e0  |e2 |e3
    """
    experts, columns = matrices.shape[0], matrices.shape[1 if transposed else 2]
    of_expert, *strides = matrices.stride()
    of_inner, of_column = reversed(strides) if transposed else strides
    out = a.new_empty(a.shape[0], columns)
    tiles = triton.cdiv(a.shape[0], way.rows) + experts  # every expert may leave one tile unfilled
    _multiply[(tiles * triton.cdiv(columns, way.columns),)](
        out,
        a,
        matrices,
        offsets,
        experts,
        a.shape[1],
        columns,
        a.stride(0),
        of_expert,
        of_inner,
        of_column,
        ROWS=way.rows,
        COLUMNS=way.columns,
        INNER=way.inner,
        EXPERTS=triton.next_power_of_2(experts),
        num_warps=way.warps,
        num_stages=way.stages,
    )
    return out


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
    total, memory, left, right, offsets, experts, of_left, of_right,
    ROWS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, GROUP: tl.constexpr,
    EXPERTS: tl.constexpr, PARTS: tl.constexpr, REDUCE: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
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
    `describable` must hold for all three. programs: how many run at
    the same time. The descriptors are parameters of the launch, by value: a captured graph has its
    own.

    A step is a product of some rows. The loop of a program goes over steps and not over tiles, so
    the loads of a tile are under way while the one before is finished: with a hundred rows per
    expert a tile has two steps, and most of the time is memory's.

        steps of one program:  tile 0: rows 0.. 64..  | tile 132: rows 0.. 64.. | tile 264: ...
        loads, some ahead:     x0 y0  x1 y1           | x0 y0  x1 y1            |
        products:                     p0     p1       |        p0     p1        |
        leaves for memory:                            | tile 0                  | tile 132

    A tile leaves as an addition that the second-level cache makes (`reduce`): nothing waits for
    what was there. Each element is added to once, so the result does not depend on who comes first;
    it is rounded as a product first and as a sum then. Without `reduce` the tile is read, added to
    and written, rounded once.

    Rows beyond the end of an expert are another expert's, or nobody's and perhaps NaN. They are
    kept out by bounds of the descriptors that lie where the expert ends ("ragged" descriptors: two
    more dimensions whose strides add up to 2 ** 64 bytes and more and so to nothing; from Triton's
    tools), which gives zeros on both sides of the product. An expert without rows costs one step of
    zeros; its tile is sent out of bounds, where nothing is written.
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
    total, left, right, offsets, of_left, of_right, left_stride, right_stride,
    ROWS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
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

    By pointers, one program makes one tile of one expert. It goes over the expert's rows in order,
    so the sum has a fixed order, and reads and writes its tile of `total` once. Programs of experts
    without rows end at once. Tiles of one expert follow each other in groups, so that rows are read
    from the second-level cache. It takes what any memory holds, and float32 as such (not as TF32).
    """
    left, right = (aligned(by_rows(x)) for x in (left, right))
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


def multiply(a: Tensor, matrices: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """[R, N] from a [R, K] and matrices [E, K, N], or [E, N, K] if `transposed`."""
    a, matrices = _rows(a), aligned(matrices.contiguous())
    b, ends = matrices.mT if transposed else matrices, offsets.contiguous()
    if _by_torch(a, *b.shape[1:]):
        way = multiplied_way(a, matrices)
        if way.kernel == "torch":
            return F.grouped_mm(a, b, offs=offsets)
        programs = programs_at_once(a.device, way.programs)
        return multiply_by_descriptors(a, matrices, ends, transposed, way, programs)
    if _by_kernel(a):
        way = multiplied_anywhere(a, matrices)
        return multiply_by_pointers(a, matrices, ends, transposed, way)
    total = a.new_zeros(a.shape[0], b.shape[2])
    for matrix, inside in zip(b.unbind(0), _inside(offsets, a.shape[0]), strict=True):
        total = total + torch.where(inside, a, 0) @ matrix
    return total


def matrices_gradient(grad: Tensor, a: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """Gradient of matrices: [E, K, N] = a^T grad per expert, or [E, N, K] if `transposed`. grad:
    [R, N]; a: [R, K]."""
    left, right = (_rows(grad), _rows(a)) if transposed else (_rows(a), _rows(grad))
    if _by_torch(a, left.shape[1], right.shape[1]):
        return F.grouped_mm(left.mT, right, offs=offsets)
    if _by_kernel(left):
        total = left.new_zeros(offsets.shape[0], left.shape[1], right.shape[1])
        add_products(total, left, right, offsets)
        return total
    return torch.stack(
        [
            torch.where(inside, left, 0).mT @ torch.where(inside, right, 0)
            for inside in _inside(offsets, a.shape[0])
        ]
    )


def add_matrices_gradient(
    total: Tensor, grad: Tensor, a: Tensor, offsets: Tensor, transposed: bool
) -> None:
    """total += matrices_gradient(grad, a, offsets, transposed), in one pass over `total` on CUDA.

    There the sum is rounded once, elsewhere (and in ways that let the cache add) the product first,
    to the dtype of `total`: that may be float32 where rows are narrower. With few rows per expert a
    gradient costs what its memory does, and written, read and added it goes through twice as much.
    """
    if total.is_contiguous() and _by_kernel(total):
        add_products(total, *((grad, a) if transposed else (a, grad)), offsets)
    else:
        grad, a = grad.to(total.dtype), a.to(total.dtype)
        total.add_(matrices_gradient(grad, a, offsets, transposed))


def _rows(x: Tensor) -> Tensor:
    """x, in rows that a kernel can read."""
    if not x.numel():
        return x.new_empty(x.shape)  # its strides may be 0
    stride = x.stride(0)
    fits = x.stride(1) == 1 and stride >= x.shape[1] and stride * x.element_size() % ALIGNMENT == 0
    return aligned(x if fits else x.contiguous())


def _inside(offsets: Tensor, rows: int) -> list[Tensor]:
    """Per expert which rows are its own, bool [R, 1]."""
    row = torch.arange(rows, device=offsets.device, dtype=torch.int32)[:, None]
    before = row.new_zeros(())
    inside = []
    for end in offsets.unbind(0):
        inside.append((row >= before) & (row < end))
        before = end
    return inside


def grouped_problems(device: torch.device, dtype: torch.dtype, *widths: int) -> list[str]:
    """Every reason why torch's grouped product cannot serve rows of these widths without a host
    sync; none if it can."""
    on_cuda = device.type == "cuda"
    reasons = {
        f"the dtype is {dtype}, not bfloat16": on_cuda and dtype != torch.bfloat16,
        "the device has a compute capability below 9.0": on_cuda
        and torch.cuda.get_device_capability(device) < HOPPER,
        f"the dtype is {dtype}, not float32, bfloat16 or float16": not on_cuda
        and dtype not in FLOATS,
    }
    return [reason for reason, holds in reasons.items() if holds] + [
        f"rows of {width} numbers do not fill {ALIGNMENT} bytes"
        for width in widths
        if width * dtype.itemsize % ALIGNMENT
    ]


def _by_torch(x: Tensor, *widths: int) -> bool:
    """Returns whether torch's grouped product can be taken."""
    return not grouped_problems(x.device, x.dtype, *widths)


def _by_kernel(x: Tensor) -> bool:
    """Returns whether Triton's kernels can be taken; else products are masked. Raises ValueError
    where that would surprise."""
    if not x.is_cuda or x.dtype not in FLOATS:
        return False
    if not HAS_TRITON:
        raise ValueError(
            f"grouped_mm needs Triton for {x.dtype} on {x.device} (torch alone: bfloat16 on "
            "compute "
            "capability 9.0 or more, rows that fill 16 bytes), which is not installed: pip install "
            "triton"
        )
    return True
