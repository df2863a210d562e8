"""Shape of a decoder: everything that its parameters and numbers depend on."""

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from packgraph.models.branch_kind import BranchKind
from packgraph.models.branches import KINDS
from packgraph.models.expert_config import ExpertConfig
from packgraph.models.latent_config import LatentConfig
from packgraph.models.mamba_config import MambaConfig
from packgraph.models.pattern import read_pattern
from packgraph.ops.attention.api import BACKENDS

# Larger numbers are mistakes: three of them multiplied are a size in bytes, which must stay below
# 2^63.
LARGEST_SIZE = 2**18
LARGEST = {
    "vocab_size": 2**24,
    "num_layers": 2**14,
    "max_position_embeddings": 2**62,
    "latent.scaling.original_positions": 2**62,
}


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder of the Qwen3 or DeepSeek-V3 family, or a hybrid of Mamba-2 and attention by a
    pattern.

    num_kv_heads: key and value heads, a divisor of num_heads. head_dim: need not be hidden_size /
    num_heads. tie_embeddings: the head uses the embedding matrix. qk_norm: RMSNorm on queries and
    keys. attention_bias: biases of the attention projections. dropout: on both residual branches,
    in training mode. initializer_range: standard deviation of fresh matrices. attention_backend: a
    name of `packgraph.ops.attention.api.BACKENDS` or `auto`. max_position_embeddings: only recorded
    in checkpoints; rotary positions have no limit here. latent: multi-head latent attention instead
    of grouped queries; num_kv_heads and head_dim then mean nothing. experts: which layers have
    experts instead of one feed-forward block, and how tokens are routed to them. pattern: the
    branches of the layers in letters, such as M-M*-E or (M-)(*-), repeated over all layers
    (models/pattern.py); empty = attention and a feed-forward branch in each, with experts from
    experts.first_dense on. mamba: shape of the Mamba-2 layers that the pattern names. activation:
    of feed-forward blocks and experts: swiglu has a gate, relu2 (the square of what is positive)
    has none. rotary_share: part of a head's columns that the position turns, its first ones; 0 =
    none. Raises ValueError that names every illegal value at once.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qk_norm: bool = True
    attention_bias: bool = False
    dropout: float = 0.0
    initializer_range: float = 0.02
    attention_backend: str = "auto"
    max_position_embeddings: int = 32768
    latent: LatentConfig = field(default_factory=LatentConfig)
    experts: ExpertConfig = field(default_factory=ExpertConfig)
    pattern: str = ""
    mamba: MambaConfig = field(default_factory=MambaConfig)
    activation: Literal["swiglu", "relu2"] = "swiglu"
    rotary_share: float = 1.0

    def __post_init__(self) -> None:
        reasons = _illegal(self)
        if reasons:
            raise ValueError("DecoderConfig cannot be built: " + "; ".join(reasons))

    def branches(self, index: int) -> tuple[str, ...]:
        """The branches of layer `index`, in order: `mamba`, `attn`, `mlp` or `moe`."""
        if not self.pattern:
            return "attn", "moe" if self.experts.has_layer(index) else "mlp"
        layers = read_pattern(self.pattern)
        return layers[index % len(layers)]

    def count(self, branch: str) -> int:
        """How many layers have this branch."""
        return sum(branch in self.branches(index) for index in range(self.num_layers))

    def kinds(self) -> Mapping[str, BranchKind]:
        """The kinds of branches that some layer has, by name."""
        names = {name for index in range(self.num_layers) for name in self.branches(index)}
        return {name: kind for name, kind in KINDS.items() if name in names}


def _illegal(config: DecoderConfig) -> list[str]:
    """Every reason why `config` describes no model."""
    positive = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "rope_theta",
        "rms_norm_eps",
        "max_position_embeddings",
    )
    reasons = [
        f"{name} is {getattr(config, name)}, must be positive"
        for name in positive
        if getattr(config, name) <= 0
    ]
    reasons += [
        f"{name} is {value}, must be at most {LARGEST.get(name, LARGEST_SIZE):,}"
        for name, value in _whole_numbers(config)
        if value > LARGEST.get(name, LARGEST_SIZE)
    ]
    if config.num_kv_heads > 0 and config.num_heads % config.num_kv_heads:
        reasons.append(
            f"num_heads {config.num_heads} is no multiple of num_kv_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2 and not config.latent.enabled:
        reasons.append(
            f"head_dim {config.head_dim} is odd; rotary embedding turns pairs of columns"
        )
    if not 0.0 <= config.dropout < 1.0:
        reasons.append(f"dropout is {config.dropout}, must be in [0, 1)")
    if config.initializer_range < 0.0:
        reasons.append(f"initializer_range is {config.initializer_range}, must not be negative")
    if config.attention_backend != "auto" and config.attention_backend not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        reasons.append(
            f"attention_backend {config.attention_backend!r} is unknown; known are {known}"
        )
    share = config.rotary_share
    if not 0.0 <= share <= 1.0 or (share < 1.0 and share * config.head_dim % 2):
        reasons.append(
            f"rotary_share is {share}: of head_dim {config.head_dim} it must leave an even "
            "number of columns, from none to all, to rotary embedding, which turns pairs"
        )
    if share != 1.0 and config.latent.enabled:
        reasons.append(
            "rotary_share means nothing with latent attention, whose latent.rope_dim says it"
        )
    return reasons + _illegal_pattern(config)


def _whole_numbers(section: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """All whole numbers of a tree of dataclasses, by their names with dots."""
    for one in dataclasses.fields(section):
        value = getattr(section, one.name)
        if dataclasses.is_dataclass(value):
            yield from _whole_numbers(value, f"{prefix}{one.name}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield prefix + one.name, value


def _illegal_pattern(config: DecoderConfig) -> list[str]:
    """Every reason why the pattern of `config` and what it names do not belong together."""
    try:
        named = {branch for layer in read_pattern(config.pattern) for branch in layer}
    except ValueError as error:
        return [str(error)]
    problems = {
        "experts.first_dense means nothing with a pattern, which says where experts are": bool(
            config.pattern
        )
        and config.experts.first_dense > 0
    }
    for kind in KINDS.values():
        enabled = bool(kind.section) and bool(operator.attrgetter(kind.section)(config))
        if not config.pattern:
            # Experts need no pattern: `first_dense` says where they are.
            problems[
                f"{kind.section} is set, but no pattern says which layers are {kind.title}"
            ] = enabled and kind.is_mixer
        elif kind.section:
            problems[f"pattern has {kind.letter}, but {kind.section} is 0"] = (
                kind.name in named and not enabled
            )
            problems[f"{kind.section} is set, but pattern has no {kind.letter}"] = (
                enabled and kind.name not in named
            )
    return [text for text, wrong in problems.items() if wrong]
