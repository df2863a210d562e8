"""Training with compiled stages: graphs of them, and the same code run eagerly, give the same run bit by bit."""
import dataclasses

import pytest
import torch
from trainkit import state_of, tiny, trainer

from packgraph.graphs.graphed import graph
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.options import GraphConfig
from packgraph.train.signals import StopRequest

NEVER = 10**6


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """torch's tracing compiler instead of the one that generates code."""
    torch._dynamo.reset()
    monkeypatch.setattr("packgraph.train.executor.graph", lambda *args, compile, **options: graph(
        *args, compile="aot_eager" if compile else False, **options))
    yield
    torch._dynamo.reset()


def train(folder, **options):
    """State at the end, losses, and the summary."""
    config = tiny(graph=True, steps=5)
    config = dataclasses.replace(config, graph=dataclasses.replace(config.graph, compile=True, **options))
    run = trainer(folder, config)
    summary = run.run(StopRequest())
    state = state_of(run)
    run.close()
    return state, [(row["loss"], row["gradient_norm"]) for row in read_metrics(folder / METRICS)], summary


@pytest.mark.parametrize("options", [{"granularity": "layer"}, {"granularity": "step", "optimizer": True}],
                         ids=["layer", "step"])
def test_graphs_of_compiled_stages_train_as_the_compiled_stages_do(options, tmp_path):
    state, rows, summary = train(tmp_path / "graph", warmup=2, **options)
    expected, expected_rows, eager_summary = train(tmp_path / "eager", warmup=NEVER)
    assert rows == expected_rows
    assert not [name for name, value in state.items() if not torch.equal(value, expected[name])]
    assert summary["replayed"] > 0 and eager_summary["replayed"] == 0
    assert summary["compiled"] == eager_summary["compiled"] > 0 and summary["compile_seconds"] >= 0


def test_the_attention_in_use_is_known(tmp_path):
    assert trainer(tmp_path / "run", tiny()).attention == "sdpa (no flash: the tensors are on cpu)"


def test_compiling_needs_graphs():
    with pytest.raises(ValueError, match="compile is of captured code, so it needs enabled = true"):
        GraphConfig(enabled=False, compile=True)
