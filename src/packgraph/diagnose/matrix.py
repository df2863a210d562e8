"""The default check of `packgraph verify`: a tiny model under every combination that may go wrong on its own.

Granularity layer and chunk, dropout off and on; in each case three capacities, microbatch counts that change from
step to step, and steps whose forwards all run before their backwards. Over several processes: every layout that they
can take and granularity layer and chunk, with dropout.
"""
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from packgraph.diagnose.ranks import RanksReport, verify_ranks
from packgraph.diagnose.verify import VerifyReport, verify
from packgraph.models.decoder import DecoderConfig
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import pack
from packgraph.parallel.mesh import Layout, make_mesh
from packgraph.train.options import (
    GraphConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    disagreements,
)

VOCABULARY = 64
CAPACITIES = (Capacity(32, 4), Capacity(64, 6), Capacity(128, 12))
BUDGETS = (200, 60, 330, 120, 20)


def tiny_config(granularity: str, dropout: float, steps: int) -> TrainConfig:
    """A two-layer model that runs a step in milliseconds."""
    return TrainConfig(
        preset="verify",
        model=DecoderConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
            head_dim=8, rope_theta=10_000.0, tie_embeddings=True, dropout=dropout),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        graph=GraphConfig(capacities=CAPACITIES, granularity="chunk" if granularity == "chunk" else "layer"),
        run=RunConfig(steps=steps, tokens_per_step=200),
    )


def random_packs(seed: int) -> Iterator[PackedBatch]:
    """Endless packs of random documents with heavy-tailed lengths, over all capacities."""
    draw = random.Random(seed)
    longest = max(capacity.tokens for capacity in CAPACITIES)
    while True:
        lengths = [min(longest, 1 + int(draw.paretovariate(0.8) * 4)) for _ in range(draw.randint(3, 12))]
        documents = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
        yield from pack(documents, list(CAPACITIES))


def default_matrix(device: torch.device, steps: int) -> Iterator[VerifyReport]:
    """Verify every combination for `steps` steps each; yields each report as it is done."""
    for granularity, dropout in itertools.product(("layer", "chunk"), (0.0, 0.1)):
        title = f"granularity {granularity}, dropout {dropout}"
        config = tiny_config(granularity, dropout, steps)
        yield verify(title, config, random_packs(seed=1), device, budget=budget_of)


def budget_of(step: int) -> int:
    """Real tokens of a step, so that the number of microbatches changes from step to step."""
    return BUDGETS[step % len(BUDGETS)]


def budget_over(replicas: int) -> Callable[[int], int]:
    """Budgets that reach all replicas in some steps, and leave some without a pack in others."""
    return lambda step: budget_of(step) * ((replicas + 1) // 2)


def config_for(layout: Layout, granularity: str, steps: int) -> TrainConfig:
    """The tiny model with as many layers and heads as `layout` (dp filled in) has stages and parts of a matrix.

    Ranks of a pipeline hold two chunks each where a chunk is a region.
    """
    config = tiny_config(granularity, 0.1, steps)
    chunks = 2 if layout.pp > 1 and granularity == "chunk" else 1
    model = replace(config.model, num_layers=max(2, layout.pp * chunks), num_heads=max(4, layout.tp),
                    num_kv_heads=max(2, layout.tp))
    return replace(config, model=model,
                   parallel=ParallelConfig(dp=layout.dp, tp=layout.tp, pp=layout.pp, chunks=chunks))


def layouts_of(world: int) -> list[Layout]:
    """Every way to spread the tiny model over `world` processes."""
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    every = [Layout(dp=world // (pp * tp), pp=pp, tp=tp) for pp in sizes for tp in sizes if world % (pp * tp) == 0]
    return [layout for layout in every if not disagreements(config_for(layout, "layer", 30), "cpu", world=world)]


def ranks_matrix(device: torch.device, steps: int, world: int, *, one_process: bool = True) -> Iterator[RanksReport]:
    """Verify every layout of `world` connected processes, at granularity layer and chunk; collective."""
    for layout, granularity in itertools.product(layouts_of(world), ("layer", "chunk")):
        config = config_for(layout, granularity, steps)
        chunks = f" x {config.parallel.chunks} chunks" if config.parallel.chunks > 1 else ""
        title = f"dp={layout.dp}, pp={layout.pp}{chunks}, tp={layout.tp}, granularity {granularity}, dropout 0.1"
        yield verify_ranks(title, config, lambda: random_packs(seed=1), device, make_mesh(layout, device),
                           one_process=one_process, budget=budget_over(layout.dp or 1))
