"""State space duality, the mixing operation of Mamba-2, on packed documents (Dao and Gu 2024,
arXiv:2405.21060).

    state[t] = exp(dt[t] * a) * state[t-1] + dt[t] * x[t] (outer) b[t]      y[t] = state[t] c[t] + d * x[t]

per head, with a state [P, S] that is zero before the first row of every document. Rows are cut into
chunks of Q, whatever the documents are, so all shapes are static; documents enter only as a
comparison of ids:

    rows      a a a a | a b b c | c c c c | c - - -        Q = 4
    in chunk  every row sees the earlier rows of its document within the chunk, by products of [Q,
              Q]
    states    what the chunk's LAST document leaves behind; carried on while the last rows of two
              chunks are of one
              document, so that a document which ended reaches nothing
    across    rows of the document that the chunk before ended with add what the carried state holds

Sums of decays start anew with every document, also within a chunk: no bit of a document depends on
what stands in another one. States and all sums are float32 (float64 in float64). Exponents are
masked before exp.

On CUDA kernels do it (ssd_forward.py, ssd_backward.py); elsewhere, and for what they do not take
(`ssd_problems`), `chunked_ssd`.

The kernels are two operations, forward and backward, with shapes known beforehand: torch.compile,
the recorder and whoever watches operations see these two and nothing of the kernels. The forward
keeps its inputs and nothing else.
"""  # noqa: E501

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packgraph.mamba import ssd_backward, ssd_forward
from packgraph.ops.kernels import by_rows, kernel_problems, save_inputs

CHUNKS = (16, 32, 64, 128, 256)
MOST_HEAD_SIZE, MOST_STATE_SIZE = 128, 256
MOST_STATE_BYTES = {
    torch.float32: 2**15,
    torch.bfloat16: 2**16,
    torch.float16: 2**16,
}  # that shared memory holds
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    document_ids: Tensor,
    chunk: int = 128,
) -> Tensor:
    """The recurrence above for every head: y [T, H, P], dtype of x; zero in padding.

    x: [T, H, P]. dt: [T, H], the step itself: softplus, bias and limits are the caller's. a: [H],
    negative. b, c: [T, G, S], head h uses group h // (H / G). d: [H] or None. document_ids: int32
    [T], -1 = padding, the rows of a document one after another (see mamba/conv.py). chunk: Q
    >= 1, rows that are mixed by products; the result does not depend on it but for rounding. dt, a
    and d are best float32. No host sync. What stands in rows of padding (x, dt, b, c and the
    gradient of y) reaches nothing; their gradients are 0. Raises ValueError for shapes that do not
    fit together.
    """
    _check(x, dt, a, b, c, d, document_ids, chunk)
    problems = ssd_problems(x.device, x.dtype, x.shape[2], b.shape[2], chunk)
    run = chunked_ssd if problems else ssd_by_kernels
    return run(x, dt, a, b, c, d, document_ids, chunk)


def ssd_problems(
    device: torch.device, dtype: torch.dtype, head_size: int, state_size: int, chunk: int
) -> list[str]:
    """Returns reasons why the kernels cannot compute the scan; empty if they can."""
    # sizes as powers of two
    tile = 1 << max(head_size - 1, 15).bit_length() + max(state_size - 1, 15).bit_length()
    large = (
        head_size > MOST_HEAD_SIZE
        or state_size > MOST_STATE_SIZE
        or tile * dtype.itemsize > MOST_STATE_BYTES.get(dtype, 2**16)
    )
    chunks = ", ".join(map(str, CHUNKS))
    others = {
        f"a state of [{head_size}, {state_size}] in {dtype} is too large for the kernels": large,
        f"the kernels take chunks of {chunks} rows, not {chunk}": chunk not in CHUNKS,
    }
    return kernel_problems(device, dtype, others)


def chunked_ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    document_ids: Tensor,
    chunk: int = 128,
) -> Tensor:
    """Computes `ssd` by PyTorch's operations; differentiable. A chunk holds [Q, Q, H] numbers."""
    length, heads, _ = x.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    ids = F.pad(document_ids, (0, -length % chunk), value=-1).view(-1, chunk)
    live = (ids >= 0)[:, :, None]

    def chunks(value: Tensor) -> Tensor:
        clean = torch.where((document_ids >= 0).view(-1, *[1] * (value.dim() - 1)), value, 0).to(
            wide
        )
        return F.pad(clean, [0, 0] * (value.dim() - 1) + [0, -length % chunk]).view(
            -1, chunk, *value.shape[1:]
        )

    b, c, groups = chunks(b), chunks(c), b.shape[1]
    values = chunks(x).unflatten(2, (groups, -1))  # [N, Q, G, R, P]: R heads share a group
    step = chunks(dt)
    index = torch.arange(chunk, device=ids.device)
    same = (
        live & (ids[:, :, None] == ids[:, None, :]) & (index[:, None] >= index[None, :])
    )  # [N, Q, Q]
    log = step * a.to(wide)
    # The sum over rows j < k <= i, not the difference of two sums: in that the gradient of a row's
    # own decay would be what is left of two large numbers.
    pairs = torch.where(
        (same & (index[:, None] > index[None, :]))[..., None], log[:, :, None], 0
    ).cumsum(1)
    between = pairs.masked_fill(~same[..., None], -float("inf")).exp()  # [N, Q, Q, H]
    decay = same.to(wide) @ log  # [N, Q, H]: since the document or the chunk began
    weights = (between * step[:, None]).unflatten(3, (groups, -1))  # [N, Q, Q, G, R]
    scores = torch.einsum("nigs,njgs->nijg", c, b)
    y = torch.einsum("nijgr,njgrp->nigrp", scores[..., None] * weights, values)

    before = F.pad(ids[:-1, -1], (1, 0), value=-1)  # the document that the chunk before ended with
    leaving = between[:, -1] * step  # zero but in rows of the chunk's last document
    left = torch.einsum(
        "njgrp,njgs->ngrps", leaving.unflatten(2, (groups, -1))[..., None] * values, b
    )
    through = torch.where(((ids[:, -1] == before) & (before >= 0))[:, None], decay[:, -1].exp(), 0)
    entering = _carry(through.unflatten(1, (groups, -1)), left)
    arriving = decay.masked_fill(
        ~(live & (ids == before[:, None])[:, :, None]), -float("inf")
    ).exp()
    y = y + arriving.unflatten(2, (groups, -1))[..., None] * torch.einsum(
        "nigs,ngrps->nigrp", c, entering
    )
    if d is not None:
        y = y + d.to(wide).view(groups, -1, 1) * values
    # Padding: nothing was added to its rows, and only this keeps a NaN of the gradient out of
    # everything else.
    y = torch.where(live[..., None], y.flatten(2, 3), 0)
    return y.reshape(-1, heads, x.shape[2])[:length].to(x.dtype)


def _carry(through: Tensor, left: Tensor) -> Tensor:
    """State that enters each chunk [N, G, R, P, S]: through [N, G, R] times what entered the last
    one, plus `left`."""
    states = [torch.zeros_like(left[0])]
    for factor, added in zip(through[:-1].unbind(0), left[:-1].unbind(0), strict=True):
        states.append(factor[..., None, None] * states[-1] + added)
    return torch.stack(states)


def naive_ssd(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, document_ids: Tensor
) -> Tensor:
    """The specification: the recurrence, row after row. Reads the ids on the host."""
    wide = torch.promote_types(x.dtype, torch.float32)
    heads, size = x.shape[1:]
    repeats = heads // b.shape[1]
    state, last, rows = torch.zeros(0), -1, []
    for row, document in enumerate(document_ids.tolist()):
        if document < 0:
            rows.append(torch.zeros_like(x[0]))
            continue
        if document != last:
            state = torch.zeros(heads, size, b.shape[2], dtype=wide, device=x.device)
        last = document
        value, step = x[row].to(wide), dt[row].to(wide)
        key, query = (side[row].to(wide).repeat_interleave(repeats, 0) for side in (b, c))  # [H, S]
        state = torch.exp(step * a.to(wide))[:, None, None] * state + (
            (step[:, None] * value)[:, :, None] * key[:, None, :]
        )
        y = (state * query[:, None, :]).sum(2)
        rows.append((y if d is None else y + d.to(wide)[:, None] * value).to(x.dtype))
    return torch.stack(rows)


def _check(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    document_ids: Tensor,
    chunk: int,
) -> None:
    shapes = {"x": x, "dt": dt, "a": a, "b": b, "c": c, "d": d, "document_ids": document_ids}
    sizes = {name: None if value is None else list(value.shape) for name, value in shapes.items()}
    fits = x.dim() == 3 and b.dim() == 3
    if fits:
        length, heads, groups = x.shape[0], x.shape[1], b.shape[1]
        fits = (
            sizes["dt"] == [length, heads]
            and sizes["a"] == [heads]
            and sizes["b"] == sizes["c"]
            and b.shape[0] == length
            and sizes["d"] in (None, [heads])
            and sizes["document_ids"] == [length]
            and groups >= 1
            and heads % groups == 0
        )
    if not fits:
        raise ValueError(
            "ssd needs x [T, H, P], dt [T, H], a [H], b and c [T, G, S] with G dividing H, d [H] "
            "or None "
            f"and document_ids [T], got {sizes}"
        )
    if chunk < 1:
        raise ValueError(f"ssd needs a chunk of at least one row, got chunk={chunk}")


@torch.library.custom_op("packgraph::ssd", mutates_args=())
def ssd_by_kernels(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    document_ids: Tensor,
    chunk: int,
) -> Tensor:
    """Does the same as `ssd`, for inputs without `ssd_problems`: y [T, H, P]."""
    return ssd_forward.forward(
        side_by_side(x),
        by_rows(dt),
        a.contiguous(),
        side_by_side(b),
        side_by_side(c),
        None if d is None else d.contiguous(),
        document_ids.contiguous(),
        chunk,
    )


@torch.library.custom_op("packgraph::ssd_backward", mutates_args=())
def _ssd_backward(
    grad: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    document_ids: Tensor,
    chunk: int,
) -> Gradients:
    """Gradients of x, dt, a, b, c and d (one element if there is none)."""
    dx, ddt, da, db, dc, dd = ssd_backward.backward(
        side_by_side(grad),
        side_by_side(x),
        by_rows(dt),
        a.contiguous(),
        side_by_side(b),
        side_by_side(c),
        None if d is None else d.contiguous(),
        document_ids.contiguous(),
        chunk,
    )
    return dx, ddt, da, db, dc, a.new_empty(1) if dd is None else dd


ssd_by_kernels.register_fake(lambda x, *_: x.new_empty(x.shape))


@_ssd_backward.register_fake
def _shapes(
    grad: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    document_ids: Tensor,
    chunk: int,
) -> Gradients:
    x, dt, a, b, c = (value.new_empty(value.shape) for value in (x, dt, a, b, c))
    return x, dt, a, b, c, a.new_empty(1) if d is None else d.new_empty(d.shape)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *gradients, of_skip = _ssd_backward(grad, *ctx.saved_tensors, *ctx.constants)
    return (*gradients, None if ctx.saved_tensors[5] is None else of_skip, None, None)


ssd_by_kernels.register_autograd(_differentiate, setup_context=save_inputs)


def side_by_side(value: Tensor) -> Tensor:
    """[T, A, B] as it is if the A B columns of a row lie side by side, rows anywhere; otherwise a
    copy."""
    return value if value.stride()[1:] == (value.shape[2], 1) else value.contiguous()
