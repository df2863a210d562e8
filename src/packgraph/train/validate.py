"""Checks the sections of a run's configuration against each other, all reasons at once."""

from packgraph.graphs.stages import scope_errors
from packgraph.models.decoder import named_stages
from packgraph.train.config.sections import AUTO, TrainConfig
from packgraph.train.config.values import true_of
from packgraph.train.features.live import live_problems, live_shape
from packgraph.train.features.lora import lora_problems
from packgraph.train.features.moe import exchange_problems
from packgraph.train.features.offload import offload_problems
from packgraph.train.features.precision import problems_of_precision
from packgraph.train.features.recompute import problems_of_recompute
from packgraph.train.metrics import missing_trackers
from packgraph.train.parallelisms import PARALLELISMS, known_capacities

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
        f"eval.every = {config.eval.every} leaves no evaluation in run.steps = {config.run.steps}; "
        "lower it": config.eval.every > config.run.steps,
        "optimizer.gradients = bfloat16 needs run.dtype = bfloat16: weights in float32 have "
        "gradients in float32": config.optimizer.gradients == "bfloat16"
        and config.run.dtype == "float32",
        f"model.mtp_layers = {config.model.mtp_layers} is for models of packgraph: with hf.path "
        "the model's own code says what it predicts": config.hf.path is not None
        and config.model.mtp_layers > 0,
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
        for capacity in known_capacities(config)
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
    found = true_of(problems)
    found += problems_of_recompute(config) + problems_of_precision(config, device_type)
    found += live_problems(config) + lora_problems(config)
    found += [] if config.hf.path is not None else offload_problems(config)
    found += [
        f"run.tracker names {name}, which is not installed: pip install {name}, or leave it out"
        for name in missing_trackers(config.run.tracker)
    ]
    found += _optimizer_problems(config, world)
    for parallelism in PARALLELISMS:
        found += parallelism.problems(config, world)
    return found + exchange_problems(config, device_type)


def _optimizer_problems(config: TrainConfig, world: int) -> list[str]:
    """Lists what keeps the rule of `optimizer.name` from the parameters as ranks have them, its
    state from the host, and the update from being part of a graph, when these are asked for."""
    parallel, graph, options = config.parallel, config.graph, config.optimizer
    layout, name, muon = parallel.layout(), options.name, options.name == "muon"
    copies, replicas = max(1, world // (layout.pp * layout.tp)), layout.replicas(world)
    inside = graph.enabled and graph.optimizer
    untested = {
        "parallel.expert_stash": parallel.expert_stash > 0,
        "parallel.dispatcher = symmetric": parallel.dispatcher_name == "symmetric",
        "hf.path": config.hf.path is not None,
        "lora.rank": config.lora.enabled,
    }
    others = true_of(untested)
    moved = others + (["offload.modules"] if config.offload.modules else [])
    problems = {
        f"graph.optimizer needs graph.granularity = step, not {graph.granularity}: no other graph "
        "lasts until the update": inside and graph.granularity != "step",
        f"graph.optimizer with parallel.pp = {parallel.pp} is not there yet with "
        f"{' and '.join(moved)}: leave one of them out": inside and parallel.pp > 1 and bool(moved),
        f"graph.optimizer with {replicas} replicas (parallel.dp) is not there yet with "
        f"{' and '.join(others)}: leave one of them out": inside and replicas > 1 and bool(others),
        f"optimizer.name = muon cannot serve {copies} ranks that share the update of one matrix "
        "(parallel.dp x cp): Muon needs whole matrices, and each of them updates a part; use "
        "adamw": muon and copies > 1,
        f"optimizer.name = {name} with parallel.tp = {layout.tp} is not there yet: each rank has "
        "some rows or columns of a matrix; use adamw or adamw8bit": name in ("muon", "adafactor")
        and layout.tp > 1,
        "optimizer.name = muon is not there yet for models of transformers and adapters "
        "(hf.path, lora.rank): which of their matrices are embeddings is not known; use "
        "adamw": muon and (config.hf.path is not None or config.lora.enabled),
        f"optimizer.resident = {options.resident} is of a state on the host: say "
        "optimizer.offload, too, or leave it out": not options.offload and options.resident != AUTO,
        f"optimizer.offload with optimizer.name = {name} is not there yet: only AdamW's float32 "
        "state can be updated piece by piece; leave one of them out": options.offload
        and name != "adamw",
        "optimizer.offload with graph.optimizer is not there yet: an update in a graph needs its "
        "state on the device; leave one of them out": options.offload and inside,
    }
    return true_of(problems)
