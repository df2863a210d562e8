"""Predicted pools against those of torch's allocator: random allocations, and layers of
Qwen3-0.6B's shape.

To be run with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, too: another model answers then.
"""

import random

import pytest
import torch

from packgraph.graphs.cuda.backend import CudaBackend
from packgraph.graphs.graphed import graph
from packgraph.graphs.memory.bank import BankModel, Lifetime
from packgraph.graphs.memory.trace import pool_model, trace_memory
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.packing.capacity import Capacity
from packgraph.train.executor import sample_batch
from packgraph.train.memory_budget import plan_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
CAPACITIES = (Capacity(1024, 16), Capacity(2048, 32), Capacity(4096, 64))
QWEN = DecoderConfig(
    vocab_size=32_768,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=6,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
)
WITHIN = 0.05


@pytest.fixture(autouse=True)
def fresh():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def random_trace(seed, most=200):
    draw = random.Random(seed)
    sizes = [
        draw.choice(
            [draw.randint(1, 5000), draw.randint(1, 40) * 300_000, draw.randint(1, 12) * 3_000_000]
        )
        for _ in range(most)
    ]
    events = draw.sample(list(range(most)) * 2, 2 * most)
    ticks: dict[int, list[int]] = {}
    for tick, number in enumerate(events):
        ticks.setdefault(number, []).append(tick)
    return [Lifetime(size, *pair) for size, pair in zip(sizes, sorted(ticks.values()), strict=True)]


@pytest.mark.parametrize("seed", range(6))
def test_the_model_reserves_what_torch_reserves(seed):
    """A real private pool, filled by a capture, as those of slots are."""
    backend, captures = CudaBackend(CUDA), [random_trace(2 * seed), random_trace(2 * seed + 1)]
    pool, graphs = backend.new_pool(), []

    def allocate(blocks):
        births, deaths = (
            {b.birth: n for n, b in enumerate(blocks)},
            {b.death: n for n, b in enumerate(blocks)},
        )
        held = {}
        for tick in range(2 * len(blocks)):
            if tick in births:
                number = births[tick]
                held[number] = torch.empty(blocks[number].nbytes, dtype=torch.uint8, device=CUDA)
            else:
                del held[deaths[tick]]
        backend.spare.zero_()  # an empty capture is no graph

    for blocks in captures:
        with backend.window(pool, pool, None) as window:
            graphs.append(window.capture(lambda blocks=blocks: allocate(blocks))[0])
    model = pool_model("cuda")()
    for blocks in captures:
        model.replay(blocks)
    assert model.nbytes == pool.nbytes()
    for made in graphs:
        made.reset()


def arguments(chunk, capacity):
    return sample_batch(capacity).to(CUDA), torch.ones((), dtype=torch.int64, device=CUDA)


def graphed_qwen(slots, granularity, **options):
    model = DecoderModel(QWEN, device="cuda", dtype=torch.bfloat16).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return graph(
        model,
        capacities=CAPACITIES,
        warmup=0,
        slots=slots,
        granularity=granularity,
        strict=True,
        **options,
    )


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_pools_of_qwen_layers_are_within_five_percent(granularity, slots):
    graphed = graphed_qwen(slots, granularity)
    plan = plan_memory([graphed], arguments, [slots], CAPACITIES)
    graphed.build([arguments(0, capacity) for capacity in CAPACITIES], slots)
    measured = graphed.stats.pool_bytes
    print(
        f"{granularity}, {slots} slots: predicted {plan.pools / 2**20:.1f} MiB, measured "
        f"{measured / 2**20:.1f} MiB"
    )
    assert plan.banks and plan.pools == pytest.approx(measured, rel=WITHIN)
    graphed.close()


def test_capacities_between_measured_ones_are_within_five_percent():
    graphed = graphed_qwen(1, "chunk")
    traces = {
        capacity: trace_memory(graphed, arguments(0, capacity))
        for capacity in (CAPACITIES[0], CAPACITIES[2])
    }
    predicted = BankModel(traces, pool_model(graphed.backend)).predict([CAPACITIES[1]], 1)
    graphed.build([arguments(0, CAPACITIES[1])], 1)
    print(
        f"2048 tokens: predicted {predicted.pools / 2**20:.1f} MiB, measured "
        f"{graphed.stats.pool_bytes / 2**20:.1f}"
    )
    assert not predicted.seen and predicted.pools == pytest.approx(
        graphed.stats.pool_bytes, rel=WITHIN
    )
    graphed.close()


@pytest.mark.slow
def test_pools_of_compiled_layers_are_within_five_percent():
    graphed = graphed_qwen(1, "chunk", compile=True)
    plan = plan_memory([graphed], arguments, [1], CAPACITIES[:1])
    graphed.build([arguments(0, CAPACITIES[0])], 1)
    assert plan.banks and plan.pools == pytest.approx(graphed.stats.pool_bytes, rel=WITHIN)
    graphed.close()


def test_a_trace_leaves_gradients_and_random_numbers_alone():
    graphed = graphed_qwen(1, "layer")
    gradients = {name: p.grad.clone() for name, p in graphed.named_parameters()}
    state = torch.cuda.get_rng_state()
    trace_memory(graphed, arguments(0, CAPACITIES[0]))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(torch.equal(p.grad, gradients[name]) for name, p in graphed.named_parameters())


def test_a_budget_keeps_the_pools_within_it():
    free = graphed_qwen(1, "chunk")
    budget = plan_memory([free], arguments, [1], CAPACITIES[:2]).banks[0].total + 2**20
    plan = plan_memory([free], arguments, [1], CAPACITIES, budget=budget)
    assert plan.dropped == CAPACITIES[2:]
    free.build([arguments(0, capacity) for capacity in plan.kept], 1)
    assert free.stats.pool_bytes <= budget * (1 + WITHIN)
    free.close()
