"""Steps of a run, made ahead by a thread: planned, shared out, and read into packs.

    stream ─▶ packs of a step, planned ─▶ assignment ─▶ this rank's packs, pinned ─▶ `take`
    └────────────── at most `ahead` steps before they are taken ─────────────────┘

    main     take  launch  wait for the numbers of the step before  take  launch ...
    thread               └─ go_on: make steps ─┘                        └─ ...

All ranks plan all packs by lengths alone; tokens are read for the packs of this rank. A pack waits
in pinned memory, so its upload is one copy that the host does not wait for. The invariant: the
position of a feed is that of the stream after the last step that was taken, however many were made
ahead of it. A read may hang for ever: nobody waits for the thread without an end.
"""

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from packgraph.graphs.checks.random_state import QUIET_THREAD
from packgraph.packing.batch import PackedBatch
from packgraph.packing.pack import PackReport, PlannedPack
from packgraph.parallel.context.plan import ContextPlan
from packgraph.train.data import Microbatches, PlannedSteps
from packgraph.train.data.source import BadDocuments, DataError
from packgraph.train.outcome import Outcome
from packgraph.train.signals import StopRequest
from packgraph.train.step import MicrobatchAssignment, StepPack, count_loss_tokens, take_step

LOOK = 0.2  # seconds that one look for a step may wait; signals are heeded in between
PATIENCE = 5.0  # seconds in which data may come that the other processes have
LONGEST = 5.0  # seconds that the end of a feed waits for the step that is being made


class NoDataError(DataError):
    """Data that had not come when the run was asked to stop."""


@dataclass(frozen=True)
class StreamCounts:
    """Counts of a stream, as `Microbatches` has them, at one position."""

    report: PackReport
    empty_documents: int
    unlabelled_documents: int
    bad: BadDocuments

    @staticmethod
    def of(stream: Microbatches) -> "StreamCounts":
        """Those of a stream where it is."""
        return StreamCounts(
            dataclasses.replace(stream.report),
            stream.empty_documents,
            stream.unlabelled_documents,
            stream.bad,
        )


@dataclass(frozen=True)
class FedStep:
    """A step. packs: of all ranks, none at the end of the data. share: this rank's, on the host.

    loss_tokens: of the whole step. state, counts: of the stream after it. plan: with dynamic
    context parallelism.
    """

    packs: Sequence[StepPack]
    share: Sequence[PackedBatch]
    loss_tokens: int
    state: dict[str, Any]
    counts: StreamCounts
    plan: ContextPlan | None


class StepFeed:
    """The steps of a run, in order.

    Attributes:
        stop: Ends what waits for a step, None = nothing does.
    """

    def __init__(
        self,
        stream: Microbatches,
        tokens_per_step: int,
        sharing: MicrobatchAssignment,
        device: torch.device,
        ahead: int,
        patience: float = 0.0,
    ) -> None:
        """ahead: steps that are made before they are asked for; 0 makes each when it is. patience:
        seconds after a request to stop in which a step may still come."""
        self._stream, self._tokens_per_step, self._sharing = stream, tokens_per_step, sharing
        self._pins, self._ahead = device.type == "cuda", ahead
        self._state: dict[str, Any] | None = None  # None: that of the stream
        self._counts: StreamCounts | None = None
        self._making: deque[Future[FedStep]] = deque()
        self._asked: SimpleQueue[Future[FedStep] | None] | None = None
        self.stop: StopRequest | None = None
        self._patience = patience
        self._is_whole = True  # no step is half made

    @property
    def counts(self) -> StreamCounts:
        """Counts of the stream after the last step that was taken."""
        return self._counts or StreamCounts.of(self._stream)

    def take(self) -> FedStep:
        """The next step. Raises what the stream raises, in the place of the step that it met, and
        NoDataError where it has not come after a request to stop."""
        end: float | None = None
        while not self.is_ready():
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

    def is_ready(self) -> bool:
        """Have the next step made, and wait for it a short while; whether `take` need not wait."""
        if self._state is None:
            self._state, self._counts = self._stream.state_dict(), StreamCounts.of(self._stream)
        if not self._making:
            self._start()
        return self._making[0].done() or bool(wait([self._making[0]], LOOK).done)

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
            threading.Thread(target=self._serve, args=asked, name=name, daemon=True).start()
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
        packs: list[Any] = list(take_step(self._stream.planned, self._tokens_per_step))
        share = [self._loaded(pack) for pack in self._sharing.share(packs)]
        planned = isinstance(self._stream, PlannedSteps) and packs
        step = FedStep(
            packs,
            share,
            count_loss_tokens(packs),
            self._stream.state_dict(),
            StreamCounts.of(self._stream),
            self._stream.plan if planned and isinstance(self._stream, PlannedSteps) else None,
        )
        self._is_whole = True
        return step

    def _loaded(self, pack: PackedBatch | PlannedPack) -> PackedBatch:
        batch = pack.load() if isinstance(pack, PlannedPack) else pack
        return batch.pin_memory() if self._pins else batch

    def state_dict(self) -> dict[str, Any]:
        """The position in the data after the last step that was taken, JSON-able."""
        return self._stream.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises DataError as the stream does."""
        self._drop()
        self._stream.load_state_dict(state)
        self._state = self._counts = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block the stream is where the last step that was taken has left it, and may be
        told how to go on; steps made ahead are made anew."""
        if self._state is not None:
            self.load_state_dict(self._state)
        yield

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
        self._stream.close()
