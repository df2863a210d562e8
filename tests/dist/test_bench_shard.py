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
from bench_models import draw_batches, shape
from bench_shard import ShardArguments, measure_shard
from distkit import CPU, run_ranks
from shard_ways import FsdpWay, RankStep, TrainerWay, WayName, make_way

from packgraph.bench.comparison import Deadline
from packgraph.bench.rows import Rows, facts
from packgraph.packing.capacity import Capacity
from packgraph.parallel.layout import Layout
from packgraph.parallel.mesh import single_process

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


def trained(mesh, name):
    """Norm of the gradient, and which elements of matrices have changed: own ones, and others'."""
    chosen, capacity = options(name), Capacity(32, 4)
    packs = draw_batches(capacity, 2, chosen.config.vocab_size, **chosen.drawn)
    step = RankStep(packs, 2 * sum(pack.num_loss_tokens for pack in packs), 60.0)
    way = make_way(name, chosen.config, capacity, mesh, CPU)
    spans = [span for span in way.optimizer.flat.spans if span.decays]
    before = [span.parameters.clone() for span in spans]
    way.prepare([step])
    way.watch()
    loss, norm = map(float, way.step(step))
    assert way.complaint() is None and 2.5 < loss < 3.3, "half of the tokens' loss"
    changed = [span.parameters != old for span, old in zip(spans, before, strict=True)]
    own = any(bool(new[span.own].any()) for span, new in zip(spans, changed, strict=True))
    others = sum(int(new.sum() - new[s.own].sum()) for s, new in zip(spans, changed, strict=True))
    way.close()
    return norm, own, others > 0


@pytest.mark.parametrize(("name", "exchanges"), [("none+quiet", False), ("none", True)])
def test_a_quiet_way_neither_gathers_nor_reduces(name, exchanges):
    for norm, own, others in run_ranks(trained, 2, name, layout=Layout(), seconds=SECONDS):
        assert own and others == exchanges and (norm > 0) == exchanges


@pytest.mark.parametrize("fails", [1, 3, 5])
def test_a_way_that_runs_out_of_memory_leaves_its_reason_on_all_ranks(fails):
    """While it gets ready, in the step that is checked, and in a round."""
    chosen = options("none", "fsdp", "parameters")
    for rows in run_ranks(measured, 2, chosen, True, fails, layout=Layout(), seconds=SECONDS):
        assert [row["reason"] is None for row in rows] == [True, False, True]
        assert rows[1]["reason"] == "rank 0: OutOfMemoryError: CUDA out of memory"
        assert rows[1]["tokens_per_second"] is None and rows[2]["agrees"]


@pytest.mark.parametrize("fails", [1, 3, 4, 5])
def test_a_way_that_exchanges_nothing_may_fail_on_one_rank(fails):
    """While it gets ready, in the steps that are checked and whose memory is measured, and in a
    round."""
    chosen, more = options("alone", "fsdp"), (True, fails, TrainerWay, (1,))
    for rows in run_ranks(measured, 2, chosen, *more, layout=Layout(), seconds=SECONDS):
        assert rows[0]["reason"] == "rank 1: OutOfMemoryError: CUDA out of memory"
        assert rows[1]["reason"] is None and rows[1]["tokens_per_second"] > 0


def test_a_single_process_trains_with_the_state_on_the_host_and_knows_no_fsdp():
    ways = options("none", "none+offload", "none+offload=50", "none+offload=100", "fsdp")
    none, *host, fsdp = measured(single_process(), ways)
    assert none["reason"] is None
    for way in host:
        assert way["reason"] is None
        assert way["loss_difference"] == way["gradient_difference"] == 0.0
    assert fsdp["reason"].startswith("ValueError: FSDP2 shards over several ranks")


def test_names_of_ways_are_read_or_refused():
    assert WayName.read("fsdp-keep+compile") == WayName("fsdp-keep", compile=True)
    found = WayName("parameters", "step", compile=True, offload=True)
    assert WayName.read("parameters+step+compile+offload") == found
    found = WayName("none", compile=True, offload=True, resident=60)
    assert WayName.read("none+offload=60+compile") == found
    for wrong, text in (
        ("none+offload=101", "101 % of the state are more than there is"),
        ("none+offload=6GiB", "none knows .*, not offload=6GiB"),
        ("none+offload+offload=60", "a word twice"),
        ("fsdp+offload=60", "fsdp knows compile, prefetch, not offload"),
        ("zero3", "'zero3' is none of alone, none,"),
        ("fsdp+layer", "fsdp knows compile, prefetch, not layer"),
        ("none+layer+step", "two granularities"),
        ("none+compile+compile", "a word twice"),
    ):
        with pytest.raises(ValueError, match=text):
            options(wrong)


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
