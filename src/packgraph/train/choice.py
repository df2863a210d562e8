"""Which way a bucket is run from now on, replay or eager, by how long both took: never the slower
one.

Every rank that took part says how long the bucket's microbatches took it, both ways. The slowest
rank decides, since all others wait for it. The invariant: the choice is a pure function of what all
ranks said, so all of them choose alike; and replay stays unless it was slower by more than `MARGIN`
and by more than the medians are uncertain.

`Turns` says which way a step is run so that each bucket gets timed both ways, with as few steps as
that takes.

A step goes one way as a whole. The host runs ahead of the device, so behind a replay, which costs
the host next to nothing, an eager microbatch would be launched while the device is still busy, and
the time of its own launches would not show: that is all there is to save where the host is the
slower of the two.

    step        0       1       2       3     ...
    way       replay  eager   replay  eager   -        `-`: no bucket in it is left to time

Turns alternate, so slow changes of the machine (clocks, heat, neighbours) touch both ways alike.
The invariant: turns follow from the buckets of all replicas' microbatches, which every rank knows
from host integers; so all ranks take the same turns, and know together when a bucket is ready for
its choice, without a word.
"""

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

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
Bucket = Hashable
Known = TypeVar("Known", bound=Bucket)
Shares = Sequence[Sequence[Bucket]]  # of a step: for each replica the buckets of its microbatches


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


@dataclass(frozen=True)
class Turns:
    """How often each bucket was timed, by `replicas` replicas.

    counts: (replica, bucket, way) -> times. last: the way of the last turn.
    """

    replicas: int

    counts: Mapping[tuple[int, Bucket, Way], int] = field(default_factory=dict)
    last: Way = EAGER

    def next_way(self, shares: Shares, open_buckets: Iterable[Bucket]) -> Way | None:
        """How to run a step; None where no bucket in it is left to time. open_buckets: those
        without a choice."""
        present = {bucket for share in shares for bucket in share} & set(open_buckets)
        lacking = {way: sum(self._missing(bucket, way) for bucket in present) for way in WAYS}
        if not any(lacking.values()):
            return None
        if lacking[REPLAY] == lacking[EAGER]:
            return EAGER if self.last == REPLAY else REPLAY
        return max(WAYS, key=lambda way: lacking[way])

    def after(self, shares: Shares, way: Way) -> "Turns":
        """The turns once a step was run `way`."""
        counts = Counter(self.counts)
        for replica, share in enumerate(shares):
            counts.update((replica, bucket, way) for bucket in share)
        return Turns(self.replicas, counts, way)

    def ripe(self, open_buckets: Iterable[Known]) -> list[Known]:
        """The buckets that were timed often enough both ways, in the order given."""
        return [
            bucket for bucket in open_buckets if not any(self._missing(bucket, way) for way in WAYS)
        ]

    def without(self, bucket: Bucket) -> "Turns":
        """The turns as if `bucket` had not been timed yet."""
        counts = {key: count for key, count in self.counts.items() if key[1] != bucket}
        return Turns(self.replicas, counts, self.last)

    def _missing(self, bucket: Bucket, way: Way) -> int:
        """How many timings are missing: some replica needs all, and every replica enough to have a
        vote."""
        counts = [self.counts.get((replica, bucket, way), 0) for replica in range(self.replicas)]
        if max(counts) >= MOST_SAMPLES:
            return 0
        return max(0, SAMPLES - max(counts), FEWEST_SAMPLES - min(counts))
