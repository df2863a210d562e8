"""The gated delta rule on packed documents (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464), and
Kimi Delta Attention, whose decays are one for each channel of the keys (Kimi Linear, 2025,
arXiv:2510.26692).

    state = exp(g[t]) * state;  state += k[t] (outer) beta[t] * (v[t] - k[t] state);  y[t] = q[t] state

per head, with a state [K, V] that is zero before the first row of every document. Rows are cut into
chunks of Q, whatever the documents are, so all shapes are static; documents enter only as a
comparison of ids, as in mamba/ssd.py:

    in chunk  what every row writes, (I + L) u = beta (v - k decay state), by one triangular solve;
              L and the scores q k join rows of one document only
    states    the chunk's LAST document leaves them behind; rows of the document that the chunk
              before ended with read what is carried

Sums of decays start anew with every document, and exponents are masked before exp. States and sums
are float32 (float64 in float64). Nothing waits for the host.

The single operations of `chunked_gated_delta` do it. There are kernels for CUDA
(delta_forward.py, delta_backward.py), two operations for whoever watches, as in mamba/ssd.py, whose
forward keeps its inputs and nothing else.

One decay a head is a factor of the product q k. Decays of channels are not: rows meet the keys of
blocks before theirs by way of their block's first row, from where both exponents are at most zero,
and those of their own block one by one.
"""  # noqa: E501

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packgraph.mamba import delta_backward, delta_forward
from packgraph.mamba.ssd import side_by_side
from packgraph.ops.kernels import by_rows, kernel_problems, save_inputs

CHUNKS = (16, 32, 64)  # that kernels take
MOST_SIZE = 256  # columns of a head
MOST_KEYS = 128  # columns, for chunks of more than 32 rows
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
BLOCK = 16  # rows whose decays of channels are taken one by one


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    document_ids: Tensor,
    chunk: int = 64,
) -> Tensor:
    """The recurrence above for every head: y [T, Hv, V], dtype of v; zero in padding.

    q, k: [T, Hk, K], scaled and normalised by the caller. v: [T, Hv, V]; Hv is a multiple of Hk,
    value head h reads key head h // (Hv / Hk). g: [T, Hv], or [T, Hv, K] for a decay of every
    channel; not positive. beta: [T, Hv]. document_ids: int32 [T], -1 = padding, the rows of a
    document one after another. chunk: Q >= 1; the result does not depend on it but for rounding.
    What stands in padding reaches nothing. Raises ValueError for shapes that do not fit together.
    Where kernels do it q and k are rounded to the dtype of v.
    """
    _check(q, k, v, g, beta, document_ids)
    if delta_problems(v.device, v.dtype, (k.shape[2], v.shape[2]), chunk, g.dim()):
        return chunked_gated_delta(q, k, v, g, beta, document_ids, chunk)
    if k.shape[2] > MOST_KEYS:  # more is wrong on Hopper with Triton 3.6
        chunk = min(chunk, 32)
    return delta_by_kernels(q.to(v.dtype), k.to(v.dtype), v, g, beta, document_ids, chunk)


def delta_problems(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int], chunk: int, dims: int
) -> list[str]:
    """Returns reasons why the kernels cannot compute the rule; empty if they can. sizes: columns of
    keys and of values. dims: of the decays."""
    others = {
        f"the kernels take heads of 16, 32, 48 ... {MOST_SIZE} columns, not {size}": (
            size % 16 > 0 or size > MOST_SIZE
        )
        for size in sizes
    } | {
        f"the kernels take chunks of {', '.join(map(str, CHUNKS))} rows, not {chunk}": chunk
        not in CHUNKS,
        "the kernels take one decay a head, not one of every channel": dims != 2,
    }
    return kernel_problems(device, dtype, others)


def chunked_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    document_ids: Tensor,
    chunk: int = 64,
) -> Tensor:
    """Computes `gated_delta` by PyTorch's operations; differentiable."""
    tokens, wide = v.shape[0], torch.promote_types(v.dtype, torch.float32)
    more, group = -tokens % chunk, v.shape[1] // k.shape[1]
    ids = F.pad(document_ids, (0, more), value=-1)
    live = ids >= 0
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))

    def chunks(x: Tensor) -> Tensor:
        """[T, H, ...] -> [chunks, H, Q, ...], zero in padding."""
        x = F.pad(x.to(wide), (*(0, 0) * (x.dim() - 1), 0, more))
        x = torch.where(live.view(-1, *[1] * (x.dim() - 1)), x, 0)
        return x.unflatten(0, (-1, chunk)).transpose(1, 2)

    q, k, v_in, g, beta = (chunks(x) for x in (q, k, v, g, beta))
    ids = ids.unflatten(0, (-1, chunk))
    carried = F.pad(ids[:-1, -1], (1, 0), value=-1)  # the document that the chunk before ended with
    goes_on = ((ids == carried[:, None]) & (ids >= 0))[:, None]  # [chunks, 1, Q]
    leaves = (ids == ids[:, -1:])[:, None]
    joined = (ids[:, :, None] == ids[:, None, :]).tril()[:, None]  # [chunks, 1, Q, Q]
    written = k * beta[..., None]
    if g.dim() == 4:
        total = joined.to(wide) @ g  # from the document's first row in the chunk
        solve, scores = _by_channel(torch.stack((written, q)), k, total, ids).unbind()
    else:
        total = (joined * g[:, :, None, :]).sum(-1)[..., None]
        between = (total - total.mT).masked_fill(~joined, -torch.inf).exp()
        solve, scores = written @ k.mT * between, q @ k.mT * between
    entered = total.masked_fill(~goes_on[..., None], -torch.inf).exp()
    left = (total[..., -1:, :] - total).masked_fill(~leaves[..., None], -torch.inf).exp()
    through = entered[..., -1, :, None]  # of the state, to the chunk's end
    mixed = torch.eye(chunk, dtype=wide, device=v.device) + solve.tril(-1)
    solved = torch.linalg.solve_triangular(
        mixed, torch.cat((v_in * beta[..., None], written * entered), -1), upper=False
    )
    values, reads = solved.split((v.shape[2], k.shape[-1]), dim=-1)
    queries, keys = q * entered, (k * left).mT
    state = v_in.new_zeros(v.shape[1], k.shape[-1], v.shape[2])
    found = []
    for number in range(ids.shape[0]):
        made = values[number] - reads[number] @ state
        found.append(queries[number] @ state + scores[number] @ made)
        state = through[number] * state + keys[number] @ made
    y = torch.stack(found).transpose(1, 2).flatten(0, 1)[:tokens]
    return torch.where(live[:tokens, None, None], y, 0).to(v.dtype)


def _by_channel(rows: Tensor, keys: Tensor, total: Tensor, ids: Tensor) -> Tensor:
    """Products of rows with the keys of their document up to them, each channel decayed from key to
    row: [..., chunks, H, Q, Q], else zero. rows: [..., chunks, H, Q, K]. keys, total: without the
    first dimensions of rows. ids: [chunks, Q]."""
    chunk = ids.shape[1]
    block = math.gcd(chunk, BLOCK)
    blocks = chunk // block

    def cut(x: Tensor) -> Tensor:
        return x.unflatten(-2, (blocks, block))

    own, first = ids.unflatten(1, (blocks, block)), ids[:, ::block, None]
    begun, sums = total[..., ::block, None, :], cut(total)
    places = torch.arange(chunk, device=ids.device)
    earlier = (ids[:, None] == first) & (places < places[::block, None])  # [chunks, blocks, Q]
    down = (sums - begun).masked_fill((own != first)[:, None, ..., None], -torch.inf).exp()
    up = begun - total[..., None, :, :]
    up = up.masked_fill(~earlier[:, None, ..., None], -torch.inf).exp() * keys[..., None, :, :]
    far = (cut(rows) * down) @ up.mT  # [..., blocks, block, Q]
    same = (own[..., :, None] == own[..., None, :]).tril()[:, None, ..., None]
    apart = (sums[..., :, None, :] - sums[..., None, :, :]).masked_fill(~same, -torch.inf).exp()
    near = torch.einsum("...ik,...jk,...ijk->...ij", cut(rows), cut(keys), apart)
    diagonal = torch.eye(blocks, dtype=far.dtype, device=far.device)[:, None, :, None]
    both = far.unflatten(-1, (blocks, block)) + diagonal * near[..., None, :]
    return both.flatten(-2).flatten(-3, -2)


def naive_gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, document_ids: Tensor
) -> Tensor:
    """The specification: row by row, ids read on the host."""
    group = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    state, last, rows = v.new_zeros(v.shape[1], k.shape[2], v.shape[2]), -1, []
    for row, number in enumerate(document_ids.tolist()):
        if number < 0:
            rows.append(torch.zeros_like(v[row]))
            continue
        state = torch.zeros_like(state) if number != last else state
        last = number
        state = state * g[row].view(v.shape[1], -1, 1).exp()
        missing = v[row] - torch.einsum("hk,hkv->hv", k[row], state)
        state = state + torch.einsum("hk,hv->hkv", k[row], missing * beta[row, :, None])
        rows.append(torch.einsum("hk,hkv->hv", q[row], state))
    return torch.stack(rows)


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, document_ids: Tensor) -> None:
    if not (
        q.shape == k.shape
        and q.dim() == v.dim() == 3
        and beta.shape == v.shape[:2]
        and g.shape in (v.shape[:2], (*v.shape[:2], k.shape[2]))
        and q.shape[0] == v.shape[0] == document_ids.shape[0]
        and v.shape[1] % k.shape[1] == 0
    ):
        raise ValueError(
            f"gated_delta shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v "
            f"{tuple(v.shape)}, g {tuple(g.shape)}, beta {tuple(beta.shape)}, document_ids "
            f"{tuple(document_ids.shape)}"
        )


@torch.library.custom_op("packgraph::gated_delta", mutates_args=())
def delta_by_kernels(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, document_ids: Tensor, chunk: int
) -> Tensor:
    """Does the same as `gated_delta`, for inputs without `delta_problems`: y [T, H, V]. q and k are
    of the dtype of v."""
    return delta_forward.forward(*_for_kernels(q, k, v, g, beta), document_ids.contiguous(), chunk)


@torch.library.custom_op("packgraph::gated_delta_backward", mutates_args=())
def _delta_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    document_ids: Tensor,
    chunk: int,
) -> Gradients:
    """Gradients of q, k, v, g and beta."""
    operands = (side_by_side(grad), *_for_kernels(q, k, v, g, beta), document_ids.contiguous())
    return delta_backward.backward(*operands, chunk)


def _for_kernels(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Gradients:
    return side_by_side(q), side_by_side(k), side_by_side(v), by_rows(g), by_rows(beta)


delta_by_kernels.register_fake(lambda q, k, v, *_: v.new_empty(v.shape))
_delta_backward.register_fake(lambda grad, *all: tuple(x.new_empty(x.shape) for x in all[:5]))


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_delta_backward(grad, *ctx.saved_tensors, *ctx.constants), None, None)


delta_by_kernels.register_autograd(_differentiate, setup_context=save_inputs)
