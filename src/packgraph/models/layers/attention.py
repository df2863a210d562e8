"""The attention of decoder layers: grouped queries as in Qwen3, or multi-head latent attention, and
the rotary frequencies that both read.

Multi-head latent attention (MLA) makes keys and values of all heads from one small vector per
token:

    x --(q_a_proj, norm, q_b_proj | q_proj)--> queries [T, heads, nope + rope]
    x --kv_a_proj_with_mqa--> latent [T, kv_rank] | shared [T, rope]
        latent --norm, kv_b_proj--> [T, heads, nope | value]         keys = nope | shared, turned, for every head

The queries' rope columns and the shared ones are turned by the position. Source: DeepSeek-V2,
arXiv:2405.04434. The numbers are those of DeepseekV3Attention in transformers.

A captured graph reads the buffer by its address, so it belongs to the model. Casting a model to
bfloat16 would round the frequencies and with them every position, so they are made anew whenever
the buffer would be converted or moved.
"""  # noqa: E501

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from packgraph.models.config import DecoderConfig, RopeScaling
from packgraph.models.layers.mlp import RMSNorm
from packgraph.offloading.marks import Mark, offload_block
from packgraph.ops.attention.api import AttentionMetadata, attention
from packgraph.ops.elementwise import (
    apply_rotary,
    inverse_frequencies,
    rotary_tables,
    stretched_frequencies,
)
from packgraph.ops.heads import turned_heads, turns_heads
from packgraph.ops.linear import is_plain, linear_layer, merged

LATENT_EPS = 1e-6  # of both norms inside, whatever rms_norm_eps is: so the models were trained


class RotaryEmbedding(nn.Module):
    """Cosines and sines for positions; `inv_freq` is float32 [head_dim / 2] and no part of the
    state_dict."""

    inv_freq: Tensor

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = RopeScaling() if scaling is None else scaling
        self.register_buffer("inv_freq", self._frequencies(), persistent=False)

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """position_ids: int [T]. Returns cos and sin, each [T, head_dim] of `dtype`."""
        return rotary_tables(position_ids, self.inv_freq, dtype, self.scaling.table_factor)

    def _frequencies(self) -> Tensor:
        scaling = self.scaling
        if not scaling.enabled:
            return inverse_frequencies(self.head_dim, self.theta)
        return stretched_frequencies(
            self.head_dim,
            self.theta,
            scaling.factor,
            scaling.original_positions,
            scaling.beta_fast,
            scaling.beta_slow,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq is not before:
            self.inv_freq = self._frequencies().to(self.inv_freq.device)
        return self


class GroupedQueryAttention(nn.Module):
    """[T, H] -> [T, H]; projections are named as in Hugging Face checkpoints."""

    reads: ClassVar = ("rotary", "attention")

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, by, bias = config.hidden_size, config.precision, config.attention_bias
        self.q_proj = linear_layer(by, hidden, queries, bias)
        self.k_proj = linear_layer(by, hidden, keys, bias)
        self.v_proj = linear_layer(by, hidden, keys, bias)
        self.o_proj = linear_layer(by, queries, hidden, bias)
        self.q_norm = (
            RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        )
        self.k_norm = (
            RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        )
        self.offload: Mark = offload_block

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], metadata: AttentionMetadata
    ) -> Tensor:
        """x: [T, H]; rotary: cos and sin [T, head_dim]. Returns [T, H]."""
        with self.offload("qkv_linear", leave=rotary):
            parts = merged(x, self.q_proj, self.k_proj, self.v_proj)
            q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
            q, k = self._turned(q, k, rotary)
        with self.offload("core_attn", leave=metadata):
            out = attention(q, k, v, metadata).flatten(1)
        with self.offload("attn_proj"):
            return self.o_proj(out)

    def _turned(
        self, q: Tensor, k: Tensor, rotary: tuple[Tensor, Tensor] | tuple[()]
    ) -> tuple[Tensor, Tensor]:
        """Heads of queries and keys, normalised and rotated: by one operation where `ops/heads.py`
        chooses it and nothing but the norms wants to see them."""
        of_q, of_k = self.q_norm, self.k_norm
        if rotary and is_plain(of_q, RMSNorm) and is_plain(of_k, RMSNorm):
            weights = of_q.weight, of_k.weight
            if of_q.eps == of_k.eps and turns_heads(q, k, weights, rotary):
                return turned_heads(q, k, weights, of_q.eps, rotary)
        return apply_rotary(of_q(q), of_k(k), *rotary)


class LatentAttention(nn.Module):
    """[T, H] -> [T, H]; projections are named as in Hugging Face checkpoints."""

    reads: ClassVar = ("rotary", "attention")

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        shape, hidden, bias = config.latent, config.hidden_size, config.attention_bias
        self.shape, self.heads, by = shape, config.num_heads, config.precision
        queries = config.num_heads * shape.query_dim
        if shape.query_rank:
            self.q_a_proj = linear_layer(by, hidden, shape.query_rank, bias)
            self.q_a_layernorm = RMSNorm(shape.query_rank, LATENT_EPS)
            self.q_b_proj = linear_layer(by, shape.query_rank, queries)
        else:
            self.q_proj = linear_layer(by, hidden, queries)
        self.kv_a_proj_with_mqa = linear_layer(by, hidden, shape.kv_rank + shape.rope_dim, bias)
        self.kv_a_layernorm = RMSNorm(shape.kv_rank, LATENT_EPS)
        self.kv_b_proj = linear_layer(
            by, shape.kv_rank, config.num_heads * (shape.nope_dim + shape.value_dim)
        )
        self.o_proj = linear_layer(by, config.num_heads * shape.value_dim, hidden, bias)
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
        queries, latent = merged(x, getattr(self, self.first), self.kv_a_proj_with_mqa)
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
