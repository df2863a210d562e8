"""A decoder as a list of stages: embedding, layers, head. The layers bring their own stages.

    begin -> embed (-1) -> layer 0's stages -> ... -> layer L-1's stages -> head (L) -> end

State: batch and tokens_in_step from `begin`; hidden [T, H], rotary (cos, sin) and attention (metadata) from
`embed`; the head leaves loss alone. Padding rows of hidden start as exact zeros, so that nothing a padding
token holds reaches a result, and stay finite from there on.
"""
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packgraph.models.config import DenseConfig
from packgraph.models.layers.norm import RMSNorm
from packgraph.models.layers.rotary import RotaryEmbedding
from packgraph.ops.attention import attention_metadata, choose_backend
from packgraph.ops.loss import linear_cross_entropy, token_count
from packgraph.packing.batch import PackedBatch
from packgraph.plan.stages import Stage, State, run_stages


class StagedLayer(Protocol):
    """A decoder layer that lists its stages, in order."""

    def stages(self) -> Sequence[Stage]: ...


class DecoderStack(nn.Module):
    """Embedding, layers and head of a decoder over packed microbatches; implements `plan.stages.Staged`.

    config: sizes and options. layers: modules that are StagedLayers. Parameters are named as in Hugging Face
    checkpoints without the leading `model.`; with tied embeddings there is no `lm_head`.
    """

    def __init__(self, config: DenseConfig, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta)

    @property
    def head_weight(self) -> Tensor:
        """The [V, H] matrix of the head."""
        return self.embed_tokens.weight if self.config.tie_embeddings else self.lm_head.weight

    def begin(self, batch: PackedBatch, tokens_in_step: Tensor | None = None) -> State:
        return {"batch": batch, "tokens_in_step": tokens_in_step}

    def stages(self) -> Sequence[Stage]:
        inner = [stage for layer in self.layers for stage in layer.stages()]  # type: ignore[operator]
        return [Stage("embed", -1, self.run_embed), *inner, Stage("head", len(self.layers), self.run_head)]

    def end(self, state: State) -> Tensor:
        return state["loss"]

    def forward(self, batch: PackedBatch, tokens_in_step: Tensor | None = None) -> Tensor:
        """Sum of the token losses of `batch` divided by `tokens_in_step`: 0-d float32.

        tokens_in_step: 0-d int64 or float32 on the batch's device, the labels that count in the whole step;
        None takes this batch's own count. A count of 0 divides by 1.
        """
        return run_stages(self, batch, tokens_in_step)

    def logits(self, batch: PackedBatch) -> Tensor:
        """Logits [T, V] of all rows; those of padding rows mean nothing but are finite."""
        state = self.begin(batch)
        for stage in self.stages()[:-1]:
            state = stage.run(state)
        return F.linear(self.norm(state["hidden"]), self.head_weight)

    def run_embed(self, state: State) -> State:
        """Stage `embed`: token embeddings, zero in padding; rotary tables; attention metadata."""
        batch = state["batch"]
        embedded: Tensor = self.embed_tokens(batch.tokens)
        hidden = embedded.masked_fill(batch.padding_mask[:, None], 0.0)
        rotary = self.rotary(batch.position_ids, hidden.dtype)
        return {**state, "hidden": hidden, "rotary": rotary,
                "attention": attention_metadata(batch, self._backend(hidden))}

    def run_head(self, state: State) -> State:
        """Stage `head`: final norm, logits and loss; nothing but the loss is left in the state."""
        labels = state["batch"].labels
        total = linear_cross_entropy(self.norm(state["hidden"]), self.head_weight, labels)
        tokens = state["tokens_in_step"]
        tokens = token_count(labels) if tokens is None else tokens
        return {"loss": total / tokens.clamp(min=1)}

    def reset_parameters(self, seed: int) -> None:
        """Normal matrices, norms of one, biases of zero; the same for a seed on every device."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() < 2:
                    continue
                fresh = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                parameter.copy_(fresh.normal_(0.0, self.config.initializer_range, generator=generator))
            for module in self.modules():
                if isinstance(module, RMSNorm):
                    module.weight.fill_(1.0)
                elif isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()

    def _backend(self, hidden: Tensor) -> str:
        if self.config.attention_backend != "auto":
            return self.config.attention_backend
        device, dtype = hidden.device, hidden.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        return choose_backend(device, dtype)

    def extra_repr(self) -> str:
        fields: dict[str, Any] = vars(self.config)
        return ", ".join(f"{name}={value}" for name, value in fields.items())
