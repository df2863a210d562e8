"""Tokens that pipeline stages and pages are planned for: those of the longest row of a run."""

from packgraph.train.options import TrainConfig


def longest_row(config: TrainConfig) -> int:
    """Tokens that one rank has of the longest row; rows are spread over the ranks of a context."""
    auto = config.graph.capacities == "auto"
    row = (
        config.buckets.max_tokens
        if auto
        else max(c.tokens for c in config.graph.packing_capacities())
    )
    return -(-row // config.parallel.cp)


def stage_tokens(config: TrainConfig) -> int:
    """Tokens that meet one copy of a layer's weights, for `models.decoder.stage_layers`: of all
    ranks that share experts."""
    return longest_row(config) * config.parallel.ep
