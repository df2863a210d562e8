"""Merged linear layers against one product after the other, and the models that use them."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import packgraph
from packgraph.bench.models import SHAPES, draw_batches
from packgraph.models.decoder import DecoderModel
from packgraph.models.layers.merged import MergedProjections
from packgraph.ops import linear as merging
from packgraph.ops.linear import lay_side_by_side, merged_linear, naive_merged_linear, one_matrix
from packgraph.packing.capacity import Capacity
from packgraph.parallel.data import FlatParameters

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32 sums in another order
CAPACITY = Capacity(32, 4)


def make(
    rows: int, width: int, sizes: list[int], adjacent: bool, seed: int = 0
) -> tuple[Tensor, list[torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.nn.Parameter(torch.randn(size, width, generator=generator)) for size in sizes]
    if adjacent:
        lay_side_by_side(weights)
    return torch.randn(rows, width, generator=generator), weights


@settings(max_examples=25)
@given(
    rows=st.integers(1, 6),
    width=st.integers(1, 7),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    adjacent=st.booleans(),
    seed=st.integers(0, 99),
)
def test_merged_equals_naive_for_outputs_and_gradients(rows, width, sizes, adjacent, seed):
    x, weights = make(rows, width, sizes, adjacent, seed)
    assert (one_matrix(weights) is not None) == (adjacent or len(sizes) == 1)
    results = []
    for function in (merged_linear, naive_merged_linear):
        leaf = x.clone().requires_grad_()
        outputs = function(leaf, weights)
        torch.autograd.backward(outputs, [torch.full_like(out, 0.5).cumsum(0) for out in outputs])
        results.append([*outputs, leaf.grad, *(weight.grad for weight in weights)])
        for weight in weights:
            weight.grad = None
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_laying_keeps_values_and_is_done_once():
    _, weights = make(1, 3, [2, 4, 1], adjacent=False)
    before = [weight.detach().clone() for weight in weights]
    assert one_matrix(weights) is None
    lay_side_by_side(weights)
    assert all(torch.equal(a, b) for a, b in zip(before, weights))
    assert torch.equal(one_matrix(weights), torch.cat(before))
    place = weights[0].data_ptr()
    lay_side_by_side(weights)
    assert weights[0].data_ptr() == place
    assert one_matrix(weights[::-1]) is None, "in this order only"
    assert one_matrix([weights[0], weights[2]]) is None, "nothing in between"


def test_one_product_each_where_weights_are_adjacent(monkeypatch):
    """Negative control: the weights are not copied together."""
    x, weights = make(4, 3, [2, 5], adjacent=True)
    monkeypatch.setattr(merging, "naive_merged_linear", None)
    monkeypatch.setattr(torch, "cat", None)
    torch.stack([out.sum() for out in merged_linear(x.requires_grad_(), weights)]).sum().backward()


def model(merge: bool, **options) -> DecoderModel:
    config = dataclasses.replace(SHAPES["tiny"], num_layers=2, merge_projections=merge, **options)
    return DecoderModel(config, seed=4)


def merged_modules(whole: torch.nn.Module) -> list[bool]:
    """For each module that merges whether its weights lie side by side."""
    return [
        one_matrix([getattr(module, name).weight.detach() for name in reversed(module.merged)])
        is not None
        for module in whole.modules()
        if isinstance(module, MergedProjections) and module.merged
    ]


def test_models_have_the_same_parameters_and_compute_the_same():
    plain, merged = model(False), model(True)
    assert merged_modules(merged) == [True] * 4 and not merged_modules(plain)
    for (name, ours), (other, theirs) in zip(
        merged.state_dict().items(), plain.state_dict().items(), strict=True
    ):
        assert name == other and torch.equal(ours, theirs)
    batch = draw_batches(CAPACITY, 1, 320, mean=9.0, sigma=0.5, seed=0)[0]
    for whole in (plain, merged):
        whole(batch).backward()
    for (name, ours), theirs in zip(merged.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **TOLERANCE, msg=name)


def test_weights_stay_side_by_side_when_a_model_is_moved_loaded_or_flattened():
    merged = model(True)
    assert all(merged_modules(merged.to(torch.bfloat16)))
    merged.load_state_dict(model(False).state_dict())
    assert all(merged_modules(merged))
    FlatParameters(merged.named_parameters(), None)
    assert all(merged_modules(merged)), "the buffers of the optimizer hold them in this order"


def test_products_are_formed_one_by_one_under_autocast():
    merged, plain = model(True), model(False)
    batch = draw_batches(CAPACITY, 1, 320, mean=9.0, sigma=0.5, seed=0)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(merged(batch), plain(batch))


@pytest.mark.parametrize("compile", [False, "aot_eager"])
def test_replays_equal_eager(compile):
    torch._dynamo.reset()
    batches = draw_batches(CAPACITY, 4, 320, mean=9.0, sigma=0.8, seed=1)
    found = []
    for reason in ("compare", None):
        graphed = packgraph.graph(
            model(True), capacities=[CAPACITY], warmup=1, strict=True, compile=compile
        )
        FlatParameters(graphed.named_parameters(), None).zero_gradients()
        for batch in batches:
            if reason is None:
                loss = graphed(batch)
            else:
                with packgraph.eager(reason):
                    loss = graphed(batch)
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in graphed.parameters())])
    assert graphed.stats.replayed == 3
    for eager, replayed in zip(found[:4], found[4:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))


def test_biases_and_merging_exclude_each_other():
    with pytest.raises(ValueError, match="merge_projections needs projections without biases"):
        model(True, attention_bias=True)
