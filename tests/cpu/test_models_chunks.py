"""A decoder cut into pipeline stages computes what the whole decoder computes."""
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import packgraph
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.plan.chunks import split_layers

CONFIG = DecoderConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_layers=5, num_heads=2, num_kv_heads=1,
                     head_dim=8, tie_embeddings=False)


@given(st.integers(1, 40), st.integers(1, 12))
def test_layers_are_split_in_order_evenly_with_the_ends_shortest(layers, stages):
    if stages > layers:
        with pytest.raises(ValueError, match="every stage needs a layer"):
            split_layers(layers, stages)
        return
    parts = split_layers(layers, stages)
    assert [index for part in parts for index in part] == list(range(layers))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    if layers % stages <= max(0, stages - 2):
        assert sizes[0] == sizes[-1] == min(sizes)


@given(st.integers(2, 12), st.integers(2, 5), st.floats(0, 12))
def test_no_other_cut_has_a_cheaper_slowest_stage(layers, stages, head_cost):
    if stages > layers:
        return
    cost = max(len(part) + head_cost * last for part, last in
               zip(split_layers(layers, stages, head_cost), [*[False] * (stages - 1), True], strict=True))
    cuts = itertools.combinations(range(1, layers), stages - 1)
    best = min(max(end - start + head_cost * (end == layers) for start, end in itertools.pairwise((0, *cut, layers)))
               for cut in cuts)
    assert cost == best


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
