"""Float32 gradients of bfloat16 weights on a GPU: products are added in their epilogue, graphs have
the bits of eager calls, compiled or not."""

import dataclasses

import pytest
import torch
from tracekit import differences

import packgraph
from packgraph.graphs.compiled.products import add_product
from packgraph.models.decoder import DecoderModel
from packgraph.ops.embedding import add_embedding_gradient, naive_embedding_gradient
from packgraph.ops.linear import add_matrices_gradient
from packgraph.ops.loss import add_scaled_gradient
from packgraph.train.config.presets import preset
from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.optimizer import Optimizer

pytestmark = pytest.mark.gpu
CAPACITY = packgraph.Capacity(512, 8)


def drawn(*sizes, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(size, generator=generator, device="cuda").to(dtype) for size in sizes]


@pytest.mark.parametrize("turned", [False, True])
def test_a_product_is_added_without_rounding_it_to_bfloat16(turned):
    left, right = drawn((1024, 4096), (4096, 768))
    left = left.t().contiguous().t() if turned else left
    (total,) = drawn((1024, 768), dtype=torch.float32)
    exact = total.double() + left.double() @ right.double()
    rounded = total + left @ right
    again, address = total.clone(), total.data_ptr()
    add_product(total, left, right)
    add_product(again, left, right)
    assert total.data_ptr() == address and torch.equal(total, again)
    # Sums of 4,096 products of about 64; of bfloat16 a place is 0.5 at that size.
    assert (total - exact).abs().max() < 5e-3 < 0.2 < (rounded - exact).abs().max()


def test_a_captured_product_adds_in_place():
    left, right = drawn((256, 512), (512, 128))
    total, stream, graph = torch.zeros(256, 128, device="cuda"), torch.cuda.Stream(), None
    add_product(total, left, right)
    one, graph = total.clone(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        add_product(total, left, right)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        graph.replay()
    assert torch.cuda.memory_allocated() == before
    torch.testing.assert_close(total, 4 * one, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("experts", [4, 64])
@pytest.mark.parametrize("transposed", [True, False])
def test_products_of_experts_are_added_in_float32(transposed, experts):
    rows, grad = drawn((4096, 256), (4096, 512))
    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (4000 // experts)
    shape = (512, 256) if transposed else (256, 512)
    (total,) = drawn((experts, *shape), dtype=torch.float32)
    exact = total.double()
    first, second = (grad, rows) if transposed else (rows, grad)
    for expert, (start, end) in enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False)):
        exact[expert] += first[start:end].double().t() @ second[start:end].double()
    add_matrices_gradient(total, grad, rows, ends, transposed)
    assert (total - exact).abs().max() < 1e-3


def test_rows_and_scaled_gradients_are_added_in_float32():
    (grad, part), total = drawn((3000, 1000), (5000, 1000)), torch.zeros(5000, 1000, device="cuda")
    words = torch.randint(5000, (3000,), device="cuda")
    add_embedding_gradient(total, grad, words, part)
    expected = naive_embedding_gradient(grad.float(), words, total)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-5)
    factor = torch.tensor(1 / 3, device="cuda")
    expected = total + part.float() * factor
    add_scaled_gradient(total, part, factor, part)
    assert torch.equal(total, expected)


def model_of(kind):
    model = dataclasses.replace(
        preset({"dense": "qwen3-tiny", "experts": "moonlight-tiny"}[kind]).model, dropout=0.0
    )
    return DecoderModel(model, seed=1, dtype=torch.bfloat16, device="cuda")


def train(kind, gradients, warmup, steps=4, **options):
    """Gradients and losses of steps of four microbatches, and the graphs' counts."""
    torch._dynamo.reset()
    model = model_of(kind)
    config = OptimizerConfig(gradients=gradients)
    update = Optimizer(model.named_parameters(), config)
    call = packgraph.graph(model, capacities=[CAPACITY], warmup=warmup, **options)
    generator, trace = torch.Generator().manual_seed(3), []
    for _ in range(steps):
        update.zero_grad()
        facts = {}
        for number in range(4):
            documents = [torch.randint(0, 32, (120,), generator=generator).tolist()] * 4
            (batch,) = packgraph.pack(documents, [CAPACITY])
            loss = call(batch.to("cuda")) / 4
            loss.backward()
            facts[f"loss {number}"] = loss.detach().clone()
        facts |= {f"gradient {n}": g.clone() for n, g in update.gradients().items()}
        facts["norm"] = update.step(1e-3).clone()
        facts |= {n: p.detach().clone() for n, p in model.named_parameters()}
        trace.append(facts)
    return trace, call.stats


@pytest.mark.parametrize("gradients", ["float32", "bfloat16"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_graphs_have_the_bits_of_eager_calls(kind, granularity, compiled, gradients):
    options = {"granularity": granularity, "compile": compiled}
    eager, stats = train(kind, gradients, 10**6, **options)
    assert stats.replayed == 0
    found, stats = train(kind, gradients, 1, **options)
    assert stats.replayed > 8 and differences(eager, found) == []
    kinds = {value.dtype for name, value in found[0].items() if name.startswith("gradient")}
    assert kinds == {getattr(torch, gradients)}


@pytest.mark.parametrize("microbatches", [64, 1024])
def test_sums_of_equal_microbatches_do_not_stagnate(microbatches):
    model = model_of("dense")
    update = Optimizer(model.named_parameters(), OptimizerConfig())
    (batch,) = packgraph.pack([list(range(30)) * 8] * 2, [CAPACITY])
    batch = batch.to("cuda")
    update.zero_grad()
    model(batch).backward()
    one = {name: gradient.double() for name, gradient in update.gradients().items()}
    update.zero_grad()
    for _ in range(microbatches):
        (model(batch) / microbatches).backward()
    wrong = sum((g - one[n]).square().sum() for n, g in update.gradients().items())
    right = sum(value.square().sum() for value in one.values())
    assert (wrong / right).sqrt() < 1e-5


def test_the_preset_is_that_of_the_measurement():
    assert preset("qwen3-0.6b").gradient_dtype(1) == "float32"
