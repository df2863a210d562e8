"""A decoder cut into pipeline stages computes what the whole decoder computes."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import packgraph
from packgraph.models.branches import layer_cost
from packgraph.models.config import ExpertConfig
from packgraph.models.decoder import DecoderConfig, DecoderModel, stage_layers
from packgraph.parallel.pipeline.chunks import split_layers
from packgraph.train.config.presets import preset

CONFIG = DecoderConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=32,
    num_layers=5,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    tie_embeddings=False,
)


@given(st.integers(1, 40), st.integers(1, 12))
def test_layers_are_split_in_order_evenly_with_the_ends_shortest(layers, stages):
    if stages > layers:
        with pytest.raises(ValueError, match="every stage needs a layer"):
            split_layers([1] * layers, stages)
        return
    parts = split_layers([1] * layers, stages)
    assert [index for part in parts for index in part] == list(range(layers))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    if layers % stages <= max(0, stages - 2):
        assert sizes[0] == sizes[-1] == min(sizes)


def judged(costs, sizes, head_cost):
    """What `split_layers` says of a cut into stages of these sizes: less is better."""
    bounds = itertools.pairwise([0, *itertools.accumulate(sizes)])
    found = [sum(costs[start:end]) for start, end in bounds]
    found[-1] += head_cost
    return (
        max(found),
        sum(cost * cost for cost in found),
        sizes[-1],
        sizes[0],
        [-size for size in sizes],
    )


@given(st.lists(st.integers(0, 6), min_size=2, max_size=10), st.integers(1, 5), st.integers(0, 20))
def test_the_cut_is_the_best_of_all(costs, stages, head_cost):
    """Against enumeration: slowest stage, sum of squares, then the ends shortest and earlier stages
    longer."""
    if stages > len(costs):
        return
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    every = [
        [end - start for start, end in itertools.pairwise((0, *cut, len(costs)))] for cut in cuts
    ]
    parts = split_layers(costs, stages, head_cost)
    assert [index for part in parts for index in part] == list(range(len(costs)))
    assert [len(part) for part in parts] == min(
        every, key=lambda sizes: judged(costs, sizes, head_cost)
    )


def test_stages_of_a_hybrid_are_cut_by_what_its_layers_cost():
    """The layers of Mamba-2 stand first: as many layers on either side would be twice the work on
    one."""
    model = dataclasses.replace(
        preset("hybrid-1.6b").model,
        num_layers=16,
        pattern="M" * 8 + "*" * 8,
        vocab_size=64,
        experts=ExpertConfig(),
    )
    first, second = stage_layers(model, 2)
    assert len(first) < 6 and len(second) > 10
    costs = [sum(layer_cost(model, index, 4096) for index in part) for part in (first, second)]
    assert max(costs) < 1.25 * min(costs)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_stages_in_a_row_equal_the_whole_bitwise(stages):
    whole = DecoderModel(CONFIG, seed=3)
    parts = [DecoderModel(CONFIG, seed=3, stage=stage, stages=stages) for stage in range(stages)]
    names = [name for part in parts for name in part.state_dict()]
    assert sorted(names) == sorted(whole.state_dict())
    for part in parts:
        for name, value in part.state_dict().items():
            assert torch.equal(value, whole.state_dict()[name]), name
    batch = packgraph.pack([list(range(9)), list(range(20))], [packgraph.Capacity(32, 4)])[0]
    expected = whole(batch)
    expected.backward()
    value = parts[0](batch)
    for part in parts[1:]:
        value = part(batch, None, value)
    value.backward()
    assert torch.equal(value, expected)
    gradients = dict(whole.named_parameters())
    for part in parts:
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter.grad, gradients[name].grad), name
