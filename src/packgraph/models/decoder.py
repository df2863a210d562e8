"""Decoders by their config: a stack of layers, whole or one pipeline stage of it."""
from collections.abc import Collection, Iterable, Sequence

import torch

from packgraph.models.config import DecoderConfig
from packgraph.models.layers.decoder import DecoderLayer
from packgraph.models.sizes import token_weights
from packgraph.models.stack import DecoderStack
from packgraph.plan.chunks import split_layers
from packgraph.plan.stages import Stage

__all__ = ["DecoderConfig", "DecoderModel", "named_stages", "parts_without"]


class DecoderModel(DecoderStack):
    """Decoder with stages `embed`, those of every layer (such as `attn` and `mlp`), `head`; see DecoderStack for calls.

    stage, stages: which part of the decoder this is when it is cut into that many pipeline stages; a part has the
    names and the fresh values that its parameters have in the whole.
    seed: of the fresh parameters; torch's own generators are not touched. device: torch's default one when
    None. dtype: of the parameters, default float32.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        stage: int = 0,
        stages: int = 1,
    ) -> None:
        target = torch.get_default_device() if device is None else torch.device(device)
        with torch.device("meta"):  # torch's own initialisation would draw from the global generator
            indices = split_layers(config.num_layers, stages, head_cost(config))[stage]
            layers = {index: DecoderLayer(config, index) for index in indices}
            super().__init__(config, layers, first=stage == 0, last=stage == stages - 1)
        self.to(dtype).to_empty(device=target)
        self.reset_parameters(seed)


def head_cost(config: DecoderConfig) -> float:
    """Work of the head in layers: the ratio of the weights that a token uses. All layers count alike."""
    return config.hidden_size * config.vocab_size / (token_weights(config) / config.num_layers)


def named_stages(config: DecoderConfig) -> Sequence[Stage]:
    """Every stage name that a decoder of `config` has, without its weights: those of one layer of each kind."""
    with torch.device("meta"):
        indices = _one_of_each_kind(config, range(config.num_layers))
        return DecoderStack(config, {index: DecoderLayer(config, index) for index in indices}).stages()


def parts_without(config: DecoderConfig, parts: int, names: Collection[str]) -> list[int]:
    """Which of `parts` pipeline stages of a decoder have no stage of these names; without weights, as above."""
    found = []
    with torch.device("meta"):
        for number, indices in enumerate(split_layers(config.num_layers, parts, head_cost(config))):
            layers = {index: DecoderLayer(config, index) for index in _one_of_each_kind(config, indices)}
            stack = DecoderStack(config, layers, first=number == 0, last=number == parts - 1)
            if not any(stage.name in names for stage in stack.stages()):
                found.append(number)
    return found


def _one_of_each_kind(config: DecoderConfig, indices: Iterable[int]) -> list[int]:
    """The first of `indices` whose layer has certain branches, for all that there are; in order."""
    kinds = {config.branches(index): index for index in sorted(indices, reverse=True)}
    return sorted(kinds.values())
