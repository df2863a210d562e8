"""The trainer with offloading: the same run bit by bit, whatever moves and whatever is captured."""

import json
from dataclasses import replace
from functools import partial

import pytest
from trainkit import CPU, RandomPacks, ended, equal, ran, state_of, tiny, trainer

from packgraph.offloading.plan import KEPT
from packgraph.offloading.timing import Headroom
from packgraph.parallel.mesh import single_process
from packgraph.train.config.reading import ConfigError
from packgraph.train.config.sections import OffloadConfig, ParallelConfig
from packgraph.train.features.offload import report_offloading
from packgraph.train.validate import validate

DENSE = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_act")


def finish(folder, config):
    run, summary = ran(folder, config)
    prepare = run.executor.prepare
    if prepare is not None:
        (told,) = summary["offload"]
        assert told["moved_bytes"] <= told["bytes"] and told["groups"] == len(
            prepare.runtimes[0].plan.moves
        )
    return state_of(run), prepare


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return finish(tmp_path_factory.mktemp("kept") / "run", tiny())[0]


@pytest.mark.parametrize(
    ("graph", "granularity", "fraction"),
    [(False, "layer", 0.5), (True, "layer", 1.0), (True, "chunk", 0.5), (True, "step", 1.0)],
)
@pytest.mark.few(2)
def test_a_run_that_offloads_is_bitwise_one_that_does_not(
    graph, granularity, fraction, kept, tmp_path
):
    config = tiny(graph=graph)
    modules = [name for name in DENSE if granularity != "layer" or "norm" not in name]
    config = replace(
        config,
        graph=replace(config.graph, granularity=granularity, strict=True),
        offload=OffloadConfig(modules=tuple(modules), fraction=fraction, min_bytes=1, margin=0),
    )
    assert validate(config, "cpu") == []
    found, offloading = finish(tmp_path / "run", config)
    equal(found, kept)
    (runtime,) = offloading.runtimes
    assert sum(runtime.plan.moves) == len(runtime.plan.moves) * fraction
    assert all(
        (at == KEPT) != moves
        for moves, at in zip(runtime.plan.moves, runtime.plan.reload_at, strict=True)
    )


@pytest.mark.parametrize(("slots", "room"), [(1, 7), (2, 0), (None, 0)])
def test_a_forward_has_its_backwards_room_where_both_use_one_pool(
    slots, room, tmp_path, monkeypatch
):
    monkeypatch.setattr(Headroom, "nbytes", 7)
    config = replace(
        tiny(graph=True), offload=OffloadConfig(modules=DENSE[1:4], min_bytes=1, margin=0)
    )
    _, offloading = finish(
        tmp_path / "run", replace(config, graph=replace(config.graph, slots=slots))
    )
    (planner,) = offloading.planners
    measured, _, _ = planner.planned
    assert measured.room == room


@pytest.mark.parametrize("asked", [{"budget": "48KiB"}, {"lost": 0.3}, {"lost": 0.0}], ids=str)
def test_a_budget_of_memory_or_of_time_says_what_moves(asked, kept, tmp_path):
    config = replace(
        tiny(graph=True), offload=OffloadConfig(modules=DENSE[1:4], min_bytes=1, margin=0, **asked)
    )
    found, offloading = finish(tmp_path / "run", config)
    equal(found, kept)
    ((measured, _, plan),) = [planner.planned for planner in offloading.planners]
    assert plan == offloading.runtimes[0].plan and measured.slots == 1
    if "budget" in asked:
        assert plan.peak_bytes <= 48 * 1024 < plan.kept_peak_bytes
    else:
        assert plan.lost <= asked["lost"] + 1e-9


def test_a_budget_that_nothing_fits_says_what_would_and_ends_cleanly(tmp_path):
    config = replace(
        tiny(), offload=OffloadConfig(modules=("core_attn",), budget="1KiB", min_bytes=1)
    )
    with pytest.raises(
        ConfigError,
        match=r"offload.budget = 1KiB: no plan of offloading fits in 1.00 KiB: the least",
    ):
        ran(tmp_path / "run", config)
    for wrong in (
        {"budget": "a lot"},
        {"budget": "40%"},
        {"lost": 1.0},
        {"lost": 0.1, "budget": "1GiB"},
    ):
        with pytest.raises(ValueError, match=r"budget|lost"):
            OffloadConfig(**wrong)


def test_what_was_planned_is_told_and_drawn(tmp_path):
    config = replace(
        tiny(steps=3),
        offload=OffloadConfig(modules=("core_attn", "mlp_act"), fraction=0.5, min_bytes=1),
    )
    run, notes = trainer(tmp_path / "run", config, RandomPacks()), []
    run.executor.prepare.when_planned = partial(
        report_offloading, mesh=single_process(), folder=run.folder, note=notes.append
    )
    ended(run)
    (note,) = notes
    folder = run.folder / "offload"
    table = (folder / "table.txt").read_text()
    assert (
        table.rstrip() in note
        and str(folder) in note
        and table.splitlines()[1].startswith("rank 0  1 of 4")
    )
    assert "<svg" in (folder / "rank0.svg").read_text()
    assert {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}} in json.loads(
        (folder / "trace.json").read_text()
    )["traceEvents"]


def test_what_cannot_be_offloaded_is_refused_with_all_reasons():
    config = tiny(graph=True)
    config = replace(
        config,
        offload=OffloadConfig(modules=("attn_proj", "attn_norm", "expert_fc1", "mlp_akt")),
        parallel=ParallelConfig(expert_stash=1.1),
    )
    found = " | ".join(validate(config, "cpu"))
    for reason in (
        "attn_proj needs core_attn",
        "did you mean 'mlp_act'",
        "expert_fc1 is in the stash",
        "attn_norm saves a hidden state that a region takes in or hands on (layers 0, 1)",
    ):
        assert reason in found
    nothing = validate(
        replace(config, offload=OffloadConfig(lost=0.01), parallel=ParallelConfig()), "cpu"
    )
    assert nothing == [
        "offload.lost says how much may move, and offload.modules says nothing may: name modules, "
        "such "
        "as qkv_linear,core_attn,mlp_act"
    ]
    with pytest.raises(ValueError, match="fraction must be 0 to 1"):
        OffloadConfig(fraction=2.0)


def test_nothing_is_attached_without_modules(tmp_path):
    run = trainer(tmp_path / "run", tiny(), RandomPacks(), CPU)
    assert run.executor.prepare is None
