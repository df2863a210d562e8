"""Grouped-query attention with rotary positions and normalised queries and keys, as in Qwen3."""

from typing import ClassVar

from torch import Tensor, nn

from packgraph.models.config import DecoderConfig
from packgraph.models.layers.norm import RMSNorm
from packgraph.offloading.marks import Mark, offload_block
from packgraph.ops.attention.api import AttentionMetadata, attention
from packgraph.ops.rotary import apply_rotary


class GroupedQueryAttention(nn.Module):
    """[T, H] -> [T, H]; projections are named as in Hugging Face checkpoints."""

    reads: ClassVar = ("rotary", "attention")

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)
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
            parts = self.q_proj(x), self.k_proj(x), self.v_proj(x)
            q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
            q, k = apply_rotary(self.q_norm(q), self.k_norm(k), *rotary)
        with self.offload("core_attn", leave=metadata):
            out = attention(q, k, v, metadata).flatten(1)
        with self.offload("attn_proj"):
            return self.o_proj(out)
