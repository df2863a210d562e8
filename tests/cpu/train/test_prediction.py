"""Multi-token prediction through the trainer: graphs are eager bit by bit, resumed runs are those
that never stopped, and its losses stand in the metrics by themselves."""

import random
from dataclasses import replace

import pytest
import torch
from trainkit import (
    CAPACITIES,
    PacksOfOneCapacity,
    RandomPacks,
    StopAfter,
    ended,
    equal,
    ran,
    state_of,
    tiny,
    traced,
    trainer,
)

from packgraph.models.config import ExpertConfig
from packgraph.models.layers.moe import moe_blocks
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.train.config.sections import HfConfig, LoraConfig, OffloadConfig, ParallelConfig
from packgraph.train.features.moe import share
from packgraph.train.memory import DecoderMemory, need_of
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.validate import validate

EXPERTS = ExpertConfig(
    count=4, per_token=2, intermediate_size=8, shared=1, score_bias=True, document_loss=1e-3
)


def config(
    graph=True, experts=False, recompute="none", depths=2, tied=True, stash=0.0, offload=(), **more
):
    """Graphs of several shapes without experts, of one with them."""
    made = tiny(graph=graph, recompute=recompute, checkpoint_every=100)
    if experts:
        more = {"capacities": CAPACITIES[-1:]} | more
    model = replace(
        made.model,
        mtp_layers=depths,
        tie_embeddings=tied,
        experts=EXPERTS if experts else ExpertConfig(),
    )
    return replace(
        made,
        model=model,
        graph=replace(made.graph, strict=graph, **more),
        parallel=ParallelConfig(expert_stash=stash),
        offload=OffloadConfig(modules=offload, min_bytes=1, margin=0),
    )


def packs_of(settings):
    """Packs of the capacities that are captured."""
    return RandomPacks() if len(settings.graph.capacities) > 1 else PacksOfOneCapacity()


def finish(folder, settings, resume=False, stop=None):
    """All tensors and the metrics of a run."""
    folder.parent.mkdir(exist_ok=True)
    run, _ = ran(folder, settings, packs_of(settings), resume=resume, stop=stop)
    return state_of(run), read_metrics(folder / METRICS), run.executor.totals()


def numbers(rows):
    return [(row["loss"], row["mtp_loss/1"], row["mtp_loss/2"]) for row in rows]


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    found = {}
    for experts in (False, True):
        folder = tmp_path_factory.mktemp("eager") / "run"
        found[experts] = finish(folder, config(graph=False, experts=experts))
    return found


@pytest.mark.parametrize(
    ("experts", "options"),
    [
        pytest.param(False, {"granularity": "layer"}, marks=pytest.mark.slow),
        (False, {"granularity": "chunk", "recompute": "full", "offload": ("layer_input",)}),
        pytest.param(False, {"granularity": "step"}, marks=pytest.mark.slow),
        (False, {"granularity": "step", "optimizer": True}),
        (True, {"granularity": "layer", "recompute": "attn"}),
        (True, {"granularity": "chunk", "stash": 1.5}),
        pytest.param(True, {"granularity": "step"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.few(3)
def test_graphs_are_eager_bit_by_bit(experts, options, eager, tmp_path):
    settings = config(experts=experts, **options)
    assert validate(settings, "cpu") == []
    expected, rows, _ = eager[experts]
    found, graphed_rows, totals = finish(tmp_path / "run", settings)
    equal(found, expected)
    assert numbers(graphed_rows) == numbers(rows) and len(rows) == 6
    assert totals["replayed"] >= 3
    assert any("layers.3.eh_proj.weight" in name for name in expected)


class OneCapacity(RandomPacks):
    """Packs of one capacity: all code is compiled once."""

    def __next__(self):
        draw = random.Random(self.position)
        self.position += 1
        drawn = [draw.randrange(32) for _ in range(14)]
        return PackedBatch.build([drawn[:9], drawn[9:]], CAPACITIES[0])


def compiled(folder, **options):
    """State and numbers of a run."""
    settings = config(compile=True, depths=1, capacities=CAPACITIES[:1], **options)
    with traced():
        folder.parent.mkdir(exist_ok=True)
        run, _ = ran(folder, settings, OneCapacity())
    found = state_of(run), run.executor.totals()
    rows = read_metrics(folder / METRICS)
    return *found, [(row["loss"], row["mtp_loss/1"]) for row in rows]


def test_graphs_of_compiled_code_are_that_code_bit_by_bit(tmp_path):
    expected, _, losses = compiled(tmp_path / "eager" / "run", warmup=10**6)
    found, totals, graphed = compiled(tmp_path / "graphs" / "run")
    equal(found, expected)
    assert graphed == losses and totals["replayed"] >= 3


def test_a_resumed_run_is_one_that_never_stopped(eager, tmp_path):
    expected, rows, _ = eager[True]
    settings = config(experts=True, granularity="chunk")
    finish(tmp_path / "run", settings, stop=StopAfter(3))
    found, resumed, _ = finish(tmp_path / "run", settings, resume=True)
    equal(found, expected)
    assert numbers(resumed) == numbers(rows)


def test_losses_are_those_of_tokens_ahead_and_the_loss_is_that_of_the_next(tmp_path):
    """At the start the weights of the decoder are those of a run without these layers."""
    settings = config(graph=False)
    settings = replace(settings, model=replace(settings.model, dropout=0.0))
    without = replace(settings, model=replace(settings.model, mtp_layers=0))
    _, rows, _ = finish(tmp_path / "with" / "run", settings)
    _, plain, _ = finish(tmp_path / "without" / "run", without)
    assert rows[0]["loss"] == plain[0]["loss"] and rows[-1]["loss"] != plain[-1]["loss"]
    assert not any(name.startswith("mtp_loss") for name in plain[0])
    # Of a document of L tokens there are L - 1 labels, L - 2 one token ahead, and so on.
    assert rows[0]["loss"] > rows[0]["mtp_loss/1"] > rows[0]["mtp_loss/2"] > 0


def test_a_step_that_is_made_again_counts_once(eager, tmp_path):
    """Too few pages of the stash: the step is made again with more."""
    settings = config(experts=True, granularity="chunk", stash=1.5)
    folder = tmp_path / "run"
    run = trainer(folder, settings, packs_of(settings))
    blocks = moe_blocks(run.model.chunks)
    stash = blocks[0].stash
    stash.allocate(4, columns=dict(stash.columns))
    share(stash, blocks)
    ended(run)
    assert run.repeated > 0
    equal(state_of(run), eager[True][0])
    assert numbers(read_metrics(folder / METRICS)) == numbers(eager[True][1])


def test_estimates_count_the_layers():
    model = config().model
    without = replace(model, mtp_layers=0)
    deeper = replace(without, num_layers=model.depth)
    capacity = Capacity(64, 8)
    predicting, deep = (DecoderMemory(one, one.depth, 4)(capacity) for one in (model, deeper))
    assert predicting - deep == 4 * 2 * model.vocab_size * model.hidden_size  # heads' gradients
    assert model.count("attn") == 4 and without.count("attn") == 2
    needs = [
        need_of(replace(config(), model=one), "cpu").weights for one in (model, deeper, without)
    ]
    extra = 2 * (2 * model.hidden_size**2 + 3 * model.hidden_size)
    assert needs[0] - needs[1] == 4 * extra and needs[1] > needs[2]


def test_adapters_and_models_of_others_are_refused(tmp_path):
    found = validate(replace(config(), lora=LoraConfig(rank=2)), "cpu")
    assert any("lora.rank with model.mtp_layers = 2" in problem for problem in found)
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    transformers.LlamaConfig(**sizes, num_attention_heads=2).save_pretrained(tmp_path)
    found = validate(replace(config(), hf=HfConfig(path=str(tmp_path))), "cpu")
    assert any("model.mtp_layers = 2 is for models of packgraph" in problem for problem in found)


def test_control_without_its_gradient_the_decoder_learns_otherwise(tmp_path):
    states = []
    for weight in (0.3, 0.0):
        settings = config(graph=False)
        settings = replace(settings, model=replace(settings.model, mtp_loss_weight=weight))
        states.append(finish(tmp_path / str(weight) / "run", settings)[0])
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(states[0][name], states[1][name])
