"""The benchmark of sharded training: every way trains the same, all ranks know the same rows, and a
way that fails leaves its reason."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import bench_shard
import pytest
import torch
from bench import ALL
from bench_command import read_bench
from bench_models import shape
from bench_shard import ShardArguments, measure_shard
from distkit import CPU, run_ranks
from shard_ways import FsdpWay

from packgraph.bench.comparison import Deadline
from packgraph.bench.rows import Rows, facts
from packgraph.parallel.layout import Layout

SECONDS = 240.0
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "h200x2.sh"


def options(*ways, **changes):
    given = {
        "model": "tiny",
        "layers": 2,
        "tokens": (32,),
        "step_tokens": 64,
        "documents": 4,
        "ways": ways,
        "rounds": 1,
        "steps": 2,
        "mean": 10.0,
        "sigma": 0.5,
        "seed": 0,
    }
    return ShardArguments(**given | changes)


def measured(mesh, chosen, tied=True, fails=0, kind=FsdpWay, on=(0, 1)):
    """All rows of one rank. fails: the number of the step of a kind of way that runs out of memory.
    on: ranks where it does."""
    rows, steps, step = Rows(facts(CPU, "abc123"), write=False), [], kind.step

    def runs_out(way, given):
        steps.append(given)
        if len(steps) == fails and mesh.rank in on:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(way, given)

    def shaped(name, layers):
        return dataclasses.replace(shape(name, layers), tie_embeddings=tied)

    with (
        mock.patch.object(bench_shard, "shape", shaped),
        mock.patch.object(kind, "step", runs_out),
    ):
        measure_shard(chosen, CPU, mesh, rows, Deadline(None))
    return rows.all


@pytest.mark.parametrize(
    ("ways", "tied", "together"),
    [
        (("none", "fsdp-keep", "alone", "none+quiet"), True, None),
        (("gradients+layer", "parameters+quiet", "fsdp+prefetch", "parameters"), False, 1),
    ],
)
def test_every_way_trains_the_same(ways, tied, together):
    chosen = options(*ways, together=together)
    one, two = run_ranks(measured, 2, chosen, tied, layout=Layout(), seconds=SECONDS)
    assert one == two, "all ranks know the same"
    assert [row["way"] for row in one] == list(ways)
    for row in one:
        json.dumps(row)
        assert row["reason"] is None and row["figures"]["step_ms"]["n"] == 2
        assert row["tokens_per_second"] > 0 and row["microbatches"] == row["ranks"] == 2
        assert (row["pool_bytes"] is None) == row["way"].startswith("fsdp")
        if row["way"] == "alone" or "quiet" in row["way"]:
            assert row["agrees"] is row["of_alone"] is row["quiet_ms"] is None
        else:
            assert row["agrees"] and row["loss_difference"] < 1e-6
    if "alone" in ways:
        none, fsdp, alone, quiet = one
        step_ms = [row["figures"]["step_ms"]["median"] for row in (none, alone)]
        assert none["of_alone"] == pytest.approx(step_ms[1] / step_ms[0], abs=1e-4)
        assert none["quiet_ms"] == quiet["figures"]["step_ms"]["median"]
        assert fsdp["of_alone"] is fsdp["quiet_ms"] is None
    else:
        assert one[3]["quiet_ms"] == one[1]["figures"]["step_ms"]["median"]
        assert one[0]["quiet_ms"] is None


@pytest.mark.parametrize("fails", [1, 3, 5])
def test_a_way_that_runs_out_of_memory_leaves_its_reason_on_all_ranks(fails):
    """While it gets ready, in the step that is checked, and in a round."""
    chosen = options("none", "fsdp", "parameters")
    for rows in run_ranks(measured, 2, chosen, True, fails, layout=Layout(), seconds=SECONDS):
        assert [row["reason"] is None for row in rows] == [True, False, True]
        assert rows[1]["reason"] == "rank 0: OutOfMemoryError: CUDA out of memory"
        assert rows[1]["tokens_per_second"] is None and rows[2]["agrees"]


@pytest.mark.skipif(sys.platform == "win32", reason="a script for bash")
def test_the_script_for_two_gpus_runs_cases_that_there_are(tmp_path):
    found = subprocess.run(
        ["bash", str(SCRIPT), *map(str, range(1, 9))],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OUT": str(tmp_path), "DRY": "1", "COMMIT": "abc123"},
    )
    cases = []
    for line in found.stdout.splitlines():
        words = shlex.split(line)
        asked = read_bench(words[words.index("benchmarks/bench.py") + 1 :], ALL)
        assert asked.device == "cuda" and asked.seconds and asked.commit == "abc123"
        cases.append((asked.model, asked.tokens, asked.ways[0]))
    assert len(cases) == 8 and cases[2] == ("qwen3-8b", (4096,), "parameters+compile")
