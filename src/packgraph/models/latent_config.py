"""Shape of multi-head latent attention (MLA), as in DeepSeek-V2 and V3, and how its positions are
scaled."""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RopeScaling:
    """Rotary positions stretched to longer documents than a model was trained on first (YaRN);
    factor 1 = they are not.

    factor: how many times as long. original_positions: tokens of the longest documents of the first
    training. beta_fast: columns that turn at least so many times within these stay as they are.
    beta_slow: columns that turn at most so many times within these are slowed down by the factor,
    those between by a part of it. mscale: growth of cosines and sines with the factor's logarithm,
    if the next one is given, too; 0 = not given. mscale_all_dim: growth of scores with the factor's
    logarithm, by which cosines and sines are divided; 0 = not given. Raises ValueError that names
    every illegal value at once. Source: YaRN, arXiv 2309.00071; DeepSeek-V2, arXiv 2405.04434,
    section 3.1.4.
    """

    factor: float = 1.0
    original_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        reasons = [
            f"{name} is {getattr(self, name)}, must be positive"
            for name in ("original_positions", "beta_fast", "beta_slow")
            if getattr(self, name) <= 0
        ]
        reasons += [
            f"{name} is {getattr(self, name)}, must not be negative"
            for name in ("mscale", "mscale_all_dim")
            if getattr(self, name) < 0
        ]
        if self.factor < 1.0:
            reasons.append(f"factor is {self.factor}, must be at least 1")
        if 0 < self.beta_fast < self.beta_slow:
            reasons.append(f"beta_fast {self.beta_fast} is less than beta_slow {self.beta_slow}")
        if reasons:
            raise ValueError("RopeScaling cannot be built: " + "; ".join(reasons))

    @property
    def enabled(self) -> bool:
        """Whether positions are scaled."""
        return self.factor > 1.0

    @property
    def table_factor(self) -> float:
        """Factor on cosines and sines."""
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def score_factor(self) -> float:
        """Factor on the scale of the scores, beside that of the tables."""
        return self._growth(self.mscale_all_dim) ** 2

    def _growth(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class LatentConfig:
    """Keys and values made of one small latent vector per token; kv_rank 0 = none, grouped-query
    attention instead.

    kv_rank: columns of the latent. query_rank: columns that queries are made of, 0 = made of the
    hidden state itself. nope_dim: columns of a head's queries and keys without rotary positions.
    rope_dim: columns of them with rotary positions; the keys' are one for all heads. value_dim:
    columns of a head's values. interleaved: rotary positions turn columns 2i and 2i + 1, not i and
    i + rope_dim / 2. scaling: of rotary positions. Raises ValueError that names every illegal value
    at once. Source: DeepSeek-V2, arXiv 2405.04434.
    """

    kv_rank: int = 0
    query_rank: int = 0
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    interleaved: bool = True
    scaling: RopeScaling = field(default_factory=RopeScaling)

    def __post_init__(self) -> None:
        reasons = [
            f"{name} is {getattr(self, name)}, must not be negative"
            for name in ("kv_rank", "query_rank")
            if getattr(self, name) < 0
        ]
        reasons += [
            f"{name} is {getattr(self, name)}, must be positive"
            for name in ("nope_dim", "rope_dim", "value_dim")
            if getattr(self, name) <= 0
        ]
        if self.rope_dim % 2:
            reasons.append(
                f"rope_dim {self.rope_dim} is odd; rotary embedding turns pairs of columns"
            )
        if self.scaling.enabled and not self.enabled:
            reasons.append(
                f"scaling.factor is {self.scaling.factor}, but without kv_rank positions cannot be "
                "scaled"
            )
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
