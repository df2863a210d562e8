"""Widths of a decoder's parts by its configuration."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packgraph.models.config import DecoderConfig


def head_sizes(config: "DecoderConfig") -> tuple[int, int]:
    """Columns of a head's queries and keys, and of its values."""
    latent = config.latent
    return (
        (latent.query_dim, latent.value_dim)
        if latent.enabled
        else (config.head_dim, config.head_dim)
    )


def rotary_width(config: "DecoderConfig") -> int:
    """Columns of a head that are turned by the position."""
    return (
        config.latent.rope_dim
        if config.latent.enabled
        else round(config.rotary_share * config.head_dim)
    )


def routed_width(config: "DecoderConfig") -> int:
    """Columns of a row that is sent to experts."""
    return config.experts.latent_size or config.hidden_size
