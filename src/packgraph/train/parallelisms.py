"""All kinds of parallelism of a run, in one list, which validation, the build of a model and the
layouts that verify tries go through (`parallel/mesh.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from packgraph.graphs.stages import in_scope
from packgraph.integrations.transformers.model import PackedModel
from packgraph.integrations.transformers.tensor import parallelize as split_live
from packgraph.models.decoder import named_stages, parts_without
from packgraph.moe.dispatch.over_ranks import make_dispatcher
from packgraph.parallel.context.rows import context_problems, spread_context
from packgraph.parallel.deferred import on_meta
from packgraph.parallel.expert import split_experts
from packgraph.parallel.layout import Layout
from packgraph.parallel.mesh import Mesh, Parallelism
from packgraph.parallel.tensor import parallelize, tensor_problems
from packgraph.train.config.contradictions import (
    context_problems_of_run,
    idle_expert_options,
    known_capacities,
    replica_problems,
)
from packgraph.train.config.reading import true_of
from packgraph.train.config.sections import TrainConfig
from packgraph.train.features.context import (
    places_multiple,
    rank_tokens,
    stage_tokens,
)
from packgraph.train.features.moe import make_buffers


class DataParallelism(Parallelism):
    """Replicas; their number follows from the other axes. `parallel/data.py`"""

    name = "dp"

    def problems(self, config: TrainConfig, world: int) -> list[str]:
        return replica_problems(config, world)


class PipelineParallelism(Parallelism):
    """Stages of the model, which `train/build.py` makes one by one. `parallel/pipeline`"""

    name = "pp"

    def problems(self, config: TrainConfig, world: int) -> list[str]:
        model, stages, chunks = config.model, config.parallel.pp, config.parallel.chunks
        if stages == 1:
            lone = (
                f"parallel.chunks = {chunks} needs parallel.pp of at least 2: on one rank chunks "
                "have nobody to take turns with"
            )
            return [lone] * (chunks > 1)
        cut = f"parallel.pp = {stages}" + (f" x parallel.chunks = {chunks}" if chunks > 1 else "")
        graph, parts = config.graph, stages * chunks
        known = graph.enabled and graph.scope is not None and model.num_layers >= parts
        scope = graph.scope if known else None
        without = (
            parts_without(model, parts, scope, stage_tokens(config)) if scope is not None else []
        )
        return true_of(
            {
                f"{cut} needs at least as many layers, model.num_layers is "
                f"{model.num_layers}": model.num_layers < parts,
                f"parallel.pp = {stages} needs a stage in graph.scope that every rank has: head is "
                "on the last one only; add attn or mlp": graph.enabled and graph.scope == ("head",),
                f"graph.scope leaves nothing to capture on parts {without} of {cut}: add "
                "attn": bool(without),
            }
        )

    def tried(self, layout: Layout) -> list[Layout]:
        return _shares(layout, self.name)


class TensorParallelism(Parallelism):
    """Matrices, as DTensors. `parallel/tensor.py`"""

    name = "tp"

    def problems(self, config: TrainConfig, world: int) -> list[str]:
        parallel = config.parallel
        found = []
        if parallel.tp > 1 and config.hf.path is None:
            found = tensor_problems(config.model, parallel.tp)
        # Where rows are spread over a context, too, that one says it.
        if parallel.cp == 1 and (odd := _odd_capacities(config)):
            found.append(
                f"parallel.tp = {parallel.tp} with parallel.sequence needs capacities whose tokens "
                f"are a multiple of it, not {odd}; or set parallel.sequence = false"
            )
        return found

    def tried(self, layout: Layout) -> list[Layout]:
        return _shares(layout, self.name)

    def apply(self, models: Sequence[nn.Module], mesh: Mesh, config: TrainConfig) -> None:
        for model in models if mesh.size("tp") > 1 else ():
            split = split_live if isinstance(model, PackedModel) else parallelize
            with on_meta(model):
                split(model, mesh["tp"], sequence=config.parallel.sequence)


class ExpertParallelism(Parallelism):
    """Experts, of which replicas keep parts. `parallel/expert.py`"""

    name = "ep"

    def problems(self, config: TrainConfig, world: int) -> list[str]:
        experts, parallel, graph = config.model.experts, config.parallel, config.graph
        if config.hf.path is not None:  # its own code has the reasons, see features/live.py
            return []
        if not experts.enabled:
            return idle_expert_options(config)
        waits = parallel.dispatcher_name == "host_splits"
        named = (
            sorted(
                {
                    stage.name
                    for stage in named_stages(config.model)
                    if in_scope(stage.name, ["moe"]) and in_scope(stage.name, graph.scope)
                }
                - {"moe_router"}
            )
            if graph.scope is not None
            else []
        )
        return true_of(
            {
                f"parallel.ep = {parallel.ep} does not divide model.experts.count = "
                f"{experts.count}": experts.count % parallel.ep > 0,
                "parallel.dispatcher = host_splits makes the host wait for the sizes of what is "
                f"routed, so {', '.join(named)} "
                "cannot be in graph.scope; use dispatcher = padded, or leave them out": bool(
                    graph.enabled and waits and named
                ),
                "parallel.expert_stash_resident leaves nothing for the stash of a model with one "
                "layer of experts; leave parallel.expert_stash out": parallel.expert_stash_resident
                and config.model.count("moe") == 1,
                "parallel.dispatcher = host_splits cannot be part of a whole step in one graph; "
                "use dispatcher = padded, or "
                "graph.granularity = layer": graph.enabled
                and waits
                and graph.granularity == "step",
            }
        )

    def tried(self, layout: Layout) -> list[Layout]:
        """All replicas share the experts."""
        return [replace(layout, ep=layout.dp or 1)] if _has_replicas_alone(layout) else []

    def apply(self, models: Sequence[nn.Module], mesh: Mesh, config: TrainConfig) -> None:
        by = partial(
            make_dispatcher,
            config.parallel.dispatcher_name,
            factor=config.parallel.expert_room,
            buffers=make_buffers(models, config, next(models[0].parameters()).device, mesh),
        )
        shared = config.model.experts.enabled or mesh.size("ep") > 1
        for model in models if shared else ():
            split_experts(model, mesh, by)


class ContextParallelism(Parallelism):
    """Rows of tokens, over a fixed or changing number of ranks. `parallel/context`"""

    name = "cp"

    def problems(self, config: TrainConfig, world: int) -> list[str]:
        parallel = config.parallel
        found = context_problems_of_run(config)
        if parallel.cp > 1:
            found += _row_problems(config)
            if odd := _odd_capacities(config):
                found.append(
                    f"parallel.cp = {parallel.cp} spreads every row over {parallel.row_parts} "
                    "ranks (cp x tp where parallel.sequence holds), so the tokens of capacities "
                    f"must be a multiple of that, not {odd}"
                )
        return found

    def tried(self, layout: Layout) -> list[Layout]:
        """All replicas become ranks that share rows."""
        return [replace(layout, dp=1, cp=layout.dp or 1)] if _has_replicas_alone(layout) else []

    def apply(self, models: Sequence[nn.Module], mesh: Mesh, config: TrainConfig) -> None:
        for model in models if mesh.size("cp") > 1 else ():
            kind = config.parallel.cp_kind
            spread_context(model, mesh, rank_tokens(config), kind, config.model)


# In the order in which they are applied and give their reasons.
PARALLELISMS: list[Parallelism] = [
    DataParallelism(),
    PipelineParallelism(),
    TensorParallelism(),
    ExpertParallelism(),
    ContextParallelism(),
]


def _shares(layout: Layout, name: str) -> list[Layout]:
    """`layout` with every divisor of its replicas given to the axis `name`."""
    dp, given = layout.dp or 1, list[Layout]()
    for size in range(2, dp + 1):
        if dp % size == 0:
            sizes: dict[str, Any] = {"dp": dp // size, name: size}
            given.append(replace(layout, **sizes))
    return given


def _has_replicas_alone(layout: Layout) -> bool:
    """Tells whether there are replicas, of a whole matrix, that share nothing yet."""
    return (layout.dp or 1) > 1 and layout.tp == layout.ep == 1


def _row_problems(config: TrainConfig) -> list[str]:
    """Lists what keeps rows from being cut for the ranks of a context as asked."""
    parallel = config.parallel
    if found := context_problems(config.model, parallel.cp, parallel.tp, parallel.cp_kind):
        return found
    multiple, known = places_multiple(config), known_capacities(config)
    odd = ", ".join(
        str(capacity)
        for capacity in known
        if capacity.tokens % multiple or capacity.bound % multiple
    )
    shared = not context_problems(config.model, parallel.cp, parallel.tp, "ulysses")
    return (
        [
            f"rows cut in zigzag over parallel.cp = {parallel.cp} ranks need capacities whose "
            "tokens and longest "
            f"document are multiples of {multiple}, not {odd}"
            f"{'; or choose parallel.cp_kind = ulysses' if shared else ''}"
        ]
        if odd
        else []
    )


def _odd_capacities(config: TrainConfig) -> str:
    """The tokens of capacities that ranks cannot share equally, for messages."""
    parts = config.parallel.row_parts
    return ", ".join(str(c.tokens) for c in known_capacities(config) if c.tokens % parts)
