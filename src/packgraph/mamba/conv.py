"""Depthwise causal convolution of packed documents, with bias and SiLU: the short convolution of
Mamba-2.

    z[t, c] = bias[c] + sum over k < K of weight[c, k] * x[t - (K - 1 - k), c]      y = silu(z) or z

A tap whose row is of another document, or before the first row, adds nothing, so documents may be
shorter than K. Rows of padding (document id -1) are 0 in y and in the gradient of x, whatever
stands there in x and in the gradient of y. Sums are float32 (float64 in float64) and rounded once.
On CUDA forward and backward are one kernel each; elsewhere, and for what the kernels do not take
(`conv_problems`), the operations of `plain_packed_causal_conv`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packgraph.ops.kernels import by_rows, kernel_problems, save_inputs, tl, triton
from packgraph.packing.batch import PackedBatch

MOST_TAPS = 4  # Mamba-2 has four
FORWARD_ROWS, FORWARD_COLUMNS = 16, 128
SPAN, SPAN_COLUMNS, SPAN_WARPS = 64, 256, 2


def live_document_ids(batch: PackedBatch) -> Tensor:
    """int32 [T]: number of each row's document, -1 in padding. One kernel: make it once per
    microbatch, for all layers.

    batch: anything with the fields `document_ids` (int32 [T]) and `padding_mask` (bool [T]).

        batch.document_ids    0 0 0 1 1 2 2 2 2 N N       result    0 0 0 1 1 2 2 2 2 -1 -1

    Convolution and state space operations ask two things of a row: is it padding (its id is
    negative), and does another row belong to the same document (their ids are equal). So numbers
    may start anywhere and leave out documents without tokens, but the rows of a document must
    follow one another in the document's order.
    """
    return batch.document_ids.masked_fill(batch.padding_mask, -1)


def naive_packed_causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor, activation: bool = True
) -> Tensor:
    """The specification: row after row, tap after tap. Reads the ids on the host."""
    ids, taps = document_ids.tolist(), weight.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = []
    for row, document in enumerate(ids):
        if document < 0:
            rows.append(torch.zeros_like(x[0]))
            continue
        z = torch.zeros_like(x[0], dtype=wide) if bias is None else bias.to(wide)
        for tap in range(taps):
            source = row - (taps - 1 - tap)
            if source >= 0 and ids[source] == document:
                z = z + weight[:, tap].to(wide) * x[source].to(wide)
        rows.append((z / (1.0 + torch.exp(-z)) if activation else z).to(x.dtype))
    return torch.stack(rows)


def plain_packed_causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor, activation: bool = True
) -> Tensor:
    """Returns the same as `packed_causal_conv`, by one shifted product per tap."""
    wide = torch.promote_types(x.dtype, torch.float32)
    live = (document_ids >= 0)[:, None]
    clean, taps = torch.where(live, x, 0).to(wide), weight.shape[1]
    z = clean * weight[:, taps - 1].to(wide)
    for shift in range(1, taps):
        earlier = F.pad(document_ids, (shift, 0), value=-1)[: len(document_ids)]
        moved = F.pad(clean, (0, 0, shift, 0))[: len(document_ids)]
        product = moved * weight[:, taps - 1 - shift].to(wide)
        z = z + torch.where((earlier == document_ids)[:, None], product, 0)
    if bias is not None:
        z = z + bias.to(wide)
    return torch.where(live, F.silu(z) if activation else z, 0).to(x.dtype)


@triton.jit
def _value(x, ids, row, back, row_ids, column, start, rows, stride, channels):  # type: ignore[no-untyped-def]
    """x of `back` rows before `row`, float32 [rows, columns]; 0 where that row is of another
    document than row_ids.

    row counts from the row `start`; only `start`, in 64 bits, may be large.
    """
    source = start + row - back
    inside = (source >= 0) & (source < rows)
    source_ids = tl.load(ids + source, mask=inside, other=-1)
    here = x + start * stride + ((row - back)[:, None] * stride + column[None, :])
    taken = tl.load(
        here, mask=(source_ids >= 0)[:, None] & (column < channels)[None, :], other=0.0
    ).to(tl.float32)
    return tl.where((source_ids == row_ids)[:, None], taken, 0.0)


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    x, weight, bias, ids, row, row_ids, column, start, rows, stride, channels,
    TAPS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Operand of the activation: float32 [rows, columns]."""
    inside = column < channels
    total = row[:, None].to(tl.float32) * 0.0 + column[None, :].to(tl.float32) * 0.0
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(TAPS):
        factor = tl.load(weight + column * TAPS + (TAPS - 1 - back), mask=inside, other=0.0).to(
            tl.float32
        )
        total += factor[None, :] * _value(
            x, ids, row, back, row_ids, column, start, rows, stride, channels
        )
    return total


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, weight, bias, ids, y, rows, stride, channels,
    TAPS: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * ROWS
    row, column = tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_ids = tl.load(ids + start + row, mask=start + row < rows, other=-1)
    z = _sum(x, weight, bias, ids, row, row_ids, column, start, rows, stride, channels, TAPS, BIAS)
    if ACTIVATION:
        z = z / (1.0 + tl.exp(-z))
    z = tl.where((row_ids >= 0)[:, None], z, 0.0)
    inside = (start + row < rows)[:, None] & (column < channels)[None, :]
    tl.store(
        y + start * channels + (row[:, None] * channels + column[None, :]),
        z.to(y.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def _row(x, dy, ids, row, column, start, rows, x_stride, dy_stride, channels):  # type: ignore[no-untyped-def]
    """One row of x and dy, float32 [columns], 0 in padding and outside, and its id. row counts from
    `start`."""
    place = start + row
    exists = (place >= 0) & (place < rows)
    inside = (column < channels) & exists
    row_id = tl.load(ids + place, mask=exists, other=-1)
    value = tl.load(x + place * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dy + place * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    # Padding is loaded and then dropped: loads that wait for nothing can be started rows ahead.
    return tl.where(row_id >= 0, value, 0.0), tl.where(row_id >= 0, grad, 0.0), row_id


@triton.jit
def _activated(  # type: ignore[no-untyped-def]
    value, value_1, value_2, value_3, grad, factor_0, factor_1, factor_2, factor_3, bias,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Gradient of the sum before the activation; the values are of this row and those before it."""
    if ACTIVATION:
        z = bias + factor_0 * value + factor_1 * value_1 + factor_2 * value_2 + factor_3 * value_3
        chance = 1.0 / (1.0 + tl.exp(-z))
        grad = grad * (chance * (1.0 + z * (1.0 - chance)))
    return grad


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    dy, x, weight, bias, ids, dx, partial, rows, dy_stride, x_stride, channels,
    TAPS: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, SPAN: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx [T, C], and of SPAN rows: gradients of weights, tap by tap, and of bias. partial: [spans,
    K + 1, C].

    Row after row, with the last three in registers: value_1 is x of the row before, z_1 the
    gradient of its sum. The gradient of a row of x is complete three rows later.
    """
    start = tl.program_id(0).to(tl.int64) * SPAN
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    tap = (
        weight + column * TAPS + (TAPS - 1)
    )  # taps are counted back from the row itself; those that lack are 0
    factor_0 = tl.load(tap, mask=inside, other=0.0).to(tl.float32)
    factor_1 = tl.load(tap - 1, mask=inside & (TAPS > 1), other=0.0).to(tl.float32)
    factor_2 = tl.load(tap - 2, mask=inside & (TAPS > 2), other=0.0).to(tl.float32)
    factor_3 = tl.load(tap - 3, mask=inside & (TAPS > 3), other=0.0).to(tl.float32)
    zero = tl.zeros([COLUMNS], tl.float32)
    shift = zero
    if BIAS:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    of_bias, of_tap_0, of_tap_1, of_tap_2, of_tap_3, z_1, z_2, z_3 = (
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
        zero,
    )
    value_1, _, id_1 = _row(x, dy, ids, -1, column, start, rows, x_stride, dy_stride, channels)
    value_2, _, id_2 = _row(x, dy, ids, -2, column, start, rows, x_stride, dy_stride, channels)
    value_3, _, id_3 = _row(x, dy, ids, -3, column, start, rows, x_stride, dy_stride, channels)
    for group in range(SPAN // 4 + 1):  # four rows are loaded before the first is worked on
        first = group * 4
        value_a, grad_a, id_a = _row(
            x, dy, ids, first, column, start, rows, x_stride, dy_stride, channels
        )
        value_b, grad_b, id_b = _row(
            x, dy, ids, first + 1, column, start, rows, x_stride, dy_stride, channels
        )
        value_c, grad_c, id_c = _row(
            x, dy, ids, first + 2, column, start, rows, x_stride, dy_stride, channels
        )
        value_d, grad_d, id_d = _row(
            x, dy, ids, first + 3, column, start, rows, x_stride, dy_stride, channels
        )
        values, grads = (value_a, value_b, value_c, value_d), (grad_a, grad_b, grad_c, grad_d)
        row_ids = (id_a, id_b, id_c, id_d)
        for turn in tl.static_range(4):
            value, row_id = values[turn], row_ids[turn]
            seen_1, seen_2 = (
                tl.where(id_1 == row_id, value_1, 0.0),
                tl.where(id_2 == row_id, value_2, 0.0),
            )
            seen_3 = tl.where(id_3 == row_id, value_3, 0.0)
            z = _activated(
                value,
                seen_1,
                seen_2,
                seen_3,
                grads[turn],
                factor_0,
                factor_1,
                factor_2,
                factor_3,
                shift,
                ACTIVATION,
            )
            own = tl.where(first < SPAN, z, 0.0)
            of_bias += own
            of_tap_0 += own * value
            of_tap_1 += own * seen_1
            of_tap_2 += own * seen_2
            of_tap_3 += own * seen_3
            found = factor_0 * z_3 + tl.where(id_3 == id_2, factor_1 * z_2, 0.0)
            found += tl.where(id_3 == id_1, factor_2 * z_1, 0.0) + tl.where(
                id_3 == row_id, factor_3 * z, 0.0
            )
            row = first + turn - 3
            tl.store(
                dx + (start + row) * channels + column,
                tl.where(id_3 >= 0, found, 0.0).to(dx.dtype.element_ty),
                mask=inside & (row >= 0) & (row < SPAN) & (start + row < rows),
            )
            value_3, value_2, value_1 = value_2, value_1, value
            z_3, z_2, z_1 = z_2, z_1, z
            id_3, id_2, id_1 = id_2, id_1, row_id
    here = partial + tl.program_id(0).to(tl.int64) * (TAPS + 1) * channels + column
    tl.store(here + TAPS * channels, of_bias, mask=inside)
    tl.store(here + (TAPS - 1) * channels, of_tap_0, mask=inside)
    tl.store(here + (TAPS - 2) * channels, of_tap_1, mask=inside & (TAPS > 1))
    tl.store(here + (TAPS - 3) * channels, of_tap_2, mask=inside & (TAPS > 2))
    tl.store(here + (TAPS - 4) * channels, of_tap_3, mask=inside & (TAPS > 3))


@torch.library.custom_op("packgraph::packed_causal_conv", mutates_args=())
def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor, activation: bool
) -> Tensor:
    """y [T, C].

    A program has a tile of a few rows, and loads the K - 1 rows before them again, from the cache.
    Nothing is atomic, tiles are fixed, offsets are 64-bit.
    """
    x, weight = by_rows(x), weight.contiguous()
    (rows, channels), taps = x.shape, weight.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _forward[(triton.cdiv(rows, FORWARD_ROWS), triton.cdiv(channels, FORWARD_COLUMNS))](
        x,
        weight,
        weight if bias is None else bias.contiguous(),
        document_ids.contiguous(),
        y,
        rows,
        x.stride(0),
        channels,
        TAPS=taps,
        BIAS=bias is not None,
        ACTIVATION=activation,
        ROWS=FORWARD_ROWS,
        COLUMNS=FORWARD_COLUMNS,
    )
    return y


@torch.library.custom_op("packgraph::packed_causal_conv_backward", mutates_args=())
def _conv_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    document_ids: Tensor,
    activation: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x [T, C], weight [C, K] and bias [C], the last in the weight's dtype if there is
    none."""
    grad, x, weight = by_rows(grad), by_rows(x), weight.contiguous()
    (rows, channels), taps = x.shape, weight.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    spans = triton.cdiv(rows, SPAN)
    partial = torch.empty(spans, taps + 1, channels, dtype=torch.float32, device=x.device)
    _backward[(spans, triton.cdiv(channels, SPAN_COLUMNS))](
        grad,
        x,
        weight,
        weight if bias is None else bias.contiguous(),
        document_ids.contiguous(),
        dx,
        partial,
        rows,
        grad.stride(0),
        x.stride(0),
        channels,
        TAPS=taps,
        BIAS=bias is not None,
        ACTIVATION=activation,
        SPAN=SPAN,
        COLUMNS=SPAN_COLUMNS,
        num_warps=SPAN_WARPS,
    )
    sums = partial.sum(0)
    of_bias = sums[taps].to(weight.dtype if bias is None else bias.dtype, copy=True)
    return (
        dx,
        sums[:taps].t().to(weight.dtype, copy=True, memory_format=torch.contiguous_format),
        of_bias,
    )


convolve.register_fake(lambda x, *_: x.new_empty(x.shape))


@_conv_backward.register_fake
def _shapes(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    document_ids: Tensor,
    activation: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    of_bias = weight.new_empty(weight.shape[0]) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), of_bias


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx, of_weight, of_bias = _conv_backward(grad, *ctx.saved_tensors, *ctx.constants)
    return dx, of_weight, None if ctx.saved_tensors[2] is None else of_bias, None, None


convolve.register_autograd(_differentiate, setup_context=save_inputs)


def packed_causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor, activation: bool = True
) -> Tensor:
    """Convolve every channel along its document: [T, C], dtype of x.

    x: [T, C], a float dtype, any stride between rows. weight: [C, K]; weight[:, K - 1] is for the
    row itself. bias: [C] or None. document_ids: int32 [T], -1 = padding, the rows of a document one
    after another (see mamba/conv.py). activation: SiLU on top. No host sync; a changed
    document leaves the bits of all others. Raises ValueError for shapes that do not fit together.
    """
    _check(x, weight, bias, document_ids)
    problems = conv_problems(x.device, x.dtype, weight.shape[1])
    run = plain_packed_causal_conv if problems else convolve
    return run(x, weight, bias, document_ids, activation)


def conv_problems(device: torch.device, dtype: torch.dtype, taps: int) -> list[str]:
    """Returns reasons why the kernels cannot compute the convolution; empty if they can."""
    too_many = {f"the kernels take up to {MOST_TAPS} taps, not {taps}": taps > MOST_TAPS}
    return kernel_problems(device, dtype, too_many)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor) -> None:
    channels = x.shape[1] if x.dim() == 2 else -1
    fits = (
        x.dim() == 2
        and weight.dim() == 2
        and weight.shape[0] == channels
        and weight.shape[1] >= 1
        and (bias is None or tuple(bias.shape) == (channels,))
        and tuple(document_ids.shape) == (x.shape[0],)
    )
    if not fits:
        raise ValueError(
            "packed_causal_conv needs x [T, C], weight [C, K], bias [C] or None and document_ids "
            "[T], got "
            f"{list(x.shape)}, {list(weight.shape)}, {None if bias is None else list(bias.shape)} "
            "and "
            f"{list(document_ids.shape)}; a Conv1d weight [C, 1, K] goes in as weight[:, 0]"
        )
