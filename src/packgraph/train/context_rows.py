"""How the rows of a run are cut for the ranks of its contexts, and what room its documents need for it."""
import math

from packgraph.parallel.context import context_choice
from packgraph.parallel.mesh import context_sizes
from packgraph.plan.context.kind import ContextChoice, document_multiple
from packgraph.train.options import TrainConfig


def context_choices(config: TrainConfig) -> dict[int, ContextChoice]:
    """How ranks share attention, for every number of ranks over 1 that may share a row of the run.

    Raises ValueError where that cannot be, which `disagreements` finds first.
    """
    parallel = config.parallel
    sizes = {parallel.cp, *(context_sizes(parallel.cp) if parallel.dynamic_cp else ())} - {1}
    return {size: context_choice(config.model, size, parallel.tp, parallel.cp_kind) for size in sorted(sizes)}


def places_multiple(config: TrainConfig) -> int:
    """Documents of the run take up multiples of so many places, whatever row they come to."""
    if config.parallel.cp_kind == "ulysses":
        return 1
    return math.lcm(*(document_multiple(choice.kind, size) for size, choice in context_choices(config).items()))


def context_notes(config: TrainConfig) -> list[str]:
    """What people are to know of rows that are cut in zigzag; nothing where none is."""
    cut = {size: choice for size, choice in context_choices(config).items() if choice.kind == "zigzag"}
    why = "; ".join(f"{size} ranks: {choice.reason}" for size, choice in cut.items())
    return [f"rows are cut in zigzag ({why}), documents take up multiples of {places_multiple(config)} places"] \
        if cut else []
