"""Evaluations over ranks: every layout finds the loss of one document after another, trains as a
run without them, and all ranks decide alike."""

import contextlib
import dataclasses
import math
import warnings
from pathlib import Path

import pytest
from distkit import run_ranks
from evalkit import config, documents, held_out, learned, made, naive_loss, rows
from trainkit import equal, held_tensors

from packgraph.graphs.errors import PackgraphWarning
from packgraph.models.config import ExpertConfig
from packgraph.models.decoder import DecoderModel
from packgraph.models.layers.moe import moe_blocks
from packgraph.packing.capacity import Capacity
from packgraph.parallel.layout import Layout
from packgraph.parallel.pieces import collect
from packgraph.train.checkpoint.writer import best_checkpoint
from packgraph.train.config.sections import EvalConfig, ParallelConfig
from packgraph.train.evaluation import STOPPED_EARLY
from packgraph.train.signals import StopRequest

SHARE = EvalConfig(every=2, share=0.2)
EXPERTS = ExpertConfig(count=8, per_token=2, intermediate_size=16, shared=1, document_loss=1e-2)
SKEWED = dataclasses.replace(EXPERTS, per_token=1, shared=0)
ROWS = (Capacity(64, 8),)
KINDS = {
    "dp": (2, {"dp": 2}, {}),
    "dp sharded": (2, {"dp": 2, "shard": "parameters"}, {}),
    "pp": (2, {"pp": 2}, {}),
    "pp chunks": (2, {"pp": 2, "chunks": 2}, {"model_": {"num_layers": 4}}),
    "pp step": (2, {"pp": 2}, {"graph_": {"granularity": "step"}}),
    "tp": (2, {"tp": 2}, {}),
    "cp": (2, {"cp": 2}, {}),
    "cp zigzag": (2, {"cp": 2, "cp_kind": "zigzag"}, {}),
    "cp dynamic": (2, {"cp": 2, "dynamic_cp": True}, {"graph_": {"capacities": ROWS}}),
    "cp dynamic, unlike rows": (
        4,
        {"cp": 4, "dynamic_cp": True},
        {
            "graph_": {"capacities": (Capacity(128, 8),)},
            "documents": {"count": 200, "longest": 45},
        },
    ),
    "cp dynamic, two tokens": (
        2,
        {"cp": 2, "dynamic_cp": True},
        {"graph_": {"capacities": ROWS}, "model_": {"mtp_layers": 1}},
    ),
    "pp, two tokens": (2, {"pp": 2}, {"model_": {"mtp_layers": 1}}),
    "ep": (2, {"dp": 2, "ep": 2, "expert_room": 4.0}, {"model_": {"experts": EXPERTS}}),
    "pp dp": (4, {"dp": 2, "pp": 2}, {}),
}


def settings(folder, parallel, changes, evaluation=SHARE, graph=True):
    model = {"num_heads": 4, "num_kv_heads": 2, "tie_embeddings": False} | changes.get("model_", {})
    return config(
        str(Path(folder) / "data.jsonl"),
        evaluation,
        graph,
        steps=4,
        checkpoint_every=100,
        parallel=ParallelConfig(**parallel),
        graph_={**changes.get("graph_", {}), "enabled": graph},
        model_=model,
    )


def layout_of(parallel):
    return ParallelConfig(**{"dp": 1} | parallel).layout()


def go(mesh, folder, name, options, change=None):
    """Run to the end: what this rank holds, what it has found, and all tensors whole."""
    with contextlib.closing(made(Path(folder) / name, options, mesh)) as run:
        if change is not None:
            change(run, mesh)
        with warnings.catch_warnings(action="error", category=PackgraphWarning):
            summary = run.run(StopRequest())
        held = held_tensors(run)
        found = {"held": held, "summary": summary, "state": run.evaluation.state()}
        return found | {"whole": dict(collect(mesh, run.tensors())), "step": run.step}


def three(mesh, folder, parallel, changes):
    """With evaluations, without, and with evaluations eagerly."""
    off = dataclasses.replace(SHARE, every=0)
    return [
        go(mesh, folder, "evaluated", settings(folder, parallel, changes)),
        go(mesh, folder, "plain", settings(folder, parallel, changes, off)),
        go(mesh, folder, "eager", settings(folder, parallel, changes, graph=False)),
    ]


def whole_model(options, tensors):
    """The model of a run by itself, with the weights of all ranks."""
    model = DecoderModel(options.model)
    weights = {name.removeprefix("model."): value for name, value in tensors.items()}
    model.load_state_dict(
        {name: value for name, value in weights.items() if not name.startswith("optimizer.")},
        strict=False,
    )
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_evaluates_alike_and_trains_on(tmp_path, kind):
    world, parallel, changes = KINDS[kind]
    documents(tmp_path / "data.jsonl", **changes.get("documents", {}))
    found = run_ranks(
        three, world, str(tmp_path), parallel, changes, layout=layout_of(parallel), seconds=150.0
    )
    for evaluated, plain, eager in found:
        equal(evaluated["held"], plain["held"])
        equal(evaluated["held"], eager["held"])
        assert evaluated["state"] == found[0][0]["state"] == eager["state"]
        counts = evaluated["summary"]["evaluation"]
        assert counts["replayed"] > 0 and not counts["fallbacks"]
    told = {name: rows(tmp_path / name) for name in ("evaluated", "plain", "eager")}
    assert list(map(learned, told["evaluated"])) == list(map(learned, told["plain"]))
    assert [row["step"] for row in told["evaluated"] if "eval_loss" in row] == [2, 4]
    losses = [[row.get("eval_loss") for row in told[name]] for name in ("evaluated", "eager")]
    assert losses[0] == losses[1]

    options = settings(tmp_path, parallel, changes)
    model = whole_model(options, found[0][0]["whole"])
    expected, labels = naive_loss(model, [(options, held_out(options))])
    assert told["evaluated"][-1]["eval_tokens"] == labels
    # Sums of float32 in another order, and over ranks.
    assert told["evaluated"][-1]["eval_loss"] == pytest.approx(expected, rel=1e-5)


def falling(run, mesh):
    """Losses of ranks that differ, as nothing but their sum counts."""
    sums = iter([3.0, 2.0, 2.5, math.nan])
    run.evaluation._add = lambda name, total: total.fill_(10.0 * next(sums) + mesh.rank) and 10


def stop_early(mesh, folder):
    options = settings(folder, {"dp": 2}, {}, dataclasses.replace(SHARE, every=1, patience=2))
    options = dataclasses.replace(options, run=dataclasses.replace(options.run, steps=6))
    return go(mesh, folder, "run", options, falling)


def test_all_ranks_stop_early_together(tmp_path):
    documents(tmp_path / "data.jsonl")
    found = run_ranks(stop_early, 2, str(tmp_path), layout=Layout(dp=2), seconds=90.0)
    for one in found:
        assert one["step"] == 4 and one["state"] == found[0]["state"]
        assert one["summary"]["ended"] == f"{STOPPED_EARLY}: no better evaluation since step 2"
    assert best_checkpoint(tmp_path / "run" / "checkpoints").name == "step-00000002"


def crowd(run, mesh):
    """Let one rank find too little room for experts once."""
    before, calls = run.executor.evaluate, []

    def evaluate(batches):
        calls.append(None)
        found = before(batches)
        if len(calls) == 1 and mesh.rank == 1:
            moe_blocks(run.model.chunks)[0].evaluation_demand.fill_(4500)
        return found

    run.executor.evaluate = evaluate


def crowded(mesh, folder, parallel, changes):
    options = settings(folder, parallel, changes)
    return [
        go(mesh, folder, "quiet", options),
        go(mesh, folder, "crowded", options, crowd),
    ]


def test_an_evaluation_that_lacks_room_for_experts_is_made_again(tmp_path):
    _, parallel, changes = KINDS["ep"]
    documents(tmp_path / "data.jsonl")
    found = run_ranks(
        crowded, 2, str(tmp_path), parallel, changes, layout=layout_of(parallel), seconds=120.0
    )
    for quiet, other in found:
        equal(quiet["held"], other["held"])
        assert quiet["state"] == other["state"]


def lacking(mesh, folder):
    """An evaluation of fresh weights whose experts have hardly any room."""
    parallel = {"dp": 2, "ep": 2, "expert_room": 1.0}
    with contextlib.closing(
        made(
            Path(folder) / "run", settings(folder, parallel, {"model_": {"experts": SKEWED}}), mesh
        )
    ) as run:
        room = [block.dispatcher.factor for block in moe_blocks(run.model.chunks)]
        found = run.evaluation.run(0)
        grown = [block.dispatcher.factor for block in moe_blocks(run.model.chunks)]
        return found, room, grown, dict(collect(mesh, run.tensors()))


def test_no_row_of_an_expert_is_left_out(tmp_path):
    documents(tmp_path / "data.jsonl", alphabet="a")
    layout = layout_of({"dp": 2, "ep": 2})
    (found, room, grown, tensors), _ = run_ranks(lacking, 2, str(tmp_path), layout=layout)
    assert max(grown) > max(room)
    options = settings(tmp_path, {}, {"model_": {"experts": SKEWED}})
    expected, _ = naive_loss(whole_model(options, tensors), [(options, held_out(options))])
    assert found["eval_loss"] == pytest.approx(expected, rel=1e-5)
