"""The dense decoder of the Qwen3 family: a stack of dense layers."""
import torch

from packgraph.models.config import DenseConfig
from packgraph.models.layers.decoder import DenseLayer
from packgraph.models.stack import DecoderStack

__all__ = ["DenseConfig", "DenseModel"]


class DenseModel(DecoderStack):
    """Decoder with stages `embed`, `attn` and `mlp` of every layer, `head`; see DecoderStack for its calls.

    seed: of the fresh parameters; torch's own generators are not touched. device: torch's default one when
    None. dtype: of the parameters, default float32.
    """

    def __init__(
        self,
        config: DenseConfig,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        target = torch.get_default_device() if device is None else torch.device(device)
        with torch.device("meta"):  # torch's own initialisation would draw from the global generator
            super().__init__(config, [DenseLayer(config, index) for index in range(config.num_layers)])
        self.to(dtype).to_empty(device=target)
        self.reset_parameters(seed)
