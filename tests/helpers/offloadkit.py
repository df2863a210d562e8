"""Training with offloading: a small decoder, its runtime, and everything that two runs must agree
on."""

import random
from dataclasses import replace

import torch

from packgraph.graphs.choose import make_copy_streams
from packgraph.graphs.graphed import GraphedModule, graph
from packgraph.graphs.memory.trial import trial_memory
from packgraph.graphs.recorder.copy_streams import EmulatedCopyStreams
from packgraph.models.config import DecoderConfig, ExpertConfig
from packgraph.models.decoder import DecoderModel
from packgraph.offloading.api import attach
from packgraph.offloading.plan import CopySpeed, OffloadKnobs
from packgraph.offloading.runtime import OffloadRuntime
from packgraph.offloading.search import plan_by_knobs
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.train.strategies import sample_batch

CAPACITIES = [Capacity(24, 4), Capacity(48, 8)]
DENSE = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_act")
EXPERTS = (*DENSE, "expert_fc1", "moe_act")
TOKENS = 40
NAMES = ("core_attn", "mlp_act")


def config(layers: int = 2, experts: bool = False, **options) -> DecoderConfig:
    made = DecoderConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        intermediate_size=24,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        dropout=0.1,
        initializer_range=0.2,
        tie_embeddings=False,
        **options,
    )
    return (
        replace(
            made, experts=ExpertConfig(count=4, per_token=2, intermediate_size=8, first_dense=1)
        )
        if experts
        else made
    )


def batches(count: int, capacities=CAPACITIES, seed: int = 0) -> list[PackedBatch]:
    """Batches of all capacities in random order, with different padding."""
    chance, made = random.Random(seed), []
    for _ in range(count):
        capacity = chance.choice(capacities)
        made.append(
            PackedBatch.build(
                [
                    [chance.randrange(1, TOKENS) for _ in range(chance.randrange(2, 7))]
                    for _ in range(chance.randrange(1, capacity.documents // 2 + 2))
                ],
                capacity,
            )
        )
    return made


def by_hand(**knobs):
    """A policy of classic knobs; nothing is too small here."""
    return lambda trace: plan_by_knobs(
        trace, CopySpeed(), OffloadKnobs(**{"min_bytes": 1, "margin": 0} | knobs)
    )


def runtime_of(model, chunk: torch.nn.Module, modules, late=(), **options) -> OffloadRuntime:
    """A runtime for `chunk`, on the copy streams of `model` if that is graphed. late: copy streams
    that run as late as they may."""
    if isinstance(model, GraphedModule):
        copy_streams = model.capture_backend.copy_streams
    else:
        copy_streams = make_copy_streams(next(model.parameters()).device)
    if late:
        copy_streams.queues.late.update(late)
    runtime = OffloadRuntime(modules, copy_streams, **{"min_bytes": 1} | options)
    attach(runtime, chunk)
    return runtime


def train(
    settings: DecoderConfig,
    modules=(),
    *,
    granularity=None,
    counts=(1, 1, 2, 1),
    capacities=CAPACITIES[:1],
    late=(),
    policy=None,
    scope=None,
    poison=True,
    device="cpu",
    dtype=torch.float32,
    **options,
):
    """Train steps of `counts` microbatches; all forwards of a step come before its backwards, which
    run in random order. Returns [losses, gradients of every step], the runtime and the graphed
    module or None.
    """
    model = called = DecoderModel(settings, seed=1, device=device, dtype=dtype)
    if granularity is not None:
        called = graph(
            model,
            capacities=capacities,
            granularity=granularity,
            scope=scope,
            strict=True,
            warmup=2,
        )
    runtime = (
        runtime_of(called, model, modules, late, policy=policy, **options) if modules else None
    )
    torch.manual_seed(3)
    order, facts, packs = random.Random(5), [], iter(batches(sum(counts), capacities))
    for count in counts:
        losses = []
        for _ in range(count):
            _poison(called, poison)
            losses.append(called(next(packs).to(device), torch.tensor(20, device=device)))
        for index in order.sample(range(count), count):
            _poison(called, poison)
            losses[index].backward()
        facts += [loss.detach().clone() for loss in losses]
        facts += [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        if runtime is not None:
            runtime.end_step()
            if granularity is None:
                runtime.settle()
    return facts, runtime, called if granularity is not None else None


def warmed(
    settings: DecoderConfig,
    modules=(),
    *,
    capacity=CAPACITIES[0],
    granularity="chunk",
    scope=None,
    slots=1,
    device="cpu",
    dtype=torch.float32,
    **options,
):
    """A graphed model that has run one microbatch eagerly, its runtime with a plan (None without
    modules), and the arguments of a call.
    """
    model = DecoderModel(settings, seed=1, device=device, dtype=dtype)
    graphed = graph(
        model,
        capacities=[capacity],
        granularity=granularity,
        scope=scope,
        warmup=1,
        slots=slots,
        strict=True,
    )
    runtime = runtime_of(graphed, model, modules, **options) if modules else None
    arguments = sample_batch(capacity).to(device), torch.tensor(7, device=device)
    torch.manual_seed(2)
    graphed(*arguments).backward()
    if runtime is not None:
        runtime.end_step()
        runtime.settle()
    return graphed, runtime, arguments


def foretold_and_taken(
    settings: DecoderConfig, modules=(), *, slots=1, **options
) -> tuple[int, int]:
    """Bytes of the pools of `warmed`: as predicted before the capture, and what they are after
    it."""
    graphed, _, arguments = warmed(settings, modules, slots=slots, **options)
    foretold = trial_memory(graphed, [arguments], slots).pools
    graphed.build([arguments])
    taken = graphed.stats.pool_bytes
    graphed.close()
    return foretold, taken


def _poison(called, wanted: bool) -> None:
    if wanted and isinstance(called, GraphedModule):
        for slot in called.slots._free:
            slot.poison()


def same(left, right) -> bool:
    assert len(left) == len(right)
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class AsksTwice(torch.autograd.Function):
    """A product whose backward unpacks all that was saved for each thing it needs."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0]
        w = ctx.saved_tensors[1]
        return gradient * w, gradient * x


def offloaded(module: torch.nn.Module, late=("out", "back"), **options) -> OffloadRuntime:
    runtime = OffloadRuntime(NAMES, EmulatedCopyStreams(set(late)), **{"min_bytes": 1, **options})
    attach(runtime, module)
    return runtime
