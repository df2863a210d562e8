"""The gated delta rule on packed documents (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464).

    state = exp(g[t]) * state;  state += k[t] (outer) beta[t] * (v[t] - k[t] state);  y[t] = q[t] state

per head, with a state [K, V] that is zero before the first row of every document. Rows are cut into
chunks of Q, whatever the documents are, so all shapes are static; documents enter only as a
comparison of ids, as in mamba/ssd.py:

    in chunk  what every row writes, (I + L) u = beta (v - k decay state), by one triangular solve;
              L and the scores q k join rows of one document only
    states    the chunk's LAST document leaves them behind; rows of the document that the chunk
              before ended with read what is carried

Sums of decays start anew with every document, and exponents are masked before exp. States and sums
are float32 (float64 in float64). These are single operations; nothing waits for the host.
"""  # noqa: E501

import torch
import torch.nn.functional as F
from torch import Tensor


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
    value head h reads key head h // (Hv / Hk). g, beta: [T, Hv]; g is not positive. document_ids:
    int32 [T], -1 = padding, the rows of a document one after another. chunk: Q >= 1; the result
    does not depend on it but for rounding. What stands in padding reaches nothing. Raises
    ValueError for shapes that do not fit together.
    """
    _check(q, k, v, g, beta, document_ids)
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
    total = (joined * g[:, :, None, :]).sum(-1)  # from the document's first row in the chunk
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~joined, -torch.inf).exp()
    entered = total.masked_fill(~goes_on, -torch.inf).exp()[..., None]
    left = (total[..., -1:] - total).masked_fill(~leaves, -torch.inf).exp()[..., None]
    through = entered[..., -1, :, None]  # of the state, to the chunk's end
    written = k * beta[..., None]
    mixed = torch.eye(chunk, dtype=wide, device=v.device) + (written @ k.mT * between).tril(-1)
    solved = torch.linalg.solve_triangular(
        mixed, torch.cat((v_in * beta[..., None], written * entered), -1), upper=False
    )
    values, reads = solved.split((v.shape[2], k.shape[-1]), dim=-1)
    scores, queries, keys = q @ k.mT * between, q * entered, (k * left).mT
    state = v_in.new_zeros(v.shape[1], k.shape[-1], v.shape[2])
    found = []
    for number in range(ids.shape[0]):
        made = values[number] - reads[number] @ state
        found.append(queries[number] @ state + scores[number] @ made)
        state = through[number] * state + keys[number] @ made
    y = torch.stack(found).transpose(1, 2).flatten(0, 1)[:tokens]
    return torch.where(live[:tokens, None, None], y, 0).to(v.dtype)


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
        state = state * g[row, :, None, None].exp()
        missing = v[row] - torch.einsum("hk,hkv->hv", k[row], state)
        state = state + torch.einsum("hk,hv->hkv", k[row], missing * beta[row, :, None])
        rows.append(torch.einsum("hk,hkv->hv", q[row], state))
    return torch.stack(rows)


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, document_ids: Tensor) -> None:
    if not (
        q.shape == k.shape
        and q.dim() == v.dim() == 3
        and g.shape == beta.shape == v.shape[:2]
        and q.shape[0] == v.shape[0] == document_ids.shape[0]
        and v.shape[1] % k.shape[1] == 0
    ):
        raise ValueError(
            f"gated_delta shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v "
            f"{tuple(v.shape)}, g {tuple(g.shape)}, beta {tuple(beta.shape)}, document_ids "
            f"{tuple(document_ids.shape)}"
        )
