"""Ways of the step benchmark for layers with experts: every one computes what the model does,
whatever it makes."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import ALL, PEERS
from bench_command import read_bench
from bench_models import (
    SHAPES,
    refit,
    shape,
)
from bench_ways import Graphed
from benchkit import ONE, make, make_way, results
from expert_ways import MOE_WAYS, Stashed
from step_figures import model_flops

pytestmark = pytest.mark.usefixtures("fresh_compiler")

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "h200_moe.sh"
TINY = shape("moonlight-tiny")
EXACT = ("host-splits", "chunk", "partial", "chunk+stash")


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[float, float]]]:
    return {
        part: results(make_way("eager", setting), model, draws, setting.work)
        for part in ("layers", "model")
        for model, draws, setting in [make(part, TINY, 3)]
    }


@pytest.mark.parametrize(
    ("part", "name"),
    [
        *(("layers", name) for name in (*EXACT, "compile")),
        *(
            pytest.param("layers", name, marks=pytest.mark.slow)
            for name in ("chunk+compile", "chunk+compile+stash")
        ),
        ("model", "partial"),
        ("model", "chunk+stash"),
    ],
)
@pytest.mark.few(3)
def test_ways_compute_what_eager_does(expected: dict[str, Any], part: str, name: str) -> None:
    model, draws, setting = make(part, TINY, 3)
    way = make_way(name, setting)
    found = results(way, model, draws, setting.work)
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(expected[part]), rtol=1e-5, atol=1e-7
    )
    if name in EXACT:
        assert found == expected[part]
    if isinstance(way, Graphed):
        assert way.graphed.stats.replayed >= len(draws) and not way.graphed.stats.fallbacks.get(
            "capture failed"
        )
        assert bool(way.by_autograd) == (name.startswith("partial") and part == "layers")
    way.close()


def test_a_stash_without_room_is_a_complaint_and_pages_are_counted() -> None:
    _, draws, setting = make("layers", TINY, 3)
    way = make_way("chunk+stash", setting)
    assert isinstance(way, Stashed)
    way.prepare([refit(batch, ONE) for batch in draws])
    found = way.facts()
    assert (
        found["stash_pages"] == 2 and found["stash_bytes"] > 0
    )  # one page of 64 rows for each of two layers
    way.stash.pages.state.fill_(1)  # whatever is in it, an overflow among that
    assert "rows found no page" in str(way.complaint())


def test_operations_count_the_experts_that_a_token_is_routed_to() -> None:
    config = SHAPES["moonlight"]
    attention = 2048 * (16 * 192 + 512 + 64) + 512 * 16 * 256 + 16 * 128 * 2048
    layer = attention + 2048 * (64 + 3 * 8 * 1408)
    pairs = 1000 * 1001 // 2
    assert model_flops(config, [1000], head=False) == 8 * (
        6 * layer * 1000 + 3 * 16 * 2 * (192 + 128) * pairs
    )


@pytest.mark.skipif(sys.platform == "win32", reason="a script for bash")
def test_the_script_for_a_gpu_tests_first_and_runs_ways_that_there_are(tmp_path: Path) -> None:
    def lines(**environment: str) -> list[list[str]]:
        found = subprocess.run(
            ["bash", str(SCRIPT)],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"OUT": str(tmp_path), "PYTHON": "echo"} | environment,
        )
        return [shlex.split(line) for line in found.stdout.splitlines()]

    tests, pieces, *benchmarks = lines(COMMIT="abc123", LIMIT="600")
    assert tests[:3] == ["-m", "pytest", "-q"] and all(
        (SCRIPT.parents[1] / file).exists() for file in tests[-2:]
    )
    assert pieces[:3] == ["benchmarks/moe_experts.py", "--seconds", "25"]
    assert all(words[1] == "moe" for words in benchmarks)
    asked = [read_bench(words[1:], ALL) for words in benchmarks]
    assert all(
        one.part == "layers" and one.commit == "abc123" and one.ways[0] == "host-splits"
        for one in asked
    )
    assert [one.tokens for one in asked[:3]] == [(1024,), (4096,), (16384,)], (
        "the whole grid before anything else"
    )
    assert {way for one in asked for way in one.ways} == {*MOE_WAYS, *PEERS}
    assert all(
        one[:2] == ["-m", "pytest"] or one[0] == "benchmarks/moe_experts.py"
        for one in lines(LIMIT="20")
    )
    assert "not run, the limit of 20 seconds is near" in (tmp_path / "h200_moe_own.log").read_text()
    assert lines(TESTS="0")[0][0] == "benchmarks/moe_experts.py"
