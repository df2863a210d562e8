"""Which way a bucket is run from now on, replay or eager, by how long both took: never the slower
one.

Every rank that took part says how long the bucket's microbatches took it, both ways. The slowest
rank decides, since all others wait for it. The invariant: the choice is a pure function of what all
ranks said, so all of them choose alike; and replay stays unless it was slower by more than `MARGIN`
and by more than the medians are uncertain.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Way = Literal["eager", "replay"]
EAGER: Way = "eager"
REPLAY: Way = "replay"
WAYS: tuple[Way, ...] = (REPLAY, EAGER)

# timings of each way before a choice is made; a median of five survives two that something
# disturbed
SAMPLES = 5
FEWEST_SAMPLES = 3  # a rank with fewer of them has no vote
# a rank with so many of them does not wait for the votes of others, to whom the bucket seldom comes
MOST_SAMPLES = 15
# Standard error of the median of n normal samples, in median distances from it: sqrt(pi / 2) /
# 0.6745 / sqrt(n).
ERROR = 1.858
MARGIN = 0.01  # of eager's time: replay may be slower by that much before graphs are given up


@dataclass(frozen=True)
class Timing:
    """How long something took, several times. Milliseconds; not a number without samples.

    spread: median distance of the samples from their median.
    """

    median: float = math.nan
    spread: float = math.nan
    samples: int = 0

    @staticmethod
    def of(milliseconds: Sequence[float]) -> "Timing":
        """The timing of these samples, of which there may be none."""
        if not milliseconds:
            return Timing()
        median = statistics.median(milliseconds)
        return Timing(
            median, statistics.median(abs(one - median) for one in milliseconds), len(milliseconds)
        )

    @property
    def error(self) -> float:
        """Standard error of the median, estimated from the spread."""
        return ERROR * self.spread / math.sqrt(self.samples) if self.samples else math.nan


@dataclass(frozen=True)
class Vote:
    """What one rank measured of one bucket."""

    eager: Timing
    replay: Timing

    @property
    def counts(self) -> bool:
        """Whether both ways were timed often enough."""
        return min(self.eager.samples, self.replay.samples) >= FEWEST_SAMPLES


@dataclass(frozen=True)
class Choice:
    """How a bucket is run, and the timings of the slowest rank that this follows from."""

    way: Way
    eager: Timing
    replay: Timing

    @property
    def gain(self) -> float:
        """How many times as long the other way takes as the chosen one."""
        other, chosen = (
            (self.eager, self.replay) if self.way == REPLAY else (self.replay, self.eager)
        )
        return other.median / chosen.median if chosen.median > 0 else math.nan


def choose(votes: Iterable[Vote], *, last: bool = True) -> Choice | None:
    """How to run a bucket from here on; None when no rank has timed both ways often enough.

    last: whether there will be no more timings; if there may be, None is also for replay that seems
    to be slower, but not beyond doubt.
    """
    counted = [vote for vote in votes if vote.counts]
    if not counted:
        return None
    eager = max((vote.eager for vote in counted), key=lambda timing: timing.median)
    replay = max((vote.replay for vote in counted), key=lambda timing: timing.median)
    lost = replay.median - eager.median
    if lost <= MARGIN * eager.median:
        return Choice(REPLAY, eager, replay)
    if lost > math.hypot(eager.error, replay.error):
        return Choice(EAGER, eager, replay)
    return Choice(REPLAY, eager, replay) if last else None
