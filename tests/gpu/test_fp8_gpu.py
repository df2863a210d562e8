"""Products in float8 on a GPU that has them: casts bit by bit, products against emulation, no wait
for the device, and training that graphs and compiled graphs replay bit by bit."""

from dataclasses import replace

import pytest
import torch

from packgraph.ops.float8.cast import (
    blocks_to_float8,
    columns_to_float8,
    naive_columns_to_float8,
    naive_rows_to_float8,
    rows_to_float8,
    swizzled,
)
from packgraph.ops.float8.linear import FLOAT8, FLOAT8_GRADIENTS, MXFP8, float8_problems
from packgraph.ops.linear import linear_layer, product
from packgraph.verification.matrix import random_packs, tiny_config
from packgraph.verification.verify import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
EDGES = (0.0, -0.0, 448.0, 449.0, 1.75, 1.7501, -256.0, 2.0**-70, 2.0**-130, 3e38)


@pytest.fixture(autouse=True)
def float8():
    """Only where there is any."""
    problems = float8_problems(DEVICE, torch.bfloat16)
    if problems:
        pytest.skip("; ".join(problems))


def numbers(dtype, *size):
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(size, generator=generator, device=DEVICE)
    x = x * 2.0 ** torch.randint(-40, 40, (size[0], 1), generator=generator, device=DEVICE)
    x[0, : len(EDGES)] = torch.tensor(EDGES)
    x[3, 5], x[4, 0], x[5, 32] = torch.nan, torch.inf, -torch.inf
    return x.to(dtype)


def same(found, expected):
    """Bit by bit but for the bits of NaN."""
    return all(
        a.dtype == b.dtype
        and torch.equal(a.float().isnan(), b.float().isnan())
        and torch.equal(a.float().nan_to_num(), b.float().nan_to_num())
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("size", [(9, 48), (1030, 176), (65, 9728), (2560, 1024)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_cast_as_the_specification_says(dtype, size):
    x = numbers(dtype, *size)
    assert same(rows_to_float8(x), naive_rows_to_float8(x))
    assert same(columns_to_float8(x), naive_columns_to_float8(x))
    stack = torch.stack([x, -0.5 * x])
    assert same(columns_to_float8(stack), naive_columns_to_float8(stack))
    taken = torch.arange(size[0], device=DEVICE)[:, None] % 3 > 0
    how = taken, 16
    assert same(columns_to_float8(x, *how), naive_columns_to_float8(x, *how))
    assert not same(columns_to_float8(x, *how)[1:], columns_to_float8(x, None, 16)[1:])


@pytest.mark.parametrize("size", [(9, 48), (65, 9728)])
def test_compiled_casts_have_the_same_bits(size):
    x = numbers(torch.bfloat16, *size)
    assert same(torch.compile(rows_to_float8, dynamic=False)(x), naive_rows_to_float8(x))


def gradients(layer, x, grad):
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    made = layer(leaf)
    made.backward(grad)
    return made.detach(), leaf.grad, layer.weight.grad.clone()


@pytest.mark.parametrize("size", [(9, 64), (130, 1024)])
def test_blocks_and_their_scales_are_those_of_a_cpu(size):
    x = numbers(torch.bfloat16, *size)
    codes, inverse = blocks_to_float8(x)
    expected = blocks_to_float8(x.cpu())
    assert same((codes.cpu(), inverse.cpu()), expected)
    scales, theirs = swizzled(inverse).cpu(), swizzled(expected[1])
    assert torch.equal(scales.view(torch.uint8), theirs.view(torch.uint8))


def test_mxfp8_is_refused_before_blackwell():
    if not float8_problems(DEVICE, torch.bfloat16, precision=MXFP8):
        pytest.skip("this GPU has it")
    layer = linear_layer(MXFP8, 64, 96).to(DEVICE, torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"mxfp8 needs compute capability 10\.0 or more"):
        layer(torch.randn(8, 64, device=DEVICE).bfloat16())


@pytest.mark.parametrize("rows", [1, 250, 4096])
@pytest.mark.parametrize("precision", [FLOAT8, FLOAT8_GRADIENTS, MXFP8])
def test_a_layer_is_near_its_emulation(precision, rows):
    """The device sums with fewer bits than float32 has, the emulation does not: 1 %, in float8 over
    all rows 3 %. Not run so far: mxfp8, on a Blackwell GPU."""
    if problems := float8_problems(DEVICE, torch.bfloat16, precision=precision):
        pytest.skip("; ".join(problems))
    layer = linear_layer(precision, 512, 1056).to(torch.bfloat16)
    x, grad = torch.randn(rows, 512).bfloat16(), torch.randn(rows, 1056).bfloat16()
    expected = gradients(layer, x, grad)
    found = gradients(layer.to(DEVICE), x.to(DEVICE), grad.to(DEVICE))
    near = 0.01, 0.01, 0.03 if precision == FLOAT8_GRADIENTS else 0.01
    for ours, theirs, limit in zip(found, expected, near, strict=True):
        ours, theirs = ours.cpu().float(), theirs.float()
        assert (ours - theirs).norm() < limit * theirs.norm()


@pytest.mark.parametrize("transposed", [True, False])
def test_grouped_products_are_near_their_emulation(transposed):
    if problems := float8_problems(DEVICE, torch.bfloat16, experts=True):
        pytest.skip("; ".join(problems))
    rows = torch.randn(300, 256).bfloat16()
    stack = torch.randn(4, *((96, 256) if transposed else (256, 96))).bfloat16()
    ends = torch.tensor([100, 100, 117, 280], dtype=torch.int32)
    expected = product(rows, stack, ends, transposed, FLOAT8)[:280].float()
    rows[280:] = torch.nan
    found = product(rows.to(DEVICE), stack.to(DEVICE), ends.to(DEVICE), transposed, FLOAT8)
    assert (found[:280].cpu().float() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("precision", [FLOAT8, FLOAT8_GRADIENTS])
def test_rows_of_padding_reach_no_other_row_and_no_weight(precision):
    layer = linear_layer(precision, 512, 1040).to(DEVICE, torch.bfloat16)
    x, grad = (torch.randn(256, n, device=DEVICE).bfloat16() for n in (512, 1040))
    x[200:], grad[200:] = 0.0, 0.0
    expected = gradients(layer, x, grad)
    x[200:] = 1e4
    found = gradients(layer, x, grad)
    assert all(torch.equal(a[:200], b[:200]) for a, b in zip(found[:2], expected[:2], strict=True))
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.parametrize("precision", [FLOAT8, FLOAT8_GRADIENTS, MXFP8])
def test_float8_trains_through_graphs_bit_by_bit(precision, granularity, compile, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # attention's backward adds by atomics otherwise
    if problems := float8_problems(DEVICE, torch.bfloat16, precision=precision):
        pytest.skip("; ".join(problems))
    config = tiny_config(granularity, 0.0, 6)
    model = replace(
        config.model,
        precision=precision,
        hidden_size=128,
        intermediate_size=256,
        head_dim=64,
        num_layers=3,
    )
    graph = replace(config.graph, compile=compile)
    run = replace(config.run, dtype="bfloat16")
    report = verify(
        "float8", replace(config, model=model, graph=graph, run=run), random_packs(seed=1), DEVICE
    )
    assert report.good and report.shows and not report.differences
