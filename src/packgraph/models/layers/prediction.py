"""Multi-token prediction: decoder layers behind the model that learn to predict further tokens.

Depth k reads what depth k - 1 made of token t (depth 0 is the decoder itself) and the embedding of
token t + k, and predicts token t + k + 1 with the head of the decoder:

    hidden of depth k-1 [T, H] -- hnorm --+
                                          +-- eh_proj [2H -> H] -- decoder layer -- norm -- head
    embedding of token t+k     -- enorm --+

Embedding and head are those of the decoder. Tokens and labels of other documents of the row are not
seen: the last k tokens of a document have a zero embedding and no label, and attention is causal,
so nothing that has a label depends on them.

Sources: DeepSeek-V3, arXiv:2412.19437, section 2.2; what depth k hands on is normed, as in
Megatron-Core's `MultiTokenPredictionLayer`. Names are those of DeepSeek-V3's checkpoints.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from packgraph.graphs.stages import Stage, State
from packgraph.models.config import DecoderConfig
from packgraph.models.layers.decoder import DecoderLayer
from packgraph.models.layers.mlp import RMSNorm
from packgraph.ops.linear import linear_layer


class PredictionLayer(DecoderLayer):
    """A decoder layer whose input is made of the depth before and of a later token's embedding.

    shared_head.norm stands before the head of the decoder, which has no weights here.
    """

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__(config, index)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(size, eps)
        self.hnorm = RMSNorm(size, eps)
        self.eh_proj = linear_layer(config.of_layer(index).precision, 2 * size, size)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(size, eps)})

    def stages(self) -> Sequence[Stage]:
        return [Stage("mtp_input", self.index, self.run_input), *super().stages()]

    def run_input(self, state: State) -> State:
        """Stage `mtp_input`: takes mtp_embedding [T, H] out of the state, replaces hidden."""
        parts = self.enorm(state["mtp_embedding"]), self.hnorm(state["hidden"])
        left = {key: value for key, value in state.items() if key != "mtp_embedding"}
        return {**left, "hidden": self.eh_proj(torch.cat(parts, dim=-1))}

    def normed(self, hidden: Tensor) -> Tensor:
        """Normalises this depth's hidden [T, H] for the head and the next depth."""
        return cast(Tensor, self.shared_head["norm"](hidden))


class LossSums(nn.Module):
    """Sums of the losses of each depth over the microbatches of a step, for metrics.

    losses: float32 [D] whatever the model's dtype, no part of the state_dict. Forwards of training
    add to it.
    """

    losses: Tensor

    def __init__(self, depths: int) -> None:
        super().__init__()
        self.register_buffer("losses", torch.zeros(depths), persistent=False)

    @torch.no_grad()
    def add(self, depth: int, loss: Tensor) -> None:
        """Count a loss, float32 [], of depth number `depth`."""
        self.losses[depth].add_(loss)

    @torch.no_grad()
    def take(self) -> Tensor:
        """Returns the losses that were counted, float32 [D]; counting begins anew."""
        found = self.losses.clone()
        self.losses.zero_()
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.losses
        super()._apply(fn, recurse)
        if self.losses.dtype != torch.float32:
            self.losses = before.to(self.losses.device)
        return self


def make_layer(config: DecoderConfig, index: int) -> DecoderLayer:
    """Layer `index` of a decoder; from `config.num_layers` on those of multi-token prediction."""
    return (DecoderLayer if index < config.num_layers else PredictionLayer)(config, index)


def ahead(values: Tensor, document_ids: Tensor, steps: int, fill: int | bool) -> Tensor:
    """`values` [T] of `steps` tokens later in the same document, `fill` where it has ended.

    document_ids: int32 [T]. steps: at least 0.
    """
    steps = min(steps, len(values))
    end = values.new_full((steps,), fill)
    same = document_ids[steps:] == document_ids[: len(values) - steps]
    return torch.cat((torch.where(same, values[steps:], fill), end))
