"""Functions and files of packgraph that one replay and one capture pass through.

    PYTHONPATH=src python benchmarks/hops.py        --calls prints every function, --times the time

The module is two linear layers; counted are the call and its backward, in all threads.
"""

import argparse
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import packgraph

SOURCE = Path(packgraph.__file__).parent


class Walk:
    """The calls of packgraph's functions while `work` runs, in order: file, function, and seconds
    until the function returned."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.calls: list[tuple[str, str]] = []
        self.seconds: Counter[tuple[str, str]] = Counter()
        self._begun: dict[int, float] = {}
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    @property
    def files(self) -> set[str]:
        """The files that were passed."""
        return {file for file, _ in self.calls}

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(SOURCE)):
            return
        name = str(Path(code.co_filename).relative_to(SOURCE)), code.co_qualname
        if event == "call":
            self.calls.append(name)
            self._begun[id(frame)] = time.perf_counter()
        elif id(frame) in self._begun:
            self.seconds[name] += time.perf_counter() - self._begun.pop(id(frame))


def walks() -> tuple[Walk, Walk]:
    """One capture, and one replay in the steady state."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    graphed, x = packgraph.graph(model, warmup=1), torch.randn(4, 8)
    call = lambda: graphed(x).square().sum().backward()  # noqa: E731
    call()
    capture = Walk(call)
    for _ in range(3):
        call()
    replay = Walk(call)
    assert graphed.stats.replayed == 5, graphed.stats
    return capture, replay


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", action="store_true", help="print every function, in order")
    parser.add_argument("--times", action="store_true", help="print microseconds of each")
    asked = parser.parse_args()
    for name, walk in zip(("capture", "replay"), walks(), strict=True):
        counts = Counter(walk.calls)
        print(f"{name}: {len(walk.calls)} calls, {len(counts)} functions, {len(walk.files)} files")
        for (file, function), count in counts.items() if asked.calls or asked.times else ():
            shown = f"{1e6 * walk.seconds[file, function]:9.1f} us" if asked.times else ""
            print(f"  {shown} {count:6} {file}  {function}")


if __name__ == "__main__":
    main()
