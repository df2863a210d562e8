"""The long matrix of ranks that fail: python tests/faults/matrix.py [--device cuda] [WORD ...],
also `make faults`.

Every phase x layout x fault, without torchrun and with it; prints seconds from the fault until all
other ranks have ended, their exit code, and whether each said exactly one line that names the rank.
A capture that raises before its exchanges ends nothing where its partners come to the vote: all go
on eagerly, and end with 0. Partners come that have nothing to exchange (dp, pp), and with NCCL all,
whose exchanges are queued; with gloo a partner of tp, cp and ep waits in one.
Words choose: dp-tp kill save ... On the device cuda, each rank on one of its own, ranks exchange
data by NCCL; layouts of pairs need four. --jobs N runs so many cases side by side, their rank 0 on
one card after the other: on four cards 8 are well below the limits.
"""

import argparse
import itertools
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import faultkit

PHASES = ("boot", "meeting", "warm-up", "capture", "replay", "save", "data")
FAULTS = ("kill", "stop", "raise")
LAUNCHERS = ("plain", "torchrun")
LIMIT = 15.0


def verdict(
    layout: str, fault: str, phase: str, launcher: str, device: str, number: int
) -> tuple[bool, str]:
    """Run case `number`; whether it went as it should, and a row of the table."""
    cards = torch.cuda.device_count() if device == "cuda" else 0
    order = ",".join(str((2 * number + place) % cards) for place in range(cards))
    with tempfile.TemporaryDirectory() as folder:
        found = faultkit.run_with_fault(
            Path(folder),
            layout,
            fault,
            phase,
            torchrun=launcher == "torchrun",
            more=("--run.device", device),
            settings={"CUDA_VISIBLE_DEVICES": order} if cards else {},
        )
    seconds = "none" if found.seconds is None else f"{found.seconds:.1f}"
    errors = [lines for rank, lines in found.errors().items() if rank not in (-1, 1)]
    lines = [line for own in errors for line in own]
    good = (
        found.seconds is not None
        and found.seconds <= LIMIT
        and all(len(own) == 1 and "rank 1" in own[0] for own in errors)
    )
    if (fault, phase) == ("raise", "capture") and (device == "cuda" or layout in ("dp", "pp")):
        good = found.seconds is not None and not lines and found.codes.get(0, 0) == 0
    code = found.codes.get(0, found.codes.get(-1))
    return good, f"{layout:6}{phase:9}{fault:6}{launcher:9}{seconds:>6} s  code {code}  " + (
        "ok" if good else "WRONG " + repr(lines or found.said[0][-300:])
    )


def main() -> int:
    """Run all cases that the words leave; the exit code says whether all were good."""
    axes = [[*faultkit.LAYOUTS, *faultkit.PAIRS], list(FAULTS), list(PHASES), list(LAUNCHERS)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "words", nargs="*", help="of which layouts, faults, phases and launchers; none = all"
    )
    asked = parser.parse_args()
    words = asked.words
    unknown = [word for word in words if not any(word in axis for axis in axes)]
    if unknown:
        raise SystemExit(f"unknown: {unknown}; known: {axes}")
    chosen = [[value for value in axis if value in words] or axis for axis in axes]
    cases = [
        (layout, fault, phase, launcher)
        for layout, fault, phase, launcher in itertools.product(*chosen)
        if phase != "data" or fault == "raise"
    ]
    with ThreadPoolExecutor(asked.jobs) as pool:
        started = [
            pool.submit(verdict, *case, asked.device, number) for number, case in enumerate(cases)
        ]
        wrong = 0
        for case in as_completed(started):
            good, row = case.result()
            wrong += not good
            print(row, flush=True)
    print(f"{wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
