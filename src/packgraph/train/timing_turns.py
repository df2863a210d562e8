"""Which way a training step is run so that each bucket gets timed both ways, with as few steps as
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

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from packgraph.train.choice import EAGER, FEWEST_SAMPLES, MOST_SAMPLES, REPLAY, SAMPLES, WAYS, Way

Bucket = Hashable
Known = TypeVar("Known", bound=Bucket)
Shares = Sequence[Sequence[Bucket]]  # of a step: for each replica the buckets of its microbatches


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
