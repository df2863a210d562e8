"""Pools as a trial capture tells them, against those of the graphs: layers of Qwen3-0.6B's shape.

To be run with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, too.
"""

import pytest
import torch

from packgraph.graphs.graphed import graph
from packgraph.graphs.memory.trial import trial_memory
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.packing.capacity import Capacity
from packgraph.train.memory import plan_memory
from packgraph.train.strategies import sample_batch

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
WITHIN = 0.02


@pytest.fixture(autouse=True)
def fresh():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


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
def test_pools_of_qwen_layers_are_within_two_percent(granularity, slots):
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


@pytest.mark.slow
def test_pools_of_compiled_layers_are_within_two_percent():
    graphed = graphed_qwen(1, "chunk", compile=True)
    plan = plan_memory([graphed], arguments, [1], CAPACITIES[:1])
    graphed.build([arguments(0, CAPACITIES[0])], 1)
    assert plan.banks and plan.pools == pytest.approx(graphed.stats.pool_bytes, rel=WITHIN)
    graphed.close()


def test_a_trial_leaves_gradients_and_random_numbers_alone():
    graphed = graphed_qwen(1, "layer")
    gradients = {name: p.grad.clone() for name, p in graphed.named_parameters()}
    state = torch.cuda.get_rng_state()
    trial_memory(graphed, [arguments(0, CAPACITIES[0])], 1)
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
