"""Latent attention: numbers equal to transformers' DeepseekV3ForCausalLM, graphs equal to eager,
sizes as told."""

import dataclasses
import random

import pytest
import torch
from graphedkit import assert_graphs_are_eager
from hfkit import compare_with_transformers, randomised, saved_and_loaded
from model_batches import hand_batch, random_documents

from packgraph.models.config import DecoderConfig, LatentConfig, RopeScaling
from packgraph.models.decoder import DecoderModel
from packgraph.models.layers.attention import RotaryEmbedding
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.tensor import tensor_problems

transformers = pytest.importorskip("transformers")

YARN = RopeScaling(
    factor=4.0, original_positions=16, beta_fast=4.0, beta_slow=0.5, mscale=1.0, mscale_all_dim=0.7
)


def config(latent: LatentConfig, **changes) -> DecoderConfig:
    """A small decoder; the fields that mean nothing with latent attention are as a checkpoint fills
    them in."""
    base = DecoderConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=36,
        num_layers=2,
        num_heads=3,
        num_kv_heads=3,
        head_dim=latent.query_dim,
        rope_theta=100.0,
        rms_norm_eps=1e-5,
        qk_norm=False,
        max_position_embeddings=64,
        initializer_range=0.2,
        latent=latent,
    )
    return dataclasses.replace(base, **changes)


PLAIN = LatentConfig(kv_rank=8, nope_dim=6, rope_dim=4, value_dim=5)
SMALL_QUERIES = LatentConfig(kv_rank=10, query_rank=7, nope_dim=4, rope_dim=8, value_dim=4)
SHAPES = {
    "queries of hidden states": config(PLAIN),
    "queries of a small vector, tied": config(SMALL_QUERIES, tie_embeddings=True, num_layers=3),
    "yarn": config(dataclasses.replace(SMALL_QUERIES, scaling=YARN)),
    "yarn without mscale, halves, biases": config(
        dataclasses.replace(
            PLAIN,
            rope_dim=12,
            interleaved=False,
            scaling=dataclasses.replace(YARN, mscale=0.0, mscale_all_dim=0.0),
        ),
        attention_bias=True,
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("lengths", "rows", "implementation"),
    [
        ([13], 13, "eager"),  # unpacked: one document, no padding
        ([7, 1, 12, 30], 64, "sdpa"),  # packed, padded
    ],
)
def test_logits_and_gradients_equal_those_of_transformers(
    shape, lengths, rows, implementation, tmp_path
):
    compare_with_transformers(
        randomised(SHAPES[shape], seed=len(lengths)), tmp_path, lengths, rows, implementation
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_saved_and_loaded_again_is_the_same_model(shape, tmp_path):
    assert saved_and_loaded(SHAPES[shape], tmp_path) == SHAPES[shape]


@pytest.mark.parametrize(
    "scaling",
    [
        YARN,
        RopeScaling(),
        RopeScaling(40.0, mscale=1.0, mscale_all_dim=1.0),
        RopeScaling(2.0, 8, beta_fast=1.0),
    ],
)
def test_frequencies_are_those_of_transformers_whatever_is_done_to_the_model(scaling):
    rope = {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "rope_theta": 5e4,
        "original_max_position_embeddings": scaling.original_positions,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "mscale": scaling.mscale,
        "mscale_all_dim": scaling.mscale_all_dim,
    }
    described = transformers.DeepseekV3Config(
        qk_rope_head_dim=16,
        max_position_embeddings=int(scaling.factor * scaling.original_positions),
        rope_parameters=rope if scaling.enabled else {"rope_type": "default", "rope_theta": 5e4},
    )
    theirs = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3RotaryEmbedding(
        described
    )
    ours = RotaryEmbedding(16, 5e4, scaling).to(torch.bfloat16)
    assert ours.inv_freq.dtype == torch.float32 and torch.equal(ours.inv_freq, theirs.inv_freq)
    positions = torch.tensor([0, 1, 9, 4000])
    for table, expected in zip(
        ours(positions, torch.float32), theirs(torch.zeros(1), positions[None])
    ):
        torch.testing.assert_close(table, expected[0], rtol=1e-6, atol=1e-6)


def test_what_padding_holds_reaches_nothing():
    model = DecoderModel(SHAPES["yarn"], seed=2)
    documents = random_documents([9, 4], 50, seed=0)
    found = []
    for rows, token in ((13, 0), (32, 0), (32, 7)):
        model.zero_grad()
        loss = model(hand_batch(documents, rows, 4, padding_token=token))
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for exact, padded, other in zip(*found):
        torch.testing.assert_close(exact, padded)
        assert torch.equal(padded, other)


@pytest.mark.parametrize(
    ("granularity", "scope"), [("layer", None), ("chunk", None), ("layer", ("attn",))]
)
@pytest.mark.parametrize("shape", ["queries of hidden states", "yarn"])
@pytest.mark.few(6)
def test_graphed_training_is_bitwise_eager_training(granularity, scope, shape):
    capacities = [Capacity(24, 4), Capacity(48, 8)]
    chance = random.Random(0)
    batches = [
        PackedBatch.build(
            random_documents(
                [chance.randrange(1, 7) for _ in range(chance.randrange(1, 4))], 50, seed
            ),
            capacities[seed % 2],
        )
        for seed in range(10)
    ]
    config = dataclasses.replace(SHAPES[shape], dropout=0.1)
    assert_graphs_are_eager(config, batches, capacities, granularity, scope)


def test_tensor_parallelism_is_refused():
    assert "latent.kv_rank is 8" in tensor_problems(SHAPES["queries of hidden states"], 3)[0]


def test_all_that_is_wrong_is_told():
    with pytest.raises(
        ValueError, match=r"factor is 0\.5.*beta_fast 1\.0 is less than beta_slow 2\.0"
    ):
        RopeScaling(factor=0.5, beta_fast=1.0, beta_slow=2.0)
    with pytest.raises(ValueError, match=r"kv_rank is -1.*rope_dim 3 is odd"):
        LatentConfig(kv_rank=-1, rope_dim=3)
    with pytest.raises(ValueError, match="without kv_rank positions cannot be scaled"):
        LatentConfig(scaling=YARN)
