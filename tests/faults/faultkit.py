"""Start ranks of `packgraph train`, let one of them fail, and see how the others end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

SCRIPT = Path(__file__).with_name("faulty_rank.py")
SOURCE = SCRIPT.parents[2] / "src"
WORDS = (
    "--run.device cpu --run.steps 8 --run.tokens-per-step 1024 --run.checkpoint-every 2 "
    "--run.log-every 1 "
    "--graph.capacities 256x8 --graph.autotune false --run.name x"
)
LAYOUTS = {
    "dp": "qwen3-tiny --parallel.dp 2",
    "tp": "qwen3-tiny --parallel.tp 2 --parallel.sequence false",
    "pp": "qwen3-tiny --parallel.pp 2",
    "cp": "qwen3-tiny --parallel.cp 2",
    "ep": "moonlight-tiny --parallel.dp 2 --parallel.ep 2",
}
PAIRS = {
    "dp-tp": "qwen3-tiny --parallel.dp 2 --parallel.tp 2",
    "pp-cp": "qwen3-tiny --parallel.pp 2 --parallel.cp 2",
    "ep-pp": "moonlight-tiny --parallel.dp 2 --parallel.ep 2 --parallel.pp 2",
    "tp-cp": "qwen3-tiny --parallel.tp 2 --parallel.cp 2",
}


@dataclass
class Outcome:
    """How the ranks that did not fail have ended. seconds: from the fault until the last of them
    was gone, None = they were not; codes, said: exit code and stderr by rank; torchrun's own under
    -1."""

    seconds: float | None
    codes: dict[int, int | None]
    said: dict[int, str]

    def errors(self) -> dict[int, list[str]]:
        """The lines of each rank that are errors, and lines of tracebacks."""
        return {
            rank: [
                line
                for line in text.splitlines()
                if line.startswith(("packgraph: ", "Traceback", "Warning")) or "[W" in line[:3]
            ]
            for rank, text in self.said.items()
        }


def losses(folder: Path, runs: str = "runs") -> list[float]:
    """The losses of the run x in `folder`."""
    rows = (folder / runs / "x" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_with_fault(*arguments: Any, **options: Any) -> Outcome:
    """As `_run_with_fault`, which see; again where another process has taken the port of the ranks
    between the look for a free one and rank 0's."""
    for _ in range(3):
        found = _run_with_fault(*arguments, **options)
        if found.seconds is not None or "EADDRINUSE" not in "".join(found.said.values()):
            break
    return found


def _run_with_fault(
    folder: Path,
    layout: str,
    fault: str,
    phase: str,
    *,
    culprit: int = 1,
    torchrun: bool = False,
    wake: float | None = None,
    limit: float = 60.0,
    more: Sequence[str] = (),
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Outcome:
    """Train in `folder` until rank `culprit` fails in `phase`. wake: seconds after which a stopped
    rank goes on. settings: of the environment of all ranks."""
    world, stamp = 4 if layout in PAIRS else 2, folder / "stamp"
    for left in folder.glob("stamp*"):  # of a run before, in the same folder
        left.unlink()
    words = [
        "train",
        *(LAYOUTS | PAIRS)[layout].split(),
        *WORDS.split(),
        "--run.folder",
        str(folder / "runs"),
        *more,
    ]
    command = [str(SCRIPT), str(culprit), fault, phase, str(stamp), *words]
    environment = os.environ | {
        **settings,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SOURCE),
        "PYTHONUNBUFFERED": "1",
    }
    with tempfile.TemporaryDirectory() as place:
        logs = [Path(place) / str(rank) for rank in range(world)]
        started: dict[int, subprocess.Popen[bytes]] = {}
        try:
            if torchrun:
                with logs[0].open("wb") as log:
                    started[-1] = subprocess.Popen(
                        [
                            sys.executable,
                            "-m",
                            "torch.distributed.run",
                            "--standalone",
                            "--nproc-per-node",
                            str(world),
                            "--log-dir",
                            place,
                            "--redirects",
                            "3",
                            *command,
                        ],
                        env=environment,
                        stderr=log,
                        stdout=log,
                        start_new_session=True,
                    )
            else:
                port = str(free_port())
                for rank in range(world):
                    own = environment | {
                        "RANK": str(rank),
                        "WORLD_SIZE": str(world),
                        "LOCAL_RANK": str(rank),
                        "LOCAL_WORLD_SIZE": str(world),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port,
                    }
                    with logs[rank].open("wb") as log:
                        started[rank] = subprocess.Popen(
                            [sys.executable, *command],
                            env=own,
                            stderr=log,
                            stdout=log,
                            start_new_session=True,
                        )
            ranks = (
                range(world)
                if wake is not None
                else [rank for rank in range(world) if rank != culprit]
            )
            seconds = _watch(list(started.values()), stamp, ranks, wake, limit)
            codes = {rank: _code(process) for rank, process in started.items()}
        finally:
            for process in started.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
            _end(stamp)
        said = {
            rank: path.read_text(errors="replace")
            for rank, path in enumerate(logs)
            if path.is_file()
        }
        if torchrun:
            said = {-1: said[0]} | {
                int(path.parent.name): path.read_text(errors="replace")
                for path in Path(place).rglob("stderr.log")
            }
        return Outcome(seconds, codes, said)


def _watch(
    started: Sequence["subprocess.Popen[bytes]"],
    stamp: Path,
    ranks: Sequence[int],
    wake: float | None,
    limit: float,
) -> float | None:
    """Seconds from the fault until all of `ranks` have ended; None if there was no fault, or they
    go on."""
    boot = time.time() + 90
    while not (stamp.is_file() and stamp.read_text()):
        if any(process.poll() for process in started):  # it failed by itself; others hear of it
            boot = min(boot, time.time() + 15)
        if time.time() > boot or all(process.poll() is not None for process in started):
            return None
        time.sleep(0.05)
    pid, at = stamp.read_text().split()
    while time.time() < float(at) + limit:
        if wake is not None and time.time() > float(at) + wake:
            os.kill(int(pid), signal.SIGCONT)
            wake = None
        for process in started:
            process.poll()  # a process that nobody has asked about is there, still
        if wake is None and not any(
            _lives(int(Path(f"{stamp}-{rank}").read_text())) for rank in ranks
        ):
            return time.time() - float(at)
        time.sleep(0.05)
    return None


def _code(process: "subprocess.Popen[bytes]") -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.5)  # its threads may need a moment longer
    return process.returncode


def _lives(pid: int) -> bool:
    """Whether there is such a process and it has not ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _end(stamp: Path) -> None:
    """Ranks that torchrun has started are in sessions of their own, and may be left, or stopped."""
    for file in stamp.parent.glob(f"{stamp.name}-*"):
        pid = int(file.read_text() or 0)
        try:
            ours = SCRIPT.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if ours:
            os.kill(pid, signal.SIGKILL)
