"""Never slower than eager: the first steps after capture are timed both ways, and every bucket
keeps the faster one.

    step    0        1        2        3      ...   9        10, 11, ...
    way     replay   eager    replay   eager        eager    as chosen for each bucket

Replay and eager compute the same bits, so real training steps are timed and nothing is run twice.
What is timed is the pace of a loop, host and device together, whichever is the slower. On CUDA that
is the time between events on the stream at the starts of consecutive microbatches: where launching
takes longer than computing, the device waits between kernels and the events are as far apart as the
host's launches. For this to be so the host must not have a lead from before, so a timed step begins
on an idle device and goes one way as a whole: behind a replay, which costs the host next to
nothing, an eager microbatch would be launched while the device is still busy, and the time of its
own launches would not show.

Turns alternate, so slow changes of the machine (clocks, heat, neighbours) touch both ways alike. A
bucket is chosen for by the medians of `SAMPLES` timings each way. The slowest rank decides, since
all others wait for it; replay stays unless it was slower by more than `MARGIN`.

The host waits for the device only between steps (R13), and only around those that are timed. The
invariant: turns and choices follow from numbers that all ranks have (the buckets of all replicas'
microbatches, and the medians that were gathered), so all ranks run a step the same way (R16).
"""

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from packgraph.graphs.backend import Stopwatch
from packgraph.graphs.fallback import eager
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.ranks import gather_numbers
from packgraph.train.config.reading import render
from packgraph.train.data.microbatches import StepPack
from packgraph.train.feed import MicrobatchAssignment

if TYPE_CHECKING:
    from packgraph.train.strategies import Executor

Way = Literal["eager", "replay"]
EAGER: Way = "eager"
REPLAY: Way = "replay"
# Timings of each way before a choice is made: a median of five survives two that something
# disturbed.
SAMPLES = 5
FEWEST_SAMPLES = 3  # a rank with fewer of them has no vote
# A rank with so many of them does not wait for the votes of others, to whom the bucket seldom
# comes.
MOST_SAMPLES = 15
MARGIN = 0.02  # of eager's time: replay may be slower by that much before graphs are given up
TIMED = "timed against its graphs"
FASTER = "eager is faster (measured)"
WHOLE_STEP = "whole steps"  # the bucket of all steps where the step is what is timed
SPARE = 1.1  # eager needs about what the graphs hold; blocks of other sizes make it a little more

Bucket = Capacity | str


@dataclass(frozen=True)
class Choice:
    """Way in which a bucket runs, with the slowest rank's median milliseconds that led to it (NaN
    where it could not be timed)."""

    way: Way
    eager: float = math.nan
    replay: float = math.nan
    samples: tuple[int, int] = (0, 0)  # of eager and of replay, that these are medians of

    @property
    def gain(self) -> float:
        """Time of the other way over that of the chosen one."""
        other, chosen = (
            (self.eager, self.replay) if self.way == REPLAY else (self.replay, self.eager)
        )
        return other / chosen if chosen > 0 else math.nan


def choose(medians: Iterable[tuple[float, float]]) -> Choice:
    """Chooses how a bucket runs from here on.

    medians: of eager and of replay, on every rank; not a number on ranks without a vote.
    """
    votes = [pair for pair in medians if not any(map(math.isnan, pair))]
    if not votes:
        return Choice(REPLAY)
    eager_ms, replay_ms = (max(times) for times in zip(*votes, strict=True))
    way = EAGER if replay_ms > (1 + MARGIN) * eager_ms else REPLAY
    return Choice(way, eager_ms, replay_ms)


def free_bytes(device: torch.device) -> float:
    """Memory that a device has left, after the allocator gave back what it keeps in reserve; no
    limit on a CPU."""
    if device.type != "cuda":
        return math.inf
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


class Autotune:
    """Times the buckets of one run and says how each of them is run. Collective: all ranks run the
    same steps."""

    def __init__(
        self,
        graphs: "Executor",
        mesh: Mesh,
        device: torch.device,
        *,
        whole_steps: bool,
        sharing: MicrobatchAssignment | None = None,
    ) -> None:
        """whole_steps: time steps instead of microbatches, where several of them are on their way
        at once or one graph holds them all; there is one choice then. sharing: who runs which
        packs, default: replicas. `clock` may be replaced before the first step."""
        self.whole_steps, self.off = whole_steps, ""
        self._unit = "ms per 1,000 places" if whole_steps else "ms per microbatch"
        self.choices: dict[Bucket, Choice] = {}
        self._graphs, self._mesh, self._device = graphs, mesh, device
        self._bank: frozenset[Capacity] = frozenset()
        self._buckets: list[Bucket] = []
        self._sharing = sharing or MicrobatchAssignment.of(mesh)
        self._turns: Counter[tuple[int, Bucket, Way]] = Counter()  # microbatches of a replica
        self._last: Way = EAGER
        self._way: Way | None = None
        self._samples: dict[tuple[Bucket, Way], list[float]] = {}
        self.clock = Stopwatch(device)
        self._timed: list[tuple[Bucket, float, bool]] = []
        self._knows_room = False
        self._captures = 0  # at the last mark

    def begin(self, batches: Sequence[StepPack], note: Callable[[str], None]) -> bool:
        """Before the uploads of a step: read the timings of the last one, choose, and decide about
        this one's way.

        batches: all packs of the step, those of other replicas too. note: is told what a person
        should know. Returns whether the step is timed. Waits for the device around steps that are
        timed.
        """
        if not self._bank:
            self._bank = frozenset(self._graphs.bank())
            self._buckets = [WHOLE_STEP] if self.whole_steps else sorted(self._bank)
        if self._way is not None:
            for (bucket, size, good), lap in zip(self._timed, self.clock.take_laps(), strict=True):
                if good:
                    self._samples.setdefault((bucket, self._way), []).append(lap / size)
            self._timed = []
        self._choose([bucket for bucket in self._open() if not any(self._missing(bucket))], note)
        shares = [self._buckets_of(share) for share in self._sharing.shares(batches)]
        way = None if self.off else self._next_way({one for share in shares for one in share})
        if way == EAGER and not self._has_room(note):
            way = None
        self._way = way
        if way is not None:
            self._last = way
            for replica, share in enumerate(shares):
                self._turns.update((replica, bucket, way) for bucket in share)
            self.clock.wait()
        return way is not None

    def give_up_slower(self) -> None:
        """After graphs were captured anew: free those of buckets that run eagerly."""
        for bucket, choice in self.choices.items():
            if choice.way == EAGER:
                self._graphs.free_graphs(bucket if isinstance(bucket, Capacity) else None)

    def microbatch(self, batch: PackedBatch) -> contextlib.AbstractContextManager[None]:
        """Around the forward and backward of a microbatch: runs it the way of its bucket, or of the
        step's turn."""
        return self._run(batch.capacity, 1.0)

    def step(self, batches: Sequence[PackedBatch]) -> contextlib.AbstractContextManager[None]:
        """Around a whole step of this rank, `batches` being its share: as `microbatch`, in time per
        1,000 places.

        Steps have different numbers of microbatches, so they are compared by their places, padding
        included.
        """
        if not self._buckets_of(batches):
            return _eagerly(self._reason(WHOLE_STEP))
        return self._run(WHOLE_STEP, sum(batch.capacity.tokens for batch in batches) / 1000)

    def chosen(self, batch: PackedBatch) -> contextlib.AbstractContextManager[None]:
        """Around a forward alone, such as of an evaluation: what has no graphs any more runs
        eagerly, and nothing is timed."""
        choice = self.choices.get(WHOLE_STEP if self.whole_steps else batch.capacity)
        return _eagerly(FASTER if choice is not None and choice.way == EAGER else None)

    def summary(self) -> dict[str, Any]:
        """Entry of summary.json: for each bucket the way, the median milliseconds of both ways and
        their samples.

        Buckets that were not timed often enough so far are replayed, and are not `decided`.
        """
        return {
            "autotune": f"off: {self.off}" if self.off else self._unit,
            "choices": {render(bucket): self._described(bucket) for bucket in self._buckets},
        }

    def _described(self, bucket: Bucket) -> dict[str, Any]:
        of_eager, of_replay, *samples = self._figures(bucket, 1)
        known = Choice(REPLAY, of_eager, of_replay, (int(samples[0]), int(samples[1])))
        choice = self.choices.get(bucket) or known
        figures = {"eager_ms": choice.eager, "replay_ms": choice.replay, "gain": choice.gain}
        return {
            "way": choice.way,
            "decided": bucket in self.choices,
            **{name: None if math.isnan(value) else value for name, value in figures.items()},
            "eager_samples": choice.samples[0],
            "replay_samples": choice.samples[1],
        }

    @contextlib.contextmanager
    def _run(self, bucket: Bucket, size: float) -> Iterator[None]:
        """Run and time what is inside; its time counts divided by `size`."""
        with _eagerly(self._reason(bucket)):
            if self._way is None:
                yield
                return
            if not self._timed:
                self.clock.mark()
                self._captures = self._graphs.changes()[0]
            fallbacks = self._graphs.changes()[1]
            yield
            self.clock.mark()
            captures_after, fallbacks_after = self._graphs.changes()
            as_meant = self._way == EAGER or fallbacks == fallbacks_after
            # Since the mark before: captures between two microbatches are part of the lap.
            self._timed.append((bucket, size, as_meant and self._captures == captures_after))
            self._captures = captures_after

    def _reason(self, bucket: Bucket) -> str | None:
        """Reason why `bucket` runs eagerly now, or None."""
        if bucket not in self._buckets:
            return None  # it has no graphs, and is counted so
        choice = self.choices.get(bucket)
        if choice is not None and choice.way == EAGER:
            return FASTER
        return TIMED if self._way == EAGER else None

    def _buckets_of(self, batches: Sequence[StepPack]) -> list[Bucket]:
        """The buckets that `batches`, run in one step, are timings of."""
        if not self.whole_steps:
            return [batch.capacity for batch in batches]
        return (
            [WHOLE_STEP]
            if batches and all(batch.capacity in self._bank for batch in batches)
            else []
        )

    def _open(self) -> list[Bucket]:
        return [bucket for bucket in self._buckets if bucket not in self.choices]

    def _missing(self, bucket: Bucket) -> tuple[int, int]:
        """Numbers of missing timings of eager and of replay: some replica needs all, and every
        replica enough to have a vote."""

        def of(way: Way) -> int:
            counts = [self._turns[number, bucket, way] for number in range(self._sharing.replicas)]
            lacking = max(0, SAMPLES - max(counts), FEWEST_SAMPLES - min(counts))
            return 0 if max(counts) >= MOST_SAMPLES else lacking

        return of(EAGER), of(REPLAY)

    def _next_way(self, buckets: set[Bucket]) -> Way | None:
        """Way to run a step of these buckets: the one that lacks more timings, in turn on a tie;
        None where nothing lacks any."""
        lacking = [self._missing(bucket) for bucket in buckets.intersection(self._open())]
        of_eager, of_replay = (sum(of_way) for of_way in zip(*lacking)) if lacking else (0, 0)
        if of_eager == of_replay:
            alternate = REPLAY if self._last == EAGER else EAGER
            return alternate if of_eager else None
        return EAGER if of_eager > of_replay else REPLAY

    def _figures(self, bucket: Bucket, fewest: int) -> tuple[float, float, int, int]:
        """Milliseconds of eager and of replay on this rank, not a number with fewer samples, and
        the numbers of samples."""
        of_eager, of_replay = (self._samples.get((bucket, way), []) for way in (EAGER, REPLAY))
        counts = len(of_eager), len(of_replay)
        if min(counts) < fewest:
            return math.nan, math.nan, *counts
        return statistics.median(of_eager), statistics.median(of_replay), *counts

    def _choose(self, ripe: Sequence[Bucket], note: Callable[[str], None]) -> None:
        if not ripe:
            return
        facts = [number for one in ripe for number in self._figures(one, FEWEST_SAMPLES)]
        every = gather_numbers(self._mesh.everyone(), facts)
        for at, bucket in enumerate(ripe):
            votes = [of[4 * at : 4 * at + 4] for of in every]
            choice = choose((vote[0], vote[1]) for vote in votes)
            of_eager, of_replay = (
                next((int(vote[2 + way]) for vote in votes if vote[way] == median), 0)
                for way, median in enumerate((choice.eager, choice.replay))
            )
            choice = self.choices[bucket] = replace(choice, samples=(of_eager, of_replay))
            if math.isnan(choice.eager):
                note(
                    f"{render(bucket)}: could not be timed against eager: it was captured again or "
                    "fell back each time"
                )
            if choice.way == EAGER:
                self._graphs.free_graphs(bucket if isinstance(bucket, Capacity) else None)
                note(
                    f"{render(bucket)}: runs eagerly from here on, which is faster: "
                    f"{choice.eager:.3g} ms, by "
                    f"graphs {choice.replay:.3g} ms ({self._unit}, medians)"
                )
        self._graphs.tell_choices(
            {render(bucket): self._described(bucket) for bucket in self.choices}
        )
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # of the memory of eager steps

    def _has_room(self, note: Callable[[str], None]) -> bool:
        """Tells whether all ranks have room for an eager step beside their graphs; else ends the
        timing."""
        if self._knows_room:
            return True
        self._knows_room = True
        facts = [self._graphs.pool_bytes() * SPARE / 2**30, free_bytes(self._device) / 2**30]
        needed, free = max(
            gather_numbers(self._mesh.everyone(), facts), key=lambda pair: pair[0] - pair[1]
        )
        if needed > free:
            self.off = (
                f"an eager step beside the graphs needs about {needed:.2f} GiB, and {free:.2f} GiB "
                "are free"
            )
            note(f"replay is not timed against eager, it is taken for the faster one: {self.off}")
        return not self.off


def _eagerly(reason: str | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if reason is None else eager(reason)
