"""Shape of multi-head latent attention (MLA), as in DeepSeek-V2 and V3."""
from dataclasses import dataclass


@dataclass(frozen=True)
class LatentConfig:
    """Keys and values made of one small latent vector per token; kv_rank 0 = none, grouped-query attention instead.

    kv_rank: columns of the latent. query_rank: columns that queries are made of, 0 = made of the hidden state itself.
    nope_dim, rope_dim: columns of a head's queries and keys without and with rotary positions; the keys' rotary columns
    are one for all heads. value_dim: columns of a head's values.
    Raises ValueError that names every illegal value at once. Source: DeepSeek-V2, arXiv 2405.04434.
    """

    kv_rank: int = 0
    query_rank: int = 0
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128

    def __post_init__(self) -> None:
        reasons = [f"{name} is {getattr(self, name)}, must not be negative" for name in ("kv_rank", "query_rank")
                   if getattr(self, name) < 0]
        reasons += [f"{name} is {getattr(self, name)}, must be positive"
                    for name in ("nope_dim", "rope_dim", "value_dim") if getattr(self, name) <= 0]
        if self.rope_dim % 2:
            reasons.append(f"rope_dim {self.rope_dim} is odd; rotary embedding turns pairs of columns")
        if reasons:
            raise ValueError("LatentConfig cannot be built: " + "; ".join(reasons))

    @property
    def enabled(self) -> bool:
        """Whether the decoder has latent attention."""
        return self.kv_rank > 0

    @property
    def query_dim(self) -> int:
        """Columns of a head's queries and keys."""
        return self.nope_dim + self.rope_dim
