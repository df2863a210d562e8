"""The default check of `packgraph verify`: a tiny model under every combination that may go wrong on its own.

Granularity layer and chunk, dropout off and on; in each case three capacities, microbatch counts that change from
step to step, and steps whose forwards all run before their backwards.
"""
import itertools
import random
from collections.abc import Iterator

import torch

from packgraph.diagnose.verify import VerifyReport, verify
from packgraph.models.dense import DenseConfig
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import pack
from packgraph.train.options import GraphConfig, OptimizerConfig, RunConfig, TrainConfig

VOCABULARY = 64
CAPACITIES = (Capacity(32, 4), Capacity(64, 6), Capacity(128, 12))
BUDGETS = (200, 60, 330, 120, 20)


def tiny_config(granularity: str, dropout: float, steps: int) -> TrainConfig:
    """A two-layer model that runs a step in milliseconds."""
    return TrainConfig(
        preset="verify",
        model=DenseConfig(
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
        yield verify(title, config, random_packs(seed=1), device, budget=lambda step: BUDGETS[step % len(BUDGETS)])
