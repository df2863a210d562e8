"""What the sections of a run's configuration must agree on, all reasons at once."""

from packgraph.graphs.stages import in_scope, scope_errors
from packgraph.models.decoder import named_stages, parts_without
from packgraph.packing.capacity import Capacity
from packgraph.parallel.context.rows import context_problems
from packgraph.parallel.tensor import tensor_problems
from packgraph.train.config.sections import TrainConfig
from packgraph.train.features.context import context_problems_of_run, places_multiple, stage_tokens
from packgraph.train.features.live import live_problems, live_shape
from packgraph.train.features.lora import lora_problems
from packgraph.train.features.moe import exchange_problems
from packgraph.train.features.offload import offload_problems

FEWEST_TOKENS = 2  # of a document with a token to predict


def validate(
    config: TrainConfig, device_type: str, vocabulary: int | None = None, world: int = 1
) -> list[str]:
    """All reasons why the sections of `config` do not fit together on a device of `device_type`
    (`cpu` or `cuda`).

    vocabulary: number of token ids of the tokenizer, when it is known already. world: processes of
    the run.
    """
    backend = config.graph.backend
    problems = {
        "graph.backend = cuda needs a CUDA device; use auto, or recorder on the "
        "CPU": config.graph.enabled and backend == "cuda" and device_type != "cuda",
        "graph.backend = recorder runs on the CPU only; use auto, or run.device = "
        "cpu": config.graph.enabled and backend == "recorder" and device_type == "cuda",
        f"graph.warmup = {config.graph.warmup} leaves no step to replay in run.steps = "
        f"{config.run.steps}; "
        "lower it, or set graph.enabled = false": config.graph.enabled
        and config.graph.warmup >= config.run.steps,
    }
    problems |= {
        f"graph.memory_budget = {config.graph.memory_budget} needs a CUDA device; write it in GiB "
        "or MiB": "%" in (config.graph.memory_budget or "") and device_type != "cuda",
        "graph.memory_budget is not there yet with graph.granularity = step, whose graphs are "
        "captured as steps come: "
        "lower graph.capacities": config.graph.memory_budget is not None
        and config.graph.granularity == "step",
    }
    regions = "chunk" if config.graph.granularity == "step" else config.graph.granularity
    stages = (
        named_stages(config.model) if config.hf.path is None else live_shape(config.hf.path).stages
    )
    scope = scope_errors(stages, config.graph.scope, regions)
    problems |= {f"graph.scope: {problem}": config.graph.enabled for problem in scope}
    attention = config.model.attention_backend
    problems[
        f"model.attention_backend = {attention} needs a CUDA device and run.dtype = bfloat16; use "
        "auto, or sdpa"
    ] = attention in ("flash", "varlen") and (device_type, config.run.dtype) != ("cuda", "bfloat16")
    bare = ", ".join(
        f"{capacity.tokens}x{capacity.documents}"
        for capacity in _known_capacities(config)
        if capacity.bound < FEWEST_TOKENS
    )
    problems |= {
        f"graph.capacities: no label can remain in {bare}, since a document's first token is never "
        "predicted; "
        f"give documents room for {FEWEST_TOKENS} tokens": bool(bare),
        f"buckets.max_tokens = {config.buckets.max_tokens} leaves no label, since a document's "
        "first token is never "
        f"predicted; it must be at least {FEWEST_TOKENS}": config.graph.capacities == "auto"
        and config.buckets.max_tokens < FEWEST_TOKENS,
    }
    if vocabulary is not None:
        size = config.model.vocab_size
        problems[
            f"model.vocab_size = {size} is smaller than the tokenizer's {vocabulary} ids; raise it"
        ] = size < vocabulary
    found = [text for text, wrong in problems.items() if wrong]
    found += live_problems(config) + lora_problems(config)
    found += (
        ([] if config.hf.path is not None else offload_problems(config))
        + _optimizer_problems(config, world)
        + _parallel_problems(config, world)
    )
    return found + exchange_problems(config, device_type)


def _optimizer_problems(config: TrainConfig, world: int) -> list[str]:
    """What keeps the update of the weights from being part of a graph, when that is asked for."""
    if not (config.graph.enabled and config.graph.optimizer):
        return []
    parallel, granularity = config.parallel, config.graph.granularity
    replicas = parallel.dp or max(1, world // (parallel.pp * parallel.cp * parallel.tp))
    problems = {
        f"graph.optimizer needs graph.granularity = step, not {granularity}: no other graph lasts "
        "until the update": granularity != "step",
        f"graph.optimizer with parallel.pp = {parallel.pp} is not there yet: the graph of a "
        "pipeline's step ends with "
        "its last transfer; leave one of them out": parallel.pp > 1,
        f"graph.optimizer cannot serve {replicas} replicas (parallel.dp): their packs differ, so "
        "one would capture the "
        "collectives of the update while another replays them; leave it out": replicas > 1,
    }
    return [text for text, wrong in problems.items() if wrong]


def _pipeline_problems(config: TrainConfig) -> list[str]:
    """What keeps a run from being cut into pipeline stages."""
    model, stages, chunks = config.model, config.parallel.pp, config.parallel.chunks
    cut = f"parallel.pp = {stages}" + (f" x parallel.chunks = {chunks}" if chunks > 1 else "")
    problems = {
        f"{cut} needs at least as many layers, model.num_layers is "
        f"{model.num_layers}": model.num_layers < stages * chunks,
        f"parallel.pp = {stages} needs a stage in graph.scope that every rank has: head is on the "
        "last one only; add "
        "attn or mlp": config.graph.enabled and config.graph.scope == ("head",),
    }
    if (
        config.graph.enabled
        and config.graph.scope is not None
        and model.num_layers >= stages * chunks
    ):
        lone = parts_without(model, stages * chunks, config.graph.scope, stage_tokens(config))
        problems[f"graph.scope leaves nothing to capture on parts {lone} of {cut}: add attn"] = (
            bool(lone)
        )
    return [text for text, wrong in problems.items() if wrong]


def _expert_problems(config: TrainConfig) -> list[str]:
    """What keeps experts from being shared, and stages of them from being captured, as asked."""
    experts, parallel, graph = config.model.experts, config.parallel, config.graph
    if not experts.enabled:
        way = parallel.dispatcher
        idle = {
            f"parallel.ep = {parallel.ep} shares experts": parallel.ep > 1,
            f"parallel.dispatcher = {way} is how tokens get to experts": way != "auto",
            f"parallel.expert_stash = {parallel.expert_stash} is what experts "
            "keep": parallel.expert_stash > 0,
        }
        return [f"{text}, but model.experts.count is 0" for text, asked in idle.items() if asked]
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
    problems = {
        f"parallel.tp = {parallel.tp} with parallel.sequence is not there yet with experts, whose "
        "router needs all "
        "rows of a microbatch; set parallel.sequence = false": parallel.splits_rows,
        f"parallel.ep = {parallel.ep} does not divide model.experts.count = "
        f"{experts.count}": experts.count % parallel.ep > 0,
        "parallel.dispatcher = host_splits makes the host wait for the sizes of what is routed, "
        f"so {', '.join(named)} "
        "cannot be in graph.scope; use dispatcher = padded, or leave them out": graph.enabled
        and waits
        and bool(named),
        "offload.modules with graph.compile and parallel.expert_stash is not there yet: all that a "
        "compiled layer "
        "saves would move, the pages of the stash among it; leave one of them out": graph.compile
        and parallel.expert_stash > 0
        and bool(config.offload.modules),
        "parallel.dispatcher = host_splits cannot be part of a whole step in one graph; use "
        "dispatcher = padded, or "
        "graph.granularity = layer": graph.enabled and waits and graph.granularity == "step",
    }
    return [text for text, wrong in problems.items() if wrong]


def _row_problems(config: TrainConfig) -> list[str]:
    """What keeps rows from being cut for the ranks of a context as asked."""
    parallel = config.parallel
    found = context_problems(config.model, parallel.cp, parallel.tp, parallel.cp_kind)
    if found:
        return found
    multiple, known = places_multiple(config), _known_capacities(config)
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


def _known_capacities(config: TrainConfig) -> list[Capacity]:
    return [] if config.graph.capacities == "auto" else config.graph.packing_capacities()


def _parallel_problems(config: TrainConfig, world: int) -> list[str]:
    """All reasons why the model and its capacities cannot be spread over `world` processes as
    asked."""
    parallel = config.parallel
    found = [f"parallel: {problem}" for problem in parallel.layout().problems(world)]
    if parallel.pp > 1:
        found += _pipeline_problems(config)
    elif parallel.chunks > 1:
        found.append(
            f"parallel.chunks = {parallel.chunks} needs parallel.pp of at least 2: on one rank "
            "chunks have "
            "nobody to take turns with"
        )
    if parallel.tp > 1:
        found += tensor_problems(config.model, parallel.tp)
    found += _expert_problems(config)
    known = _known_capacities(config)
    found += context_problems_of_run(config)
    odd = ", ".join(
        str(capacity.tokens) for capacity in known if capacity.tokens % parallel.row_parts
    )
    if parallel.cp > 1:
        found += _row_problems(config)
        found += (
            [
                f"parallel.cp = {parallel.cp} spreads every row over {parallel.row_parts} ranks "
                "(cp x tp where "
                "parallel.sequence holds), so the tokens of capacities must be a multiple of "
                f"that, not {odd}"
            ]
            if odd
            else []
        )
    elif odd:
        found.append(
            f"parallel.tp = {parallel.tp} with parallel.sequence needs capacities whose tokens are "
            "a multiple "
            f"of it, not {odd}; or set parallel.sequence = false"
        )
    return found
