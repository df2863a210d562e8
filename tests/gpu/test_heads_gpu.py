"""Kernels of `ops/heads.py` on CUDA: outputs and all gradients against float64, the same bits twice
and in replays with new values, no wait for the device; where they are chosen; and layers that hold
them."""

import pytest
import torch
from bench_models import TimedPart, build_part, draw_batches, shape, zero_gradients
from bench_ways import Graphed, Setting
from headskit import (
    EPS,
    assert_near,
    differentiated,
    draw,
    exact,
    tables,
    take_everywhere,
    turned_reference,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from packgraph.ops.heads import LEAST_ROWS, turned_heads, turns_heads
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
    ("tokens", "counts", "head_dim"),
    [
        (1, (1, 1), 64),
        (777, (16, 8), 128),
        (513, (32, 8), 128),
        (300, (14, 2), 64),
        (40, (5, 5), 2),
    ],
)
def test_heads(tokens, counts, head_dim, dtype):
    shapes = [(tokens, count, head_dim) for count in counts]
    q, k, q_grad, k_grad = on_cuda(*shapes, *shapes, dtype=dtype)
    weights = on_cuda((head_dim,), (head_dim,), dtype=dtype)
    cos_sin = [table.cuda() for table in tables(tokens, head_dim, dtype)]

    def turned(q, k, first, second):
        return turned_heads(q, k, (first, second), EPS, cos_sin)

    leaves, grads = [q, k, *weights], [q_grad, k_grad]
    found = differentiated(turned, leaves, grads)
    assert_near(found, exact(turned_reference(*cos_sin), leaves, grads))
    assert all(map(torch.equal, found, differentiated(turned, leaves, grads)))


def test_replays_have_the_bits_of_eager_and_nothing_waits():
    q, k = on_cuda((1000, 16, 64), (1000, 4, 64), dtype=torch.bfloat16)
    weights = on_cuda((64,), (64,), dtype=torch.bfloat16)
    cos_sin = [table.cuda() for table in tables(1000, 64, torch.bfloat16)]
    leaves = [value.requires_grad_() for value in (q, k, *weights)]

    def work():
        outputs = turned_heads(q, k, tuple(weights), EPS, cos_sin)
        return torch.autograd.grad(outputs, leaves, [out.detach() for out in outputs])

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


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="measured on compute capability 9 alone",
)
def test_where_the_gain_was_measured_they_are_chosen():
    q, k = on_cuda((LEAST_ROWS, 16, 128), (LEAST_ROWS, 8, 128), dtype=torch.bfloat16)
    weights = on_cuda((128,), (128,), dtype=torch.bfloat16)
    cos_sin = [table.cuda() for table in tables(LEAST_ROWS, 128, torch.bfloat16)]
    assert turns_heads(q, k, weights, cos_sin)
    assert not turns_heads(q[1:], k[1:], weights, [table[1:] for table in cos_sin])


@pytest.mark.parametrize("compiled", [False, True])
def test_layers_in_graphs_have_the_bits_of_eager(monkeypatch, compiled):
    """By attention of single products, whose backward repeats bitwise as that of varlen does not;
    numbers are near those of plain layers."""
    device = torch.device("cuda", 0)
    config, capacity = shape("qwen3-0.6b", 2), Capacity(512, 8)
    model = build_part("layers", config, device, torch.bfloat16)
    zero_gradients([model])
    drawn = draw_batches(capacity, 4, config.vocab_size, mean=128, sigma=1.0, seed=0)
    batches = [batch.to(device) for batch in drawn]
    work = TimedPart(model, 512, min(batch.num_tokens for batch in drawn))
    setting = Setting(work, model, capacity, (capacity,), attention="sdpa")
    results = {}
    for name in ("plain", "fused"):
        if name == "fused":
            take_everywhere(monkeypatch)
        how = setting.compiler if compiled else False
        work = setting.work.by(setting.model_of("chunk"))
        way = Graphed("chunk", work, (capacity,), "chunk", compile=how)
        with sdpa_kernel(SDPBackend.MATH):
            way.prepare(batches)
            results[name] = [
                found for batch in batches[:3] for found in replayed_as_eager(way, model, batch)
            ]
        assert way.complaint() is None
        way.close()
    assert not all(map(torch.equal, results["fused"], results["plain"])), "other kernels"
    for ours, theirs in zip(results["fused"], results["plain"], strict=True):
        assert (ours.float() - theirs.float()).norm() <= 0.03 * theirs.float().norm() + 1e-6


def replayed_as_eager(way, model, batch):
    """Output and gradients of a replay, which an eager call has bit by bit."""
    zero_gradients([model])
    out = way.run(batch).clone()
    replayed = [out, *(value.grad.clone() for value in model.parameters())]
    zero_gradients([model])
    out = way.graphed.run_eagerly(*way.work.arguments(batch))
    torch.autograd.backward(out, way.work.incoming(batch))
    eager = [out.detach(), *(value.grad for value in model.parameters())]
    assert all(map(torch.equal, replayed, eager))
    return replayed
