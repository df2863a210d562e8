"""Sizes of a decoder's parts by its config, for all who count with them; every kind of layer is known here alone."""
from packgraph.models.config import DecoderConfig


def head_sizes(config: DecoderConfig) -> tuple[int, int]:
    """Columns of a head's queries and keys, and of its values."""
    latent = config.latent
    return (latent.query_dim, latent.value_dim) if latent.enabled else (config.head_dim, config.head_dim)


def rotary_width(config: DecoderConfig) -> int:
    """Columns of a head that are turned by the position."""
    return config.latent.rope_dim if config.latent.enabled else config.head_dim


def attention_weights(config: DecoderConfig) -> int:
    """Elements of the matrices of one layer's attention."""
    hidden, heads, latent = config.hidden_size, config.num_heads, config.latent
    if not latent.enabled:
        return hidden * config.head_dim * (2 * heads + 2 * config.num_kv_heads)
    queries, rank = heads * latent.query_dim, latent.query_rank
    return ((hidden * rank + rank * queries if rank else hidden * queries)
            + hidden * (latent.kv_rank + latent.rope_dim)
            + latent.kv_rank * heads * (latent.nope_dim + latent.value_dim) + heads * latent.value_dim * hidden)


def feed_forward_weights(config: DecoderConfig, layer: int) -> int:
    """Elements of the matrices that a token passes in the feed-forward branch of `layer`, its experts' alone."""
    experts = config.experts
    if not experts.has_layer(layer):
        return 3 * config.hidden_size * config.intermediate_size
    blocks = experts.per_token + experts.shared
    return config.hidden_size * (experts.count + 3 * blocks * experts.intermediate_size)


def token_weights(config: DecoderConfig) -> int:
    """Elements of the matrices that a token passes in all layers."""
    return sum(attention_weights(config) + feed_forward_weights(config, layer) for layer in range(config.num_layers))
