"""The trainer with activation recomputation: the same run bit by bit, in less memory."""

import re
from dataclasses import replace

import pytest
from trainkit import CAPACITIES, equal, ran, state_of, tiny

from packgraph.models.config import ExpertConfig
from packgraph.train.config.sections import OffloadConfig, ParallelConfig
from packgraph.train.validate import validate


def finish(folder, config):
    folder.parent.mkdir(exist_ok=True)
    run, summary = ran(folder, config)
    kinds = [stage.recompute for chunk in run.model.chunks for stage in chunk.stages()]
    return state_of(run), summary, kinds, (folder.parent / "log").read_text().replace("\n", " ")


def made(
    recompute="none", graph=True, offload=(), parallel=None, experts=False, dropout=None, **graphs
):
    config = tiny(graph=graph, recompute=recompute)
    model = config.model
    if experts:
        model = replace(model, experts=ExpertConfig(count=4, per_token=2, intermediate_size=8))
    if dropout is not None:
        model = replace(model, dropout=dropout)
    return replace(
        config,
        model=model,
        graph=replace(config.graph, **graphs),
        offload=OffloadConfig(modules=offload, min_bytes=1, margin=0),
        parallel=parallel or ParallelConfig(),
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return finish(tmp_path_factory.mktemp("kept") / "run", tiny())[0]


@pytest.mark.parametrize(
    ("graph", "granularity", "recompute", "offload"),
    [
        (False, "layer", "full", ()),
        (True, "layer", "attn,mlp", ()),
        (True, "chunk", "selective", ()),
        (True, "chunk", "full", ("layer_input",)),
        pytest.param(True, "step", "full", (), marks=pytest.mark.slow),
        (True, "step", "full", ("layer_input",)),
    ],
)
@pytest.mark.few(2)
def test_a_run_that_recomputes_is_bitwise_one_that_does_not(
    graph, granularity, recompute, offload, kept, tmp_path
):
    config = made(recompute, graph, offload, granularity=granularity, strict=True)
    assert validate(config, "cpu") == []
    found, summary, kinds, _ = finish(tmp_path / "run", config)
    wanted = "selective" if recompute == "selective" else "full"
    assert kinds == ["", *[wanted] * 4, ""]
    equal(found, kept)
    if offload:
        (told,) = summary["offload"]
        assert told["groups"] == told["moved"] == 2 and told["moved_bytes"] > 0


def test_auto_chooses_the_least_that_fits(kept, tmp_path):
    budget, chosen = "1GiB", []
    for number, expected in enumerate(("none", "full")):
        config = made("auto", memory_budget=budget, granularity="chunk")
        state, summary, kinds, log = finish(tmp_path / str(number) / "run", config)
        chosen.append(kinds[1] or "none")
        assert f"recompute auto chose {expected}" in log
        equal(state, kept)
        memory = summary["memory"]
        total = memory["predicted_pool_bytes"] + sum(memory["buffer_bytes"])
        budget = f"{total / 1024 / 2}KiB"
    assert chosen == ["none", "full"]


MODULES = ("qkv_linear", "core_attn", "mlp_act", "layer_input")


def auto(folder, limit, modules, **offload):
    """A run that chooses: its state, the choice, bytes of graphs, the summary and the log."""
    config = made("auto", offload=modules, memory_budget=limit, granularity="chunk", strict=True)
    config = replace(config, offload=replace(config.offload, **offload))
    assert validate(config, "cpu") == []
    state, summary, kinds, log = finish(folder / "run", config)
    memory = summary["memory"]
    assert not memory["dropped"] and summary["replayed"] >= 6
    total = memory["predicted_pool_bytes"] + sum(memory["buffer_bytes"])
    return state, kinds[1] or "none", total, summary, log


def test_auto_counts_on_what_is_offloaded(kept, tmp_path):
    def run(limit, modules, **offload):
        state, *found = auto(tmp_path / str(len([*tmp_path.iterdir()])), limit, modules, **offload)
        equal(state, kept)
        return found

    kind, alone, _, _ = run("1GiB", ())
    assert kind == "none"
    kind, both, summary, log = run("1GiB", MODULES)
    assert kind == "none" and both < alone and summary["offload"][0]["moved_bytes"] > 0
    assert "none as planned" in log
    between = f"{(alone + both) / 2 / 1024}KiB"
    assert run(between, ())[0] == "full"
    assert run(between, MODULES)[0] == "none"
    # A plan that leaves everything where it is does not fit, though everything moved does.
    kind, _, summary, log = run(between, MODULES, fraction=0.0)
    assert kind == "full" and summary["offload"][0]["moved_bytes"] == 0
    assert "none as planned" in log and "selective" in log


def test_auto_offloads_what_the_choice_leaves(kept, tmp_path):
    state, kind, _, summary, log = auto(tmp_path / "0", "1GiB", MODULES, budget="5KiB")
    (told,) = summary["offload"]
    assert kind == "selective" and "none not: offload.budget = 5KiB: no plan" in log
    assert told["groups"] == 2 and told["moved"] == 1  # the inputs of two layers
    equal(state, kept)
    # The second plan, by graphs, is for the same choice.
    state, kind, _, summary, log = auto(tmp_path / "1", "1GiB", MODULES, lost=0.9)
    (told,) = summary["offload"]
    assert kind == "none" and told["moved"] == told["groups"] > 0
    assert (
        summary["captured"] == 2 * len(CAPACITIES) and log.count("recompute auto chose none") == 1
    )
    equal(state, kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": "atn"}, "run.recompute = atn: 'atn' cannot be recomputed.*mean 'attn'"),
        ({"recompute": "auto", "graph": False}, "auto reads memory off graphs on trial"),
        ({"recompute": "auto", "granularity": "step"}, "auto is not there yet with"),
        (
            {"recompute": "auto", "offload": ("layer_input",), "granularity": "layer"},
            "layer_input saves a hidden state that a region takes in",
        ),
        ({"recompute": "auto", "offload": ("mlp_at",)}, "no module 'mlp_at'"),
        (
            {"recompute": "auto", "offload": ("mlp_act",), "compile": True},
            "run.recompute = auto has nothing to choose by",
        ),
        ({"recompute": "full", "parallel": ParallelConfig(tp=2)}, "cannot be recomputed yet"),
        ({"offload": ("layer_input",)}, "layer_input is what recomputation begins with"),
        ({"recompute": "full", "offload": ("mlp_act",)}, "mlp_act is computed again in the backw"),
        (
            {"recompute": "full", "offload": ("layer_input",), "granularity": "layer"},
            "layer_input saves a hidden state that a region takes in",
        ),
        (
            {"recompute": "full", "experts": True, "parallel": ParallelConfig(expert_stash=1.5)},
            "moe stages cannot be recomputed where experts keep their rows in a stash",
        ),
        ({"recompute": "full", "dropout": 0.1, "compile": True}, "draw random numbers cannot be"),
        (
            {"recompute": "full", "experts": True, "compile": True},
            "moe stages cannot be recomputed in compiled code",
        ),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    world = 2 if "parallel" in options and options["parallel"].tp > 1 else 1
    problems = validate(made(**options), "cpu", world=world)
    assert any(re.search(message, problem) for problem in problems), problems


def test_stages_beside_a_stash_may_be_recomputed():
    config = made("attn", experts=True, parallel=ParallelConfig(expert_stash=1.5))
    assert not [problem for problem in validate(config, "cpu") if "recompute" in problem]
