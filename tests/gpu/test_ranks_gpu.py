"""Ranks over NCCL and symmetric memory: programs that torchrun starts, each on as many GPUs as it
has ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from packgraph.ops.symmetric_memory import symmetric_problem

pytestmark = [pytest.mark.gpu, pytest.mark.dist]
TESTS = Path(__file__).parents[1]


def start(ranks, *command, seconds=300):
    """What the ranks have printed. command: of torchrun; a program of this folder by its name."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    program, *words = command
    if program != "-m":
        program = str(TESTS / "gpu" / f"{program}.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    places = TESTS.parent / "src", TESTS / "helpers", TESTS.parent / "benchmarks"
    paths = os.pathsep.join(map(str, places))
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", str(ranks), program, *words],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=os.environ | {"PYTHONPATH": paths, "COLUMNS": "200"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, "--pp 2 --chunks 2 --tied"),
        (2, "--tp 2 --granularity step --optimizer"),
        (2, "--tp 2 --precision fp8 --compile"),
        (2, "--granularity step --optimizer"),
        (2, "--pp 2 --tied --granularity step --optimizer"),
        (2, "--granularity step --optimizer --shard gradients"),
        (2, "--granularity step --optimizer --shard parameters"),
        (2, "--cp 2 --granularity step --optimizer --shard parameters"),
        (2, "--ep 2 --granularity step --optimizer --shard parameters"),
        (4, "--tp 2 --pp 2 --tied"),
        (4, "--tp 2 --pp 2 --granularity layer"),
        (4, "--tp 2 --granularity step --optimizer --shard parameters"),
        (4, "--pp 2 --chunks 2 --tied"),
        (4, "--pp 2 --tied --granularity step --optimizer"),
        (4, "--pp 2 --granularity step --optimizer --shard parameters"),
    ],
)
def test_graphs_train_as_eager_does(ranks, options):
    start(ranks, "training_ranks", *options.split(), "--layers", "4", seconds=500)


@pytest.mark.parametrize(
    "options",
    [
        "--tp 2 --sequence",
        "--tp 2 --granularity layer",
        "--tp 2 --sequence --precision fp8",
        "--tp 2 --granularity layer --precision fp8_weight_gradients",
        "--tp 1",
        "--tp 1 --granularity layer",
        "--tp 1 --shard gradients --granularity layer",
        "--tp 1 --shard parameters --granularity layer",
        "--tp 1 --shard parameters",
    ],
)
def test_graphs_of_replicas_and_tensor_parallel_ranks_equal_eager(options):
    start(2, "parallel_ranks", *options.split())


@pytest.mark.parametrize(
    ("ranks", "options"), [(2, "--chunks 1 --layers 4"), (4, "--chunks 2 --layers 8")]
)
def test_graphs_of_pipelines_equal_eager(ranks, options):
    start(ranks, "pipeline_ranks", *options.split(), "--soak", "20", seconds=500)


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_cut_in_zigzag_replay_with_the_bits_of_eager_and_equal_whole_rows(ranks):
    start(ranks, "zigzag_ranks")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", ["--granularity chunk", "--granularity layer --steps 20"])
def test_graphs_of_every_number_of_ranks_equal_eager_bitwise(ranks, options):
    printed = start(ranks, "context_ranks", *options.split())
    assert printed.count("ok ") == (3 if ranks == 2 else 5) and "WRONG" not in printed


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", ["--tokens 1024", "--tokens 256 --places 1"])
def test_dispatchers_and_replays_have_the_same_bits(ranks, options):
    problem = symmetric_problem(torch.device("cuda"), ranks)
    start(ranks, "moe_ranks", *options.split(), *(["--no-symmetric"] if problem else []))
    if problem:
        pytest.skip(f"the others hold, but symmetric memory was not tested: {problem}")


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_training_over_symmetric_memory_is_bitwise_eager(granularity):
    """With so little room at first that it has to grow, on all ranks and in all layers."""
    if problem := symmetric_problem(torch.device("cuda"), 2):
        pytest.skip(problem)
    options = (
        "verify moonlight --model.num-layers 3 --model.vocab-size 4096 --steps 6 "
        "--graph.capacities 512x16,1024x32 --run.tokens-per-step 4096 --parallel.ep 2 "
        "--parallel.dispatcher symmetric --parallel.expert-room 1 "
        f"--graph.granularity {granularity}"
    )
    printed = start(2, "-m", "packgraph.cli", *options.split())
    assert "1 of 1 runs bitwise equal on every rank" in printed


def test_small_models_of_every_layout_are_verified():
    printed = start(2, *["-m", "packgraph.cli", "verify", "--steps", "8"], seconds=600)
    assert "6 of 6 runs bitwise equal on every rank" in printed
