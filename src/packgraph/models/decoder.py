"""Decoders by their config: a stack of layers, whole, one pipeline stage of it, or the stages that
one rank holds (`ModelChunks`).

    2 ranks, 2 chunks each    rank 0: stages 0 and 2    rank 1: stages 1 and 3

The invariant: every parameter has the name that it has in the whole decoder, so whatever is stored
by name (fresh values, checkpoints, optimizer state) does not depend on how the decoder was cut.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from packgraph.graphs.stages import Stage, in_scope
from packgraph.models.branches import head_cost, layer_cost
from packgraph.models.config import DecoderConfig
from packgraph.models.layers.prediction import make_layer
from packgraph.models.stack import DecoderStack
from packgraph.models.values import fill_normal
from packgraph.parallel.deferred import defer, set_aside
from packgraph.parallel.expert import keep_experts
from packgraph.parallel.pieces import mark_part, part_of, stored
from packgraph.parallel.pipeline.chunks import split_layers

__all__ = [
    "DecoderConfig",
    "DecoderModel",
    "ModelChunks",
    "layer_kind",
    "layer_matrices",
    "named_stages",
    "parts_without",
    "stage_layers",
    "stage_weights",
]
TOKENS = 4096  # of a row, where nobody says it


class DecoderModel(DecoderStack):
    """Decoder with stages `embed`, those of every layer (such as `attn` and `mlp`), `head`; see
    DecoderStack for calls.

    stage, stages: which part of the decoder this is when it is cut into that many pipeline stages;
    a part has the names and the fresh values that its parameters have in the whole. tokens: for
    which it is cut, see `stage_layers`. experts: those of every layer that have memory here,
    default all; `split_experts` must follow with the same. seed: of the fresh parameters; torch's
    own generators are not touched. device: torch's default one when None. dtype: of the parameters,
    default float32. deferred: matrices have no memory until flat buffers give them some
    (`parallel/deferred.py`).
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
        tokens: int = TOKENS,
        experts: range | None = None,
        deferred: bool = False,
    ) -> None:
        target = torch.get_default_device() if device is None else torch.device(device)
        with torch.device(
            "meta"
        ):  # torch's own initialisation would draw from the global generator
            indices = stage_layers(config, stages, tokens)[stage]
            layers = {index: make_layer(config, index) for index in indices}
            super().__init__(config, layers, first=stage == 0, last=stage == stages - 1)
            if experts is not None:
                keep_experts(self, experts)
        parts = {
            name: part
            for name, parameter in self.named_parameters()
            if (part := part_of(parameter)) is not None
        }
        self.to(dtype)
        matrices = self.normal_parameters() if deferred else {}
        with set_aside(self, matrices):
            self.to_empty(device=target)
        scale = config.initializer_range
        values = {
            name: partial(fill_normal, name, parts.get(name, matrix).shape, seed, scale)
            for name, matrix in matrices.items()
        }
        defer(self, values, target)
        for name, part in parts.items():
            mark_part(self.get_parameter(name), part)
        self.reset_parameters(seed)


def stage_layers(config: DecoderConfig, stages: int, tokens: int = TOKENS) -> tuple[range, ...]:
    """The layers of each of so many pipeline stages, cut by what layers and head are estimated to
    cost.

    tokens: that meet one copy of a layer's weights in a microbatch: those of a rank's row, times
    the ranks that share experts. With few of them experts cost what reading them does; layers that
    are all alike are cut the same anyway. Those of multi-token prediction are the last stage's, as
    the head is, through which they all go.
    """
    costs = [layer_cost(config, index, tokens) for index in range(config.num_layers)]
    *others, last = split_layers(costs, stages, head_cost(config, tokens))
    return (*others, range(last.start, config.depth))


@lru_cache(maxsize=1024)
def stage_weights(
    config: DecoderConfig,
    stage: int,
    stages: int,
    tokens: int = TOKENS,
    experts: range | None = None,
) -> tuple[int, int, int]:
    """Elements of the parameters of one of so many stages, those of experts that ranks share apart,
    and its layers.

    experts: those of every layer that have memory here, None = all, and ranks share none. Allocates
    nothing.
    """
    indices = stage_layers(config, stages, tokens)[stage]
    stack = _skeleton(config, indices, first=stage == 0, last=stage == stages - 1)
    if experts is not None:
        keep_experts(stack, experts)
    shared = sum(value.numel() for value in stack.parameters() if part_of(value) is not None)
    return sum(value.numel() for value in stack.parameters()) - shared, shared, len(indices)


@lru_cache
def layer_matrices(config: DecoderConfig) -> list[tuple[int, int]]:
    """Elements of the matrices of each layer, those of its experts apart. Allocates nothing."""
    sizes = {}
    few = _one_of_each_kind(config, range(config.depth))
    for index, layer in _skeleton(config, few).layers.items():
        keep_experts(layer, range(config.experts.count))
        matrices = [value for value in layer.parameters() if value.ndim >= 2]
        experts = sum(value.numel() for value in matrices if part_of(value) is not None)
        whole = sum(value.numel() for value in matrices)
        sizes[layer_kind(config, int(index))] = (whole - experts, experts)
    return [sizes[layer_kind(config, index)] for index in range(config.depth)]


@lru_cache
def end_units(config: DecoderConfig) -> int:
    """Number of units (embedding, head) that are sharded as layers are: none where several stages
    read one matrix."""
    return len(_skeleton(config, ()).ends)


@lru_cache(maxsize=16)  # layers come with stages
def named_stages(config: DecoderConfig) -> Sequence[Stage]:
    """Every stage name that a decoder of `config` has, without its weights: those of one layer of
    each kind."""
    return tuple(_skeleton(config, _one_of_each_kind(config, range(config.depth))).stages())


def parts_without(
    config: DecoderConfig, parts: int, scope: Collection[str], tokens: int = TOKENS
) -> list[int]:
    """Numbers of those `parts` pipeline stages of a decoder, cut for `tokens`, that have no stage
    in `scope`; as above."""
    found = []
    for number, indices in enumerate(stage_layers(config, parts, tokens)):
        few, last = _one_of_each_kind(config, indices), number == parts - 1
        stack = _skeleton(config, few, first=number == 0, last=last)
        if not any(in_scope(stage.name, scope) for stage in stack.stages()):
            found.append(number)
    return found


def _skeleton(config: DecoderConfig, indices: Iterable[int], **ends: bool) -> DecoderStack:
    """These layers of a decoder, without memory. ends: `first` and `last` of `DecoderStack`."""
    with torch.device("meta"):
        layers = {index: make_layer(config, index) for index in indices}
        return DecoderStack(config, layers, **ends)


def _one_of_each_kind(config: DecoderConfig, indices: Iterable[int]) -> list[int]:
    """The first of `indices` whose layer is of some kind, for all that there are; in order."""
    kinds = {layer_kind(config, index): index for index in sorted(indices, reverse=True)}
    return sorted(kinds.values())


def layer_kind(config: DecoderConfig, index: int) -> tuple[tuple[str, ...], bool]:
    """The branches of a layer, and whether it is one of multi-token prediction."""
    return config.branches(index), index >= config.num_layers


class ModelChunks:
    """The modules of this rank, in the order of their stages. A whole decoder is one chunk."""

    def __init__(self, chunks: Sequence[nn.Module], *, adapters_only: bool = False) -> None:
        """adapters_only: all else is frozen and not stored. Raises ValueError when two chunks have
        a parameter of the same name."""
        self.chunks, self.adapters_only = list(chunks), adapters_only
        names = [name for name, _ in self.named_parameters()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"two chunks of one rank both hold {', '.join(twice)}; cut the decoder into stages "
                "that "
                "share no parameter, or give them to different ranks"
            )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters by their names in the whole decoder."""
        return (named for chunk in self.chunks for named in chunk.named_parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """Live parameters and persistent buffers by their names in the whole decoder."""
        return {name: value for chunk in self.chunks for name, value in chunk.state_dict().items()}

    def stored(self, kept: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """`state_dict` as checkpoints hold it and ranks compare it: experts shared with other ranks
        as `Pieces`, a parameter of two names once, of frozen models the adapters alone.

        kept: by name, what this rank keeps of parameters that are not whole in `state_dict`.
        """
        named = dict(self.named_parameters())
        again = {
            name
            for chunk in self.chunks
            for name, _ in chunk.named_parameters(remove_duplicate=False)
            if name not in named
        }
        found = {name: value for name, value in self.state_dict().items() if name not in again}
        found = stored(found, self.named_parameters()) | dict(kept or {})
        trained = [name for name, value in named.items() if value.requires_grad]
        return {name: found[name] for name in trained} if self.adapters_only else found
