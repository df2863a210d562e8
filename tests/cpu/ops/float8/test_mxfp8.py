"""MXFP8, which no GPU here has run: casts by blocks, layers by emulation, graphs, refusals."""

import itertools
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from packgraph.graphs.graphed import graph
from packgraph.models.decoder import DecoderModel
from packgraph.ops.float8 import linear
from packgraph.ops.float8.cast import CODES, blocks_to_float8, from_float8, swizzled
from packgraph.ops.float8.linear import FLOAT8, MXFP8, Mxfp8Linear, float8_problems, multiply_by
from packgraph.ops.linear import linear_layer, merged, product
from packgraph.ops.names import NATIVE
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import pack
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.memory import DecoderMemory
from packgraph.train.validate import validate
from packgraph.verification.matrix import (
    CAPACITIES,
    random_packs,
    tiny_config,
    tiny_experts_config,
)
from packgraph.verification.verify import verify

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NUMBERS = torch.arange(256, dtype=torch.uint8).view(CODES).double()  # of all codes; NaN: 127, 255


def of(config, **model):
    """A config in MXFP8, in sizes that it takes."""
    changed = {"precision": MXFP8, "head_dim": 16, "bf16_ends": 0, **model}
    return replace(config, model=replace(config.model, **changed))


def naive_code(number):
    """The code nearest to a number, of two as near the even one."""
    distances = (NUMBERS - number).abs().nan_to_num(torch.inf)
    nearest = (distances == distances.min()).nonzero().flatten().tolist()
    even = [code for code in nearest if code % 2 == 0] or nearest
    return next((code for code in even if (code >= 128) == (number < 0)), even[0])


def naive_block(numbers):
    """Codes and scale of 32 finite numbers."""
    exponent = -72  # that of blocks below 2^-64
    while max(abs(number) for number in numbers) > 448 * 2.0**exponent:
        exponent += 1
    return [naive_code(number / 2.0**exponent) for number in numbers], 2.0**exponent


def naive_rounded(x):
    """What the codes of x [R, C] stand for: each block of 32 by itself, number by number."""
    rows = []
    for row in x.double().tolist():
        found = []
        for start in range(0, len(row), 32):
            codes, scale = naive_block(row[start : start + 32])
            found += [NUMBERS[code].item() * scale for code in codes]
        rows.append(found)
    return torch.tensor(rows, dtype=x.dtype)


def different_sizes(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-30, 30, (rows, columns // 32, 1), generator=generator)
    numbers = torch.randn(rows, columns // 32, 32, generator=generator) * 2.0**sizes
    return numbers.flatten(1)


def test_blocks_are_rounded_as_number_by_number():
    x = different_sizes(5, 96)
    x[0, :6] = torch.tensor([0.0, 448.0, 449.0, -1.75, 2.0**-100, -17.0])
    x[1, 32:64], x[2, :32] = 0.0, 2.0**-80
    codes, inverse = blocks_to_float8(x)
    assert codes.shape == (5, 96) and codes.dtype == CODES and inverse.shape == (5, 3)
    blocks = x.double().view(5, 3, 32).tolist()
    expected = [[naive_block(block) for block in row] for row in blocks]
    assert inverse.tolist() == [[scale for _, scale in row] for row in expected]
    assert from_float8(codes, inverse).tolist() == naive_rounded(x).tolist()


def test_a_block_that_is_not_finite_is_so_alone():
    x = different_sizes(3, 96)
    expected = from_float8(*blocks_to_float8(x))
    x[1, 40], x[2, 95] = torch.nan, -torch.inf
    found = from_float8(*blocks_to_float8(x)).view(3, 3, 32)
    bad = torch.tensor([[False] * 3, [False, True, False], [False, False, True]])
    assert found[bad].isnan().all()
    assert torch.equal(found[~bad], expected.view(3, 3, 32)[~bad])


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 4), (130, 9), (300, 8)])
def test_scales_lie_where_products_read_them(rows, columns):
    """cuBLAS's layout of scales: tiles of 128 x 4, whose rows r and r + 32 are 4 bytes apart."""
    exponents = torch.randint(-70, 110, (rows, columns))
    inverse = 2.0 ** exponents.float()
    inverse[0, 0] = torch.nan
    found = swizzled(inverse)
    assert found.dtype == torch.float8_e8m0fnu and found.is_contiguous()
    across = -(-columns // 4)
    expected = torch.zeros(-(-rows // 128) * across * 512, dtype=torch.uint8)
    for row, column in itertools.product(range(rows), range(columns)):
        tile = (row // 128) * across + column // 4
        place = 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
        expected[place] = 255 if row == column == 0 else 127 + exponents[row, column]
    assert torch.equal(found.view(torch.uint8), expected)


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_multiplies_what_is_rounded_and_has_all_gradients(bias):
    layer, x = linear_layer(MXFP8, 64, 96, bias), different_sizes(6, 64).requires_grad_()
    weight, grad = layer.weight.detach(), different_sizes(6, 96, seed=1)
    made = layer(x)
    made.backward(grad)
    expected = naive_rounded(x.detach()) @ naive_rounded(weight).t()
    assert torch.equal(made, expected + layer.bias if bias else expected)
    turned = naive_rounded(weight.t().contiguous())
    assert torch.equal(x.grad, naive_rounded(grad) @ turned.t())
    assert torch.equal(layer.weight.grad, grad.t() @ x.detach())
    assert not bias or torch.equal(layer.bias.grad, grad.sum(0))
    near = x.detach() @ weight.t()
    assert 0 < (expected - near).norm() < 0.05 * near.norm()


def test_one_large_number_costs_its_block_alone_and_not_its_row():
    x = torch.randn(4, 64)
    x[:, 0] = 2.0**20
    codes = {}
    for precision in (FLOAT8, MXFP8):
        layer = linear_layer(precision, 64, 32)
        layer.weight.data.fill_(1.0)[:, 0] = 0.0
        codes[precision] = (layer(x) - x[:, 1:].sum(1, keepdim=True)).abs().max()
    assert codes[MXFP8] < 0.75 * codes[FLOAT8]


def test_layers_that_read_one_input_have_the_numbers_of_each():
    layers = [linear_layer(MXFP8, 64, size) for size in (32, 96)]
    x = torch.randn(2, 3, 64)
    with mock.patch.object(linear, "blocks_to_float8", wraps=blocks_to_float8) as cast:
        found = merged(x, *layers)
    assert cast.call_count == 3  # x once, and each weight
    assert all(map(torch.equal, found, [layer(x) for layer in layers]))
    weight = layers[0].weight.detach()
    assert torch.equal(product(x[0], weight, None, True, MXFP8), found[0][0])
    assert torch.equal(product(x[0], weight.t().contiguous(), None, False, MXFP8), found[0][0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layers[0](x).dtype == torch.bfloat16


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_needs_no_gradient_has_none(frozen):
    layer = linear_layer(MXFP8, 64, 32)
    x = torch.randn(6, 64, requires_grad=frozen != "x")
    layer.weight.requires_grad_(frozen != "weight")
    layer(x).sum().backward()
    assert (x.grad is None) == (frozen == "x")
    assert (layer.weight.grad is None) == (frozen == "weight")


@pytest.mark.parametrize("padding", [1e4, torch.nan, torch.inf])
def test_rows_of_padding_reach_no_other_row(padding):
    layer, x, grad = linear_layer(MXFP8, 64, 96), torch.randn(8, 64), torch.randn(8, 96)
    grad[5:] = 0.0
    found = []
    for value in (0.0, padding):
        leaf = x.index_fill(0, torch.tensor([5, 6, 7]), value).requires_grad_()
        made = layer(leaf)
        made.backward(grad)
        weight_grad, layer.weight.grad = layer.weight.grad, None
        found.append((made[:5].detach(), leaf.grad[:5], weight_grad))
    compared = 3 if padding == 1e4 else 2  # 0 times infinity, as in bfloat16
    assert all(itertools.starmap(torch.equal, zip(*found, strict=True))) == (compared == 3)
    assert all(map(torch.equal, found[0][:compared], found[1][:compared]))


@pytest.mark.parametrize("granularity", ["layer", pytest.param("chunk", marks=pytest.mark.slow)])
def test_it_trains_through_graphs_bit_by_bit(granularity):
    config = of(tiny_config(granularity, 0.1, 6))  # two steps of warm-up, four by graphs
    report = verify("mxfp8", config, random_packs(seed=1), CPU)
    assert report.good and report.shows and not report.differences
    assert report.replayed >= 3


@pytest.mark.slow
def test_it_trains_through_compiled_graphs_bit_by_bit(monkeypatch):
    """By torch's tracing compiler, as the other precisions."""
    by_tracing = partial(graph, compile="aot_eager")
    monkeypatch.setattr(
        "packgraph.train.strategies.graph",
        lambda *given, compile, **rest: by_tracing(*given, **rest),
    )
    config = of(tiny_config("chunk", 0.0, 5), num_layers=3, bf16_ends=1)
    graphs = replace(config.graph, compile=True, capacities=CAPACITIES[:1])
    packs = (pack([[1, 2, 3] * 4, [5] * 9], [CAPACITIES[0]])[0] for _ in itertools.count())
    report = verify("mxfp8", replace(config, graph=graphs), packs, CPU)
    assert report.good and report.shows and not report.differences


def test_decoders_and_live_layers_take_it_by_name():
    config = of(tiny_config("layer", 0.0, 4), num_layers=3, bf16_ends=1).model
    model = DecoderModel(config, seed=1)
    kinds = [
        {type(part) for part in layer.modules() if isinstance(part, nn.Linear)}
        for layer in model.layers.values()
    ]
    assert kinds == [{nn.Linear}, {Mxfp8Linear}, {nn.Linear}]
    plain = DecoderModel(replace(config, precision=NATIVE), seed=1)
    batch = next(random_packs(seed=1))
    exact, ours = plain(batch).item(), model(batch).item()
    assert ours != exact and abs(ours - exact) < 0.05 * exact
    layers = nn.ModuleList([nn.Linear(64, 32), nn.Linear(32, 48)])
    assert multiply_by(layers, MXFP8) == ["1: 32 x 48 is not made of multiples of 32"]
    assert multiply_by(layers, FLOAT8) == []


CAPABILITIES = "torch.cuda.get_device_capability"


@pytest.mark.parametrize(
    ("capability", "reasons"),
    [
        ((8, 9), ["mxfp8 needs compute capability 10.0 or more (Blackwell), H100 has 8.9"]),
        ((9, 0), ["mxfp8 needs compute capability 10.0 or more (Blackwell), H100 has 9.0"]),
        ((10, 0), []),
        ((12, 0), []),
    ],
)
def test_gpus_before_blackwell_are_refused(capability, reasons):
    with (
        mock.patch(CAPABILITIES, return_value=capability),
        mock.patch("torch.cuda.get_device_name", return_value="H100"),
        mock.patch("torch.cuda.is_available", return_value=True),
    ):
        assert float8_problems(CUDA, torch.bfloat16, precision=MXFP8) == reasons
        found = validate(of(tiny_config("layer", 0.0, 4)), "cuda")
        assert all(any(reason in problem for problem in found) for reason in reasons)


def on_a_gpu(capability):
    """A product of fake tensors: torch's checks of shapes and types, and no computation."""
    scaled_mm = torch.nn.functional.scaled_mm
    with (
        FakeTensorMode(),
        mock.patch(CAPABILITIES, return_value=capability),
        mock.patch("torch.cuda.get_device_name", return_value="H100"),
        mock.patch.object(torch.nn.functional, "scaled_mm", wraps=scaled_mm) as scaled,
    ):
        left, right = (torch.empty(size, 64, dtype=CODES, device=CUDA) for size in (40, 96))
        inverse, inverses = (torch.empty(size, 2, device=CUDA) for size in (40, 96))
        made = linear._multiply_blocks(left, inverse, right, inverses, torch.bfloat16)
        return made, scaled


def test_no_gpu_before_blackwell_multiplies_by_something_else():
    """Also where nobody asked before, as with a layer of one's own."""
    with pytest.raises(RuntimeError, match=r"mxfp8 needs compute capability 10\.0 or more"):
        on_a_gpu((9, 0))


def test_torch_takes_what_a_blackwell_gpu_would_be_given():
    made, scaled = on_a_gpu((10, 0))
    assert made.shape == (40, 96) and made.dtype == torch.bfloat16 and made.is_cuda
    assert scaled.call_count == 1
    left, right, scale, _, other, *_ = scaled.call_args.args
    assert left.stride() == (64, 1) and right.stride() == (1, 64)
    assert scale.shape == other.shape == (512,)  # one tile of 128 x 4
    with FakeTensorMode():  # the same by the older function, which checks sizes of scales
        parts = [torch.empty(size, 64, dtype=CODES, device=CUDA) for size in (40, 96)]
        scales = [torch.empty(512, dtype=scale.dtype, device=CUDA) for _ in range(2)]
        torch._scaled_mm(parts[0], parts[1].t(), *scales, out_dtype=torch.bfloat16)
        scales[0] = torch.empty(80, dtype=scale.dtype, device=CUDA)  # as many as blocks
        with pytest.raises(RuntimeError, match="scal"):
            torch._scaled_mm(parts[0], parts[1].t(), *scales, out_dtype=torch.bfloat16)


def test_experts_sizes_and_tensor_parallelism_are_refused():
    config = of(tiny_experts_config("layer", 0.0, 4), head_dim=16)
    assert any("experts have no products in mxfp8" in found for found in validate(config, "cpu"))
    ends, stack = torch.tensor([2, 4], dtype=torch.int32), torch.randn(2, 32, 64)
    with pytest.raises(ValueError, match="experts have no products in mxfp8"):
        product(torch.randn(4, 64), stack, ends, True, MXFP8)
    with pytest.raises(ValueError, match="48 x 32 is not made of multiples of 32"):
        linear_layer(MXFP8, 48, 32)(torch.randn(2, 48))
    found = validate(of(tiny_config("layer", 0.0, 4), intermediate_size=48), "cpu")
    assert any("mlp.up_proj: 32 x 48 is not made of multiples of 32" in one for one in found)
    dense = of(tiny_config("layer", 0.0, 4))
    found = validate(replace(dense, parallel=ParallelConfig(tp=2)), "cpu", world=2)
    assert any("tensor parallelism over 2 ranks is not known" in one for one in found)


def test_plans_of_memory_count_codes_and_scales():
    plain = replace(tiny_config("layer", 0.0, 4).model, num_layers=3)
    found = DecoderMemory(replace(plain, precision=MXFP8), 3, 4)(Capacity(128, 4))
    numbers = 128 * 64 + 64 * 32
    assert found - DecoderMemory(plain, 3, 4)(Capacity(128, 4)) == numbers + numbers // 32 * 5
