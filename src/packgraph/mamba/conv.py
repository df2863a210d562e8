"""Depthwise causal convolution of packed documents, with bias and SiLU: the short convolution of
Mamba-2.

    z[t, c] = bias[c] + sum over k < K of weight[c, k] * x[t - (K - 1 - k), c]      y = silu(z) or z

A tap whose row is of another document, or before the first row, adds nothing, so documents may be
shorter than K. Rows of padding (document id -1) are 0 in y and in the gradient of x, whatever
stands there in x and in the gradient of y. Sums are float32 (float64 in float64) and rounded once.

On CUDA forward and backward are one kernel each (mamba/conv_kernel.py); elsewhere, and for what the
kernels do not take (`conv_problems`), the operations below.

`live_document_ids` makes the document ids that convolution and state space operations read: padding
is marked, not numbered.

    batch.document_ids    0 0 0 1 1 2 2 2 2 N N          document_ids    0 0 0 1 1 2 2 2 2 -1 -1

These operations ask two things of a row: is it padding (its id is negative), and does another row
belong to the same document (their ids are equal). So numbers may start anywhere and leave out
documents without tokens, but the rows of a document must follow one another in the document's
order.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from packgraph.ops.triton_found import HAS_TRITON
from packgraph.packing.batch import PackedBatch

MOST_TAPS = 4  # Mamba-2 has four


def live_document_ids(batch: PackedBatch) -> Tensor:
    """int32 [T]: number of each row's document, -1 in padding. One kernel: make it once per
    microbatch, for all layers.

    batch: anything with the fields `document_ids` (int32 [T]) and `padding_mask` (bool [T]).
    """
    return batch.document_ids.masked_fill(batch.padding_mask, -1)


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
    if not conv_problems(x.device, x.dtype, weight.shape[1]):
        from packgraph.mamba.conv_kernel import convolve

        return convolve(x, weight, bias, document_ids, activation)
    return plain_packed_causal_conv(x, weight, bias, document_ids, activation)


def conv_problems(device: torch.device, dtype: torch.dtype, taps: int) -> list[str]:
    """Returns reasons why the kernels cannot compute the convolution; empty if they can."""
    found = []
    if not HAS_TRITON:
        found.append("Triton is not installed")
    if device.type != "cuda":
        found.append(f"the kernels run on CUDA, not on {device.type}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        found.append(f"the kernels take float32, bfloat16 and float16, not {dtype}")
    if taps > MOST_TAPS:
        found.append(f"the kernels take up to {MOST_TAPS} taps, not {taps}")
    return found


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
