"""Many restarts of one run: python tests/faults/restarts.py [--restarts 20] [--ranks 1], also `make
faults`.

torchrun starts the same command again and again (`--resume auto`), since a rank is killed in the
middle of a step each time; at last the weights are compared with those of a run that never stopped.
The exit code is 1 if they differ.

    python tests/faults/restarts.py --model moonlight-tiny --layouts dp=2,ep=2 dp=4,ep=4

Each start has the next of the layouts, and so another number of ranks; the run that never stopped
has the first one. Sums are in another order then: weights may differ by rounding, at most ROUNDING
of their way from the start.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
from packgraph.train.checkpoint.reader import tensor_entries
from packgraph.train.checkpoint.writer import latest_checkpoint, load_tensors

KILLED = """
import os, signal, sys
from packgraph import cli
from packgraph.train.trainer import Trainer
one_step, begun = Trainer._one_step, []
def stepped(self):
    begun.append(1)
    if len(begun) == 4 and self.mesh.rank == self.mesh.world - 1 and self.step < int(os.environ["LAST"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return one_step(self)
if "LAST" in os.environ:
    Trainer._one_step = stepped
sys.exit(cli.main(sys.argv[1:]))
"""  # noqa: E501


# Norm of the difference over that of what training has changed; 3.6e-3 was found.
ROUNDING = 0.01


def options_of(layout: str) -> tuple[int, list[str]]:
    """Ranks and words of a layout, dp=2,tp=2 say; ep lies within dp."""
    sizes = {
        name: int(size) for name, _, size in (part.partition("=") for part in layout.split(","))
    }
    ranks = math.prod(size for name, size in sizes.items() if name != "ep")
    return ranks, [
        word for name, size in sizes.items() for word in (f"--parallel.{name}", str(size))
    ]


def start(
    folder: Path, name: str, model: str, layout: str, steps: int, last: int, restarts: int
) -> int:
    """Train under torchrun until all steps are done or a rank is killed once more than it restarts.
    last: the step from which on nobody is killed; 0 = from the start. Returns the exit code."""
    script = folder / "run.py"
    script.write_text(KILLED)
    ranks, parallel = options_of(layout)
    words = [
        "train",
        model,
        "--run.folder",
        str(folder),
        "--run.name",
        name,
        "--resume",
        "auto",
        "--run.steps",
        str(steps),
        "--run.checkpoint-every",
        "2",
        "--run.tokens-per-step",
        "512",
        *parallel,
        "--run.device",
        "cpu",
        "--run.deterministic",
        "true",
        "--model.dropout",
        "0",
        "--optimizer.decay-steps",
        "1000",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"LAST": str(last)} if last else {})
    source = str(Path(__file__).parents[2] / "src")
    environment["PYTHONPATH"] = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    began = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "--max-restarts",
            str(restarts),
            str(script),
            *words,
        ],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    resumed = (done.stdout + done.stderr).count("resumed from")
    print(
        f"{name}, {layout}: exit code {done.returncode}, resumed {resumed} times, "
        f"{time.monotonic() - began:.0f} s",
        flush=True,
    )
    if done.returncode and (restarts or "in the configuration" in done.stderr):  # refused
        raise SystemExit(done.stderr[-3000:])
    return done.returncode


def newest(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """All that the last checkpoint of a run holds."""
    found = latest_checkpoint(folder / name / "checkpoints")
    assert found is not None
    return tensors(found)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds."""
    found = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in tensor_entries(path / ".metadata").items()
    }
    load_tensors(path, found)
    return found


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """What is not there in both with the same bits."""

    def bits(value: torch.Tensor) -> torch.Tensor:
        return value.view(torch.uint8) if value.dim() else value

    return [
        key
        for key in sorted(one.keys() | other.keys())
        if key not in one or key not in other or not torch.equal(bits(one[key]), bits(other[key]))
    ]


def rounding(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], begun: dict[str, torch.Tensor]
) -> float:
    """The norm of a weight's difference over that of its change since the start, of the weight
    where it is largest.

    Single numbers say little: AdamW moves one whose gradient is nothing but rounding as far as any
    other.
    """
    weights = [key for key in one if key.startswith("model.") and one[key].is_floating_point()]
    return max(
        float((one[key] - other[key]).norm() / (one[key] - begun[key]).norm().clamp(min=1e-12))
        for key in weights
    )


def same_layout(folder: Path, model: str, ranks: int, restarts: int) -> bool:
    """Whether torchrun's own restarts lead to the same bits."""
    steps = 2 * restarts + 6
    start(folder, "never-stopped", model, f"dp={ranks}", steps, 0, 1)
    start(folder, "restarted", model, f"dp={ranks}", steps, 2 * restarts + 2, restarts + 2)
    differ = differing(newest(folder, "never-stopped"), newest(folder, "restarted"))
    print(f"differ: {differ}" if differ else "bitwise equal")
    return not differ


def other_layouts(folder: Path, model: str, layouts: list[str], restarts: int) -> bool:
    """Whether starts with other numbers of ranks lead to the same weights but for rounding."""
    steps = 2 * restarts + 6
    start(folder, "begun", model, layouts[0], 4, 0, 1)
    begun = newest(folder, "begun")
    start(folder, "never-stopped", model, layouts[0], steps, 0, 1)
    for number in range(restarts):
        if not start(
            folder, "moved", model, layouts[number % len(layouts)], steps, 2 * restarts + 2, 0
        ):
            raise SystemExit(f"start {number + 1} was not killed")
    start(folder, "moved", model, layouts[restarts % len(layouts)], steps, 0, 1)
    found = rounding(newest(folder, "never-stopped"), newest(folder, "moved"), begun)
    print(f"weights differ by {found:.2e} of what training has changed")
    return found <= ROUNDING


def main() -> int:
    """Compare both runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--model", default="qwen3-tiny")
    parser.add_argument(
        "--layouts", nargs="*", help="of the starts in turn: dp=2 dp=1,tp=2 dp=4,ep=4"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        good = (
            other_layouts(Path(name), asked.model, asked.layouts, asked.restarts)
            if asked.layouts
            else same_layout(Path(name), asked.model, asked.ranks, asked.restarts)
        )
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
