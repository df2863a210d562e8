"""Activation recomputation: the bits of training without it, in eager calls and through graphs, in
less memory."""

import itertools
import sys
import threading
from contextvars import ContextVar
from dataclasses import replace

import pytest
import torch
from graphkit import Stages
from offloadkit import CAPACITIES, batches, by_hand, config, runtime_of

import packgraph
from packgraph.graphs.checkpointed import checkpointed
from packgraph.graphs.graphed import graph
from packgraph.graphs.memory.trial import trial_memory
from packgraph.models.config import MambaConfig
from packgraph.models.decoder import DecoderModel
from packgraph.train.strategies import sample_batch

MODELS = {
    "dense": config(3),
    "experts": config(3, experts=True),
    "hybrid": config(
        3,
        pattern="(M-)(*-)M",
        mamba=MambaConfig(num_heads=4, head_dim=4, groups=2, state=4, chunk=8),
    ),
}


def train(settings, what, *, granularity=None, steps=5, in_flight=2, seed=3, **options):
    """Losses and gradients of every step; forwards of a step come before its backwards."""
    model = called = DecoderModel(settings, seed=1)
    packgraph.recompute(model, what)
    if granularity is not None:
        called = graph(
            model,
            capacities=CAPACITIES[:1],
            granularity=granularity,
            strict=True,
            warmup=2,
            **options,
        )
    torch.manual_seed(seed)
    facts, packs = [], iter(batches(steps * in_flight, CAPACITIES[:1]))
    for _ in range(steps):
        losses = [called(next(packs), torch.tensor(20)) for _ in range(in_flight)]
        for loss in reversed(losses):
            loss.backward()
        facts += [loss.detach().clone() for loss in losses]
        facts += [parameter.grad.clone() for parameter in model.parameters()]
        facts += [buffer.clone() for buffer in model.buffers()]
        model.zero_grad()
    facts.append(torch.get_rng_state())
    return facts, called


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("what", ["selective", "full", ["attn"], ["mlp", "moe"]])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(3)
def test_eager_training_keeps_its_bits(name, what):
    if name != "experts" and "moe" in what:
        what = ["mlp"]
    assert same(train(MODELS[name], "none")[0], train(MODELS[name], what)[0])


@pytest.mark.parametrize(
    ("granularity", "what"),
    [
        ("layer", "full"),
        ("chunk", "selective"),
        pytest.param("layer", "selective", marks=pytest.mark.slow),
        pytest.param("chunk", "full", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.few(8)
def test_graphs_keep_the_bits(name, granularity, what):
    expected, _ = train(MODELS[name], "none")
    found, graphed = train(MODELS[name], what, granularity=granularity)
    assert same(expected, found)
    assert graphed.stats.replayed >= 6 and set(graphed.stats.fallbacks) == {"warm-up"}


@pytest.mark.parametrize("what", [pytest.param("selective", marks=pytest.mark.slow), "full"])
def test_compiled_stages_keep_the_bits(what):
    torch._dynamo.reset()
    settings = replace(MODELS["dense"], dropout=0.0, num_layers=2)
    runs = [
        train(settings, how, granularity="chunk", compile="aot_eager") for how in ("none", what)
    ]
    assert same(runs[0][0], runs[1][0])
    assert runs[1][1].stats.replayed >= 6 and runs[1][1].stats.compiled


PHASE: ContextVar[str] = ContextVar("phase", default="unknown")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_second_forward_knows_the_phase_that_the_first_was_in(compiled):
    """Backwards on a GPU run in threads of autograd's own, which have no context of ours: compiled
    code ran operation by operation there, as under modes of others."""
    seen = []

    def run(state):
        seen.append(PHASE.get())
        return {"hidden": state["hidden"].sin()}

    token = PHASE.set("capture")
    hidden = torch.ones(3, requires_grad=True)
    made = checkpointed(run, {"hidden": hidden}, "full", compiled=compiled)["hidden"].sum()
    PHASE.reset(token)
    thread = threading.Thread(target=made.backward)
    thread.start()
    thread.join()
    assert seen == ["capture", "capture"] and torch.equal(hidden.grad, hidden.detach().cos())


def test_after_an_error_nothing_more_is_saved_for_the_checkpoint_that_failed():
    def run(state):
        assert sys._getframe(2).f_locals  # which the frames that are walked here keep until 3.13
        raise ValueError("no")

    hidden = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="no") as held:
        checkpointed(run, {"hidden": hidden}, "full")
    hidden.sin().sum().backward()
    assert held.value.__traceback__ is not None
    assert torch.equal(hidden.grad, hidden.detach().cos())


def test_compiled_dropout_is_refused_where_it_would_be_drawn_again():
    torch._dynamo.reset()
    settings = replace(MODELS["dense"], num_layers=1)
    with pytest.raises(packgraph.CaptureError, match="recomputed in full and draws random"):
        train(settings, "full", granularity="chunk", compile="aot_eager")


@pytest.mark.slow
def test_compiled_dropout_is_drawn_once_by_selective_recomputation():
    torch._dynamo.reset()
    settings = replace(MODELS["dense"], num_layers=1)
    runs = [
        train(settings, how, granularity="chunk", compile="aot_eager", steps=4)
        for how in ("none", "selective")
    ]
    assert same(runs[0][0], runs[1][0])


def pool_bytes(what, **options):
    """Bytes of the pool of graphs of a row, read off a trial."""
    settings = replace(config(6), hidden_size=32, intermediate_size=128)
    model = DecoderModel(settings, seed=1)
    packgraph.recompute(model, what)
    capacity = packgraph.Capacity(256, 4)
    graphed = graph(model, capacities=[capacity], strict=True, warmup=1, slots=1, **options)
    arguments = (sample_batch(capacity), torch.tensor(200))
    graphed(*arguments).backward()
    return trial_memory(graphed, [arguments], 1).pools


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.few(2)
@pytest.mark.slow
def test_pools_are_smaller(granularity):
    none, selective, full = (
        pool_bytes(what, granularity=granularity) for what in ("none", "selective", "full")
    )
    assert selective < 0.75 * none and full < 0.5 * none


@pytest.mark.filterwarnings("ignore:.*recompute' changed:packgraph.PackgraphWarning")
@pytest.mark.slow
def test_graphs_are_captured_again_for_another_choice():
    capacity = packgraph.Capacity(256, 4)
    graphed = graph(DecoderModel(MODELS["dense"], seed=1), capacities=[capacity], slots=1, warmup=0)
    sizes = []
    for what in ("none", "full", "none"):
        packgraph.recompute(graphed, what)
        graphed(sample_batch(capacity), torch.tensor(200)).backward()
        sizes.append(graphed.stats.pool_bytes)
    assert sizes[1] < 0.9 * sizes[0] and sizes[2] == sizes[0]


class Counting(Stages):
    """A staged model whose only layer draws random numbers, in one way or another."""

    def __init__(self, draw, recompute):
        super().__init__()
        self.linear, self.draw, self.how = torch.nn.Linear(8, 8), draw, recompute

    def stages(self):
        return [packgraph.Stage("mlp", 0, self.layer, recompute=self.how)]

    def layer(self, state):
        return {"x": self.draw(self.linear(state["x"]).sin()).square()}


def out_of_place(x):
    return torch.native_dropout(x, 0.5, True)[0]


@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.few(2)
def test_stages_of_ones_own_draw_new_numbers_at_every_replay(how):
    found = []
    for recompute in ("", how):
        torch.manual_seed(0)
        model = Counting(out_of_place, recompute)
        graphed = packgraph.graph(model, warmup=1, strict=True)
        outputs = []
        for _ in range(5):
            out = graphed(torch.ones(4, 8))
            out.sum().backward()
            outputs.append(out.detach().clone())
        assert graphed.stats.replayed == 4
        assert not any(torch.equal(a, b) for a, b in itertools.pairwise(outputs))
        found.append([*outputs, *(p.grad for p in model.parameters())])
    assert same(*found)


def test_numbers_drawn_in_place_are_refused():
    model = Counting(lambda x: x * torch.empty_like(x).bernoulli_(0.5), "full")
    with pytest.raises(RuntimeError, match="draws random numbers into a tensor in place"):
        model(torch.ones(4, 8))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("ful", "'ful' cannot be recomputed.*did you mean 'full'"),
        (["attn", "head"], "'head' cannot be recomputed: stages that can are attn, mlp"),
        ([], "names no stage"),
    ],
)
def test_unknown_choices_are_refused(what, message):
    with pytest.raises(ValueError, match=message):
        packgraph.recompute(DecoderModel(MODELS["dense"], seed=1), what)


def test_rows_that_ranks_share_and_stashed_experts_are_refused():
    model = DecoderModel(MODELS["experts"], seed=1)
    model.contexts[2] = None
    model.layers["1"].mlp.stash = object()
    with pytest.raises(ValueError, match=r"in a stash.*exchange data between ranks"):
        packgraph.recompute(model, "full")
    packgraph.recompute(model, "none")
    assert not any(stage.recompute for stage in model.stages())


def test_a_module_without_layers_is_refused():
    with pytest.raises(ValueError, match="holds no decoder"):
        packgraph.recompute(torch.nn.Linear(2, 2), "full")


def test_inputs_of_layers_wait_on_the_host_and_those_from_outside_stay():
    """The first input is an argument of the call, as in later stages of a pipeline."""
    settings = config(4)
    model = DecoderModel(settings, seed=1, stage=1, stages=2)
    packgraph.recompute(model, "full")
    graphed = graph(model, capacities=CAPACITIES[:1], granularity="chunk", strict=True, warmup=2)
    runtime = runtime_of(graphed, model, ("layer_input",), late=("out", "back"), policy=by_hand())
    plain = DecoderModel(settings, seed=1, stage=1, stages=2)
    found = []
    for called in (plain, graphed):
        torch.manual_seed(0)
        for number, batch in enumerate(batches(4, CAPACITIES[:1])):
            generator = torch.Generator().manual_seed(number)
            hidden = torch.randn(24, 16, generator=generator).requires_grad_()
            called(batch, torch.tensor(20), hidden).backward()
            runtime.end_step()
            found.append(hidden.grad)
    assert same(found[:4], found[4:]) and graphed.stats.replayed == 2
    assert same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
    assert [group.layer for group in runtime.trace.groups] == [2, 3]
    assert runtime.plan.moves == (False, True) and runtime.plan.moved_bytes == 24 * 16 * 4


@pytest.mark.slow
def test_offloaded_inputs_leave_the_pool():
    settings = replace(config(12), hidden_size=64, intermediate_size=16, dropout=0.0)
    capacity, sizes = packgraph.Capacity(256, 4), []
    for offloads in (False, True):
        model = DecoderModel(settings, seed=1)
        packgraph.recompute(model, "full")
        graphed = graph(model, capacities=[capacity], strict=True, warmup=2, slots=1)
        if offloads:
            runtime = runtime_of(graphed, model, ("layer_input",), policy=by_hand())
        arguments = (sample_batch(capacity), torch.tensor(200))
        for _ in range(2):
            graphed(*arguments).backward()
            if offloads:
                runtime.end_step()
        sizes.append(trial_memory(graphed, [arguments], 1).pools)
    assert sum(runtime.plan.moves) == 12
    assert sizes[1] < sizes[0] - 6 * 256 * 64 * 4, "at least half of the inputs are gone"
