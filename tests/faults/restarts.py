"""Many restarts of one run: python tests/faults/restarts.py [--restarts 20] [--ranks 1], also `make faults`.

torchrun starts the same command again and again (`--resume auto`), since a rank is killed in the middle of a step each
time; at last the weights are compared with those of a run that never stopped. The exit code is 1 if they differ.
"""
import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
from packgraph.train.checkpoint import latest_checkpoint, load_tensors
from packgraph.train.checkpoint_reader import tensor_entries

KILLED = """
import os, signal, sys
from packgraph import cli
from packgraph.train.trainer import Trainer
one_step, begun = Trainer._one_step, []
def stepped(self, stop):
    begun.append(1)
    if len(begun) == 4 and self.mesh.rank == self.mesh.world - 1 and self.step < int(os.environ["LAST"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return one_step(self, stop)
if "LAST" in os.environ:
    Trainer._one_step = stepped
sys.exit(cli.main(sys.argv[1:]))
"""


def run(folder: Path, name: str, ranks: int, steps: int, restarts: int) -> Path:
    """Train under torchrun; restarts: how often a rank is killed on the way. The last checkpoint."""
    script = folder / "run.py"
    script.write_text(KILLED)
    words = ["train", "qwen3-tiny", "--run.folder", str(folder), "--run.name", name, "--resume", "auto",
             "--run.steps", str(steps), "--run.checkpoint-every", "2", "--run.tokens-per-step", "512",
             "--parallel.dp", str(ranks), "--run.device", "cpu", "--run.deterministic", "true"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"LAST": str(2 * restarts + 2)} if restarts else {})
    source = str(Path(__file__).parents[2] / "src")
    environment["PYTHONPATH"] = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
         "--max-restarts", str(restarts + 2), str(script), *words],
        env=environment, capture_output=True, text=True, check=False)
    resumed = (done.stdout + done.stderr).count("resumed from")
    print(f"{name}: exit code {done.returncode}, resumed {resumed} times, {time.monotonic() - began:.0f} s", flush=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found = latest_checkpoint(folder / name / "checkpoints")
    assert found is not None
    return found


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds."""
    found = {name: torch.zeros(entry.size, dtype=entry.properties.dtype)
             for name, entry in tensor_entries(path / ".metadata").items()}
    load_tensors(path, found)
    return found


def main() -> int:
    """Compare both runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=1)
    asked = parser.parse_args()
    steps = 2 * asked.restarts + 6
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = tensors(run(folder, "never-stopped", asked.ranks, steps, 0))
        other = tensors(run(folder, "restarted", asked.ranks, steps, asked.restarts))
    differ = [key for key in one if not torch.equal(one[key].view(torch.uint8) if one[key].dim() else one[key],
                                                    other[key].view(torch.uint8) if other[key].dim() else other[key])]
    print("bitwise equal" if not differ and one.keys() == other.keys() else f"differ: {differ}")
    return int(bool(differ) or one.keys() != other.keys())


if __name__ == "__main__":
    sys.exit(main())
