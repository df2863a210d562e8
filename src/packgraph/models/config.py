"""Shape of a decoder: everything that its parameters and numbers depend on.

`DecoderConfig` has a section for each part that a decoder may have or not: `LatentConfig` with
`RopeScaling` for multi-head latent attention, `ExpertConfig`, `MambaConfig`.
"""

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from packgraph.models.branches import KINDS, BranchKind, read_pattern
from packgraph.ops.names import ATTENTION, NATIVE, PRECISIONS

# Larger numbers are mistakes: three of them multiplied are a size in bytes, which must stay below
# 2^63.
LARGEST_SIZE = 2**18
LARGEST = {
    "vocab_size": 2**24,
    "num_layers": 2**14,
    "max_position_embeddings": 2**62,
    "latent.scaling.original_positions": 2**62,
}


def _numbers(section: Any, positive: str = "", natural: str = "") -> dict[str, bool]:
    """Problems of the numbers of these names in `section`, with whether they are there."""
    problems = {
        f"{name} is {getattr(section, name)}, must not be negative": getattr(section, name) < 0
        for name in natural.split()
    }
    return problems | {
        f"{name} is {getattr(section, name)}, must be positive": getattr(section, name) <= 0
        for name in positive.split()
    }


def _refuse(section: Any, problems: Mapping[str, bool]) -> None:
    """Raises ValueError with all `problems` that are there."""
    if reasons := [text for text, is_there in problems.items() if is_there]:
        raise ValueError(f"{type(section).__name__} cannot be built: " + "; ".join(reasons))


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
        low = 0 < self.beta_fast < self.beta_slow
        problems = {
            f"factor is {self.factor}, must be at least 1": self.factor < 1.0,
            f"beta_fast {self.beta_fast} is less than beta_slow {self.beta_slow}": low,
        }
        positive, natural = "original_positions beta_fast beta_slow", "mscale mscale_all_dim"
        _refuse(self, _numbers(self, positive, natural) | problems)

    @property
    def enabled(self) -> bool:
        """True if positions are scaled."""
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
        problems = {
            f"rope_dim {self.rope_dim} is odd; rotary embedding turns pairs of columns": (
                self.rope_dim % 2 != 0
            ),
            f"scaling.factor is {self.scaling.factor}, but without kv_rank positions cannot be "
            "scaled": self.scaling.enabled and not self.enabled,
        }
        numbers = _numbers(self, "nope_dim rope_dim value_dim", "kv_rank query_rank")
        _refuse(self, numbers | problems)

    @property
    def enabled(self) -> bool:
        """True if the decoder has latent attention."""
        return self.kv_rank > 0

    @property
    def query_dim(self) -> int:
        """Columns of a head's queries and keys."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class ExpertConfig:
    """Experts of a decoder; count 0 = none, every layer has one feed-forward block.

    count: experts of a layer.
    per_token: experts that each token is routed to (top-k).
    intermediate_size: width of one expert.
    latent_size: width of the experts' rows, which tokens are brought to before they are sent and
        from which they come back (Nemotron 3); 0 = the hidden size, and no such projections.
    shared: experts that every token passes, as one block of shared * intermediate_size.
    first_dense: layers before the first one with experts.
    score: what makes scores of the router's logits.
    normalise: chosen scores are divided by their sum.
    scaling: factor on the weights after that.
    groups: equal groups that experts are in.
    groups_kept: groups that a token may choose from, those with the highest sum of their two best
        (biased) scores.
    score_bias: a bias per expert is added to scores for the choice alone (arXiv 2408.15664).
    bias_rate: how far a step moves the bias against the load.
    load_loss: factor of the auxiliary loss over a microbatch (Switch, arXiv 2101.03961).
    batch_loss: factor of the same with the fractions of tokens that the whole step before has sent
        to each expert, on all ranks (the global-batch loss of arXiv 2501.11873, one step late): a
        document may use few experts, as long as all documents together use all.
    document_loss: factor of the same for every document by itself, averaged over documents
        (DeepSeek-V3's sequence-wise loss, arXiv 2412.19437).
    z_loss: factor of the mean squared logsumexp of the logits (ST-MoE, arXiv 2202.08906).
    drop_factor: each expert takes at most drop_factor * T * per_token / count tokens and drops the
        rest, those with the lowest weights first; 0 = nothing is dropped.

    Raises ValueError that names every illegal value at once.
    """

    count: int = 0
    per_token: int = 0
    intermediate_size: int = 0
    latent_size: int = 0
    shared: int = 0
    first_dense: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scaling: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    score_bias: bool = False
    bias_rate: float = 0.001
    load_loss: float = 0.0
    batch_loss: float = 0.0
    document_loss: float = 0.0
    z_loss: float = 0.0
    drop_factor: float = 0.0

    def __post_init__(self) -> None:
        natural = (
            "count latent_size shared first_dense bias_rate load_loss batch_loss document_loss "
            "z_loss drop_factor"
        )
        positive = "per_token intermediate_size groups groups_kept scaling"
        _refuse(self, _numbers(self, positive if self.count > 0 else "", natural))
        if not self.enabled:
            return
        even, reach = self.count % self.groups == 0, self.count // self.groups * self.groups_kept
        problems = {
            f"count {self.count} is no multiple of groups {self.groups}": not even,
            f"groups_kept {self.groups_kept} is more than groups {self.groups}": (
                even and self.groups_kept > self.groups
            ),
            f"per_token {self.per_token} is more than the experts a token can choose from "
            f"({reach})": even and self.groups_kept <= self.groups and self.per_token > reach,
        }
        _refuse(self, problems)

    @property
    def enabled(self) -> bool:
        """True if any layer has experts."""
        return self.count > 0

    def has_layer(self, index: int) -> bool:
        """Returns whether layer `index` has experts."""
        return self.enabled and index >= self.first_dense


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
        uneven = self.groups > 0 and self.num_heads % self.groups != 0
        problems = {f"num_heads {self.num_heads} is no multiple of groups {self.groups}": uneven}
        positive = "head_dim state groups conv_width chunk"
        _refuse(self, _numbers(self, positive, "num_heads smallest_step") | problems)

    @property
    def enabled(self) -> bool:
        """True if there may be such layers."""
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


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder of the Qwen3 or DeepSeek-V3 family, or a hybrid of Mamba-2 and attention by a
    pattern.

    num_kv_heads: key and value heads, a divisor of num_heads. head_dim: need not be hidden_size /
    num_heads. tie_embeddings: the head uses the embedding matrix. qk_norm: RMSNorm on queries and
    keys. attention_bias: biases of the attention projections. dropout: on both residual branches,
    in training mode. initializer_range: standard deviation of fresh matrices. attention_backend: a
    name of `packgraph.ops.names.ATTENTION` or `auto`. max_position_embeddings: only recorded
    in checkpoints; rotary positions have no limit here. latent: multi-head latent attention instead
    of grouped queries; num_kv_heads and head_dim then mean nothing. experts: which layers have
    experts instead of one feed-forward block, and how tokens are routed to them. pattern: the
    branches of the layers in letters, such as M-M*-E or (M-)(*-), repeated over all layers
    (models/branches.py); empty = attention and a feed-forward branch in each, with experts from
    experts.first_dense on. mamba: shape of the Mamba-2 layers that the pattern names. activation:
    of feed-forward blocks and experts: swiglu has a gate, relu2 (the square of what is positive)
    has none. rotary_share: part of a head's columns that the position turns, its first ones; 0 =
    none. precision: how linear layers and experts multiply, a name of
    `packgraph.ops.names.PRECISIONS`: bf16 = in the dtype of the run, which is bfloat16 as a rule;
    fp8 = in float8 (ops/float8); fp8_weight_gradients = with gradients of weights in float8, too;
    mxfp8 = in float8 with a scale for 32 numbers, for Blackwell, emulated on CPUs and never run on
    such a GPU.
    bf16_ends: so many layers at the beginning and at the end stay bf16, whatever precision says,
    and so do those of mtp_layers. mtp_layers: further tokens that are predicted in training, each
    by one more layer behind the last one (multi-token prediction, DeepSeek-V3, arXiv:2412.19437,
    section 2.2). mtp_loss_weight: factor of their mean loss; 0.3, then 0.1 for the last third of
    its tokens in DeepSeek-V3. Raises ValueError that names every illegal value at once.
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
    precision: str = NATIVE
    bf16_ends: int = 1
    mtp_layers: int = 0
    mtp_loss_weight: float = 0.3

    def __post_init__(self) -> None:
        _refuse(self, _illegal(self) | _illegal_pattern(self))

    @property
    def depth(self) -> int:
        """Layers of the decoder and of multi-token prediction."""
        return self.num_layers + self.mtp_layers

    def branches(self, index: int) -> tuple[str, ...]:
        """The branches of layer `index`, in order: `mamba`, `attn`, `mlp` or `moe`."""
        if not self.pattern:
            return "attn", "moe" if self.experts.has_layer(index) else "mlp"
        layers = read_pattern(self.pattern)
        return layers[index % len(layers)]

    def of_layer(self, index: int) -> "DecoderConfig":
        """Configuration of layer `index`: this one, with the precision of that layer."""
        ends = min(self.bf16_ends, self.num_layers)
        if self.precision == NATIVE or ends <= index < self.num_layers - ends:
            return self
        return dataclasses.replace(self, precision=NATIVE)

    def count(self, branch: str) -> int:
        """Number of layers that have this branch, those of multi-token prediction too."""
        return sum(branch in self.branches(index) for index in range(self.depth))

    def kinds(self) -> Mapping[str, BranchKind]:
        """The kinds of branches that some layer has, by name."""
        names = {name for index in range(self.depth) for name in self.branches(index)}
        return {name: kind for name, kind in KINDS.items() if name in names}


def _illegal(config: DecoderConfig) -> dict[str, bool]:
    """Problems of `config` but for its pattern, with whether they are there."""
    problems = _numbers(
        config,
        "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim "
        "rope_theta rms_norm_eps max_position_embeddings",
        "initializer_range bf16_ends mtp_layers mtp_loss_weight",
    )
    problems |= {
        f"{name} is {value}, must be at most {most:,}": value > most
        for name, value in _whole_numbers(config)
        for most in [LARGEST.get(name, LARGEST_SIZE)]
    }
    heads, keys, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    share, by, ends = config.rotary_share, config.precision, config.bf16_ends
    latent = config.latent.enabled
    return problems | {
        f"num_heads {heads} is no multiple of num_kv_heads {keys}": keys > 0 and heads % keys != 0,
        f"head_dim {head_dim} is odd; rotary embedding turns pairs of columns": (
            head_dim % 2 != 0 and not latent
        ),
        f"dropout is {config.dropout}, must be in [0, 1)": not 0.0 <= config.dropout < 1.0,
        f"attention_backend {config.attention_backend!r} is unknown; known are auto, "
        f"{', '.join(ATTENTION)}": config.attention_backend not in ("auto", *ATTENTION),
        f"precision {by!r} is unknown; known are {', '.join(PRECISIONS)}": by not in PRECISIONS,
        f"bf16_ends {ends} leaves none of {config.num_layers} layers to precision {by}": (
            by in PRECISIONS and by != NATIVE and 0 <= config.num_layers <= 2 * ends
        ),
        f"rotary_share is {share}: of head_dim {head_dim} it must leave an even "
        "number of columns, from none to all, to rotary embedding, which turns pairs": (
            not 0.0 <= share <= 1.0 or (share < 1.0 and share * head_dim % 2 != 0)
        ),
        "rotary_share means nothing with latent attention, whose latent.rope_dim says it": (
            share != 1.0 and latent
        ),
        f"mtp_layers is {config.mtp_layers}, but with a pattern nothing says what such a layer "
        "is made of": config.mtp_layers > 0 and bool(config.pattern),
    }


def _whole_numbers(section: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """All whole numbers of a tree of dataclasses, by their names with dots."""
    for one in dataclasses.fields(section):
        value = getattr(section, one.name)
        if dataclasses.is_dataclass(value):
            yield from _whole_numbers(value, f"{prefix}{one.name}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            yield prefix + one.name, value


def _illegal_pattern(config: DecoderConfig) -> dict[str, bool]:
    """Problems of the pattern of `config` and what it names, with whether they are there."""
    try:
        named = {branch for layer in read_pattern(config.pattern) for branch in layer}
    except ValueError as error:
        return {str(error): True}
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
    return problems
