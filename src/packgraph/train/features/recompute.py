"""Activation recomputation in the trainer: what keeps it from being, and the least that fits.

`run.recompute = auto` warms up with everything recomputed, since numbers are the same. Then graphs
of the largest capacity are captured on trial with nothing recomputed, selectively, in full; the
first whose pools fit stays:

    none ──▶ trial ──▶ too large ──▶ selective ──▶ trial ──▶ too large ──▶ full

With offloading everything that may move does so in a trial. What fits then runs for a step eagerly,
by which the offloading is planned; if graphs by that plan, which may leave more on the device, are
too large, the search goes on:

    none ──▶ trial ──▶ fits ──▶ step ──▶ plan ──▶ trial ──▶ too large ──▶ selective ──▶ ...
"""

from collections.abc import Callable, Sequence

from torch import nn

from packgraph.graphs.graphed import GraphedModule, control
from packgraph.graphs.memory.budget import shown
from packgraph.graphs.stages import in_scope
from packgraph.integrations.transformers.model import PackedModel
from packgraph.models.decoder import named_stages
from packgraph.models.layers.decoder import COMPILED_ROUTER, DecoderLayer
from packgraph.models.recompute import (
    EXCHANGES,
    FULL,
    KINDS,
    NONE,
    SHARED,
    STASHED,
    kind_of,
    recompute,
    recompute_problems,
)
from packgraph.train.config.reading import true_of
from packgraph.train.config.sections import TrainConfig

AUTO = "auto"
LIVE_LAYERS = (
    "models of transformers (hf:PATH) recompute whole layers or nothing: choose full or none"
)


def recomputed_stages(config: TrainConfig) -> dict[str, str]:
    """Maps the names of stages that are, or may be, recomputed to how they are."""
    what = recompute_at_first(config)
    kinds = {stage.name: kind_of(stage.name, what) for stage in named_stages(config.model)}
    return {name: kind for name, kind in kinds.items() if kind}


def problems_of_recompute(config: TrainConfig) -> list[str]:
    """All reasons why what `run.recompute` asks for cannot be."""
    what, graph, parallel = config.run.recompute, config.graph, config.parallel
    exchanges = parallel.tp > 1 or parallel.cp > 1 or parallel.dynamic_cp
    if config.hf.path is not None:
        shared = exchanges or parallel.ep > 1
        problem = EXCHANGES if shared and what == FULL else LIVE_LAYERS
        allowed = what == NONE or (what == FULL and not shared)
        return [] if allowed else [f"run.recompute = {what}: {problem}"]
    found = recompute_problems(
        recompute_at_first(config), [s.name for s in named_stages(config.model)]
    )
    stages = recomputed_stages(config)
    experts = any(in_scope(name, ["moe"]) for name in stages)
    compiled = graph.enabled and graph.compile and FULL in stages.values()
    found += true_of(
        {
            STASHED: experts and parallel.expert_stash > 0,
            SHARED: experts and parallel.ep > 1,
            COMPILED_ROUTER: experts and compiled,
            "compiled stages that draw random numbers cannot be recomputed in full: set "
            "model.dropout = 0, graph.compile = false, or choose selective": compiled
            and config.model.dropout > 0,
            EXCHANGES: bool(stages) and exchanges,
            "auto reads memory off graphs on trial: set graph.enabled = true, or choose none, "
            "selective or full": what == AUTO and not graph.enabled,
            "auto is not there yet with graph.granularity = step, whose graphs are captured as "
            "steps come: choose none, selective or full": what == AUTO
            and graph.granularity == "step",
        }
    )
    return [f"run.recompute = {what}: {problem}" for problem in found]


def set_recompute(chunks: Sequence[nn.Module], what: str) -> None:
    """Let the layers of these chunks be recomputed; a chunk may have none."""
    for chunk in chunks:
        module = control(chunk).module if isinstance(chunk, GraphedModule) else chunk
        decoder = any(isinstance(part, DecoderLayer) for part in module.modules())
        if decoder or isinstance(module, PackedModel):
            recompute(module, what)


class LeastRecompute:
    """The search for the least recomputation that fits, beginning with none.

    chunks: of this rank. limit: bytes that there are, None = nobody knows, and everything is
    recomputed. agree: whether something holds on all ranks; collective, as all methods are.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], limit: int | None, agree: Callable[[bool], bool]
    ) -> None:
        self.kind = FULL
        self._chunks, self._limit, self._agree = chunks, limit, agree
        self._left, self._told = list(KINDS), list[str]()

    def next(self, needed: Callable[[], int | None], start: Callable[[str], None]) -> None:
        """Leave the chunks with the next recomputation that fits, `full` if none does.

        needed: bytes that graphs of the largest capacity take now; None where a trial failed.
        start: told of each recomputation before it is looked at.
        """
        while self._left:
            self.kind = self._left.pop(0)
            set_recompute(self._chunks, self.kind)
            start(self.kind)
            if self.kind == FULL or self.fits(needed):
                break

    def fits(self, needed: Callable[[], int | None], how: str = "") -> bool:
        """Tells whether all ranks have the memory `needed` now. how: added to the note."""
        found = needed() if self._agree(self._limit is not None) else None
        self._told.append(f"{self.kind}{how} {'unknown' if found is None else shown(found)}")
        return self._agree(found is not None and self._limit is not None and found <= self._limit)

    def refuse(self, why: str) -> None:
        """Notes why no rank can have the kind looked at last."""
        self._told.append(f"{self.kind} not: {why}")

    def note(self) -> str:
        """Note on the choice."""
        room = "an unknown budget" if self._limit is None else shown(self._limit)
        trials = ", ".join(self._told)
        return f"recompute auto chose {self.kind}: graphs of the largest row, {trials}; {room}"


def recompute_at_first(config: TrainConfig) -> str:
    """The recomputation that `run.recompute` asks for, or that `auto` begins with."""
    return FULL if config.run.recompute == AUTO else config.run.recompute
