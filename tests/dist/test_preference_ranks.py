"""Preferences on replicas: as on one process, also in evaluations, and on with fewer."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tuningkit import preferences, tiny_model

from packgraph import cli
from packgraph.train.features.preference import FIGURES
from packgraph.train.metrics import METRICS, read_metrics

# Sums over two replicas are rounded in another order; Adam then divides by small numbers.
CLOSE = {"rel": 2e-3, "abs": 1e-5}
NAMES = ("loss", "gradient_norm", *FIGURES)


def figures(run: Path) -> list[float]:
    rows = read_metrics(run / METRICS)
    found = [row[name] for row in rows for name in NAMES]
    evaluated = [row for row in rows if "eval_loss" in row]
    assert evaluated and all(row["eval_pairs"] == 9 for row in evaluated)
    return found + [row[f"eval_{name}"] for row in evaluated for name in ("loss", *FIGURES)]


@pytest.mark.parametrize(
    "more",
    [
        ("dpo", "--lora.rank", "4"),
        ("dpo",),
        ("orpo", "--graph.granularity", "step", "--graph.optimizer", "--graph.enabled"),
    ],
    ids=" ".join,
)
def test_replicas_train_as_one_process_does(more: tuple[str, ...], tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    held = preferences(tmp_path / "held.jsonl", 9, seed=4)
    data = preferences(tmp_path / "pairs.jsonl", 40)

    def words(folder: Path, *others: str) -> list[str]:
        return [
            "train", f"hf:{model}", "--run.name", "mine", "--run.folder", str(folder),
            "--run.steps", "6", "--run.dtype", "float32", "--run.tokens-per-step", "600",
            "--data.path", str(data), "--graph.capacities", "128x6,192x12", "--graph.strict",
            "--data.tokenizer", "bytes", "--optimizer.learning-rate", "1e-2", "--eval.every", "2",
            "--optimizer.decay-steps", "8", "--eval.path", str(held), "--loss.name", *more, *others,
        ]  # fmt: skip

    environment: dict[str, Any] = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "OMP_NUM_THREADS": "1",
    }
    assert cli.main(words(tmp_path / "one")) == 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    both = words(tmp_path / "two", "--run.steps", "4")
    found = subprocess.run(
        [*launcher, "--nproc-per-node", "2", "-m", "packgraph.cli", *both],
        capture_output=True, text=True, timeout=240, env=environment, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "dp 2" in found.stderr
    assert cli.main(words(tmp_path / "two", "--resume")) == 0
    one, two = figures(tmp_path / "one" / "mine"), figures(tmp_path / "two" / "mine")
    assert two == pytest.approx(one, **CLOSE)
    halved = [value / 2 for value in one]  # what a divisor of one rank would make of it
    assert two != pytest.approx(halved, **CLOSE)
