"""The update of the weights inside the graph of a step: the same run as eagerly, bit by bit."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from trainkit import CAPACITIES, equal, ran, state_of, tiny

from packgraph.graphs.errors import CaptureError
from packgraph.graphs.step import GraphedStep
from packgraph.train.config.sections import OffloadConfig, ParallelConfig, TrainConfig
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.optimizer import Optimizer
from packgraph.train.validate import validate


def config(
    steps: int = 20, *, enabled: bool = True, dtype: str = "float32", **graph: object
) -> TrainConfig:
    made = tiny(graph=enabled, steps=steps, checkpoint_every=100, dtype=dtype)
    asked = {"granularity": "step", "optimizer": True} | graph
    return dataclasses.replace(
        made,
        graph=dataclasses.replace(made.graph, **asked),
        optimizer=dataclasses.replace(made.optimizer, clip_norm=0.3, decay_steps=20),
    )


def train(folder: Path, settings: TrainConfig, resume: bool = False):
    """State at the end, loss and norm of every step, what the graphs did."""
    run, summary = ran(folder, settings, resume=resume)
    return (
        state_of(run),
        [(row["loss"], row["gradient_norm"]) for row in read_metrics(folder / METRICS)],
        summary,
    )


def assert_equal(left, right) -> None:
    assert left[1] == right[1]
    equal(left[0], right[0])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_steps_with_the_update_inside_equal_eager_steps_bitwise(dtype, tmp_path):
    """Microbatch counts and capacities change: some steps find no place in the bank and run by
    microbatch."""
    graph = train(tmp_path / "graph", config(dtype=dtype))
    assert_equal(graph, train(tmp_path / "eager", config(dtype=dtype, enabled=False)))
    assert_equal(
        graph, train(tmp_path / "layer", config(dtype=dtype, granularity="layer", optimizer=False))
    )
    summary = graph[2]
    assert summary["replayed"] >= 15
    assert set(summary["fallbacks"]) <= {
        "warm-up",
        "whole step: too many different call signatures",
    }


def test_a_step_beyond_the_bank_or_the_capacities_runs_by_microbatch(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "packgraph.train.strategies.GraphedStep", functools.partial(GraphedStep, limit=1)
    )
    graph = train(tmp_path / "graph", config(30, capacities=CAPACITIES[:2]))
    assert_equal(graph, train(tmp_path / "eager", config(30, enabled=False)))
    fallbacks = graph[2]["fallbacks"]
    assert fallbacks["whole step: too many different call signatures"] > 0
    assert fallbacks["whole step: more documents than any capacity"] > 0


def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(tmp_path):
    straight = train(tmp_path / "straight", config(10))
    train(tmp_path / "halves", config(5))
    assert_equal(straight, train(tmp_path / "halves", config(10), resume=True))


def test_a_learning_rate_that_was_baked_would_be_seen(tmp_path, monkeypatch):
    """Negative control of R10: the rate that the graph reads is never changed after the capture."""
    eager = train(tmp_path / "eager", config(8, enabled=False))
    original = Optimizer.set_learning_rate
    seen: list[float] = []

    def once(self: Optimizer, rate: float) -> None:
        seen.append(rate)
        original(self, seen[min(len(seen) - 1, 2)])

    monkeypatch.setattr(Optimizer, "set_learning_rate", once)
    graph = train(tmp_path / "graph", config(8))
    assert len(set(seen)) > 3
    with pytest.raises(AssertionError):
        assert_equal(graph, eager)


def test_strict_stops_where_a_step_cannot_be_one_graph(tmp_path, monkeypatch):
    def with_a_sync(self: Optimizer, loss: torch.Tensor | None = None) -> torch.Tensor:
        norm = update(self, loss)
        assert float(norm) > 0
        return norm

    update = Optimizer.update
    expected = train(tmp_path / "expected", config(6, enabled=False))
    monkeypatch.setattr(Optimizer, "update", with_a_sync)
    with pytest.warns(UserWarning, match="runs by its microbatches' graphs"):
        assert_equal(train(tmp_path / "run", config(6)), expected)
    with pytest.raises(CaptureError, match="reading a number"):
        train(tmp_path / "strict", config(6, strict=True))


def test_what_cannot_hold_the_update_is_said_at_once():
    settings = config(granularity="chunk")
    settings = dataclasses.replace(
        settings, parallel=ParallelConfig(dp=2, pp=2), offload=OffloadConfig(modules=("mlp_act",))
    )
    text = "\n".join(validate(settings, "cpu", world=4))
    assert "parallel.pp = 2 is not there yet with offload.modules: leave" in text
    assert "graph.granularity = step, not chunk" in text
    derived = dataclasses.replace(config(), parallel=ParallelConfig())
    assert not validate(derived, "cpu", world=3)
    assert not validate(config(), "cpu") and not validate(
        config(granularity="layer", enabled=False), "cpu"
    )
