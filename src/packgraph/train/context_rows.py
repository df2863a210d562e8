"""How the rows of a run are cut for the ranks of its contexts, what room its documents need for it,
and how many tokens pipeline stages and pages are planned for: those of the longest row.
"""

import math
from collections.abc import Iterable, Mapping

from packgraph.ops.attention.kind import ContextChoice, document_multiple
from packgraph.parallel.context.rows import context_choice
from packgraph.parallel.mesh import context_sizes
from packgraph.train.options import TrainConfig


def context_choices(config: TrainConfig) -> dict[int, ContextChoice]:
    """How ranks share attention, for every number of ranks over 1 that may share a row of the run.

    Raises ValueError where that cannot be, which `validate` finds first.
    """
    parallel = config.parallel
    return choices_of(
        config, {parallel.cp, *(context_sizes(parallel.cp) if parallel.dynamic_cp else ())}
    )


def choices_of(config: TrainConfig, sizes: Iterable[int]) -> dict[int, ContextChoice]:
    """How ranks share attention of the run's model, for each of these numbers of ranks over 1; see
    `context_choices`."""
    parallel = config.parallel
    return {
        size: context_choice(config.model, size, parallel.tp, parallel.cp_kind)
        for size in sorted({*sizes} - {1})
    }


def zigzag_sizes(choices: Mapping[int, ContextChoice]) -> tuple[int, ...]:
    """The numbers of ranks whose rows are cut in zigzag."""
    return tuple(size for size, choice in choices.items() if choice.kind == "zigzag")


def common_multiple(choices: Mapping[int, ContextChoice]) -> int:
    """Documents take up multiples of so many places, whatever row they come to."""
    return math.lcm(*(document_multiple(choice.kind, size) for size, choice in choices.items()))


def places_multiple(config: TrainConfig) -> int:
    """`common_multiple` of the run."""
    return 1 if config.parallel.cp_kind == "ulysses" else common_multiple(context_choices(config))


def context_notes(config: TrainConfig) -> list[str]:
    """What people are to know of rows that are cut in zigzag; nothing where none is."""
    return notes_of(context_choices(config))


def notes_of(choices: Mapping[int, ContextChoice]) -> list[str]:
    """What people are to know of rows that are cut in zigzag; nothing where none is."""
    cut = {size: choices[size] for size in zigzag_sizes(choices)}
    why = "; ".join(f"{size} ranks: {choice.reason}" for size, choice in cut.items())
    return (
        [
            f"rows are cut in zigzag ({why}), documents take up multiples of "
            f"{common_multiple(choices)} places"
        ]
        if cut
        else []
    )


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
