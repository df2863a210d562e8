"""Layers in float8: their numbers, all gradients, and training with them by graphs, bit by bit."""

import contextlib
import itertools
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from packgraph.graphs.compiled.products import take_products
from packgraph.graphs.graphed import control, graph
from packgraph.models.decoder import DecoderModel
from packgraph.ops.float8 import linear
from packgraph.ops.float8.cast import from_float8, naive_columns_to_float8, naive_rows_to_float8
from packgraph.ops.float8.linear import (
    FLOAT8,
    FLOAT8_GRADIENTS,
    Float8GradientsLinear,
    Float8Linear,
    float8_linear,
    multiply_by,
)
from packgraph.ops.linear import linear_layer, merged, product
from packgraph.ops.names import NATIVE
from packgraph.packing.pack import pack
from packgraph.verification.matrix import (
    CAPACITIES,
    random_packs,
    tiny_config,
    tiny_experts_config,
)
from packgraph.verification.verify import verify

CPU = torch.device("cpu")


def rounded(x):
    return from_float8(*naive_rows_to_float8(x)).to(x.dtype)


def rounded_columns(x):
    return from_float8(*naive_columns_to_float8(x)).mT.to(x.dtype)


def of(config, **model):
    return replace(config, model=replace(config.model, **{"precision": FLOAT8, **model}))


def experts_config(granularity, dropout, steps):
    """The tiny model with experts, in sizes that float8 takes."""
    config = tiny_experts_config(granularity, dropout, steps)
    latent = replace(config.model.latent, rope_dim=16)
    return replace(config, model=replace(config.model, latent=latent))


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_multiplies_what_is_rounded_and_has_all_gradients(bias):
    layer, x = linear_layer(FLOAT8, 32, 48, bias), torch.randn(6, 32, requires_grad=True)
    weight, grad = layer.weight.detach(), torch.randn(6, 48)
    made = layer(x)
    made.backward(grad)
    expected = rounded(x.detach()) @ rounded(weight).t()
    assert torch.equal(made, expected + layer.bias if bias else expected)
    assert torch.equal(x.grad, rounded(grad) @ rounded_columns(weight))
    assert torch.equal(layer.weight.grad, grad.t() @ x.detach())
    assert not bias or torch.equal(layer.bias.grad, grad.sum(0))
    near = x.detach() @ weight.t()
    assert not torch.equal(expected, near)
    assert (expected - near).norm() < 0.05 * near.norm()


def test_layers_that_read_one_input_have_the_numbers_of_each():
    layers = [linear_layer(FLOAT8, 32, size) for size in (16, 48)]
    x = torch.randn(2, 3, 32)
    assert all(map(torch.equal, float8_linear(x, tuple(layers)), [layer(x) for layer in layers]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layers[0](x).dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [1, 6, 32])
def test_gradients_of_weights_are_of_columns_that_are_rounded(rows):
    layer, x = linear_layer(FLOAT8_GRADIENTS, 32, 48), torch.randn(rows, 32, requires_grad=True)
    plain, grad = linear_layer(FLOAT8, 32, 48), torch.randn(rows, 48)
    plain.load_state_dict(layer.state_dict())
    made = layer(x)
    made.backward(grad)
    assert torch.equal(made, plain(x))
    assert torch.equal(x.grad, rounded(grad) @ rounded_columns(layer.weight.detach()))
    expected = rounded_columns(grad).t() @ rounded_columns(x.detach())
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-6, atol=1e-6)  # zeros are added
    near = grad.t() @ x.detach()
    assert not torch.equal(expected, near)
    assert (expected - near).norm() < 0.1 * near.norm()


def test_layers_that_read_one_input_share_its_columns():
    layers = tuple(linear_layer(FLOAT8_GRADIENTS, 32, size) for size in (16, 48))
    x, grads = torch.randn(6, 32), [torch.randn(6, size) for size in (16, 48)]
    alone = []
    for layer, grad in zip(layers, grads, strict=True):
        layer(x).backward(grad)
        alone.append(layer.weight.grad)
        layer.weight.grad = None
    with count_casts() as counts:
        torch.autograd.backward(merged(x, *layers), grads)
    assert counts == [(6, 32), (6, 16), (6, 48)]  # x is cast once
    assert all(map(torch.equal, alone, [layer.weight.grad for layer in layers]))


@contextlib.contextmanager
def count_casts():
    """Sizes of what is cast by columns over tokens."""
    cast, found = linear.columns_to_float8, []

    def counted(x, *how):
        if how:
            found.append(tuple(x.shape))
        return cast(x, *how)

    with mock.patch.object(linear, "columns_to_float8", counted):
        yield found


@pytest.mark.parametrize("precision", [FLOAT8, FLOAT8_GRADIENTS])
@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_needs_no_gradient_has_none(frozen, precision):
    layer = linear_layer(precision, 32, 48)
    x = torch.randn(6, 32, requires_grad=frozen != "x")
    layer.weight.requires_grad_(frozen != "weight")
    layer(x).sum().backward()
    assert (x.grad is None) == (frozen == "x")
    assert (layer.weight.grad is None) == (frozen == "weight")


@pytest.mark.parametrize("precision", [FLOAT8, FLOAT8_GRADIENTS])
@pytest.mark.parametrize("padding", [0.0, 1e4, torch.nan, torch.inf])
def test_rows_of_padding_reach_no_other_row(padding, precision):
    layer, x = linear_layer(precision, 32, 48), torch.randn(8, 32)
    grad = torch.randn(8, 48)
    grad[5:] = 0.0
    found = []
    for value in (0.0, padding):
        rows = x.clone()
        rows[5:] = value
        leaf = rows.requires_grad_()
        made = layer(leaf)
        made.backward(grad)
        found.append((made[:5].detach(), leaf.grad[:5].clone()))
        known = precision == FLOAT8_GRADIENTS or torch.isfinite(torch.tensor(value))
        weight_grad, layer.weight.grad = layer.weight.grad, None
        if known:
            found[-1] += (weight_grad,)
    assert all(map(torch.equal, *(entry[: len(found[1])] for entry in found)))


def test_without_their_gradients_large_rows_of_padding_would_change_all_scales():
    """The negative control of the test above."""
    layer, grad = linear_layer(FLOAT8_GRADIENTS, 32, 48), torch.randn(8, 48)
    grad[5:] = 0.0
    found = []
    for value in (0.0, 1e4):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
        x[5:] = value
        with mock.patch.object(linear, "SMALLEST_INVERSE", torch.nan):  # every row takes part
            layer(x).backward(grad)
        weight_grad, layer.weight.grad = layer.weight.grad, None
        found.append(weight_grad)
    assert not torch.equal(*found)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_show_in_gradients_of_weights(value):
    layer, x = linear_layer(FLOAT8_GRADIENTS, 32, 48), torch.randn(8, 32)
    x[2, 7] = value
    layer(x).backward(torch.randn(8, 48))
    assert layer.weight.grad[:, 7].isnan().all()
    layer.weight.grad, grad = None, torch.randn(8, 48)
    grad[3, 9] = value
    layer(torch.randn(8, 32)).backward(grad)
    bad = layer.weight.grad.isnan()
    assert bad[9].all() and bad.sum() == 32


@pytest.mark.parametrize("transposed", [True, False])
def test_grouped_products_are_those_of_each_expert(transposed):
    rows, grad = torch.randn(7, 32), torch.randn(7, 48)
    rows[5:] = torch.nan
    stack = torch.randn(2, 48, 32)
    matrices = (stack if transposed else stack.mT.contiguous()).requires_grad_()
    ends = torch.tensor([2, 5], dtype=torch.int32)
    leaf = rows.requires_grad_()
    made = product(leaf, matrices, ends, transposed, FLOAT8)
    made.backward(grad)
    begin = 0
    for end, matrix in zip(ends.tolist(), stack, strict=True):
        part = slice(begin, end)
        assert torch.equal(made[part], rounded(rows.detach()[part]) @ rounded(matrix).t())
        assert torch.equal(leaf.grad[part], rounded(grad[part]) @ rounded_columns(matrix))
        begin = end
    exact = product(rows.detach(), matrices.detach(), ends, transposed)
    assert (made[:5] - exact[:5]).norm() < 0.05 * exact[:5].norm()


@pytest.mark.parametrize(
    ("kind", "granularity", "precision"),
    [
        pytest.param(kind, granularity, precision, marks=[pytest.mark.slow] * (not quick))
        for kind in (tiny_config, experts_config)
        for granularity, precision, quick in (
            ("layer", FLOAT8, kind is experts_config),
            ("chunk", FLOAT8_GRADIENTS, kind is tiny_config),
            ("layer", FLOAT8_GRADIENTS, False),
            ("chunk", FLOAT8, False),
        )
    ],
)
def test_float8_trains_through_graphs_bit_by_bit(kind, granularity, precision):
    config = of(kind(granularity, 0.1, 5), bf16_ends=0, precision=precision)
    report = verify("float8", config, random_packs(seed=1), CPU)
    assert report.good and report.shows and not report.differences


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        (tiny_config, FLOAT8_GRADIENTS),
        pytest.param(tiny_config, FLOAT8, marks=pytest.mark.slow),
        pytest.param(experts_config, FLOAT8, marks=pytest.mark.slow),
        pytest.param(experts_config, FLOAT8_GRADIENTS, marks=pytest.mark.slow),
    ],
)
def test_float8_trains_through_compiled_graphs_bit_by_bit(kind, precision, monkeypatch):
    """By torch's tracing compiler, not the one that generates code; the chunk has layers of both
    precisions."""
    by_tracing = partial(graph, compile="aot_eager")
    monkeypatch.setattr(
        "packgraph.train.strategies.graph",
        lambda *given, compile, **rest: by_tracing(*given, **rest),
    )
    config = of(kind("chunk", 0.0, 5), num_layers=3, precision=precision)
    graphs = replace(config.graph, compile=True, capacities=CAPACITIES[:1])
    packs = (pack([[1, 2, 3] * 4, [5] * 9], [CAPACITIES[0]])[0] for _ in itertools.count())
    report = verify("float8", replace(config, graph=graphs), packs, CPU)
    assert report.good and report.shows and not report.differences


def test_layers_at_both_ends_stay_as_they_are():
    config = of(tiny_config("layer", 0.0, 4), num_layers=4).model
    model = DecoderModel(config, seed=1)
    kinds = [
        {type(part) for part in layer.modules() if isinstance(part, nn.Linear)}
        for layer in model.layers.values()
    ]
    assert kinds == [{nn.Linear}, {Float8Linear}, {Float8Linear}, {nn.Linear}]
    plain = DecoderModel(replace(config, precision=NATIVE), seed=1)
    assert [*plain.state_dict()] == [*model.state_dict()]
    batch = next(random_packs(seed=1))
    assert plain(batch).item() != model(batch).item()
    with pytest.raises(ValueError, match="bf16_ends 2 leaves none of 4 layers to precision fp8"):
        replace(config, bf16_ends=2)
    with pytest.raises(ValueError, match="bf16_ends is -1, must not be negative"):
        replace(config, bf16_ends=-1)


def test_layers_change_their_product_over_the_same_parameters():
    layers = nn.ModuleList([nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 16)])
    before, x = [*layers.parameters()], torch.randn(4, 32)
    plain = layers[0](x)
    assert multiply_by(layers, FLOAT8) == []
    assert all(map(lambda a, b: a is b, before, layers.parameters()))
    assert not torch.equal(layers[0](x), plain)
    assert multiply_by(layers, FLOAT8_GRADIENTS) == []
    assert {type(layer) for layer in (layers[0], layers[2])} == {Float8GradientsLinear}
    assert multiply_by(layers, NATIVE) == []
    assert torch.equal(layers[0](x), plain)


def test_sizes_that_the_device_does_not_take_are_named_all_at_once():
    layers = nn.ModuleDict({"a": nn.Linear(24, 48), "b": nn.Linear(32, 48), "c": nn.Linear(48, 7)})
    problems = multiply_by(layers, FLOAT8)
    assert [problem.partition(":")[0] for problem in problems] == ["a", "c"]
    assert {type(layer) for layer in layers.values()} == {nn.Linear}
    with pytest.raises(ValueError, match="24 x 48 is not made of multiples of 16"):
        linear_layer(FLOAT8, 24, 48)(torch.randn(2, 24))


class Adapted(nn.Module):
    """A layer with something around it, which shows the weight of what is inside, as PEFT does."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.weight, self.bias = inner, inner.weight, inner.bias

    def forward(self, x):
        return self.inner(x) + 1


def test_adapters_and_hooks_of_layers_that_share_an_input_run():
    layers = [linear_layer(FLOAT8, 32, 16) for _ in range(2)]
    x = torch.randn(4, 32)
    plain, other = merged(x, *layers)
    found = merged(x, layers[0], Adapted(layers[1]))
    assert torch.equal(found[0], plain) and torch.equal(found[1], other + 1)
    layers[1].register_forward_hook(lambda module, given, made: made + 2)
    assert torch.equal(merged(x, *layers)[1], other + 2)


def test_layers_of_two_precisions_are_two_codes_that_add_all_gradients_of_weights(monkeypatch):
    config = of(tiny_config("chunk", 0.0, 5), num_layers=3, precision=FLOAT8_GRADIENTS).model
    taken = []
    monkeypatch.setattr(
        "packgraph.graphs.compiled.compiler.take_products",
        lambda *given: taken.append(take_products(*given)) or taken[-1],
    )
    batch = next(random_packs(seed=1))
    graphed = graph(
        DecoderModel(config, seed=1),
        capacities=[batch.capacity],
        granularity="chunk",
        compile="aot_eager",
        warmup=0,
        strict=True,
    )
    graphed(batch).backward()
    stats = control(graphed).stats
    assert not stats.recompiles and stats.captured == 1
    assert sorted(map(len, taken)) == [1, 1, 7, 7]  # embedding and head, layers of both
