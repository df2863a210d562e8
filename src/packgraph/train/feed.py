"""Steps of a run: which packs, which rank runs them, and a thread that makes them ahead.

    stream ─▶ packs of a step, planned ─▶ assignment ─▶ this rank's packs, pinned ─▶ `take`
    └────────────── at most `ahead` steps before they are taken ─────────────────┘

    main     take  launch  wait for the numbers of the step before  take  launch ...
    thread               └─ go_on: make steps ─┘                        └─ ...

Which packs a rank runs (`MicrobatchAssignment`):

    replicas    every pack goes to one replica, largest first                       `shares`
    groups      packs stand in the order of the plan, and each is run by the ranks  `groups_of`
                of its group: how many follows from its tokens, which of them from its place in
                the step

All ranks plan all packs by lengths alone; tokens are read for the packs of this rank. A pack waits
in pinned memory, so its upload is one copy that the host does not wait for. The invariants: every
rank knows the share of every other, from host ints alone; the position of a feed is that of the
stream after the last step that was taken, however many were made ahead of it. A read may hang for
ever: nobody waits for the thread without an end.
"""

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from packgraph.graphs.checks.random_state import QUIET_THREAD
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import PlannedPack
from packgraph.parallel.context.plan import ContextPlan
from packgraph.parallel.mesh import Mesh
from packgraph.train.data import Microbatches, PlannedSteps
from packgraph.train.data.microbatches import Pack, StepPack
from packgraph.train.data.source import DataError
from packgraph.train.signals import Outcome, StopRequest

LOOK = 0.2  # seconds that one look for a step may wait; signals are heeded in between
PATIENCE = 5.0  # seconds in which data may come that the other processes have
LONGEST = 5.0  # seconds that the end of a feed waits for the step that is being made


def shares(
    batches: Sequence[Pack], replicas: int, together: int = 1
) -> list[list[Pack | PackedBatch]]:
    """The packs of a step that each of `replicas` runs. Those of replicas that run nothing together
    are in the order of the step, rounds in that of their first packs.

    together: consecutive replicas that share experts, or the parts of layers, so that each of their
        microbatches is one exchange among all of
    them: they must run packs of equal capacity at the same time. Where a step has too few, some run
        an empty one.

    Every replica knows the lengths of the whole stream, so all of them know the whole step from
    host ints alone, and the position in the data does not depend on how many there are. The largest
    packs are dealt out first, each to the replica with the fewest places so far (Graham 1969: at
    most 4/3 of the best possible longest share).
    """
    rounds = _rounds(batches, together)
    places = [(0, team) for team in range(replicas // together)]  # a heap
    teams: list[list[int]] = [[] for _ in places]
    for index in sorted(range(len(rounds)), key=lambda index: -rounds[index][0].capacity.tokens):
        least, team = places[0]
        heapq.heapreplace(places, (least + rounds[index][0].capacity.tokens, team))
        teams[team].append(index)
    return [
        [rounds[index][replica % together] for index in sorted(teams[replica // together])]
        for replica in range(replicas)
    ]


def _rounds(batches: Sequence[Pack], together: int) -> list[list[Pack | PackedBatch]]:
    """Packs of equal capacity, `together` at a time, filled up with empty ones; in the order of
    their first packs.

    Ranks wait for each other in every round. So packs of a round are those whose attention takes
    about as long: neighbours in the order of their pairs. Among equal ones the order of the step
    counts. The fewest pairs have empty packs beside them.
    """
    if together == 1:
        return [[batch] for batch in batches]
    places: dict[Capacity, list[int]] = {}
    for place, batch in enumerate(batches):
        places.setdefault(batch.capacity, []).append(place)
    chosen: list[list[int]] = []
    for found in places.values():
        found.sort(key=lambda place: -batches[place].num_pairs)
        chosen += [found[n : n + together] for n in range(0, len(found), together)]
    rounds = list[list[Pack | PackedBatch]]()
    for some in sorted(chosen, key=min):
        packs: list[Pack | PackedBatch] = [batches[place] for place in some]
        packs += [PackedBatch.empty(packs[0].capacity)] * (together - len(some))
        rounds.append(packs)
    return rounds


def count_loss_tokens(batches: Sequence[StepPack]) -> int:
    """Places of a whole step whose label is a token, at least 1."""
    return max(1, sum(batch.num_loss_tokens for batch in batches))


def count_pairs_of_answers(batches: Sequence[StepPack]) -> int:
    """Pairs of answers of a whole step (`train/data/pairs.py`), at least 1."""
    return max(1, sum(batch.num_documents // 2 for batch in batches))


@dataclass(frozen=True)
class MicrobatchAssignment:
    """Assignment of microbatches to replicas. replicas: ranks, or groups of them, with microbatches
    of their own; replica: this one.

    together: replicas that share experts; see `shares`. rank_tokens: of any row, where rows are
    those of groups of a changing size (dynamic context parallelism) and a replica is a rank of dp x
    cp; None: replicas are those of dp.
    """

    replicas: int = 1
    replica: int = 0
    together: int = 1
    rank_tokens: int | None = None

    @staticmethod
    def of(
        mesh: Mesh, rank_tokens: int | None = None, *, in_step: bool = False
    ) -> "MicrobatchAssignment":
        """That of a run over `mesh`. in_step: so do all replicas that share layers, if any do."""
        if rank_tokens is None:
            replicas = mesh.layout.replicas(mesh.world)
            shares = in_step and mesh.layout.shard_ranks > 0
            alike = in_step and not shares
            together = replicas if alike else mesh.layout.sharing_replicas(sharded=shares)
            return MicrobatchAssignment(replicas, mesh.replica, together)
        ranks, place = mesh.size("cp"), mesh.replica * mesh.size("cp") + mesh.place["cp"]
        return MicrobatchAssignment(
            mesh.layout.replicas(mesh.world) * ranks, place, rank_tokens=rank_tokens
        )

    def share(self, batches: Sequence[Pack]) -> list[Pack | PackedBatch]:
        """This replica's packs of a step. Raises ValueError as `shares`."""
        return self.shares(batches)[self.replica]

    def shares(self, batches: Sequence[Pack]) -> list[list[Pack | PackedBatch]]:
        """The packs of a step that each replica runs, in its order. Raises ValueError for groups
        that are no microsteps."""
        if self.rank_tokens is None:
            return shares(batches, self.replicas, self.together)
        found: list[list[Pack | PackedBatch]] = [[] for _ in range(self.replicas)]
        for batch, ranks in groups_of(batches, self.rank_tokens, self.replicas):
            for rank in ranks:
                found[rank].append(batch)
        return found


def groups_of(
    batches: Sequence[Pack], rank_tokens: int, world: int
) -> Iterator[tuple[Pack, range]]:
    """Every pack of a planned step with the ranks of its group, of `world`.

    Packs stand microstep by microstep, and in a microstep by their first rank; so their sizes,
    tokens / rank_tokens, say the rest. Raises ValueError where they do not add up to whole
    microsteps of aligned groups.
    """
    first = 0
    for batch in batches:
        size, rest = divmod(batch.capacity.tokens, rank_tokens)
        if rest or not size or first % size or first + size > world:
            raise ValueError(
                f"a pack of {batch.capacity.tokens} tokens cannot start at rank {first} of {world} "
                f"ranks with {rank_tokens} tokens each: groups must fill microstep after microstep"
            )
        yield batch, range(first, first + size)
        first = (first + size) % world
    if first:
        raise ValueError(
            f"the last microstep of a step ends at rank {first} of {world}: its groups must cover "
            "all ranks"
        )


class NoDataError(DataError):
    """Data that had not come when the run was asked to stop."""


def counts_of(stream: Microbatches) -> dict[str, Any]:
    """Counts of a stream where it is, for summary.json: packed documents, pieces one by one, those
    of each kind of `progress.FIRST`, and what is wrong with the first bad ones."""
    bad, report = stream.bad, stream.report
    return {
        "packed": report.documents,
        "split": report.split_documents,
        "dropped": report.dropped_documents,
        "dropped_tokens": report.dropped_tokens,
        "empty": stream.empty_documents,
        "unlabelled": stream.unlabelled_documents,
        "bad": bad.count,
        **({"first_bad": list(bad.first)} if bad.count else {}),
    }


@dataclass(frozen=True)
class FedStep:
    """A step. packs: of all ranks, none at the end of the data. share: this rank's, on the host.

    loss_tokens: of the whole step, or its pairs where those are counted. state, counts: of the
    stream after it. plan: with dynamic context parallelism.
    """

    packs: Sequence[StepPack]
    share: Sequence[PackedBatch]
    loss_tokens: int
    state: dict[str, Any]
    counts: dict[str, Any]
    plan: ContextPlan | None


class StepFeed:
    """The steps of a run, in order.

    Attributes:
        stop: Ends what waits for a step, None = nothing does.
        count: Divisor of the losses of a step, from the packs of all ranks.
    """

    def __init__(
        self,
        stream: Microbatches,
        tokens_per_step: int,
        sharing: MicrobatchAssignment,
        device: torch.device,
        ahead: int,
        patience: float = 0.0,
        count: Callable[[Sequence[StepPack]], int] = count_loss_tokens,
    ) -> None:
        """ahead: steps that are made before they are asked for; 0 makes each when it is. patience:
        seconds after a request to stop in which a step may still come."""
        self._stream, self._tokens_per_step, self._sharing = stream, tokens_per_step, sharing
        self._pins, self._ahead, self.count = device.type == "cuda", ahead, count
        self._state: dict[str, Any] | None = None  # None: that of the stream
        self._counts: dict[str, Any] | None = None
        self._making: deque[Future[FedStep]] = deque()
        self._asked: SimpleQueue[Future[FedStep] | None] | None = None
        self._thread = threading.Thread()
        self.stop: StopRequest | None = None
        self._patience = patience
        self._is_whole = True  # no step is half made

    @property
    def counts(self) -> dict[str, Any]:
        """Counts of the stream after the last step that was taken."""
        return self._counts or counts_of(self._stream)

    def take(self) -> FedStep:
        """The next step. Raises what the stream raises, in the place of the step that it met, and
        NoDataError where it has not come after a request to stop."""
        if self._state is None:
            self._state, self._counts = self._stream.state_dict(), counts_of(self._stream)
        if not self._making:
            self._start()
        end: float | None = None
        while not wait([self._making[0]], LOOK).done:
            if self.stop is None or not self.stop.has_come():
                continue
            end = time.monotonic() + self._patience if end is None else end
            if time.monotonic() >= end:
                raise NoDataError(
                    f"stopped by {self.stop.reason} while data did not come; other processes wait "
                    "for this one in that step"
                )
        step = self._making.popleft().result()
        self._state, self._counts = step.state, step.counts
        if step.plan is not None and isinstance(self._stream, PlannedSteps):
            self._stream.count(step.plan)
        return step

    def go_on(self) -> None:
        """Let the thread make further steps. To be called when the step that was taken is launched:
        from there on the caller waits for the device, and the thread does not take Python away
        from the launch."""
        while len(self._making) < self._ahead:
            self._start()

    def _start(self) -> None:
        if self._asked is None:
            self._asked = SimpleQueue()
            name, asked = f"{QUIET_THREAD}-data", (self._asked,)
            self._thread = threading.Thread(target=self._serve, args=asked, name=name, daemon=True)
            self._thread.start()
        self._making.append(Future())
        self._asked.put(self._making[-1])

    def _serve(self, asked: "SimpleQueue[Future[FedStep] | None]") -> None:
        """Make steps until there is None; what the thread runs."""
        for future in iter(asked.get, None):
            if future.set_running_or_notify_cancel():
                with (outcome := Outcome()):
                    future.set_result(self._make())
                if outcome.error is not None:
                    future.set_exception(outcome.error)

    def _make(self) -> FedStep:
        if not self._is_whole:
            raise RuntimeError("a step before this one could not be made")
        self._is_whole = False
        packs: list[Any] = list(self._stream.plan_step(self._tokens_per_step))
        share = [
            pack.load() if isinstance(pack, PlannedPack) else pack
            for pack in self._sharing.share(packs)
        ]
        step = FedStep(
            packs,
            [batch.pin_memory() for batch in share] if self._pins else share,
            self.count(packs),
            self._stream.state_dict(),
            counts_of(self._stream),
            self._stream.plan if packs and isinstance(self._stream, PlannedSteps) else None,
        )
        self._is_whole = True
        return step

    def state_dict(self) -> dict[str, Any]:
        """The position in the data after the last step that was taken, JSON-able."""
        return self._stream.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken: steps made ahead are made anew. Raises DataError as the
        stream does."""
        self._drop()
        self._stream.load_state_dict(state)
        self._state = self._counts = None

    def _drop(self, limit: float | None = None) -> None:
        """Forget what was made ahead, and wait for what is being made; what it met is met again.
        limit: in seconds."""
        wait([future for future in self._making if not future.cancel()], limit)
        self._making.clear()
        self._is_whole = True

    def close(self) -> None:
        """End the thread, and the processes of the stream."""
        self._stream.interrupt()
        self._drop(LONGEST)
        if self._asked is not None:
            self._asked.put(None)
            self._asked = None
            # What it holds goes before Python ends: tensors, and tables of Arrow.
            self._thread.join(LONGEST)
        self._stream.close()
