"""The script that measures sharded training on two GPUs runs cases that there are."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from bench import ALL
from bench_command import read_bench

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "h200x2.sh"


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
