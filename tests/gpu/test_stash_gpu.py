"""The paged stash on CUDA: kernels against their specification, bf16 experts in graphs, no syncs,
large offsets."""

import random

import pytest
import torch
from graphkit import WIDTH, poison_free_slots, toy_inputs, toy_loss, train
from stashkit import COLUMNS, INNER, make_expert_toy, poison_pages
from tracekit import differences

from packgraph.graphs.graphed import graph
from packgraph.moe.stash.pages import (
    Pages,
    keep,
    naive_put,
    naive_release,
    naive_reserve,
    naive_take,
    take,
)
from packgraph.moe.stash.stash import Stash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGE = 64
BF16_COLUMNS = {(torch.bfloat16, width): count for (_, width), count in COLUMNS.items()}


def memory(pages, width, dtype, host=False):
    return torch.full(
        (pages * PAGE + 1, width),
        float("nan"),
        dtype=dtype,
        device="cpu" if host else "cuda",
        pin_memory=host,
    )


@pytest.mark.parametrize(
    ("pages", "host_pages", "rows", "widths", "dtype"),
    [
        (40, 0, 1000, (2048, 1408, 24), torch.bfloat16),
        (20, 30, 1000, (2816, 8), torch.bfloat16),
        (9, 0, 333, (40,), torch.float32),
        (500, 200, 40000, (64,), torch.float16),
    ],
    ids=str,
)
def test_kernels_equal_the_operations(pages, host_pages, rows, widths, dtype):
    order, device = random.Random(0), torch.device("cuda", 0)
    pool, twin = Pages(pages, host_pages, device), Pages(pages, host_pages, torch.device("cpu"))
    buffers = [memory(pages, width, dtype) for width in widths]
    hosts = [memory(host_pages, width, dtype, host=True) for width in widths] if host_pages else []
    twins = [(b.cpu(), hosts[k].clone() if hosts else None) for k, b in enumerate(buffers)]
    out, sizes = [], (PAGE, pages, host_pages)
    for step in range(60):
        if order.random() < 0.6 or not out:
            live = order.choice([0, 1, PAGE, PAGE + 1, rows, rows + 5, order.randrange(rows)])
            offsets = torch.tensor([0, live], dtype=torch.int32)
            other = naive_reserve(twin.state, offsets, rows, *sizes)
            sources = [
                torch.randn(rows, width + 8, device="cuda").to(dtype)[:, :width] for width in widths
            ]
            record = keep(pool.state, buffers, hosts, sources, offsets.cuda(), *sizes)
            assert torch.equal(record.cpu(), other)
            for source, memories in zip(sources, twins, strict=True):
                naive_put(*memories, source.cpu(), other, PAGE)
            out.append((record, other))
        else:
            record, other = out.pop(order.randrange(len(out)))
            taken = take(pool.state, buffers, hosts, record, record, rows, *sizes, True)
            torch.cuda.synchronize()
            for back, memories in zip(taken, twins, strict=True):
                assert torch.equal(back.cpu(), naive_take(twin.state, *memories, other, rows, PAGE))
            naive_release(twin.state, other, *sizes)
        assert torch.equal(pool.state[:-1].cpu(), twin.state[:-1])
        if step % 7 == 6:
            pool.clear()
            twin.clear()


def experts_toy(stash, layers=2):
    model = make_expert_toy(stash, layers=layers).cuda()
    model.experts.to(torch.bfloat16)
    return model


def stashed(pages=600, host_pages=0):
    stash = Stash("cuda", page_rows=16)
    stash.allocate(pages, host_pages, BF16_COLUMNS)
    return stash


def run(model, stash=None):
    def between(model, step):
        if stash is not None:
            poison_pages(stash)
        if hasattr(model, "_slots"):
            poison_free_slots(model, step)

    def without_state(trace):
        return [
            {name: value for name, value in facts.items() if "stash_state" not in name}
            for facts in trace
        ]

    return without_state(train(model, steps=6, sizes=(64, 96, 48), device="cuda", between=between))


@pytest.fixture(scope="module")
def plain():
    first, second = (run(experts_toy(None)) for _ in range(2))
    assert differences(first, second) == [], (
        "eager does not repeat itself: nothing can be said of the stash"
    )
    return first


@pytest.mark.parametrize("host_pages", [0, 300])
def test_eager_gradients_are_the_same_bits(plain, host_pages):
    stash = stashed(20 if host_pages else 600, host_pages)
    assert differences(plain, run(experts_toy(stash), stash)) == []
    assert not stash.overflow_flag().item() and stash.in_use().item() == 0
    assert (stash.spilled_hi().item() > 0) == bool(host_pages)


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.parametrize("scope", [None, ["moe_experts"]], ids=str)
def test_graphs_in_any_order_are_the_same_bits(plain, granularity, scope):
    stash = stashed()
    model = experts_toy(stash)
    stash.attach(model)
    graphed = graph(model, scope=scope, granularity=granularity)
    assert differences(plain, run(graphed, stash)) == []
    assert (
        not stash.overflow_flag().item()
        and stash.in_use().item() == 0
        and graphed.stats.replayed > 5
    )


def test_nothing_waits_for_the_device():
    stash = stashed()
    model = experts_toy(stash)
    ids, x = toy_inputs(64, "cuda")
    toy_loss(model(ids, x)).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stash.pages.reset()
        toy_loss(model(ids, x)).backward()
        verdict = stash.overflow_flag()
        stash.pages.clear()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not verdict.item()


def test_an_overflow_in_a_graph_is_a_verdict_and_nothing_else():
    stash = stashed(2)
    graphed = graph(experts_toy(stash), granularity="chunk", warmup=1)
    for _ in range(5):
        stash.pages.reset()
        toy_loss(graphed(*toy_inputs(96, "cuda"))).backward()
    torch.cuda.synchronize()
    assert (
        stash.overflow_flag().item() and stash.in_use().item() == 0 and stash.need_hi().item() > 2
    )
    assert graphed.stats.replayed >= 4


def test_a_layer_costs_no_memory_of_the_graphs():
    rows, growth = 2 * 65536, []
    for with_stash in (False, True):
        sizes = []
        for layers in (2, 6):
            stash = stashed(12 * rows // 16) if with_stash else None
            graphed = graph(experts_toy(stash, layers), granularity="chunk", warmup=0, slots=1)
            toy_loss(graphed(*toy_inputs(65536, "cuda"))).backward()
            sizes.append(graphed.stats.pool_bytes)
        growth.append((sizes[1] - sizes[0]) / 4)
    assert growth[0] - growth[1] >= 0.8 * rows * (WIDTH + 2 * INNER) * 2


@pytest.mark.slow
def test_offsets_beyond_two_to_the_31():
    rows, width = 2**20 + 640, 2048
    source = torch.empty(rows, width, dtype=torch.bfloat16, device="cuda")
    source.copy_((torch.arange(rows, device="cuda") % 251)[:, None].expand(rows, width))
    pages = rows // PAGE + 1
    pool, buffer = (
        Pages(pages, 0, torch.device("cuda", 0)),
        torch.empty(pages * PAGE + 1, width, dtype=torch.bfloat16, device="cuda"),
    )
    live = torch.tensor([rows - 3], device="cuda")
    record = keep(pool.state, [buffer], [], [source], live, PAGE, pages, 0)
    back = take(pool.state, [buffer], [], record, record, rows, PAGE, pages, 0, True)[0]
    assert torch.equal(back[: rows - 3], source[: rows - 3]) and not back[rows - 3 :].any()
    assert pool.state[0].item() == 0
