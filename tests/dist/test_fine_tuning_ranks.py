"""Adapters of a model of transformers, or all of it sharded, on replicas: as on one process, and on
with fewer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tuningkit import logits, tiny_model, train, words

from packgraph import cli
from packgraph.train.metrics import METRICS, read_metrics

# Sums over two replicas are rounded in another order; Adam then divides by small numbers.
CLOSE = {"rel": 2e-3, "abs": 1e-5}


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / METRICS)]


SHARD = ("--parallel.shard", "parameters")
PIPELINE, TENSOR = ("--parallel.pp", "2"), ("--parallel.tp", "2")


@pytest.mark.parametrize(
    ("given", "spread"),
    [
        (("--lora.rank", "4"), ()),
        (SHARD, ()),
        (("--lora.rank", "1", *SHARD), ()),
        (("--lora.rank", "4"), PIPELINE),
        (("--lora.rank", "4", "--lora.dora", *SHARD), PIPELINE),
        (("--lora.rank", "4"), TENSOR),
        (
            ("--lora.rank", "4", "--lora.targets", "q_proj,down_proj"),
            (*TENSOR, "--parallel.sequence", "false"),
        ),
    ],
    ids=" ".join,
)
def test_ranks_train_as_one_process_does(
    given: tuple[str, ...], spread: tuple[str, ...], tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "model", num_key_value_heads=2)
    alone = train(tmp_path / "one", model, *given)
    options = words(tmp_path / "two", model, *given, *spread, "--graph.strict", steps=4)
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "OMP_NUM_THREADS": "1",
    }
    ranks = "4" if spread and SHARD[0] in given else "2"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    found = subprocess.run(
        [*launcher, "--nproc-per-node", ranks, "-m", "packgraph.cli", *options],
        capture_output=True, text=True, timeout=240, env=environment, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert f"{spread[0][-2:] if spread else 'dp'} 2" in found.stderr
    both = tmp_path / "two" / "runs" / "mine"
    assert losses(both) == pytest.approx(losses(alone)[:4], **CLOSE)
    train(tmp_path / "two", model, *given, "--resume")
    assert losses(both) == pytest.approx(losses(alone), **CLOSE)
    if "--lora.rank" in given:
        exported = [tmp_path / f"merged {run.parts[-3]}" for run in (alone, both)]
        for run, folder in zip((alone, both), exported, strict=True):
            assert cli.main(["export", str(run), str(folder)]) == 0
        one, other = map(logits, exported)
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
