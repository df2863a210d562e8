"""How far a verification is, said to whoever waits for it.

    eager run: step 40 of 100, 17 s       at most one such line in `SECONDS`, when a step is done
    eager run: 100 steps in 53 s          when a phase ends that took so long

The invariant: a phase that takes less than `SECONDS` says nothing, and what is said changes nothing
of what is made.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

SECONDS = 10.0

Made = TypeVar("Made")


@dataclass(frozen=True)
class VerificationProgress:
    """Watches phases. tell: takes a line of text. now: a clock, in seconds. every: seconds between
    two lines."""

    tell: Callable[[str], None]
    now: Callable[[], float] = time.monotonic
    every: float = SECONDS

    def of(self, phase: str, total: int, steps: Iterable[Made]) -> Iterator[Made]:
        """`steps` as they are, at most `total` of them; one is done when the next is asked for.

        phase: its name, empty where there is nothing to tell it from. Seconds count from where the
        first step is begun.
        """
        name = f"{phase}: " if phase else ""
        began = told = self.now()
        done = 0
        for step in steps:
            yield step
            done, now = done + 1, self.now()
            if now - told >= self.every and done < total:
                self.tell(f"{name}step {done} of {total}, {now - began:.0f} s")
                told = now
        seconds = self.now() - began
        if seconds >= self.every:
            self.tell(f"{name}{done} step{'s' * (done != 1)} in {seconds:.0f} s")


SILENT = VerificationProgress(lambda text: None)
