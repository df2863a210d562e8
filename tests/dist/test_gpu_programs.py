"""Programs that tests of GPU ranks start, over gloo: a host without GPUs sees when they are out of
date."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "words",
    [
        "training_ranks --model tiny --layers 4 --pp 2 --tied --steps 8",
        "training_ranks --model tiny --layers 2 --granularity step --optimizer --shard parameters",
        "context_ranks --granularity chunk --steps 4",
        "deep_ranks --ways layer --steps 3 -- qwen3-tiny --model.num-layers=2 "
        "--parallel.shard=parameters",
    ],
)
def test_graphs_of_two_ranks_are_eager(words: str) -> None:
    program, *options = words.split()
    places = TESTS.parent / "src", TESTS / "helpers", TESTS.parent / "benchmarks"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(TESTS / "gpu" / f"{program}.py"), *options),
        ],
        capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places)), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
