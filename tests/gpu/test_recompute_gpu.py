"""Activation recomputation on CUDA: bitwise training without it, with compiled code and with
offloading, in less memory."""

from dataclasses import replace

import pytest
import torch
from offloadkit import batches, config, runtime_of, same

import packgraph
from packgraph.graphs.graphed import graph
from packgraph.graphs.memory.allocator import free_memory
from packgraph.graphs.memory.trial import trial_memory
from packgraph.models.decoder import DecoderModel
from packgraph.packing.capacity import Capacity
from packgraph.train.strategies import sample_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
CAPACITY = Capacity(256, 32)
WIDE = replace(config(4), hidden_size=512, intermediate_size=2048, num_heads=8, head_dim=64)


def train(settings, what, *, granularity, offload=False, compile=False, steps=5):
    """Losses and gradients of every step, and the graphed module."""
    model = DecoderModel(settings, seed=1, device=CUDA, dtype=torch.bfloat16)
    packgraph.recompute(model, what)
    called = graph(
        model,
        capacities=[CAPACITY],
        granularity=granularity,
        compile=compile,
        strict=True,
        warmup=2,
    )
    runtime = runtime_of(called, model, ("layer_input",)) if offload else None
    torch.manual_seed(3)
    facts, packs = [], iter(batches(2 * steps, [CAPACITY]))
    for _ in range(steps):
        losses = [called(next(packs).to(CUDA), torch.tensor(20, device=CUDA)) for _ in range(2)]
        for loss in reversed(losses):
            loss.backward()
        facts += [loss.detach().clone() for loss in losses]
        facts += [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        if runtime is not None:
            runtime.end_step()
    assert called.stats.replayed >= 6
    return facts, called


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.parametrize("what", ["selective", "full", ["mlp"]])
@pytest.mark.parametrize("experts", [False, True])
def test_graphs_keep_the_bits_and_draw_once(experts, what, granularity):
    """With dropout, whose masks are kept."""
    settings = replace(config(3, experts=experts, attention_backend="varlen"), head_dim=16)
    what = ["mlp", "attn"] if isinstance(what, list) else what
    expected, _ = train(settings, "none", granularity=granularity)
    assert same(expected, train(settings, what, granularity=granularity)[0])


@pytest.mark.parametrize("what", ["selective", "full"])
def test_compiled_graphs_keep_the_bits(what):
    settings = replace(config(2, attention_backend="varlen"), dropout=0.0, head_dim=16)
    runs = [train(settings, how, granularity="chunk", compile=True)[0] for how in ("none", what)]
    assert same(*runs)


def test_compiled_dropout_is_refused_with_the_reason():
    """Nothing keeps numbers that compiled code draws, and a capture cannot draw them again."""
    with pytest.raises(packgraph.CaptureError, match="recomputed in full and draws random"):
        train(config(2), "full", granularity="chunk", compile=True)


def test_inputs_of_layers_may_wait_on_the_host():
    expected, _ = train(WIDE, "full", granularity="chunk")
    assert same(expected, train(WIDE, "full", granularity="chunk", offload=True)[0])


def memory(what):
    """Bytes of the pool by a trial, and the peak of an eager forward and backward."""
    model = DecoderModel(WIDE, seed=1, device=CUDA, dtype=torch.bfloat16)
    packgraph.recompute(model, what)
    capacity = Capacity(16384, 8)
    graphed = graph(model, capacities=[capacity], granularity="chunk", slots=1, strict=True)
    arguments = sample_batch(capacity).to(CUDA), torch.tensor(8000, device=CUDA)
    for _ in range(2):
        free_memory(CUDA)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        packgraph.control(graphed).run_eagerly(*arguments).backward()
        peak = torch.cuda.max_memory_allocated() - before
    return trial_memory(graphed, [arguments], 1).pools, peak


def test_pools_and_peaks_fall():
    (kept, most), (some, less), (few, least) = map(memory, ("none", "selective", "full"))
    print(f"pools {kept} {some} {few}, peaks {most} {less} {least}")
    assert some < 0.9 * kept and few < 0.6 * kept
    assert less < 0.9 * most and least < 0.7 * most
