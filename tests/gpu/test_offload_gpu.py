"""Offloading on CUDA: bitwise what stays, with slow copies; nothing waits; memory falls by what was
planned."""

import dataclasses
import gc
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from offload_measures import pinned_bytes
from offloadkit import (
    DENSE,
    EXPERTS,
    by_hand,
    config,
    foretold_and_taken,
    runtime_of,
    same,
    train,
    warmed,
)
from torch.utils.checkpoint import checkpoint
from trainkit import RandomPacks, state_of, tiny, trainer

from packgraph.graphs.cuda.copy_streams import CudaCopyStreams
from packgraph.graphs.graphed import graph
from packgraph.graphs.memory.allocator import free_memory
from packgraph.graphs.memory.trial import trial_memory
from packgraph.models.config import DecoderConfig, ExpertConfig
from packgraph.models.decoder import DecoderModel
from packgraph.offloading.marks import offload_block
from packgraph.offloading.plan import CopySpeed, OffloadKnobs
from packgraph.offloading.runtime import PARTS
from packgraph.offloading.search import plan_by_knobs, plan_for_time
from packgraph.packing.capacity import Capacity
from packgraph.train.config.sections import OffloadConfig
from packgraph.train.signals import StopRequest
from packgraph.train.strategies import sample_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
BF16 = {"device": CUDA, "dtype": torch.bfloat16, "capacities": [Capacity(256, 4)]}
INNER = ("core_attn", "attn_proj", "mlp_act", "qkv_linear")
LARGE = DecoderConfig(
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=10,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
)
SPIN = 1_500_000  # cycles, about a millisecond: longer than a layer takes


def settings(layers: int = 3, experts: bool = False) -> DecoderConfig:
    made = dataclasses.replace(
        config(layers),
        hidden_size=128,
        intermediate_size=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
    )
    return (
        dataclasses.replace(
            made, experts=ExpertConfig(count=8, per_token=2, intermediate_size=64, first_dense=1)
        )
        if experts
        else made
    )


def slow(monkeypatch: pytest.MonkeyPatch, *copy_streams: str) -> None:
    """Every copy of these copy streams begins with a spin."""
    queue = CudaCopyStreams._queue

    def spinning(self, copy_stream, *rest):
        if copy_stream in copy_streams:
            self._streams[copy_stream].wait_event(
                self.point()
            )  # in a capture the stream must be part of it first
            with torch.cuda.stream(self._streams[copy_stream]):
                torch.cuda._sleep(SPIN)
        return queue(self, copy_stream, *rest)

    monkeypatch.setattr(CudaCopyStreams, "_queue", spinning)


@pytest.mark.parametrize("late", [("out",), ("back",), ("out", "back")])
@pytest.mark.parametrize("granularity", [None, "layer", "chunk"])
def test_slow_copies_change_no_bit(granularity, late, monkeypatch):
    expected = train(settings(), **BF16)[0]
    slow(monkeypatch, *late)
    found, runtime, graphed = train(settings(), DENSE, granularity=granularity, **BF16)
    assert same(found, expected)
    assert runtime.trace.bytes > 0 and (graphed is None or graphed.stats.replayed == 3)


@pytest.mark.parametrize("knobs", [{"fraction": 0.5}, {"in_flight": 0}, {"margin": None}])
def test_plans_in_chunk_graphs(knobs, monkeypatch):
    slow(monkeypatch, "out", "back")
    found, _, _ = train(
        settings(), DENSE, granularity="chunk", policy=by_hand(**knobs), counts=(1, 2, 1, 3), **BF16
    )
    assert same(found, train(settings(), counts=(1, 2, 1, 3), **BF16)[0])


@pytest.mark.parametrize("postpones", [False, True])
@pytest.mark.parametrize("scope", [("attn",), ("mlp",)])
def test_eager_stages_between_captured_ones(scope, postpones, monkeypatch):
    slow(monkeypatch, "out", "back")
    found, _, _ = train(
        settings(), DENSE, granularity="layer", scope=scope, postpones=postpones, **BF16
    )
    assert same(found, train(settings(), **BF16)[0])


def test_experts_in_chunk_graphs(monkeypatch):
    expected = train(settings(experts=True), **BF16)[0]
    slow(monkeypatch, "out", "back")
    assert same(train(settings(experts=True), EXPERTS, granularity="chunk", **BF16)[0], expected)


HASTY = """
import pytest, torch
import test_offload_gpu as this
expected = this.train(this.settings(), **this.BF16)[0]
this.SPIN *= 30  # longer than a busy host takes to launch what should wait
with pytest.MonkeyPatch.context() as patch:
    this.slow(patch, "back")
    wait = this.CudaCopyStreams.wait
    patch.setattr(this.CudaCopyStreams, "wait", lambda self, copy: None if copy.copy_stream == "back" else wait(self, copy))
    found = this.train(this.settings(), this.DENSE, **this.BF16)[0]
    torch.cuda.synchronize()
print("the same" if this.same(found, expected) else "different")
"""  # noqa: E501


def test_a_missing_wait_is_a_wrong_number():
    """Main waits for no reload. In a process of its own: garbage in place of indices may be an
    illegal access, too."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])
    }
    done = subprocess.run(
        [sys.executable, "-c", HASTY],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    wrong = ("illegal memory access", "device-side assert")
    assert "different" in done.stdout or any(what in done.stderr for what in wrong), (
        done.stdout + done.stderr[-2000:]
    )


@pytest.mark.parametrize(("granularity", "compile"), [("step", False), ("chunk", True)])
def test_a_run_that_offloads_is_bitwise_one_that_does_not(
    granularity, compile, tmp_path, monkeypatch
):
    slow(monkeypatch, "out", "back")
    states = []
    for modules in ((), DENSE):
        made = tiny(True, dtype="bfloat16", steps=5)
        made = dataclasses.replace(
            made,
            graph=dataclasses.replace(
                made.graph, granularity=granularity, compile=compile, strict=True
            ),
            offload=OffloadConfig(modules=modules, min_bytes=1, margin=0),
        )
        run = trainer(tmp_path / str(len(modules)), made, RandomPacks(), device=CUDA)
        run.run(StopRequest())
        states.append(state_of(run))
        run.close()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


class Recomputed(torch.nn.Module):
    """Layers with a block, each under a checkpoint."""

    def __init__(self, **options) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.options = options
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        for layer in self.layers:
            layer.offload = offload_block

    def one(self, layer, x):
        h = x.sin()  # saved outside of the block, so that there is something to compute again
        with layer.offload("mlp_act"):
            h = layer(h).sin().tanh()
        return h.cos()

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(self.one, layer, x, **self.options)
        return x


@pytest.mark.filterwarnings("ignore:offloading passes:packgraph.graphs.errors.PackgraphWarning")
@pytest.mark.parametrize("keeps_random", [False, True])
def test_what_a_captured_backward_computes_again_stays_on_the_device(keeps_random):
    """It runs in autograd's thread, which knows nothing of the capture's copy streams. (With
    use_reentrant=True there is no capture: torch refuses such checkpoints where inputs of a
    backward are named, as captures do.)"""
    found = []
    for offloads in (False, True):
        module = Recomputed(use_reentrant=False, preserve_rng_state=keeps_random).to(CUDA)
        called = graph(module, warmup=2, strict=True)
        runtime = runtime_of(called, module, ("mlp_act",)) if offloads else None
        for number in range(5):
            x = (
                torch.randn(32, 64, generator=torch.Generator().manual_seed(number))
                .to(CUDA)
                .requires_grad_()
            )
            called(x).sum().backward()
            if runtime is not None:
                runtime.end_step()
        assert called.stats.replayed == 3
        found.append([parameter.grad for parameter in module.parameters()])
        assert all(slot.pool.host.arenas.nbytes() == 0 for slot in called.slots.all)
    assert same(*found) and runtime.copy_streams.memories.arenas.nbytes() == 0


def test_replays_and_eager_steps_never_wait():
    model = DecoderModel(settings(), seed=1, device=CUDA, dtype=torch.bfloat16)
    graphed = graph(model, capacities=BF16["capacities"], warmup=2, strict=True)
    runtime = runtime_of(graphed, model, DENSE)
    batch, tokens = sample_batch(BF16["capacities"][0]).to(CUDA), torch.tensor(9, device=CUDA)
    for step in range(6):
        torch.cuda.set_sync_debug_mode("error" if step in (1, 4, 5) else "default")
        graphed(batch, tokens).backward()
        runtime.end_step()
    assert graphed.stats.replayed == 4


def test_graphs_tell_their_compute_whatever_was_copied(monkeypatch):
    slow(monkeypatch, "out", "back")
    capacity, told = Capacity(8192, 16), []
    for margin in (0, 1000):  # everything moves, nothing does
        model = DecoderModel(LARGE, seed=1, device=CUDA, dtype=torch.bfloat16)
        graphed = graph(model, capacities=[capacity], warmup=1, slots=1, strict=True)
        runtime = runtime_of(
            graphed,
            model,
            INNER,
            min_bytes=2**20,
            times_graphs=True,
            policy=lambda trace, margin=margin: plan_by_knobs(
                trace, CopySpeed(), OffloadKnobs(margin=margin)
            ),
        )
        batch, tokens = sample_batch(capacity).to(CUDA), torch.tensor(8000, device=CUDA)
        for _ in range(4):
            graphed(batch, tokens).backward()
        torch.cuda.synchronize()
        told.append((runtime.plan, *runtime.replayed(CopySpeed(1.0, 1.0))))
        graphed.close()
    (moved, compute, speed), (kept, alone, unknown) = told
    assert moved.moved_bytes > 2**30 and kept.moved_bytes == 0
    assert alone.compute_us > 10_000 and abs(compute.compute_us / alone.compute_us - 1) < 0.15, told
    assert (
        unknown == CopySpeed(1.0, 1.0)
        and min(speed.to_host_bytes_per_us, speed.to_device_bytes_per_us) > 10_000
    )


@pytest.mark.parametrize("granularity", ["chunk", "step"])
def test_a_run_that_plans_by_its_graphs_is_bitwise_one_that_does_not_offload(granularity, tmp_path):
    states, plans = [], []
    for options in ({}, {"modules": INNER, "min_bytes": 1, "margin": 0, "lost": 0.3}):
        made = tiny(True, dtype="bfloat16", steps=7)
        made = dataclasses.replace(
            made,
            graph=dataclasses.replace(made.graph, granularity=granularity, strict=True),
            offload=OffloadConfig(**options),
        )
        run = trainer(tmp_path / str(len(options)), made, RandomPacks(), device=CUDA)
        if options:
            run.executor.prepare.when_planned = lambda prepared: plans.append(
                prepared.planners[0].planned
            )
        run.run(StopRequest())
        states.append(state_of(run))
        run.close()
    assert run.executor.prepare.planned_by == "graphs" and len(plans) == 2
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("modules", [(), INNER])
def test_a_model_that_nobody_has_any_more_gives_its_memory_back_at_once(modules):
    """But for workspaces, which torch keeps for the stream: the module's, and with the first those
    of eager work."""
    left = []
    free_memory(CUDA)
    gc.disable()
    try:
        for _ in range(3):
            graphed, runtime, arguments = warmed(
                LARGE,
                modules,
                capacity=Capacity(256, 4),
                device=CUDA,
                dtype=torch.bfloat16,
                **({"min_bytes": 1} if modules else {}),
            )
            graphed(*arguments).backward()
            assert graphed.stats.captured
            parameters = sum(p.numel() * p.element_size() for p in graphed.parameters())
            workspaces = graphed.capture_backend.workspaces.nbytes()
            graphed.close()
            del graphed, runtime, arguments
            torch.cuda.synchronize()
            torch._C._host_emptyCache()
            left.append((torch.cuda.memory_allocated(), pinned_bytes(CUDA)))
    finally:
        gc.enable()
    assert parameters > 2 * workspaces
    assert all(
        new <= old + workspaces and pinned == left[0][1]
        for (old, _), (new, pinned) in pairwise(left)
    ), left


def test_the_pool_falls_by_what_the_plan_says():
    capacity, taken, plan = Capacity(8192, 16), [], None
    for modules in ((), INNER):
        model = DecoderModel(LARGE, seed=1, device=CUDA, dtype=torch.bfloat16)
        graphed = graph(model, capacities=[capacity], warmup=1, slots=1, strict=True)
        if modules:
            runtime = runtime_of(
                graphed,
                model,
                modules,
                min_bytes=2**20,
                policy=lambda trace: plan_by_knobs(trace, CopySpeed(), OffloadKnobs(margin=None)),
            )
        batch, tokens = sample_batch(capacity).to(CUDA), torch.tensor(8000, device=CUDA)
        for _ in range(2):
            graphed(batch, tokens).backward()
        if modules:
            plan = runtime.plan
        taken.append(graphed.stats.pool_bytes)
        graphed.close()
        del model, graphed
        torch.cuda.empty_cache()
    saved = taken[0] - taken[1]
    assert plan is not None and plan.saved_bytes > 2**29
    assert abs(saved - plan.saved_bytes) <= max(0.05 * plan.saved_bytes, 64 * 2**20), (taken, plan)


@pytest.mark.parametrize("way", ["kept", "everything", "planned"])
def test_the_pool_is_what_was_predicted_before_the_capture(way):
    """With its holes, which the bytes that a plan saves do not tell, and which addresses most
    likely have a part in: of free blocks of one size the lowest is taken, and segments of the
    capture may lie in another order than those of the trial. Seen is 0 or 48 MiB, one activation of
    the MLP, now for one way and now for the other."""
    modules, options = INNER, {"min_bytes": 2**20}
    if way == "kept":
        modules, options = (), {}
    if way == "planned":
        options |= {"parts": PARTS, "policy": lambda trace: plan_for_time(trace, CopySpeed(), 0.05)}
    foretold, taken = foretold_and_taken(
        LARGE, modules, capacity=Capacity(8192, 16), device=CUDA, dtype=torch.bfloat16, **options
    )
    torch.cuda.empty_cache()
    print(f"{way}: predicted {foretold / 2**20:.1f} MiB, measured {taken / 2**20:.1f} MiB")
    within = 0.02 * taken if way == "kept" else 64 * 2**20
    assert taken > 2**29 and abs(foretold - taken) <= within


def test_host_memory_is_pinned_once():
    """Eager passes, dry runs, a capture that is thrown away and the one that stays take it one
    after the other."""
    free_memory(CUDA)
    before = pinned_bytes(CUDA)
    graphed, runtime, arguments = warmed(
        LARGE,
        DENSE,
        capacity=Capacity(8192, 16),
        device=CUDA,
        dtype=torch.bfloat16,
        min_bytes=2**20,
    )
    eager = runtime.copy_streams.memories.arenas.nbytes()
    trial_memory(graphed, [arguments], 1)
    graphed.build([arguments])
    graphed(*arguments).backward()
    taken = pinned_bytes(CUDA) - before
    print(f"pinned {taken / 2**20:.0f} MiB, eager passes {eager / 2**20:.0f}")
    assert 2**30 < taken <= 1.1 * eager
    graphed.close()
    del runtime, graphed
    free_memory(CUDA)
    assert pinned_bytes(CUDA) == before
