"""Dynamic context parallelism in a run: what its options mean.

    parallel.cp = 4, parallel.dynamic_cp, graph.capacities = 8192x16,8192x64

    8192 tokens on 4 ranks are L = 2048 a rank   rows of 1, 2 or 4 ranks: 2048, 4096 or 8192 tokens,
                                                 each with places for 16 or 64 documents: 6
                                                     buckets

A capacity is that of the largest row, as without dynamic_cp, so `cp` says how long a document may
be. The number of ranks of a row follows from its tokens (T / L), so a bucket of the bank is a
capacity as ever. The ranks of dp x cp are one plane, in which groups are blocks of consecutive
ranks; none is larger than cp, so a block never leaves its `cp`.
"""

from dataclasses import replace

import torch

from packgraph.models.branches import head_sizes
from packgraph.ops.attention.api import choose_backend
from packgraph.packing.buckets.cost import FLASH4, CostModel
from packgraph.packing.capacity import Capacity
from packgraph.parallel.context.request import ContextRequest
from packgraph.parallel.mesh import context_sizes
from packgraph.train.context_rows import context_choices, zigzag_sizes
from packgraph.train.options import TrainConfig
from packgraph.train.plan_context import context_cost


def rank_tokens(config: TrainConfig) -> int | None:
    """Tokens L that every rank has of whatever row it works on; None where the ranks of a row do
    not change."""
    if not config.parallel.dynamic_cp:
        return None
    return (
        max(capacity.tokens for capacity in config.graph.packing_capacities()) // config.parallel.cp
    )


def rank_rows(config: TrainConfig) -> int | None:
    """Rows of hidden states that a rank has of whatever row; None as for `rank_tokens`."""
    tokens = rank_tokens(config)
    return (
        None
        if tokens is None
        else tokens // (config.parallel.tp if config.parallel.splits_rows else 1)
    )


def with_context_buckets(config: TrainConfig) -> TrainConfig:
    """`config` whose capacities are those of all rows that a plan may have, for graphs; itself
    without dynamic_cp."""
    tokens = rank_tokens(config)
    if tokens is None:
        return config
    buckets = sorted(
        {
            Capacity(size * tokens, capacity.documents)
            for size in context_sizes(config.parallel.cp)
            for capacity in config.graph.declared_capacities()
        }
    )
    return replace(config, graph=replace(config.graph, capacities=tuple(buckets)))


def context_request(config: TrainConfig, world: int, device: torch.device) -> ContextRequest:
    """What the plan of a step is asked for. world: processes of the run. device: says which
    attention kernels run.

    A step has as many microbatches as its tokens fill (`run.tokens_per_step`, rounded up).
    """
    parallel, tokens = config.parallel, rank_tokens(config)
    assert tokens is not None
    plane = parallel.layout().replicas(world) * parallel.cp
    backend = config.model.attention_backend
    if backend == "auto":
        backend = choose_backend(
            device, getattr(torch, config.run.dtype), *head_sizes(config.model)
        ).name
    return ContextRequest(
        world=plane,
        tokens=tokens,
        sizes=context_sizes(parallel.cp),
        places=tuple(capacity.documents for capacity in config.graph.packing_capacities()),
        waves=-(-config.run.tokens_per_step // (plane * tokens)),
        cost=context_cost(
            config.model,
            parallel.tp,
            FLASH4 if backend == "flash" else CostModel(),
            zigzag_sizes(context_choices(config)),
        ),
    )


def context_problems_of_run(config: TrainConfig) -> list[str]:
    """What keeps the ranks of a row from changing from microbatch to microbatch, all reasons at
    once."""
    parallel, graph = config.parallel, config.graph
    if not parallel.dynamic_cp:
        return (
            [
                "parallel.time_rows = true is for plans of groups that change; it goes with "
                "parallel.dynamic_cp = true"
            ]
            if parallel.time_rows is True
            else []
        )
    problems = {
        "parallel.dynamic_cp chooses among groups of up to parallel.cp ranks, and that is 1; give "
        "the ranks that the "
        "longest document needs": parallel.cp == 1,
        "parallel.dynamic_cp with graph.granularity = step is not there: which rows a rank has "
        "differs from step to "
        "step and from rank to rank, so nearly every step would be captured anew; use layer or "
        "chunk": graph.enabled and graph.granularity == "step",
        "parallel.dynamic_cp needs graph.capacities that are named, such as 8192x16,8192x64: the "
        "tokens of a row on "
        "parallel.cp ranks, and places for documents; auto chooses for rows of one number of "
        "ranks": graph.capacities == "auto",
    }
    known = () if graph.capacities == "auto" else graph.declared_capacities()
    if len({capacity.tokens for capacity in known}) > 1:
        several = ", ".join(
            str(tokens) for tokens in sorted({capacity.tokens for capacity in known})
        )
        problems[
            "parallel.dynamic_cp needs graph.capacities of one number of tokens, that of a row on "
            "parallel.cp = "
            f"{parallel.cp} ranks (shorter rows follow from it), not {several}"
        ] = True
    problems[
        "parallel.dynamic_cp bounds documents by the ranks they get, so capacities cannot have a "
        "longest document "
        "of their own; leave it out"
    ] = any(capacity.bound != capacity.tokens for capacity in known)
    return [text for text, wrong in problems.items() if wrong]
