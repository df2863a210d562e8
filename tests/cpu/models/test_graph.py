"""The dense model through captured graphs: bitwise the eager numbers, for real packs, whatever is
captured."""

import random

import pytest
from graphedkit import assert_graphs_are_eager

from packgraph.models.decoder import DecoderConfig
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

CAPACITIES = [Capacity(24, 4), Capacity(48, 8)]


def random_batches(count: int) -> list[PackedBatch]:
    """Batches of both capacities in random order, with different padding."""
    chance = random.Random(0)
    batches = []
    for _ in range(count):
        capacity = chance.choice(CAPACITIES)
        documents = [
            [chance.randrange(1, 40) for _ in range(chance.randrange(1, 7))]
            for _ in range(chance.randrange(1, capacity.documents // 2 + 2))
        ]
        batches.append(PackedBatch.build(documents, capacity))
    return batches


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("granularity", "scope"),
    [
        ("layer", None),
        ("chunk", None),
        ("layer", ("attn",)),
        ("layer", ("mlp",)),
        ("chunk", ("embed", "head")),
    ],
)
@pytest.mark.few(6)
def test_graphed_training_is_bitwise_eager_training(granularity, scope, tied):
    config = DecoderConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        tie_embeddings=tied,
        dropout=0.1,
        initializer_range=0.2,
    )
    assert_graphs_are_eager(config, random_batches(6), CAPACITIES, granularity, scope)
