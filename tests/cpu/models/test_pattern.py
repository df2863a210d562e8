"""Patterns of layers, and the configurations, sizes and modules that follow from them."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packgraph.models.branches import BRANCHES, read_pattern, token_weights, write_pattern
from packgraph.models.config import DecoderConfig, ExpertConfig, MambaConfig
from packgraph.models.decoder import DecoderModel
from packgraph.models.layers import decoder as layers
from packgraph.packing.buckets.cost import CostModel
from packgraph.packing.capacity import Capacity
from packgraph.parallel.tensor import tensor_problems
from packgraph.train.memory import DecoderMemory
from packgraph.train.plan import context_cost

DENSE = DecoderConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
MAMBA = MambaConfig(num_heads=4, head_dim=8, state=6, groups=2, chunk=8)
EXPERTS = ExpertConfig(count=4, per_token=2, intermediate_size=8, shared=1)
HYBRID = dataclasses.replace(DENSE, pattern="M-M*-E", mamba=MAMBA, experts=EXPERTS)
LAYERS = st.one_of(
    st.sampled_from([(branch,) for branch in BRANCHES.values()]),
    st.tuples(st.sampled_from(["mamba", "attn"]), st.sampled_from(["mlp", "moe"])),
)


def test_a_mixer_without_a_module_is_an_error(monkeypatch):
    """A kind of branch that the decoder has no module for must not run as a feed-forward layer."""
    monkeypatch.setattr(layers, "MIXERS", {"attn": layers.MIXERS["attn"]})
    with pytest.raises(KeyError, match="mamba"):
        DecoderModel(dataclasses.replace(DENSE, pattern="(M-)(*-)", mamba=MAMBA))


@given(st.lists(LAYERS, max_size=12))
def test_a_written_pattern_reads_back(layers):
    assert read_pattern(write_pattern(layers)) == tuple(layers)


@pytest.mark.parametrize(
    "text", ["X", "M M", "(M", "M)", "(M)", "(-M)", "(MM)", "(M-*)", "()", "((M-))", "m-"]
)
def test_what_makes_no_sense_is_refused(text):
    with pytest.raises(ValueError, match="makes no sense from layer"):
        read_pattern(text)


def test_a_decoder_without_a_pattern_is_attention_and_feed_forward():
    plain = dataclasses.replace(DENSE, pattern="(*-)")
    assert [DENSE.branches(layer) for layer in range(6)] == [
        plain.branches(layer) for layer in range(6)
    ]
    first, second = (
        DecoderModel(DENSE, seed=1).state_dict(),
        DecoderModel(plain, seed=1).state_dict(),
    )
    assert first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )
    sparse = dataclasses.replace(DENSE, experts=dataclasses.replace(EXPERTS, first_dense=2))
    assert [sparse.branches(layer)[1] for layer in range(4)] == ["mlp", "mlp", "moe", "moe"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pattern": "M-X"}, "pattern 'M-X' makes no sense from layer 2"),
        (
            {"pattern": "*-"},
            "mamba.num_heads is set, but pattern has no M; experts.count is set, but pattern has "
            "no E",
        ),
        ({"pattern": ""}, "no pattern says which"),
        ({"mamba": MambaConfig()}, "pattern has M, but mamba.num_heads is 0"),
        ({"experts": ExpertConfig()}, "pattern has E, but experts.count is 0"),
        ({"experts": dataclasses.replace(EXPERTS, first_dense=1)}, "first_dense means nothing"),
        ({"rotary_share": 0.4}, r"rotary_share is 0.4: of head_dim 8"),
        ({"rotary_share": 1.5}, r"rotary_share is 1.5"),
    ],
)
def test_illegal_combinations_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(HYBRID, **values)


def test_illegal_shapes_of_mamba_are_named_at_once():
    with pytest.raises(
        ValueError, match="chunk is 0, must be positive; num_heads 6 is no multiple of groups 4"
    ):
        MambaConfig(num_heads=6, groups=4, chunk=0)


@pytest.mark.parametrize(
    ("pattern", "activation", "latent"),
    [
        ("M-M*-E", "swiglu", 0),
        ("(M-)(*E)", "relu2", 0),
        ("M", "swiglu", 0),
        ("ME*", "relu2", 12),
        ("(*E)", "swiglu", 6),
    ],
)
def test_sizes_are_those_of_the_parameters(pattern, activation, latent):
    config = dataclasses.replace(
        HYBRID,
        pattern=pattern,
        activation=activation,
        mamba=MAMBA if "M" in pattern else MambaConfig(),
        experts=dataclasses.replace(EXPERTS, latent_size=latent)
        if "E" in pattern
        else ExpertConfig(),
    )
    matrices = 0
    for name, parameter in DecoderModel(config).named_parameters():
        if name.startswith("layers.") and parameter.dim() > 1 and "conv1d" not in name:
            share = EXPERTS.per_token / EXPERTS.count if parameter.dim() == 3 else 1.0
            matrices += round(parameter.numel() * share)
    assert token_weights(config) == matrices


def test_tensor_parallelism_is_refused_with_the_reason():
    (problem,) = tensor_problems(HYBRID, 2)
    assert "not with model.pattern 'M-M*-E'" in problem


def test_estimates_count_each_kind_of_layer():
    """Exchange between ranks and memory of graphs: of half as many layers half as much."""
    mixed, attention, scans = (
        dataclasses.replace(
            HYBRID,
            pattern=pattern,
            experts=ExpertConfig(),
            mamba=MAMBA if "M" in pattern else MambaConfig(),
        )
        for pattern in ("M*", "*", "M")
    )
    costs = [context_cost(config, 1, CostModel()) for config in (mixed, attention, scans)]
    assert costs[0].exchange_us == pytest.approx((costs[1].exchange_us + costs[2].exchange_us) / 2)
    assert costs[0].group_us == costs[1].group_us == costs[2].group_us > 0
    assert (
        costs[2].attention_us
        == 0
        < 2 * costs[0].attention_us
        == pytest.approx(costs[1].attention_us)
    )
    bytes_of = [
        DecoderMemory(config, 6, 2)(Capacity(256, 8)) for config in (mixed, attention, scans)
    ]
    assert 2 * bytes_of[0] == pytest.approx(bytes_of[1] + bytes_of[2], abs=2)
    assert bytes_of[2] > 6 * 256 * 2 * (3 * 16 + 2 * 56 + 3 * 32)
