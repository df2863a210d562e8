"""Mamba-2: a state space that reads documents token by token, computed in chunks (Dao and Gu 2024,
arXiv:2405.21060).

    x --in_proj--> gate | columns | steps
        columns --conv1d, SiLU--> heads' inputs x | into the state B | out of the state C
        steps   --+ dt_bias, softplus--> dt
        state <- state * exp(dt * A) + dt * x B;  y = state C + D x            (A = -exp(A_log))
    y, gate --gated norm, out_proj--> [T, H]

Convolution and state begin anew with every document. The numbers are those of the Mamba-2 mixers in
transformers. With rows spread over ranks, both work on all rows of some heads (mamba/heads.py),
everything else on a rank's rows.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packgraph.mamba.conv import packed_causal_conv
from packgraph.mamba.gated_norm import gated_rms_norm
from packgraph.mamba.heads import own_channels, own_heads, whole_scan_rows
from packgraph.mamba.shape import ScanShape
from packgraph.mamba.ssd import ssd
from packgraph.models.config import DecoderConfig
from packgraph.offloading.marks import Mark, offload_block
from packgraph.ops.attention.context import ContextGroup, own_heads_back
from packgraph.ops.linear import linear_layer

# As the models of the paper begin: decay per unit of time, and length of a time step.
FIRST_DECAY, FIRST_STEP, LEAST_FIRST_STEP = (1.0, 16.0), (1e-3, 1e-1), 1e-4


class GatedNorm(nn.Module):
    """norm(x * silu(gate)) over equal groups of columns, scaled by `weight` [size]."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups, self.eps = groups, eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate: [T, size]. Returns [T, size]."""
        return gated_rms_norm(x, gate, self.weight, self.eps, self.groups)


class MambaMixer(nn.Module):
    """[T, H] -> [T, H]; parameters are named as in Hugging Face checkpoints.

    A_log, D, dt_bias: [heads], float32 whatever the model's dtype (float64 in float64): decays are
    exponentials of exponentials of them.
    """

    reads: ClassVar = ("documents", "context")

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        shape = config.mamba
        self.shape = ScanShape(shape.num_heads, shape.head_dim, shape.groups, shape.state)
        self.chunk, self.smallest_step = shape.chunk, shape.smallest_step
        self.columns = (shape.inner, shape.channels, shape.num_heads)
        self.in_proj = linear_layer(
            config.precision, config.hidden_size, sum(self.columns), shape.bias
        )
        # Holds the parameters; it is never called, since it knows no documents.
        self.conv1d = nn.Conv1d(
            shape.channels,
            shape.channels,
            shape.conv_width,
            groups=shape.channels,
            bias=shape.conv_bias,
        )
        self.A_log, self.D, self.dt_bias = (
            nn.Parameter(torch.empty(shape.num_heads, dtype=torch.float32)) for _ in range(3)
        )
        self.norm = GatedNorm(shape.inner, shape.groups, config.rms_norm_eps)
        self.offload: Mark = offload_block
        self.out_proj = linear_layer(config.precision, shape.inner, config.hidden_size, shape.bias)

    def forward(
        self, x: Tensor, document_ids: Tensor, context: ContextGroup | None = None
    ) -> Tensor:
        """x: [T, H], this rank's rows; document_ids: int32 [T of all ranks], -1 in padding. Returns
        [T, H]."""
        with self.offload("mamba_scan", leave=document_ids):
            gate, columns, steps = self.in_proj(x).split(self.columns, dim=-1)
            columns, steps, shape = whole_scan_rows(columns, steps, self.shape, context)
            y = self._scan(columns, steps, document_ids, shape, context)
            y = own_heads_back(y, context)
            return self.out_proj(self.norm(y.flatten(1), gate))

    def _scan(
        self,
        columns: Tensor,
        steps: Tensor,
        document_ids: Tensor,
        shape: ScanShape,
        context: ContextGroup | None,
    ) -> Tensor:
        """Convolution and state space: [T, heads, head_dim], of whole documents.

        columns: [T, channels]; steps: [T, heads], of the heads in `shape`, this rank's.
        """
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        weight = own_channels(weight, self.shape, context)
        bias = None if bias is None else own_channels(bias, self.shape, context)
        mixed = packed_causal_conv(columns, weight, bias, document_ids)
        into = shape.groups * shape.state
        heads, b, c = mixed.split((shape.heads * shape.head_dim, into, into), dim=-1)
        dt = F.softplus(steps.to(self.dt_bias.dtype) + own_heads(self.dt_bias, context))
        if self.smallest_step:
            dt = dt.clamp(min=self.smallest_step)
        b, c = (part.unflatten(-1, (shape.groups, shape.state)) for part in (b, c))
        return ssd(
            heads.unflatten(-1, (shape.heads, shape.head_dim)),
            dt,
            -own_heads(self.A_log, context).exp(),
            b,
            c,
            own_heads(self.D, context),
            document_ids,
            self.chunk,
        )

    @torch.no_grad()
    def draw_parameters(self, generator: torch.Generator) -> None:
        """Fresh values of what is no matrix, drawn on the generator's device: see FIRST_DECAY and
        FIRST_STEP."""

        def uniform(like: Tensor, low: float, high: float) -> Tensor:
            drawn = torch.empty(like.shape, dtype=torch.float32, device=generator.device)
            return drawn.uniform_(low, high, generator=generator)

        self.A_log.copy_(uniform(self.A_log, *FIRST_DECAY).log())
        self.D.fill_(1.0)
        step = (
            uniform(self.dt_bias, *(math.log(end) for end in FIRST_STEP))
            .exp()
            .clamp(min=LEAST_FIRST_STEP)
        )
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus of it is the step
        bound = self.conv1d.weight.shape[-1] ** -0.5
        self.conv1d.weight.copy_(uniform(self.conv1d.weight, -bound, bound))
        if self.conv1d.bias is not None:
            self.conv1d.bias.zero_()
        self.norm.weight.fill_(1.0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def exact(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            return made if made.dtype in (torch.float32, torch.float64) else tensor.to(made.device)

        for child in self.children() if recurse else ():
            child._apply(fn)
        return super()._apply(exact, recurse=False)
