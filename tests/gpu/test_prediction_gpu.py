"""Multi-token prediction on CUDA: graphs of layers, chunks and whole models are eager bit by bit,
and what the layers cost of a step."""

import dataclasses
import random
import time

import pytest
import torch

from packgraph.graphs.graphed import control, graph
from packgraph.models.config import DecoderConfig, ExpertConfig
from packgraph.models.decoder import DecoderModel
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = DecoderConfig(
    vocab_size=500,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    initializer_range=0.05,
    mtp_layers=2,
)
EXPERTS = ExpertConfig(count=8, per_token=2, intermediate_size=128, shared=1)
CAPACITY = Capacity(512, 16)


def batches(count, vocab=500, capacity=CAPACITY):
    draw = random.Random(0)
    for _ in range(count):
        lengths = [draw.randrange(1, capacity.tokens // 8) for _ in range(8)]
        documents = [[draw.randrange(vocab) for _ in range(length)] for length in lengths]
        yield PackedBatch.build(documents, capacity).to("cuda")


def learned(model, call, count=6):
    tokens, losses = torch.tensor(400, device="cuda"), []
    for batch in batches(count):
        loss = call(batch, tokens)
        loss.backward()
        losses.append((loss.item(), model.mtp_sums.take().tolist()))
    return losses


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("experts", [False, True])
def test_graphs_are_eager_bit_by_bit(granularity, tied, experts):
    config = dataclasses.replace(
        CONFIG, tie_embeddings=tied, experts=EXPERTS if experts else ExpertConfig()
    )
    models = [DecoderModel(config, seed=1, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    graphed = graph(models[1], capacities=[CAPACITY], granularity=granularity, strict=True)
    assert learned(models[0], models[0]) == learned(models[1], graphed)
    assert control(graphed).stats.replayed >= 3
    for (name, ours), theirs in zip(
        models[1].named_parameters(), models[0].parameters(), strict=True
    ):
        assert torch.equal(ours.grad, theirs.grad), name
    graphed.close()


def test_what_the_layers_cost(record_property):
    """8 layers of Qwen3-0.6B's shape, 4,096 tokens: one more layer and pass through the head."""
    shape = DecoderConfig(151936, 1024, 3072, 8, 16, 8, 128, tie_embeddings=True)
    capacity, times = Capacity(4096, 16), []
    for layers in (0, 1):
        config = dataclasses.replace(shape, mtp_layers=layers)
        model = DecoderModel(config, device="cuda", dtype=torch.bfloat16)
        call = graph(model, capacities=[capacity], granularity="chunk", strict=True)
        taken = []
        for batch in batches(12, 151936, capacity):
            torch.cuda.synchronize()
            began = time.perf_counter()
            call(batch, torch.tensor(4096, device="cuda")).backward()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        times.append(sorted(taken[4:])[4])
        call.close()
    record_property("ms", [round(1e3 * one, 3) for one in times])
    print(f"median ms without and with one further token: {[round(1e3 * t, 2) for t in times]}")
    assert times[1] > times[0]
