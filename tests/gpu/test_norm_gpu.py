"""Kernels of `ops/norm.py` on CUDA: outputs and all gradients against float64, the same bits twice
and in replays with new values, no wait for the device; and compiled layers that hold them."""

import pytest
import torch
from normkit import (
    EPS,
    assert_near,
    differentiated,
    draw,
    exact,
    kept_reference,
    tables,
    turned_reference,
)

from packgraph.bench.models import TimedPart, build_part, draw_batches, shape, zero_gradients
from packgraph.bench.variants import Graphed, Setting
from packgraph.ops import norm_configs
from packgraph.ops.norm import added_and_normed, normed_and_kept, normed_and_turned
from packgraph.ops.norm_configs import Normed, Turned
from packgraph.packing.capacity import Capacity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def on_cuda(*shapes, dtype):
    return [value.cuda() for value in draw(*shapes, dtype=dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 1024), (777, 1024), (4096, 1024), (300, 2560), (65, 8192), (9, 100)]
)
def test_norms(rows, width, dtype):
    x, branch, weight, grad, residual = on_cuda(
        (rows, width), (rows, width), (width,), (rows, width), (rows, width), dtype=dtype
    )
    grads = [grad, residual]
    found = differentiated(lambda x, w: normed_and_kept(x, w, EPS), [x, weight], grads)
    assert_near(found, exact(kept_reference, [x, weight], grads))
    leaves = [x, branch, weight]
    found = differentiated(lambda x, b, w: added_and_normed(x, b, w, EPS), leaves, grads)
    total = x + branch
    assert torch.equal(found[1], total)
    alone = differentiated(lambda x, w: normed_and_kept(x, w, EPS), [total, weight], grads)
    assert torch.equal(found[0], alone[0]), "the sum is normalised as it is returned"
    expected = exact(kept_reference, [total, weight], grads)
    assert_near([found[0], found[2], found[4]], [expected[0], *expected[2:]])
    again = differentiated(lambda x, b, w: added_and_normed(x, b, w, EPS), leaves, grads)
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim"),
    [
        (1, (1, 1), 64),
        (777, (16, 8), 128),
        (513, (32, 8), 128),
        (300, (14, 2), 64),
        (40, (5, 5), 2),
    ],
)
def test_heads(tokens, heads, head_dim, dtype):
    shapes = [(tokens, count, head_dim) for count in heads]
    q, k, q_grad, k_grad = on_cuda(*shapes, *shapes, dtype=dtype)
    weights = on_cuda((head_dim,), (head_dim,), dtype=dtype)
    cos, sin = (table.cuda() for table in tables(tokens, head_dim, dtype))

    def turned(q, k, first, second):
        return normed_and_turned(q, k, (first, second), EPS, cos, sin)

    leaves, grads = [q, k, *weights], [q_grad, k_grad]
    found = differentiated(turned, leaves, grads)
    assert_near(found, exact(turned_reference(cos, sin), leaves, grads))
    assert all(map(torch.equal, found, differentiated(turned, leaves, grads)))


def test_replays_have_the_bits_of_eager_and_nothing_waits():
    x, branch, weight = on_cuda((1000, 1024), (1000, 1024), (1024,), dtype=torch.bfloat16)
    q, k = on_cuda((1000, 16, 64), (1000, 4, 64), dtype=torch.bfloat16)
    heads = on_cuda((64,), (64,), dtype=torch.bfloat16)
    cos, sin = (table.cuda() for table in tables(1000, 64, torch.bfloat16))
    leaves = [value.requires_grad_() for value in (x, branch, weight, q, k, *heads)]

    def work():
        normed, total = added_and_normed(x, branch, weight, EPS)
        again, kept = normed_and_kept(total, weight, EPS)
        outputs = [normed, again, kept, *normed_and_turned(q, k, tuple(heads), EPS, cos, sin)]
        return torch.autograd.grad(outputs, leaves, [torch.ones_like(out) for out in outputs])

    work()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(captured, stream=stream):
        static = work()
    for _ in range(3):
        with torch.no_grad():
            for leaf in leaves:
                leaf.normal_()
        for value in static:
            value.fill_(float("nan"))
        captured.replay()
        assert all(map(torch.equal, static, work()))


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_in_graphs_have_the_bits_of_eager(monkeypatch, compiled):
    """Of rows so short that attention's backward repeats; numbers are near those of plain
    layers."""
    config, capacity = shape("qwen3-0.6b", 2), Capacity(512, 8)
    model = build_part("layers", config, torch.device("cuda", 0), torch.bfloat16)
    zero_gradients([model])
    drawn = draw_batches(capacity, 4, config.vocab_size, mean=128, sigma=1.0, seed=0)
    batches = [batch.to("cuda") for batch in drawn]
    work = TimedPart(model, 512, min(batch.num_tokens for batch in drawn))
    setting = Setting(work, model, capacity, (capacity,))
    results = {}
    for name in ("plain", "fused"):
        if name == "fused":
            monkeypatch.setattr(norm_configs, "is_measured", lambda device: True)
            monkeypatch.setattr(norm_configs, "NORMED", ((0, Normed("rows")),))
            monkeypatch.setattr(norm_configs, "TURNED", ((0, Turned("heads")),))
        how = setting.compiler if compiled else False
        way = Graphed("chunk", setting.work_of("chunk"), (capacity,), "chunk", compile=how)
        way.prepare(batches)
        found = []
        for batch in batches[:3]:
            zero_gradients([model])
            out = way.run(batch).clone()
            replayed = [out, *(value.grad.clone() for value in model.parameters())]
            zero_gradients([model])
            out = way.graphed.run_eagerly(*way.work.arguments(batch))
            torch.autograd.backward(out, way.work.incoming(batch))
            eager = [out.detach(), *(value.grad for value in model.parameters())]
            assert all(map(torch.equal, replayed, eager))
            found += replayed
        assert way.complaint() is None
        results[name] = found
        way.close()
    for ours, theirs in zip(results["fused"], results["plain"], strict=True):
        assert (ours.float() - theirs.float()).norm() <= 0.03 * theirs.float().norm() + 1e-6
