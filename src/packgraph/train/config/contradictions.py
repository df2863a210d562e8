"""Options that contradict each other, whatever the device and the model's code: as `validate`
checks them, without torch, so that they are told at once."""

from packgraph.ops.names import NATIVE
from packgraph.packing.capacity import Capacity, in_short
from packgraph.parallel.layout import context_sizes
from packgraph.train.config.reading import true_of
from packgraph.train.config.sections import AUTO, TrainConfig

FEWEST_TOKENS = 2  # of a document with a token to predict
PAIRED_SOURCES = ("jsonl", "parquet", "hub")  # whose rows may be preferences


def contradictions(config: TrainConfig) -> list[str]:
    """Lists the sections of `config` that do not fit together in any number of processes."""
    graph, run, model = config.graph, config.run, config.model
    bare = ", ".join(
        f"{capacity.tokens}x{capacity.documents}"
        for capacity in known_capacities(config)
        if capacity.bound < FEWEST_TOKENS
    )
    return preference_problems(config) + true_of(
        {
            f"graph.warmup = {graph.warmup} leaves no step to replay in run.steps = {run.steps}; "
            "lower it, or set graph.enabled = false": graph.enabled and graph.warmup >= run.steps,
            f"eval.every = {config.eval.every} leaves no evaluation in run.steps = {run.steps}; "
            "lower it": config.eval.every > run.steps,
            "optimizer.gradients = bfloat16 needs run.dtype = bfloat16: weights in float32 have "
            "gradients in float32": config.optimizer.gradients == "bfloat16"
            and run.dtype == "float32",
            f"model.mtp_layers = {model.mtp_layers} is for models of packgraph: with hf.path the "
            "model's own code says what it predicts": config.hf.path is not None
            and model.mtp_layers > 0,
            "graph.memory_budget is not there yet with graph.granularity = step, whose graphs are "
            "captured as steps come: lower graph.capacities": graph.memory_budget is not None
            and graph.granularity == "step",
            f"graph.capacities: no label can remain in {bare}, since a document's first token is "
            f"never predicted; give documents room for {FEWEST_TOKENS} tokens": bool(bare),
            f"buckets.max_tokens = {config.buckets.max_tokens} leaves no label, since a document's "
            f"first token is never predicted; it must be at least {FEWEST_TOKENS}": (
                graph.capacities == "auto" and config.buckets.max_tokens < FEWEST_TOKENS
            ),
        }
    )


def preference_problems(config: TrainConfig) -> list[str]:
    """Lists what keeps a run from a loss of pairs, which takes a loss over whole answers and, of
    dpo, a second model."""
    graph, parallel, model, data = config.graph, config.parallel, config.model, config.data
    loss = f"loss.name = {config.loss.name}"
    if not config.loss.is_of_pairs:
        return []
    known = known_capacities(config)
    others = {
        f"parallel.pp = {parallel.pp}": parallel.pp > 1,
        f"parallel.cp = {parallel.cp}": parallel.cp > 1,
        "parallel.dynamic_cp": parallel.dynamic_cp,
        f"parallel.tp = {parallel.tp}": parallel.tp > 1,
        f"parallel.ep = {parallel.ep}": parallel.ep > 1,
        f"parallel.shard = {parallel.shard}": parallel.shards,
        f"model.mtp_layers = {model.mtp_layers}": model.mtp_layers > 0,
        f"model.precision = {model.precision}": model.precision != NATIVE,
        "model.experts": model.experts.enabled,
        "offload.modules": bool(config.offload.modules),
        "run.recompute = auto": config.run.recompute == AUTO,
        "graph.granularity = step, without graph.optimizer": graph.enabled
        and graph.granularity == "step"
        and not graph.optimizer,
    }
    return true_of(
        {
            **{
                f"{loss} with {what} is not there yet; leave one of them out": asked
                for what, asked in others.items()
            },
            f"{loss} is of rows with `chosen` and `rejected`, and data.source = {data.source} has "
            "none: use jsonl, parquet or hub": data.source not in PAIRED_SOURCES,
            f"{loss} with model.dropout = {model.dropout}: what is dropped would count as a "
            "preference; set it to 0": model.dropout > 0,
            f"{loss} needs graph.capacities for both answers of a pair, so of at least 2 documents "
            "(graph.max_documents, too) and without a longest one, not "
            f"{', '.join(map(in_short, known))}": any(
                capacity.documents < 2 or capacity.bound < capacity.tokens for capacity in known
            ),
        }
    )


def optimizer_problems(config: TrainConfig, world: int) -> list[str]:
    """Lists what keeps the rule of `optimizer.name` from the parameters as ranks have them, its
    state from the host, and the update from being part of a graph, when these are asked for."""
    parallel, graph, options = config.parallel, config.graph, config.optimizer
    layout, name, muon = parallel.layout(), options.name, options.name == "muon"
    copies, replicas = max(1, world // (layout.pp * layout.tp)), layout.replicas(world)
    inside = graph.enabled and graph.optimizer
    others = true_of(
        {
            "parallel.expert_stash": parallel.expert_stash > 0,
            "parallel.dispatcher = symmetric": parallel.dispatcher_name == "symmetric",
            "lora.rank": config.lora.enabled,
        }
    )
    moved = others + (["offload.modules"] if config.offload.modules else [])
    return true_of(
        {
            f"graph.optimizer needs graph.granularity = step, not {graph.granularity}: no other "
            "graph lasts until the update": inside and graph.granularity != "step",
            f"graph.optimizer with parallel.pp = {parallel.pp} is not there yet with "
            f"{' and '.join(moved)}: leave one of them out": inside
            and parallel.pp > 1
            and bool(moved),
            f"graph.optimizer with {replicas} replicas (parallel.dp) is not there yet with "
            f"{' and '.join(others)}: leave one of them out": inside
            and replicas > 1
            and bool(others),
            f"optimizer.name = muon cannot serve {copies} ranks that share the update of one "
            "matrix (parallel.dp x cp): Muon needs whole matrices, and each of them updates a "
            "part; use adamw": muon and copies > 1,
            f"optimizer.name = {name} with parallel.tp = {layout.tp} is not there yet: each rank "
            "has some rows or columns of a matrix; use adamw or adamw8bit": name
            in ("muon", "adafactor")
            and layout.tp > 1,
            "optimizer.name = muon is not there yet for models of transformers and adapters "
            "(hf.path, lora.rank): which of their matrices are embeddings is not known; use "
            "adamw": muon and (config.hf.path is not None or config.lora.enabled),
            f"optimizer.resident = {options.resident} is of a state on the host: say "
            "optimizer.offload, too, or leave it out": not options.offload
            and options.resident != AUTO,
            f"optimizer.offload with optimizer.name = {name} is not there yet: only AdamW's "
            "float32 state can be updated piece by piece; leave one of them out": options.offload
            and name != "adamw",
            "optimizer.offload with graph.optimizer is not there yet: an update in a graph needs "
            "its state on the device; leave one of them out": options.offload and inside,
        }
    )


def replica_problems(config: TrainConfig, world: int) -> list[str]:
    """Lists what keeps `world` processes from the layout, and replicas from sharing layers."""
    found = [f"parallel: {problem}" for problem in config.parallel.layout().problems(world)]
    if not config.parallel.shards:
        return found
    parallel, graph = config.parallel, config.graph
    kept = f"parallel.shard = {parallel.shard} is not there yet with"
    return found + true_of(
        {
            f"{kept} parallel.dynamic_cp; leave one of them out": parallel.dynamic_cp,
            f"{kept} graph.granularity = step, without graph.optimizer; leave one of them out": (
                graph.enabled and graph.granularity == "step" and not graph.optimizer
            ),
            f"parallel.shard_ranks = {parallel.shard_ranks} is not there yet with graph.optimizer: "
            "ranks that share no layers run different microbatches, but all replicas launch the "
            "graph of a step together; leave one of them out": graph.enabled
            and graph.optimizer
            and parallel.shard_ranks > 0,
            "parallel.shard = gradients with lora.rank shards nothing: the model under adapters "
            "has no gradients, and those of adapters are small; use parallel.shard = parameters": (
                config.lora.enabled and parallel.shard == "gradients"
            ),
        }
    )


def context_problems_of_run(config: TrainConfig) -> list[str]:
    """Lists all that keeps the ranks of a row from changing from microbatch to microbatch."""
    parallel, graph = config.parallel, config.graph
    if not parallel.dynamic_cp:
        return true_of(
            {
                "parallel.time_rows = true is for plans of groups that change; it goes with "
                "parallel.dynamic_cp = true": parallel.time_rows is True,
                f"parallel.min_cp = {parallel.min_cp} bounds groups that change; it goes with "
                "parallel.dynamic_cp = true": parallel.min_cp > 1,
            }
        )
    sizes = context_sizes(parallel.cp)
    known = () if graph.capacities == "auto" else graph.declared_capacities()
    several = sorted({capacity.tokens for capacity in known})
    return true_of(
        {
            f"parallel.min_cp = {parallel.min_cp} must be one of the numbers of ranks that may "
            f"share a row with parallel.cp = {parallel.cp}: "
            f"{', '.join(map(str, sizes))}": parallel.min_cp not in sizes,
            "parallel.dynamic_cp chooses among groups of up to parallel.cp ranks, and that is 1; "
            "give the ranks that the longest document needs": parallel.cp == 1,
            "parallel.dynamic_cp with graph.granularity = step is not there: which rows a rank has "
            "differs from step to step and from rank to rank, so nearly every step would be "
            "captured anew; use layer or chunk": graph.enabled and graph.granularity == "step",
            "parallel.dynamic_cp needs graph.capacities that are named, such as 8192x16,8192x64: "
            "the tokens of a row on parallel.cp ranks, and places for documents; auto chooses for "
            "rows of one number of ranks": graph.capacities == "auto",
            "parallel.dynamic_cp needs graph.capacities of one number of tokens, that of a row on "
            f"parallel.cp = {parallel.cp} ranks (shorter rows follow from it), not "
            f"{', '.join(map(str, several))}": len(several) > 1,
            "parallel.dynamic_cp bounds documents by the ranks they get, so capacities cannot have "
            "a longest document of their own; leave it out": any(
                capacity.bound != capacity.tokens for capacity in known
            ),
        }
    )


def idle_expert_options(config: TrainConfig) -> list[str]:
    """Lists options of experts that a model without experts was given."""
    parallel, way = config.parallel, config.parallel.dispatcher
    idle = {
        f"parallel.ep = {parallel.ep} shares experts": parallel.ep > 1,
        f"parallel.dispatcher = {way} is how tokens get to experts": way != "auto",
        f"parallel.expert_stash = {parallel.expert_stash} is what experts "
        "keep": parallel.expert_stash > 0,
    }
    return [f"{text}, but model.experts.count is 0" for text, asked in idle.items() if asked]


def known_capacities(config: TrainConfig) -> list[Capacity]:
    """The shapes that packs may have; none while they are still to be chosen."""
    return [] if config.graph.capacities == "auto" else config.graph.packing_capacities()
