"""Stages of a pipeline predict their own graphs, and drop the same capacities when one of them has
no room."""

import dataclasses
from pathlib import Path

import pytest
import torch
from distkit import run_ranks
from trainkit import finished, tiny

from packgraph.graphs.key import OVER_BUDGET
from packgraph.graphs.parameters import local_tensor
from packgraph.parallel.layout import Layout
from packgraph.train.config.sections import ParallelConfig

PP2 = Layout(dp=1, pp=2)


def config(budget=None, enabled=True):
    made = tiny(graph=True, steps=8, checkpoint_every=100)
    return dataclasses.replace(
        made,
        parallel=ParallelConfig(dp=1, pp=2),
        graph=dataclasses.replace(made.graph, memory_budget=budget, enabled=enabled),
    )


def go(mesh, folder, settings):
    """Train; this rank's parameters, what it says of memory, its counts, and its prediction in
    bytes."""
    with finished(Path(folder), settings, mesh=mesh) as run:
        parameters = {
            name: local_tensor(value.detach()).clone()
            for name, value in run.model.named_parameters()
        }
        plan = run.executor.memory
        total = sum(bank.total for bank in plan.banks) if plan is not None else 0
        return parameters, run.executor.summary().get("memory"), run.executor.totals(), total


def test_one_stage_without_room_drops_a_capacity_on_all(tmp_path):
    def ranks(name, settings):
        return run_ranks(go, 2, str(tmp_path / name), settings, layout=PP2, seconds=120.0)

    eager, whole = ranks("eager", config(enabled=False)), ranks("whole", config())
    totals = [total for *_, total in whole]
    assert all(
        memory["predicted_to_measured"] == pytest.approx(1, abs=0.05) for _, memory, _, _ in whole
    )
    assert totals[0] != totals[1], "stages have different numbers of slots and different layers"
    budgeted = ranks("budget", config(f"{sum(totals) / 2 / 1024}KiB"))
    for (expected, *_), (got, memory, counts, total) in zip(eager, budgeted, strict=True):
        assert memory["dropped"] == ["64x8"] and total <= sum(totals) / 2
        assert counts["fallbacks"][OVER_BUDGET] > 0 and counts["replayed"] > 0
        assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def test_parts_of_a_tensor_parallel_model_are_predicted(tmp_path):
    settings = config()
    model = dataclasses.replace(settings.model, num_kv_heads=2)
    settings = dataclasses.replace(settings, model=model, parallel=ParallelConfig(dp=1, tp=2))
    for _, memory, counts, _ in run_ranks(
        go, 2, str(tmp_path / "tp"), settings, layout=Layout(dp=1, tp=2), seconds=120.0
    ):
        assert counts["replayed"] > 0 and memory["predicted_to_measured"] == pytest.approx(
            1, abs=0.05
        )
