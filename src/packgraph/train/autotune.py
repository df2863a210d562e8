"""Never slower than eager: the first steps after capture are timed both ways, and every bucket
keeps the faster one.

    step       0        1       2        3      ...  9        10, 11, ...
    way      replay   eager   replay   eager        eager    as chosen for each bucket

Replay and eager compute the same bits, so real training steps are timed and nothing is run twice.
What is timed is the pace of a loop, host and device together, whichever is the slower. On CUDA that
is the time between events on the stream at the starts of consecutive microbatches: where launching
takes longer than computing, the device waits between kernels and the events are as far apart as the
host's launches. For this to be so the host must not have a lead from before, so a timed step begins
on an idle device and goes one way as a whole (`train/choice.py`). Host time alone would be
wrong for kernels that outlast their launches, and device time without its gaps would hide what
graphs are for.

The host waits for the device only between steps (R13), and only around those that are timed. The
invariant: turns and choices follow from numbers that all ranks have, so all ranks run a step the
same way (R16).
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from packgraph.graphs.fallback import eager
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.mesh import Mesh
from packgraph.train.choice import EAGER, REPLAY, Choice, Timing, Turns, Vote, Way, choose
from packgraph.train.config_values import render
from packgraph.train.step import MicrobatchAssignment

TIMED = "timed against its graphs"
FASTER = "eager is faster (measured)"
WHOLE_STEP = "whole steps"  # the bucket of all steps where the step is what is timed
# Rounds of timings of a bucket; a round is lost if graphs were captured or microbatches fell back,
# or may be too noisy.
ATTEMPTS = 4
SPARE = 1.1  # eager needs about what the graphs hold; blocks of other sizes make it a little more

Bucket = Capacity | str


class Graphs(Protocol):
    """What an autotuner has to know of the graphs that it times, and may do to them."""

    def bank(self) -> Sequence[Capacity]:
        """The shapes that graphs are captured for, the same on all ranks; known when they are."""
        ...

    def tell_choices(self, choices: dict[str, dict[str, Any]]) -> None:
        """What was chosen, for `stats`."""
        ...

    def changes(self) -> tuple[int, int]:
        """Captures, and microbatches that ran eagerly, so far."""
        ...

    def pool_bytes(self) -> int:
        """Bytes that all pools hold."""
        ...

    def free_graphs(self, bucket: Capacity | None) -> None:
        """Give up the graphs of a bucket, None = all."""
        ...


class Clock:
    """Marks points in the work of a device; the laps between them are read later.

    now: seconds of the host, which are what is marked where there are no events; tests tell times
    of their own.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._now = device, now
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark the end of all work given to the device so far, without waiting for it."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(self._now())

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def take_laps(self) -> list[float]:
        """Milliseconds between consecutive marks, which are then forgotten; the device must be
        idle."""
        pairs = list(zip(self._marks, self._marks[1:]))
        self._marks = []
        if self._device.type == "cuda":
            return [first.elapsed_time(second) for first, second in pairs]
        return [1000 * (second - first) for first, second in pairs]


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
        graphs: Graphs,
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
        self.choices: dict[Bucket, Choice] = {}
        self._graphs, self._mesh, self._device = graphs, mesh, device
        self._bank: frozenset[Capacity] = frozenset()
        self._buckets: list[Bucket] = []
        self._sharing = sharing or MicrobatchAssignment.of(mesh)
        self._turns = Turns(self._sharing.replicas)
        self._way: Way | None = None
        self._attempts: Counter[Bucket] = Counter()
        self._samples: dict[tuple[Bucket, Way], list[float]] = {}
        self.clock = Clock(device)
        self._timed: list[tuple[Bucket, float, bool]] = []
        self._knows_room = False
        self._captures = 0  # at the last mark

    def begin(self, batches: Sequence[PackedBatch], note: Callable[[str], None]) -> bool:
        """Before the uploads of a step: read the timings of the last one, choose, and decide about
        this one's way.

        batches: all packs of the step, those of other replicas too. note: is told what a person
        should know. Returns whether the step is timed. Waits for the device around steps that are
        timed.
        """
        if not self._bank:
            self._bank = frozenset(self._graphs.bank())
            self._buckets = [WHOLE_STEP] if self.whole_steps else sorted(self._bank)
        self._read_laps()
        ripe = self._turns.ripe(self._open())
        if ripe:
            self._choose(ripe, note)
        shares = [
            self._buckets_of(self._sharing.share_of(batches, replica))
            for replica in range(self._sharing.replicas)
        ]
        way = None if self.off else self._turns.next_way(shares, self._open())
        if way == EAGER and not self._has_room(note):
            way = None
        self._way = way
        if way is not None:
            self._turns = self._turns.after(shares, way)
            self.clock.wait()
        return way is not None

    def give_up_slower(self) -> None:
        """After graphs were captured anew: free those of buckets that run eagerly."""
        for bucket, choice in self.choices.items():
            if choice.way == EAGER:
                self._graphs.free_graphs(bucket if isinstance(bucket, Capacity) else None)

    @contextlib.contextmanager
    def microbatch(self, batch: PackedBatch) -> Iterator[None]:
        """Around the forward and backward of a microbatch: runs it the way of its bucket, or of the
        step's turn."""
        with self._run(batch.capacity, 1.0):
            yield

    @contextlib.contextmanager
    def step(self, batches: Sequence[PackedBatch]) -> Iterator[None]:
        """Around a whole step of this rank, `batches` being its share: as `microbatch`, in time per
        1,000 places.

        Steps have different numbers of microbatches, so they are compared by their places, padding
        included.
        """
        if self._buckets_of(batches):
            with self._run(WHOLE_STEP, sum(batch.capacity.tokens for batch in batches) / 1000):
                yield
        else:
            with _eagerly(self._reason(WHOLE_STEP)):
                yield

    def summary(self) -> dict[str, Any]:
        """What summary.json says: for each bucket the way, the median milliseconds of both ways and
        their samples.

        Buckets that were not timed often enough so far are replayed, and are not `decided`.
        """
        return {
            "autotune": f"off: {self.off}" if self.off else self._unit,
            "choices": {_name(bucket): self._described(bucket) for bucket in self._buckets},
        }

    @property
    def _unit(self) -> str:
        return "ms per 1,000 places" if self.whole_steps else "ms per microbatch"

    def _described(self, bucket: Bucket) -> dict[str, Any]:
        vote = self._vote(bucket)
        choice = self.choices.get(bucket) or Choice(REPLAY, vote.eager, vote.replay)
        figures = {
            "eager_ms": choice.eager.median,
            "replay_ms": choice.replay.median,
            "gain": choice.gain,
        }
        return {
            "way": choice.way,
            "decided": bucket in self.choices,
            **{name: None if math.isnan(value) else value for name, value in figures.items()},
            "eager_samples": choice.eager.samples,
            "replay_samples": choice.replay.samples,
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
        """Why what is in `bucket` runs eagerly now, or None."""
        if bucket not in self._buckets:
            return None  # it has no graphs, and is counted so
        choice = self.choices.get(bucket)
        if choice is not None and choice.way == EAGER:
            return FASTER
        return TIMED if self._way == EAGER else None

    def _buckets_of(self, batches: Sequence[PackedBatch]) -> list[Bucket]:
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

    def _vote(self, bucket: Bucket) -> Vote:
        return Vote(*(Timing.of(self._samples.get((bucket, way), [])) for way in (EAGER, REPLAY)))

    def _read_laps(self) -> None:
        if self._way is None:
            return
        self.clock.wait()
        for (bucket, size, good), lap in zip(self._timed, self.clock.take_laps(), strict=True):
            if good:
                self._samples.setdefault((bucket, self._way), []).append(lap / size)
        self._timed = []

    def _choose(self, ripe: Sequence[Bucket], note: Callable[[str], None]) -> None:
        votes = [self._vote(bucket) for bucket in ripe]
        facts = [
            number
            for vote in votes
            for timing in (vote.eager, vote.replay)
            for number in (timing.median, timing.spread, timing.samples)
        ]
        every = [_votes(numbers) for numbers in self._gather(facts)]
        for bucket, *of_ranks in zip(ripe, *every, strict=True):
            self._attempts[bucket] += 1
            last = self._attempts[bucket] == ATTEMPTS
            choice = choose(of_ranks, last=last)
            if choice is None and not last:
                self._turns = self._turns.without(bucket)
                continue
            if choice is None:
                note(
                    f"{_name(bucket)}: could not be timed against eager: it was captured again or "
                    "fell back each time"
                )
            self.choices[bucket] = choice or Choice(REPLAY, Timing(), Timing())
            if choice is not None and choice.way == EAGER:
                self._graphs.free_graphs(bucket if isinstance(bucket, Capacity) else None)
                note(
                    f"{_name(bucket)}: runs eagerly from here on, which is faster: "
                    f"{choice.eager.median:.3g} ms, by "
                    f"graphs {choice.replay.median:.3g} ms ({self._unit}, medians)"
                )
        self._graphs.tell_choices(
            {_name(bucket): self._described(bucket) for bucket in self.choices}
        )
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # of the memory of eager steps

    def _has_room(self, note: Callable[[str], None]) -> bool:
        """Whether all ranks can run a step eagerly beside their graphs; ends the timing where they
        cannot."""
        if self._knows_room:
            return True
        self._knows_room = True
        facts = [self._graphs.pool_bytes() * SPARE / 2**30, free_bytes(self._device) / 2**30]
        needed, free = max(self._gather(facts), key=lambda pair: pair[0] - pair[1])
        if needed > free:
            self.off = (
                f"an eager step beside the graphs needs about {needed:.2f} GiB, and {free:.2f} GiB "
                "are free"
            )
            note(f"replay is not timed against eager, it is taken for the faster one: {self.off}")
        return not self.off

    def _gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank; as many on each."""
        if self._mesh.everyone() is None:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(self._mesh.world)]
        dist.all_gather(every, mine, group=self._mesh.everyone())
        return [row.tolist() for row in every]


def _votes(numbers: Sequence[float]) -> list[Vote]:
    """The votes of a rank, as it said them: median, spread and samples of eager and of replay, for
    each bucket."""
    timings = [
        Timing(numbers[at], numbers[at + 1], int(numbers[at + 2]))
        for at in range(0, len(numbers), 3)
    ]
    return [
        Vote(eager_timing, replay)
        for eager_timing, replay in zip(timings[::2], timings[1::2], strict=True)
    ]


def _eagerly(reason: str | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if reason is None else eager(reason)


def _name(bucket: Bucket) -> str:
    return render(bucket)
