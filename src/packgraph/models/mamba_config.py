"""Shape of the Mamba-2 layers of a decoder."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MambaConfig:
    """Mamba-2 layers (Dao and Gu 2024, arXiv:2405.21060); num_heads 0 = there are none.

    num_heads: heads of the state space. head_dim: columns of a head. state: columns of a head's
    state. groups: equal groups of heads; a group has input and output projections of the state, and
    a norm, in common. conv_width: tokens that the causal convolution looks at, this one included.
    conv_bias: whether the convolution has a bias. bias: whether the first and the last projection
    have one. chunk: tokens that are worked on at once; the numbers depend on it in rounding only.
    smallest_step: time steps are at least so long. Raises ValueError that names every illegal value
    at once.
    """

    num_heads: int = 0
    head_dim: int = 64
    state: int = 128
    groups: int = 1
    conv_width: int = 4
    conv_bias: bool = True
    bias: bool = False
    chunk: int = 128
    smallest_step: float = 0.0

    def __post_init__(self) -> None:
        reasons = [
            f"{name} is {getattr(self, name)}, must not be negative"
            for name in ("num_heads", "smallest_step")
            if getattr(self, name) < 0
        ]
        reasons += [
            f"{name} is {getattr(self, name)}, must be positive"
            for name in ("head_dim", "state", "groups", "conv_width", "chunk")
            if getattr(self, name) <= 0
        ]
        if self.groups > 0 and self.num_heads % self.groups:
            reasons.append(f"num_heads {self.num_heads} is no multiple of groups {self.groups}")
        if reasons:
            raise ValueError("MambaConfig cannot be built: " + "; ".join(reasons))

    @property
    def enabled(self) -> bool:
        """Whether there may be such layers."""
        return self.num_heads > 0

    @property
    def inner(self) -> int:
        """Columns of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Columns that the convolution works on: of all heads, and of both projections of the state
        of all groups."""
        return self.inner + 2 * self.groups * self.state
