"""Signs of life beside the collectives: when a rank dies or fails alone, all others end with one
line that names it.

    rank 0  ── beat ──▶ ┌───────┐ ◀── beat ──  rank 1    every rank looks at the next one, in a ring
    rank 0  ◀─ "ended" ─│ store │◀─ "ended" ─  rank 1    the first reason why the run ends, for all

A collective waits in C++ for a partner that may never come, and what it says when a connection
breaks names an address instead of a rank. So two threads of each process go on beside it. One
writes this rank's beat (phase, last checkpoint) to the store in which the processes have met, and
reads the next rank's beat and the reason to end. The other one only looks at the clock, since a
store whose host is gone blocks whoever asks it; it ends a process that hangs.

A rank that is stopped for less than the patience goes on; time in which this process was stopped
itself counts for nobody's silence. What a rank waits for is signs of life, not progress: a rank may
compile or read data for an hour.
"""

import contextlib
import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from packgraph.parallel.ranks import TIMEOUT, Launch, check_address, met

LOST = 69  # exit code of a rank that ends because of another one (EX_UNAVAILABLE of sysexits.h)
INTERVAL = 0.5  # seconds between two beats
TICK = 0.2  # seconds between two looks at the clock
POLL = 0.05  # seconds between two beats of a rank that ends
# seconds that the main thread has to end by itself when another rank failed: all may fail alike
GRACE = 1.5
BROKEN = 3.0  # seconds of silence that are enough when a connection broke, too
# seconds that who gives the reason, or keeps the store, waits for the others to have read it
FAREWELL = 3.0
# Phases in which a step may take `limit`; compiling takes what it takes.
STEPS = ("replay", "training")
CONNECTION = (
    "gloo",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL",
    "TCPStore",
    "Timed out waiting",
)


class LostRankError(RuntimeError):
    """Another rank died or failed, so this one cannot go on. The message names it and says how to
    go on."""


@dataclass
class Whereabouts:
    """Reported state of a rank.

    Attributes:
        phase: What it does: boot, start, warm-up, capture, replay, save.
        step: The step it is at.
        checkpoint: The last whole checkpoint; empty = there is none.
        limit: Seconds that a step may take; for steps whose kernels wait for other ranks without a
            limit of their own.
        store: Where the processes have met; None = they have not, or there is one only.
    """

    phase: str = "boot"
    step: int = 0
    checkpoint: str = ""
    limit: float = math.inf
    store: Any = field(default=None, repr=False)

    def at(self, phase: str, step: int = 0) -> None:
        """A phase begins."""
        self.phase, self.step = phase, step

    def together(self, what: str) -> bool:
        """Tells whether all ranks have come to say `what`, soon after each other."""
        return True

    def place(self) -> str:
        """Phase and step, for people."""
        return self.phase + (f" (step {self.step})" if self.step else "")

    def remedy(self) -> str:
        """Message on how to resume."""
        last = f"The last checkpoint is {self.checkpoint}: go on with --resume"
        return last if self.checkpoint else "There is no checkpoint yet: start the run again"


class _End(NamedTuple):
    """End of a run, with its reason. lost: ranks that cannot be told. rank: the one that failed, -1
    = one that is lost."""

    text: str
    lost: int
    rank: int = -1


class _Terminated(SystemExit):
    """SIGTERM, by which torchrun ends all ranks when one has failed: who came first is known a
    little later."""


class Silence:
    """Time in which another rank has said nothing, by this process's clock (seconds). Pure: it is
    told the time."""

    def __init__(self, now: float) -> None:
        self._since = self._last = now
        self._beat: object = None

    def tick(self, now: float) -> None:
        """Time goes on. Time in which nobody called this, since the process was stopped, is not the
        other's silence."""
        gap = now - self._last
        if gap > 3 * INTERVAL:
            self._since += gap
        self._last = now

    def heard(self, beat: object, now: float) -> None:
        """The newest beat that is known; only another one than the last is a sign of life."""
        if beat != self._beat:
            self._beat, self._since = beat, now

    def seconds(self, now: float) -> float:
        """Length of the silence."""
        return now - self._since


class Heartbeat(Whereabouts):
    """The threads of one process. Use as a context manager around everything that the ranks do
    together.

    An error that leaves the block is told to the others. If it only says that a connection broke,
    it becomes a LostRankError that names the rank which is gone.
    """

    def __init__(self, store: Any, launch: Launch, patience: float) -> None:
        """store: of all ranks, with a `clone`. patience: seconds of silence after which a rank
        counts as lost."""
        super().__init__(store=store)
        self._rank, self._world, self._patience = launch.rank, launch.world, patience
        self._next = (launch.rank + 1) % launch.world
        self._who = f"rank {self._rank} (process {os.getpid()} on {socket.gethostname()})"
        self._beats = dist.PrefixStore("packgraph/heartbeat", store.clone())
        now = time.monotonic()
        self._silences = {"rank": Silence(now), "store": Silence(now), "step": Silence(now)}
        self._neighbour: dict[str, Any] = {}
        self._end: _End | None = None  # why the run ends, as all know it
        self._own: _End | None = None  # why it ends, as this rank knows it
        self._broken = False
        self._moved, self._decided = threading.Event(), threading.Event()
        # This rank has said why it ends; others know; all have, or the block is left; the main
        # thread ends by itself.
        self._said, self._counted, self._parted, self._over = (threading.Event() for _ in range(4))
        self._threads = [
            threading.Thread(target=work, daemon=True, name=f"packgraph {work.__name__.strip('_')}")
            for work in (self._exchange, self._watch)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._over.set()
            if error is not None:
                self._fail(error)
            else:
                self._end = self._end or _End("", 0)  # rank 0 keeps the store until all have left
                self._say_farewell(self._end)
        finally:
            self._parted.set()
            self._moved.set()

    def at(self, phase: str, step: int = 0) -> None:
        """A phase begins; the others hear of another phase at once, of another step at the next
        beat."""
        changes = phase != self.phase
        super().at(phase, step)
        if changes:
            self._moved.set()

    def together(self, what: str) -> bool:
        """See `Whereabouts.together`; waits for half of the patience."""
        name, end = f"packgraph/together/{what}", time.monotonic() + self._patience / 2
        self.store.add(name, 1)
        while (
            self.store.add(name, 0) < self._world and time.monotonic() < end and self._end is None
        ):
            time.sleep(0.02)
        return bool(self.store.add(name, 0) >= self._world)

    def _fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends. Raises LostRankError if it ends for want of
        another."""
        # This process ends, and says why first, whoever tells it to end meanwhile.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if isinstance(error, _Terminated) or is_broken_connection(error):
            self._broken = True
            # Who looks at the lost rank may have noticed nothing yet; but whoever was told to end
            # was told with all.
            self._decided.wait(
                (BROKEN if isinstance(error, _Terminated) else self._patience) + 4 * INTERVAL
            )
            if self._end is not None:
                self._say_farewell(self._end)
                raise LostRankError(self._end.text) from error
        told = " ".join(f"{type(error).__name__}: {error}".split())
        self._own = _End(
            f"{self._who} failed in phase {self.place()}: {told[:600]}. {self.remedy()}",
            0,
            self._rank,
        )
        self._say_farewell(self._own)

    def _say_farewell(self, end: _End) -> None:
        self._said.set()
        self._moved.set()
        if self._rank in (0, end.rank):
            self._parted.wait(FAREWELL)
            time.sleep(2 * POLL)  # in which the others hear that all have
        else:
            self._counted.wait(2 * INTERVAL)

    def _exchange(self) -> None:
        """Beat until the end. A store that is gone ends this thread or blocks it, and the other one
        sees that."""
        with contextlib.suppress(dist.DistError, RuntimeError, OSError):
            count = 0
            while not self._parted.is_set():
                count += 1
                beat = {"count": count, "place": self.place(), "who": self._who}
                self._beats.set(f"beat/{self._rank}", json.dumps(beat))
                if self._own is not None:
                    self._beats.compare_set("ended", "", json.dumps(self._own))
                if self._end is None and self._beats.check(["ended"]):
                    self._end = _End(*json.loads(self._beats.get("ended")))
                    self._decided.set()
                if self._beats.check([f"beat/{self._next}"]):
                    self._neighbour = json.loads(self._beats.get(f"beat/{self._next}"))
                self._silences["store"].heard(count, time.monotonic())
                if self._said.is_set() and self._end is not None:
                    told = self._beats.add("told", 0 if self._counted.is_set() else 1)
                    self._counted.set()
                    if told >= self._world - self._end.lost:
                        self._parted.set()
                self._moved.wait(POLL if self._said.is_set() else INTERVAL)
                self._moved.clear()
        if self._said.is_set():  # there is nobody left to tell
            self._counted.set()
            self._parted.set()

    def _watch(self) -> None:
        """Look at the clock until the end, and end the process when its main thread does not."""
        found: float | None = None
        while not self._parted.wait(TICK):
            now = time.monotonic()
            for silence in self._silences.values():
                silence.tick(now)
            if self._end is None and self._own is None:
                self._own = self._lost(now)
            if (
                self._silences["store"].seconds(now) > self._patience
                or not self._threads[0].is_alive()
            ):
                self._end = self._end or self._own  # nobody can be told
            if self._end is None:
                continue
            self._decided.set()
            found = now if found is None else found
            if now - found > (0 if self._end.lost else GRACE) and not self._over.is_set():
                os.write(2, f"packgraph: error: {self._end.text}\n".encode())
                self._say_farewell(self._end)
                os._exit(LOST)

    def _lost(self, now: float) -> _End | None:
        """Reason why the run cannot go on; None while everybody lives."""
        patience = min(self._patience, BROKEN) if self._broken else self._patience
        most = TIMEOUT.total_seconds()
        self._silences["rank"].heard(self._neighbour.get("count"), now)
        self._silences["step"].heard(self.place(), now)
        quiet = {name: silence.seconds(now) for name, silence in self._silences.items()}
        lost, rank = 1, -1
        if quiet["store"] > self._patience:
            text = (
                "the store in which the processes have met, which rank 0 or its torchrun keeps, "
                f"did not answer for {quiet['store']:.0f} s: that process or its machine is lost"
            )
        elif quiet["step"] > self.limit and self.phase in STEPS:
            lost, rank = 0, self._rank
            text = (
                f"{self._who} has been in phase {self.place()} for {quiet['step']:.0f} s, though "
                "all ranks live: they wait for each other"
            )
        elif not self._neighbour and quiet["rank"] > most:
            text = f"rank {self._next} did not come within {most:.0f} s"
        elif self._neighbour and quiet["rank"] > patience:
            text = (
                f"{self._neighbour['who']} gave no sign of life for {quiet['rank']:.0f} s, last in "
                f"phase {self._neighbour['place']}"
            )
        else:
            return None
        return _End(f"{text}. {self.remedy()}", lost, rank)


def is_broken_connection(error: BaseException | None) -> bool:
    """Tells whether an error, or its cause, says that a connection to another rank broke."""
    seen: list[BaseException] = []
    waiting = [error]
    while waiting:
        error = waiting.pop()
        if error is None or error in seen:  # what a failure came from may name that failure
            continue
        seen.append(error)
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, CheckpointException):
            waiting += [failure[0] for failure in error.failures.values()]
            continue
        if isinstance(error, RuntimeError) and any(word in str(error) for word in CONNECTION):
            return True
        waiting.append(error.__cause__ or error.__context__)
    return False


@contextlib.contextmanager
def signs_of_life(launch: Launch, patience: float) -> Iterator[Whereabouts]:
    """Within the block the ranks of `launch`, which meet here, know of each other whether they
    live.

    Args:
        launch: This process's place among all.
        patience: Seconds without a sign of life after which a rank counts as lost.

    Yields:
        What this rank says about itself; its `store` is for `processes`.

    Raises:
        LostRankError: If ranks do not come, or are lost.
        LaunchError: If it is not known where they meet.
    """
    if launch.world == 1:
        yield Whereabouts()
        return
    check_address()
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
    except dist.DistError as error:
        raise LostRankError(
            f"the {launch.world} processes of the run did not meet: {error}"
        ) from error
    store.set_timeout(TIMEOUT)
    with _terminable(), contextlib.ExitStack() as meeting:
        try:
            own = meeting.enter_context(met(store, launch))
        except dist.DistError as error:
            raise LostRankError(
                f"rank 0 of the {launch.world} processes did not come: {str(error).splitlines()[0]}"
            ) from error
        with Heartbeat(own, launch, patience) as heartbeat:
            yield heartbeat


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Within the block SIGTERM raises `_Terminated`, where nobody else heeds it; only in the main
    thread."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise _Terminated(128 + number)

    signal.signal(signal.SIGTERM, end)
    yield
    # Not in a `finally`: a process that fails shall say why before torchrun ends it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
