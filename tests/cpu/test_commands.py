"""Forty mistakes that people make, and help: answered before torch is imported, with the option,
its value, and what was meant or what to do."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packgraph.ops.attention.api import BACKENDS
from packgraph.ops.float8.linear import PRODUCTS
from packgraph.ops.names import ATTENTION, PRECISIONS
from packgraph.train import metrics
from packgraph.train.config import sections

TINY = ["train", "qwen3-tiny"]
# Words, and what the answer must say, in any order.
MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "command": (["trian"], ["'trian'", "did you mean train?"]),
    "command, nothing like it": (["xyzzy"], ["'xyzzy'", "Known: train, try, verify"]),
    "preset": (["train", "qwen3-tny"], ["'qwen3-tny'", "did you mean qwen3-tiny?"]),
    "preset, nothing like it": (["train", "foo"], ["'foo'", "qwen3-0.6b"]),
    "no preset": (["train"], ["which preset?", "packgraph train qwen3-tiny"]),
    "no preset, but options": (["train", "--run.steps", "3"], ["name a preset", "--config"]),
    "preset of verify": (["verify", "moonligt"], ["'moonligt'", "did you mean moonlight?"]),
    "option": ([*TINY, "--run.stps", "3"], ["--run.stps", "did you mean --run.steps?"]),
    "option without its section": ([*TINY, "--steps", "3"], ["--steps", "--run.steps?"]),
    "initials": ([*TINY, "--lr", "1"], ["--lr", "--optimizer.learning-rate?"]),
    "underscores": ([*TINY, "--run.seeed=1"], ["--run.seeed", "--run.seed?"]),
    "option of another command": ([*TINY, "--apart"], ["--apart", "`packgraph verify`"]),
    "a section": ([*TINY, "--run", "3"], ["--run", "section", "--run.name"]),
    "a word too many": ([*TINY, "extra"], ["'extra'", "not expected here"]),
    "no value": ([*TINY, "--run.steps"], ["--run.steps", "a whole number", "no value"]),
    "text for a number": ([*TINY, "--run.steps", "ten"], ["--run.steps", "whole number", "'ten'"]),
    "fraction": ([*TINY, "--run.steps", "1.5"], ["--run.steps", "whole number", "'1.5'"]),
    "not finite": ([*TINY, "--optimizer.eps", "nan"], ["--optimizer.eps", "finite", "nan"]),
    "no truth": ([*TINY, "--graph.strict=maybe"], ["--graph.strict", "true or false", "'maybe'"]),
    "choice": ([*TINY, "--run.dtype", "fp16"], ["--run.dtype", "float32 | bfloat16", "'fp16'"]),
    "kernel": ([*TINY, "--model.attention-backend", "flsh"], ["'flsh'", "sdpa, varlen, flash"]),
    "precision": ([*TINY, "--model.precision", "fp9"], ["'fp9'", "bf16, fp8"]),
    "tracker": ([*TINY, "--run.tracker", "wandbb"], ["'wandbb'", "tensorboard, wandb, mlflow"]),
    "capacity": (
        [*TINY, "--graph.capacities", "512"],
        ["--graph.capacities", "TOKENSxDOCUMENTS", "'512'"],
    ),
    "too few": ([*TINY, "--run.steps", "0"], ["steps must be at least 1", "got 0"]),
    "negative": ([*TINY, "--data.seed=-1"], ["seed must not be negative", "got -1"]),
    "heads": ([*TINY, "--model.num-heads", "3"], ["num_heads 3", "num_kv_heads 2"]),
    "size": ([*TINY, "--graph.memory-budget", "12"], ["'12'", "12GiB", "12GB", "40%"]),
    "device": ([*TINY, "--run.device", "gpu"], ["'gpu'", "auto, cpu, cuda or cuda:N"]),
    "retired": ([*TINY, "--model.linear-product", "x"], ["no longer an option", "precision"]),
    "no such data": (
        [*TINY, "--data.path", "/nowhere/x.jsonl"],
        ["/nowhere/x.jsonl", "no such file or folder", "data.path"],
    ),
    "no such tokenizer": (
        [*TINY, "--data.tokenizer", "/nowhere/t.json"],
        ["/nowhere/t.json", "no such file", "data.tokenizer", "bytes"],
    ),
    "no such weights": (
        [*TINY, "--run.init-from", "/nowhere"],
        ["run.init_from", "/nowhere/config.json does not exist"],
    ),
    "no such model": (
        ["train", "hf:/nowhere", "--data.source=stdlib"],
        ["hf:/nowhere", "there is no /nowhere/config.json"],
    ),
    "model without data": (["train", "hf:/nowhere"], ["needs data", "--data.path"]),
    "no such config": (["train", "--config", "gone.toml"], ["gone.toml", "cannot be read"]),
    "suffix of a config": (
        ["train", "--config", "run.ini"],
        ["run.ini", ".toml, .json, .yaml or .yml"],
    ),
    "source without a path": ([*TINY, "--data.source", "jsonl"], ["source = jsonl", "a path"]),
    "two that contradict": (
        [*TINY, "--graph.optimizer", "true", "--graph.granularity", "layer"],
        ["graph.optimizer needs graph.granularity = step, not layer"],
    ),
    "two, with a number": (
        [*TINY, "--run.steps", "2", "--graph.warmup", "2"],
        ["graph.warmup = 2", "run.steps = 2", "lower it"],
    ),
    "experts of a model without": (
        [*TINY, "--parallel.dispatcher", "padded"],
        ["parallel.dispatcher = padded", "model.experts.count is 0"],
    ),
    "stash of a model without": (
        [*TINY, "--parallel.expert-stash", "1.1"],
        ["parallel.expert_stash = 1.1 is what experts keep", "model.experts.count is 0"],
    ),
    "processes": ([*TINY, "--parallel.tp", "2"], ["tp 2", "the 1 that were started", "torchrun"]),
    "resume": ([*TINY, "--resume", "newest"], ["'newest'", "not expected here"]),
    "two at once": (
        [*TINY, "--run.stps", "3", "--run.seed", "x"],
        ["2 problems", "--run.steps?", "--run.seed", "'x'"],
    ),
    "verify of nothing": (["verify", "--layers", "2"], ["--layers", "--hf-config"]),
    "plan": (["plan", "stdlib", "--btch", "4"], ["--btch", "did you mean --batch?"]),
    "plan of memory": (["plan", "memory", "--memory", "80"], ["--memory", "'80'", "12GiB"]),
    "schedule": (["plan", "--ranks", "4"], ["--microbatches", "required"]),
    "shards": (["data", "biuld", "x"], ["ACTION", "build | check", "'biuld'"]),
    "chat": (["chat", "runs/x", "--tokens", "0"], ["--tokens must be at least 1", "got 0"]),
    "tasks": (["eval", "runs/x"], ["which tasks?", "hellaswag"]),
    "shell": (["completion", "csh"], ["SHELL", "bash | zsh | fish", "'csh'"]),
}
EXPLAINED: dict[str, tuple[list[str], list[str]]] = {
    "all": (["--help"], ["train PRESET"]),
    "train": (["train", "--help"], ["--run.steps", "qwen3-tiny"]),
    "every option": (["train", "moonlight", "--help", "all"], ["--parallel.expert-stash"]),
    "presets": (["presets"], ["qwen3-0.6b", "hybrid-tiny"]),
    **{
        " ".join(words): ([*words, "--help"], ["usage: packgraph"])
        for words in (
            *(["verify"], ["plan"], ["plan", "stdlib"], ["plan", "memory"], ["data"]),
            *(["export"], ["chat"], ["eval"], ["completion"]),
        )
    },
    "completion of bash": (["completion", "bash"], ["--run.steps", "plan memory"]),
}
ASKED = MISTAKES | {f"help of {name}": case for name, case in EXPLAINED.items()}
ANSWERS = """
import contextlib, io, json, sys
from packgraph import cli
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(words)
    slow = [name for name in ("torch", "numpy", "transformers") if name in sys.modules]
    print(json.dumps([code, out.getvalue(), err.getvalue(), slow]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Exit code, stdout, stderr, and what slow packages were imported until then, by name."""
    words = json.dumps([words for words, _ in ASKED.values()])
    process = subprocess.run(
        [sys.executable, "-c", ANSWERS],
        input=words,
        capture_output=True,
        text=True,
        cwd=tmp_path_factory.mktemp("nothing"),
        check=True,
        timeout=120,
    )
    found = map(json.loads, process.stdout.splitlines())
    return dict(zip(ASKED, found, strict=True))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_without_torch(name: str, answers: dict[str, Any]) -> None:
    code, out, err, slow = answers[name]
    assert (code, out, slow) == (2, "", [])
    told = " ".join(err.split())
    assert told.startswith("packgraph: error: ") and "Traceback" not in told
    for part in MISTAKES[name][1]:
        assert part in told


@pytest.mark.parametrize("name", EXPLAINED)
def test_help_needs_no_torch(name: str, answers: dict[str, Any]) -> None:
    code, out, err, slow = answers[f"help of {name}"]
    assert (code, err, slow) == (0, "", [])
    for part in EXPLAINED[name][1]:
        assert part in out


@pytest.mark.parametrize("words", [["train", "--help"], ["presets"], ["train", "qwen3-tny"]])
def test_an_answer_takes_no_time(words: list[str]) -> None:
    """0.2 s on a quiet machine; with torch it would take seconds of one core."""
    command = [sys.executable, "-m", "packgraph.cli", *words]
    before = os.times()
    subprocess.run(command, capture_output=True, check=False, timeout=60)
    after = os.times()
    spent = after.children_user + after.children_system
    assert spent - before.children_user - before.children_system < 1.0


def test_names_of_options_are_those_of_what_they_choose() -> None:
    assert tuple(BACKENDS) == ATTENTION and tuple(PRODUCTS) == PRECISIONS
    assert tuple(metrics.TRACKERS) == sections.TRACKERS


WITHOUT = """
import json, sys
sys.modules[sys.argv[1]] = None
import packgraph
from packgraph import cli
try:
    found = packgraph.graph.__name__
except ImportError as error:
    found = str(error)
print(json.dumps([found, cli.main(sys.argv[2:])]))
"""


@pytest.mark.parametrize(
    ("package", "graph", "told"),
    [
        (
            "torch",
            r"packgraph.graph: PyTorch is not installed; see https://\S+ for",
            "PyTorch is not",
        ),
        ("fcntl", "graph", "this system has no POSIX locks of files; on Windows, .* WSL"),
    ],
)
def test_a_package_that_is_missing_is_told_in_one_line(
    package: str, graph: str, told: str, tmp_path: Path
) -> None:
    """What the command cannot do without, and the library; on Windows there is no fcntl."""
    words = [sys.executable, "-c", WITHOUT, package, *TINY, "--run.steps", "2"]
    process = subprocess.run(
        words, capture_output=True, text=True, cwd=tmp_path, check=True, timeout=120
    )
    found, code = json.loads(process.stdout)
    assert re.match(graph, found) and code == 2
    assert re.fullmatch(f"packgraph: error: {told}.*\n", process.stderr)
    assert not list(tmp_path.iterdir())
