"""Sizes of a decoder's parts by its config, for all who count with them; every kind of layer is
known here alone."""

from types import MappingProxyType

from packgraph.models.config import DecoderConfig
from packgraph.models.work import SCAN_WEIGHTS, BranchWork


def head_sizes(config: DecoderConfig) -> tuple[int, int]:
    """Columns of a head's queries and keys, and of its values."""
    latent = config.latent
    return (
        (latent.query_dim, latent.value_dim)
        if latent.enabled
        else (config.head_dim, config.head_dim)
    )


def rotary_width(config: DecoderConfig) -> int:
    """Columns of a head that are turned by the position."""
    return (
        config.latent.rope_dim
        if config.latent.enabled
        else round(config.rotary_share * config.head_dim)
    )


def attention_weights(config: DecoderConfig) -> int:
    """Elements of the matrices of one layer's attention."""
    hidden, heads, latent = config.hidden_size, config.num_heads, config.latent
    if not latent.enabled:
        return hidden * config.head_dim * (2 * heads + 2 * config.num_kv_heads)
    queries, rank = heads * latent.query_dim, latent.query_rank
    return (
        (hidden * rank + rank * queries if rank else hidden * queries)
        + hidden * (latent.kv_rank + latent.rope_dim)
        + latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
        + heads * latent.value_dim * hidden
    )


def mamba_weights(config: DecoderConfig) -> int:
    """Elements of the matrices of one Mamba-2 layer; its convolution is none."""
    mamba = config.mamba
    return config.hidden_size * (2 * mamba.inner + mamba.channels + mamba.num_heads)


def feed_forward_weights(config: DecoderConfig) -> int:
    """Elements of the matrices of one feed-forward block."""
    return _feed_forward_matrices(config) * config.hidden_size * config.intermediate_size


def expert_weights(config: DecoderConfig) -> int:
    """Elements of the matrices that a token passes in one layer's experts: the router's and those
    of its own."""
    return _expert_weights(config, config.experts.per_token)


def layer_cost(config: DecoderConfig, index: int, tokens: int) -> int:
    """Cost of layer `index` as models/work.py has it. tokens: that meet one copy of its weights in
    a microbatch."""
    return sum(_branch_work(config, branch).cost(tokens) for branch in config.branches(index))


def head_cost(config: DecoderConfig, tokens: int) -> int:
    """The same of the head."""
    weights = config.hidden_size * config.vocab_size
    return BranchWork(weights, weights).cost(tokens)


def routed_width(config: DecoderConfig) -> int:
    """Columns of a row that is sent to experts."""
    return config.experts.latent_size or config.hidden_size


def token_weights(config: DecoderConfig) -> int:
    """Elements of the matrices that a token passes in all layers."""
    return sum(config.count(branch) * of_one(config) for branch, of_one in _WEIGHTS.items())


def _feed_forward_matrices(config: DecoderConfig) -> int:
    """Matrices of a feed-forward block or an expert: without a gate there is one less."""
    return 2 if config.activation == "relu2" else 3


def _expert_weights(config: DecoderConfig, experts: int) -> int:
    """Elements of the router's matrix, and of those of so many experts and the shared ones."""
    settings, columns = (
        config.experts,
        _feed_forward_matrices(config) * config.experts.intermediate_size,
    )
    always = settings.count + columns * settings.shared + 2 * settings.latent_size
    return config.hidden_size * always + routed_width(config) * columns * experts


def _branch_work(config: DecoderConfig, branch: str) -> BranchWork:
    weights = _WEIGHTS[branch](config)
    if branch == "moe":
        return BranchWork(weights, _expert_weights(config, config.experts.count))
    scanned = SCAN_WEIGHTS * config.mamba.inner * config.mamba.state if branch == "mamba" else 0
    return BranchWork(weights, weights, scanned)


_WEIGHTS = MappingProxyType(
    {
        "mamba": mamba_weights,
        "attn": attention_weights,
        "mlp": feed_forward_weights,
        "moe": expert_weights,
    }
)
