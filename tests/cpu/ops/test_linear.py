"""Another product of linear layers is one class and one entry: plain, merged and grouped layers
take it, graphs replay it bit by bit."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from moekit import ends_of, run

from packgraph.graphs.graphed import graph
from packgraph.ops.linear import (
    PRODUCTS,
    NativeProduct,
    add_matrices_gradient,
    linear_layer,
    matrices_gradient,
    merged,
    product,
)
from packgraph.ops.names import PRECISIONS
from packgraph.packing.pack import pack
from packgraph.parallel.tensor import tensor_problems
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.validate import validate
from packgraph.verification.matrix import (
    CAPACITIES,
    random_packs,
    tiny_config,
    tiny_experts_config,
    tiny_hybrid_config,
)
from packgraph.verification.verify import verify

CPU = torch.device("cpu")
CALLS: Counter[str] = Counter()


def rounded(x):
    return x.to(torch.float8_e4m3fn).to(x.dtype)


class RoundedProduct(NativeProduct):
    """What goes into a product is rounded to float8: e4m3, without scales. Adds as it likes to."""

    name, splits = "rounded", False

    def layer(self, inputs, outputs, bias):
        return super(NativeProduct, self).layer(inputs, outputs, bias)

    def multiply(self, rows, matrices, offsets, transposed):
        CALLS["plain" if offsets is None else "grouped"] += 1
        return super().multiply(rounded(rows), rounded(matrices), offsets, transposed)

    def rows_gradient(self, grad, matrices, offsets, transposed):
        return NativeProduct.multiply(
            self, rounded(grad), rounded(matrices), offsets, not transposed
        )

    def matrices_gradient(self, grad, rows, offsets, transposed):
        return super().matrices_gradient(rounded(grad), rounded(rows), offsets, transposed)

    def add_matrices_gradient(self, total, grad, rows, offsets, transposed):
        CALLS["adds"] += 1
        total.add_(self.matrices_gradient(grad, rows, offsets, transposed))

    def merged(self, x, layers):
        if not torch.compiler.is_compiling():
            CALLS["merged"] += 1
        return super().merged(x, layers)


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(PRODUCTS, RoundedProduct.name, RoundedProduct())
    monkeypatch.setattr("packgraph.models.config.PRECISIONS", (*PRECISIONS, RoundedProduct.name))
    CALLS.clear()
    return RoundedProduct.name


def named(config, by):
    return replace(config, model=replace(config.model, precision=by, bf16_ends=0))


@pytest.mark.parametrize("granularity", [pytest.param("layer", marks=pytest.mark.slow), "chunk"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(tiny_config, marks=pytest.mark.slow),
        tiny_experts_config,
        pytest.param(tiny_hybrid_config, marks=pytest.mark.slow),
    ],
)
def test_a_toy_product_trains_through_graphs_bit_by_bit(toy, kind, granularity):
    config = named(kind(granularity, 0.1, 5), toy)
    report = verify("toy", config, random_packs(seed=1), CPU)
    assert report.good and report.shows and not report.differences
    assert CALLS["plain"] and (CALLS["merged"] or kind is tiny_hybrid_config)
    assert bool(CALLS["grouped"]) == (kind is not tiny_config)


def test_a_toy_product_adds_to_gradients_in_compiled_layers(toy, monkeypatch):
    """By torch's tracing compiler, not the one that generates code."""
    by_tracing = partial(graph, compile="aot_eager")
    monkeypatch.setattr(
        "packgraph.train.strategies.graph",
        lambda *given, compile, **rest: by_tracing(*given, **rest),
    )
    config = named(tiny_experts_config("layer", 0.0, 5), toy)
    experts = replace(config.model.experts, first_dense=0)
    config = replace(config, model=replace(config.model, num_layers=1, experts=experts))
    graphs = replace(config.graph, compile=True, capacities=CAPACITIES[:1])
    packs = (pack([[1, 2, 3] * 4, [5] * 9], [CAPACITIES[0]])[0] for _ in itertools.count())
    report = verify("toy", replace(config, graph=graphs), packs, CPU)
    assert report.good and report.shows and CALLS["adds"]


@pytest.mark.parametrize("transposed", [True, False])
def test_the_native_product_of_one_matrix_is_that_of_torch(transposed):
    rows, grad = torch.randn(6, 5), torch.randn(6, 4)
    matrix = torch.randn((4, 5) if transposed else (5, 4))

    def theirs(rows, matrix):
        return torch.nn.functional.linear(rows, matrix if transposed else matrix.t())

    ours = run(lambda rows, matrix: product(rows, matrix, None, transposed), [rows, matrix], grad)
    assert all(map(torch.equal, ours, run(theirs, [rows, matrix], grad)))
    total = torch.ones_like(matrix)
    add_matrices_gradient(total, grad, rows, None, transposed)
    assert torch.equal(total, matrices_gradient(grad, rows, None, transposed) + 1)


def test_gradients_of_experts_for_a_float32_total_are_not_rounded_to_bfloat16():
    rows, grad = (torch.randn(24, 8, dtype=torch.bfloat16) for _ in range(2))
    offsets, total = torch.tensor([5, 5, 24], dtype=torch.int32), torch.ones(3, 8, 8)
    add_matrices_gradient(total, grad, rows, offsets, True)
    parts = [(grad[a:b].double().t() @ rows[a:b].double()) for a, b in ((0, 5), (5, 5), (5, 24))]
    torch.testing.assert_close(total, torch.stack(parts).float() + 1, rtol=1e-6, atol=1e-5)
    narrow = matrices_gradient(grad, rows, offsets, True)
    assert not torch.allclose(narrow.float() + 1, total, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_of_another_product_has_all_gradients_and_follows_autocast(toy, bias):
    layer, x = linear_layer(toy, 5, 4, bias), torch.randn(6, 5, requires_grad=True)
    weight, grad = layer.weight.detach(), torch.randn(6, 4)
    (made,) = merged(x, layer)
    made.backward(grad)
    expected = rounded(x.detach()) @ rounded(weight).t()
    assert torch.equal(made, expected + layer.bias if bias else expected)
    assert torch.equal(x.grad, rounded(grad) @ rounded(weight))
    assert torch.equal(layer.weight.grad, rounded(grad).t() @ rounded(x.detach()))
    assert not bias or torch.equal(layer.bias.grad, grad.sum(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_what_is_not_known_of_a_product_is_refused(toy):
    with pytest.raises(
        ValueError, match="precision 'fp9' is unknown; known are bf16, fp8, fp8_weight_gradients"
    ):
        named(tiny_config("layer", 0.0, 4), "fp9")
    config = named(tiny_config("layer", 0.0, 4), toy)
    (problem,) = tensor_problems(config.model, 2)
    assert "is not known with model.precision = rounded" in problem
    config = replace(config, parallel=ParallelConfig(tp=2))
    assert problem in validate(config, "cpu", world=2)


def test_shapes_that_compilers_are_told_are_those_that_come(toy):
    rows, stack, ends = torch.randn(6, 5), torch.randn(2, 4, 5), ends_of([2, 6])
    for operation, arguments in (
        (torch.ops.packgraph.linear_product, (rows, stack[0], None, True, toy)),
        (torch.ops.packgraph.linear_product, (rows, stack, ends, True, toy)),
    ):
        leaves = [
            value.clone().requires_grad_() if isinstance(value, torch.Tensor) else value
            for value in arguments[:2]
        ]
        torch.library.opcheck(operation, (*leaves, *arguments[2:]))
