"""Training with compiled stages: graphs of them, and the same code run eagerly, give the same run
bit by bit."""

import dataclasses
import random

import pytest
import torch
from trainkit import CAPACITIES, RandomPacks, ran, state_of, tiny, traced, trainer

from packgraph.packing.batch import PackedBatch
from packgraph.train.config.sections import GraphConfig
from packgraph.train.metrics import METRICS, read_metrics

NEVER = 10**6
TWO = CAPACITIES[:2]


class Packs(RandomPacks):
    """Packs of two capacities by turns: all code is compiled once for each."""

    def __next__(self) -> PackedBatch:
        capacity = TWO[self.position % 2]
        draw = random.Random(self.position)
        self.position += 1
        drawn = [draw.randrange(32) for _ in range(capacity.tokens - 4)]
        return PackedBatch.build([drawn[:9], drawn[9:]], capacity)


def train(folder, **options):
    """State at the end, losses, and the summary."""
    config = tiny(graph=True, steps=5)
    config = dataclasses.replace(
        config, graph=dataclasses.replace(config.graph, compile=True, capacities=TWO, **options)
    )
    with traced():
        run, summary = ran(folder, config, Packs())
    return (
        state_of(run),
        [(row["loss"], row["gradient_norm"]) for row in read_metrics(folder / METRICS)],
        summary,
    )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"granularity": "layer"}, id="layer"),
        pytest.param({"granularity": "step", "optimizer": True}, id="step", marks=pytest.mark.slow),
    ],
)
def test_graphs_of_compiled_stages_train_as_the_compiled_stages_do(options, tmp_path):
    """The same granularity runs eagerly, its warm-up never ending: the tied matrix has gradients of
    two graphs of layers, which are summed first, and of one chunk, where each is added in place."""
    state, rows, summary = train(tmp_path / "graph", warmup=2, **options)
    expected, expected_rows, eager_summary = train(tmp_path / "eager", warmup=NEVER, **options)
    assert rows == expected_rows
    assert not [name for name, value in state.items() if not torch.equal(value, expected[name])]
    assert summary["replayed"] > 0 and eager_summary["replayed"] == 0
    assert summary["compiled"] == eager_summary["compiled"] > 0 and summary["compile_seconds"] >= 0


def test_the_attention_in_use_is_known(tmp_path):
    (chunk,) = trainer(tmp_path / "run", tiny()).model.chunks
    assert str(chunk.attention_choice()) == "sdpa (no flash: the tensors are on cpu)"


def test_compiling_needs_graphs():
    with pytest.raises(ValueError, match="compile is of captured code, so it needs enabled = true"):
        GraphConfig(enabled=False, compile=True)
