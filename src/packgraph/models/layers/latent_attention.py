"""Multi-head latent attention (MLA): keys and values of all heads from one small vector per token.

    x --(q_a_proj, norm, q_b_proj | q_proj)--> queries [T, heads, nope + rope]
    x --kv_a_proj_with_mqa--> latent [T, kv_rank] | shared [T, rope]
        latent --norm, kv_b_proj--> [T, heads, nope | value]         keys = nope | shared, turned, for every head

The queries' rope columns and the shared ones are turned by the position. Source: DeepSeek-V2,
arXiv:2405.04434. The numbers are those of DeepseekV3Attention in transformers.
"""  # noqa: E501

from typing import ClassVar

import torch
from torch import Tensor, nn

from packgraph.models.config import DecoderConfig
from packgraph.models.layers.norm import RMSNorm
from packgraph.offloading.marks import Mark, offload_block
from packgraph.ops.attention.api import AttentionMetadata, attention
from packgraph.ops.rotary import apply_rotary

LATENT_EPS = 1e-6  # of both norms inside, whatever rms_norm_eps is: so the models were trained


class LatentAttention(nn.Module):
    """[T, H] -> [T, H]; projections are named as in Hugging Face checkpoints."""

    reads: ClassVar = ("rotary", "attention")

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        shape, hidden, bias = config.latent, config.hidden_size, config.attention_bias
        self.shape, self.heads = shape, config.num_heads
        queries = config.num_heads * shape.query_dim
        if shape.query_rank:
            self.q_a_proj = nn.Linear(hidden, shape.query_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(shape.query_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(shape.query_rank, queries, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, shape.kv_rank + shape.rope_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(shape.kv_rank, LATENT_EPS)
        self.kv_b_proj = nn.Linear(
            shape.kv_rank, config.num_heads * (shape.nope_dim + shape.value_dim), bias=False
        )
        self.o_proj = nn.Linear(config.num_heads * shape.value_dim, hidden, bias=bias)
        self.first = "q_a_proj" if shape.query_rank else "q_proj"
        self.scale = shape.query_dim**-0.5 * shape.scaling.score_factor
        self.offload: Mark = offload_block

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], metadata: AttentionMetadata
    ) -> Tensor:
        """x: [T, H]; rotary: cos and sin [T, rope_dim]. Returns [T, H]."""
        with self.offload("qkv_linear", leave=rotary):
            q, k, v = self._project(x, rotary)
        with self.offload("core_attn", leave=metadata):
            out = attention(q, k, v, metadata, scale=self.scale).flatten(1)
        with self.offload("attn_proj"):
            return self.o_proj(out)

    def _project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [T, heads, nope + rope] and values [T, heads, value]."""
        shape = self.shape
        queries, latent = getattr(self, self.first)(x), self.kv_a_proj_with_mqa(x)
        if shape.query_rank:
            queries = self.q_b_proj(self.q_a_layernorm(queries))
        latent, shared = latent.split((shape.kv_rank, shape.rope_dim), dim=-1)
        q_nope, q_rope = queries.unflatten(-1, (self.heads, -1)).split(
            (shape.nope_dim, shape.rope_dim), dim=-1
        )
        k_nope, v = (
            self.kv_b_proj(self.kv_a_layernorm(latent))
            .unflatten(-1, (self.heads, -1))
            .split((shape.nope_dim, shape.value_dim), dim=-1)
        )
        q_rope, k_rope = apply_rotary(
            q_rope, shared[:, None, :], *rotary, interleaved=shape.interleaved
        )
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, self.heads, -1)), dim=-1)
        # A view would keep the columns of k_nope alive until the backward, which k holds already.
        return q, k, v.contiguous()
