"""The SwiGLU feed-forward layer."""
from torch import Tensor, nn

from packgraph.ops.swiglu import swiglu


class GatedMLP(nn.Module):
    """[T, H] -> [T, H] through an intermediate width; projections named as in Hugging Face checkpoints."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
