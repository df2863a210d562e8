"""What verify says of a run that takes long: where it is, not often, and nothing of a quick one."""

import pytest
import torch
from verifykit import one_capacity, packs_of_one

from packgraph.train.progress import SILENT, Phases
from packgraph.verification.matrix import tiny_config
from packgraph.verification.verify import verify, verify_sequential

CPU = torch.device("cpu")


class Clock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def said(phase: str, seconds: list[float], total: int | None = None) -> list[str]:
    """The lines of a phase whose steps take so many seconds."""
    clock, lines = Clock(), list[str]()
    progress = Phases(lines.append, clock)
    for step in progress.of(phase, len(seconds) if total is None else total, range(len(seconds))):
        clock.seconds += seconds[step]
    return lines


def test_a_phase_says_where_it_is_every_ten_seconds_and_how_long_it_took() -> None:
    assert said("eager run", [4.0] * 9) == [
        "eager run: step 3 of 9, 0:00:12, ETA 0:00:24",
        "eager run: step 6 of 9, 0:00:24, ETA 0:00:12",
        "eager run: 9 steps in 0:00:36",
    ]
    assert said("", [10.5, 2.0]) == ["step 1 of 2, 0:00:10, ETA 0:00:10", "2 steps in 0:00:12"]


@pytest.mark.slow
def test_the_runs_in_lockstep_are_one_phase_and_those_apart_are_two() -> None:
    lines: list[str] = []
    often, config = (
        Phases(lines.append, Clock(), every=0.0),
        one_capacity(tiny_config("chunk", 0.0, 3)),
    )
    together = verify("run", config, packs_of_one(), CPU, progress=often)
    texts = [f"step {step} of 3, 0:00:00, ETA 0:00:00" for step in (1, 2)] + ["3 steps in 0:00:00"]
    assert lines == [f"run: {text}" for text in texts]
    lines.clear()
    apart = verify_sequential("run", config, packs_of_one, CPU, progress=often)
    assert lines == [f"{phase}: {text}" for phase in ("eager run", "graph run") for text in texts]
    assert together.good and together == apart == verify(
        "run", config, packs_of_one(), CPU, progress=SILENT
    )
