"""The loop of every comparison: ways of doing the same work, measured in turn.

    of every way    build ─▶ warm up ─▶ check, memory
    of all          timed rounds, alternating ─▶ a row each

`Comparison` is the loop; a benchmark says how a way is made and timed, and what its rows say. A way
that fails drops out with its reason; the others go on. The first way asked for is what the others
are compared with, so it takes part in every group.

`BenchRanks` are ranks that measure together: what one finds out, all know before they go on. A rank
that fails alone between two agreements leaves the others waiting; so everything that can fail on
one rank only is attempted before it is agreed on, and what communicates runs after all ranks have
said yes.
"""

import contextlib
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
import torch._dynamo
import torch.distributed as dist

from packgraph.bench.rows import FAILURES, Row, Rows, figures, why
from packgraph.bench.timing import (
    Deadline,
    held_bytes,
    peak_bytes,
    rounds_in_turn,
    start_anew,
)
from packgraph.graphs.errors import PackgraphWarning
from packgraph.graphs.memory.allocator import free_memory
from packgraph.graphs.timer import synchronize

Result = TypeVar("Result")
OUTSIDE = 2 * 2**30  # bytes for what allocates by itself: NCCL, graphs, libraries


@dataclass(frozen=True)
class Sample:
    """One timed call (or the mean of a few). times: figure -> milliseconds. tokens: that are real.

    flops: operations that the model asks for, where that is known.
    """

    times: dict[str, float]
    tokens: float
    flops: float = 0.0


@dataclass(frozen=True)
class Check:
    """What a way computed on the first microbatches: the loss (or what stands for it), the norm of
    all gradients."""

    loss: float
    gradient_norm: float


class Results:
    """What is known of each way of one group. against: the group of the first way, which others are
    compared with; None = this one."""

    def __init__(self, names: Sequence[str], against: "Results | None" = None) -> None:
        self.names, self.against = list(names), self if against is None else against
        self.samples: dict[str, list[Sample]] = {name: [] for name in names}
        self.checks: dict[str, Check] = {}
        self.extras: dict[str, Row] = {name: {} for name in names}
        self.reasons: dict[str, str] = {}

    @property
    def running(self) -> list[str]:
        """The ways that have not dropped out."""
        return [name for name in self.names if name not in self.reasons]

    def drop(self, name: str, reason: str | None) -> None:
        """Take a way out, if there is a reason; the first reason stays."""
        if reason is not None:
            self.reasons.setdefault(name, reason)

    def attempt(self, name: str, work: Callable[[], Result]) -> Result | None:
        """What `work` returns; None when it failed, which takes the way out."""
        try:
            return work()
        except FAILURES as error:
            self.drop(name, why(error))
            return None

    def row(self, name: str, main: str, tolerance: float) -> Row:
        """The row of one way. main: the figure that ratios and the price per token are made of.

        tolerance: largest relative difference of losses that is rounding, and for gradient norms
        ten times that.
        """
        samples, against = self.samples[name], self.against.names[0]
        first = self.against.samples[against]
        row: Row = {"figures": {}, "ratio": None, "against": against, "rounds": len(samples)}
        row |= self.extras[name] | self._agreement(name, tolerance)
        reason = self.reasons.get(name)
        if reason is None and not samples:
            reason = "not measured: no round was run"
        if reason is None:
            row["figures"] = {
                kind: figures([sample.times[kind] for sample in samples])
                for kind in samples[0].times
            }
            row["figures"]["ms_per_1000_tokens"] = figures(
                [1000 * s.times[main] / s.tokens for s in samples]
            )
            if first:
                eager = figures([sample.times[main] for sample in first])["median"]
                row["ratio"] = round(eager / max(row["figures"][main]["median"], 1e-9), 4)
        return row | {"reason": reason}

    def _agreement(self, name: str, tolerance: float) -> Row:
        """Loss and gradient norm of the first microbatches, and how far they are from those of the
        first way."""
        mine, first = self.checks.get(name), self.against.checks.get(self.against.names[0])
        if mine is None:
            return {
                "loss": None,
                "loss_difference": None,
                "gradient_difference": None,
                "agrees": None,
            }
        known = mine.loss if math.isfinite(mine.loss) else None  # JSON has no other numbers
        row: Row = {
            "loss": known,
            "loss_difference": None,
            "gradient_difference": None,
            "agrees": None,
        }
        if first is not None:
            loss = _relative(mine.loss, first.loss)
            gradient = _relative(mine.gradient_norm, first.gradient_norm)
            row |= {
                "loss_difference": loss,
                "gradient_difference": gradient,
                "agrees": loss <= tolerance and gradient <= 10 * tolerance,
            }
        return row


def _relative(mine: float, other: float) -> float:
    """Relative difference; 0 only for equal numbers, infinite (as a number that JSON has) for no
    number."""
    difference = abs(mine - other) / max(abs(other), 1e-12)
    return difference if difference == difference and difference < 1e30 else 1e30


def attempt_alone(
    work: Callable[[], Result], deadline: Deadline
) -> tuple[Result | None, str | None]:
    """(what `work` returns, None), or (None, why there is nothing): for what is not measured side
    by side."""
    if deadline.passed():
        return None, deadline.reason
    try:
        return work(), None
    except FAILURES as error:
        return None, why(error)


def agreement(row: Row) -> str:
    """The verdict in a word, for the table."""
    if row["agrees"] is None:
        return "-"
    if row["loss_difference"] == 0.0:
        return "equal" if row["agrees"] else "GRADIENTS DIFFER"
    return f"{row['loss_difference']:.0e}" if row["agrees"] else "DIFFERS"


def groups(names: Sequence[str], together: int | None) -> list[list[str]]:
    """Which ways are measured side by side: all, or `together` at a time, the first one always
    among them; or each by itself, which the machine's slow changes may touch.

    Fewer at a time need less memory and more time. Raises ValueError for less than one.
    """
    if together is not None and together < 1:
        raise ValueError(f"at least 1 way at a time, not {together}")
    if together == 1:
        return [[name] for name in names]
    first, others, size = names[0], list(names[1:]), (together or len(names) + 1) - 1
    return [[first, *others[start : start + size]] for start in range(0, max(1, len(others)), size)]


class WayFailedError(RuntimeError):
    """A way has failed, and all ranks know why."""


class BenchRanks:
    """The ranks of a benchmark: all processes of the default group. Collective to make."""

    def __init__(self) -> None:
        together = dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1
        self._group = dist.new_group(backend="gloo") if together else None

    def gather(self, fact: Any) -> list[Any]:
        """`fact` of every rank, in order; waits for all of them. Facts are small and can be
        pickled."""
        if self._group is None:
            return [fact]
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, fact, group=self._group)
        return every

    def attempt(self, work: Callable[[], Result]) -> tuple[Result | None, str | None]:
        """(what `work` returns here, the first reason why it failed on any rank). `work` does not
        communicate."""
        result, reason = None, None
        try:
            result = work()
        except FAILURES as error:
            reason = why(error)
        return result, self.first_reason(reason)

    def together(self, work: Callable[[], Result]) -> Result:
        """What `work` returns here. It may communicate where it fails on all ranks at the same
        place. Raises WayFailedError on all ranks where it fails on any."""
        result, reason = self.attempt(work)
        if reason is not None:
            raise WayFailedError(reason)
        return result  # type: ignore[return-value]

    def first_reason(self, reason: str | None) -> str | None:
        """The first rank's reason that there is, with the rank's name; None when no rank has
        one."""
        for rank, other in enumerate(self.gather(reason)):
            if other is not None:
                return other if self.size == 1 else f"rank {rank}: {other}"
        return None


@contextlib.contextmanager
def limited_alike(device: torch.device, ranks: BenchRanks) -> Iterator[None]:
    """Within the block the allocators of all ranks give out as much as that of the one with least
    memory, so that ranks of the same work run out of it at the same place. Collective."""
    if device.type != "cuda":
        yield
        return
    free, total = torch.cuda.mem_get_info(device)
    mine = free + torch.cuda.memory_reserved(device) - OUTSIDE
    torch.cuda.set_per_process_memory_fraction(min(ranks.gather(mine)) / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


class Runs(Protocol):
    """A way that is ready to run."""

    def facts(self) -> Row:
        """What it has cost to get ready."""

    def complaint(self) -> str | None:
        """Why the times are not those of this way, if something ran otherwise after all."""

    def close(self) -> None:
        """Free everything that was made."""


@contextlib.contextmanager
def room_for_code() -> Iterator[None]:
    """Several ways compile the same functions: within the block torch keeps as much code as that
    takes, and code that is compiled too often raises RuntimeError instead of running eagerly."""
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        yield


def first_warning(work: Callable[[], object]) -> str | None:
    """The first thing that the library warns of while `work` runs, in one line; None without, or
    where `work` returns True."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PackgraphWarning)
        if work():
            return None
    for warning in caught:
        if issubclass(warning.category, PackgraphWarning):
            return " ".join(str(warning.message).split())
    return None


def above(peak: int | None, before: int | None) -> int | None:
    """What a peak is above what was held before, where both are known."""
    return None if peak is None or before is None else peak - before


W = TypeVar("W", bound=Runs)


class Comparison(Generic[W]):
    """Ways at one size, measured in groups; a benchmark derives from it.

    Attributes:
        main: Figure that ratios and the price per token are made of.
        communicates: Whether ways do: a failure of one rank within a step then ends the run, after
            its rows are written, unless it is a `WayFailedError`. Otherwise it drops the way.
        least_rounds: Of ways that are ready when the time is up.
        preparing: Share of the time after which nothing else is prepared.
    """

    main: ClassVar[str] = "step_ms"
    communicates: ClassVar[bool] = True
    least_rounds: ClassVar[int] = 0
    preparing: ClassVar[float] = 1.0

    def __init__(
        self,
        ways: Sequence[str],
        rounds: int,
        device: torch.device,
        deadline: Deadline,
        ranks: BenchRanks,
    ) -> None:
        self.names, self.rounds = ways, rounds
        self.device, self.deadline, self.ranks = device, deadline, ranks
        self.results, self.ways, self.doing = Results(ways), dict[str, W](), ways[0]

    def start(self) -> None:
        """Prepare what all ways need. Collective."""

    def make(self, name: str) -> W:
        """The way called `name`. Raises where it cannot run."""
        raise NotImplementedError

    def forget(self, name: str) -> None:
        """Free what there is already of a way that is not prepared."""

    def warm_up(self, way: W) -> None:
        """Run a way without communication: finds what fails on this rank alone."""

    def build(self, way: W) -> str | None:
        """Capture, and run what communicates; why that failed, or None. Collective."""
        return None

    def check(self, way: W) -> Check:
        """What a way computes on the first microbatches. Collective."""
        raise NotImplementedError

    def heaviest(self, way: W) -> object:
        """Run what takes most memory. Collective."""
        raise NotImplementedError

    def time(self, way: W, number: int) -> list[Sample]:
        """The calls of a round. Collective."""
        raise NotImplementedError

    def after(self, way: W) -> Row:
        """What is measured after all rounds. Collective."""
        return {}

    def finish(self) -> None:
        """Measure what needs all ways closed. Collective."""

    def what(self, name: str) -> Row:
        """What the row of a way says beside its figures."""
        raise NotImplementedError

    def begin(self, name: str) -> tuple[int | None, float]:
        """(bytes held before a way is made, when its making began)."""
        return held_bytes(self.device), time.monotonic()

    def measure(self, rows: Rows, together: int | None = None) -> None:
        """Measure all ways, `together` at a time; write their rows."""
        first: Results | None = None
        for number, names in enumerate(groups(self.names, together)):
            self.results, self.ways, self.doing = Results(names, first), {}, names[0]
            first = first or self.results
            try:
                with room_for_code(), self._leaving(rows):
                    self._measure()
            finally:  # what was measured before an interruption is a result, too
                for name in names[1:] if number and names[0] == self.names[0] else names:
                    rows.add(self.row(name))
            start_anew(self.device)

    def row(self, name: str) -> Row:
        """The row of one way."""
        return self.what(name) | self.results.row(name, self.main, self.tolerance(name))

    def tolerance(self, name: str) -> float:
        """Largest relative difference of the losses of a way that is rounding."""
        return 1e-2 if self.device.type == "cuda" else 1e-5

    def late(self, share: float = 1.0) -> bool:
        """Whether that share of the time is up on any rank. Collective."""
        return any(self.ranks.gather(self.deadline.passed(share)))

    def slowest(self, step: Callable[[], object]) -> dict[str, float]:
        """step_ms and host_ms of a step on the slowest rank, from a common start. Collective."""
        synchronize(self.device)
        self.ranks.gather(None)
        begin = time.perf_counter()
        step()
        launched = time.perf_counter() - begin
        synchronize(self.device)
        every = self.ranks.gather((time.perf_counter() - begin, launched))
        whole, host = (1000 * max(times) for times in zip(*every, strict=True))
        return {"step_ms": whole, "host_ms": host}

    def _attempt(self, name: str, work: Callable[[], Result]) -> Result | None:
        if not self.communicates:
            return self.results.attempt(name, work)
        try:
            return work()
        except WayFailedError as error:
            self.results.drop(name, str(error))
            return None

    @contextlib.contextmanager
    def _leaving(self, rows: Rows) -> Iterator[None]:
        """A failure of this rank alone ends the block: the others wait for it and cannot be told,
        so this one writes what is known, and leaves."""
        try:
            yield
        except FAILURES as error:
            self.results.drop(self.doing, f"rank {self.ranks.rank}: {why(error)}")
            for name in self.results.running:
                if not self.results.samples[name]:
                    reason = f"not measured: the run ended when way {self.doing} failed"
                    self.results.drop(name, reason)
            rows.write = True
            raise

    def _measure(self) -> None:
        found = self.results
        self.start()
        for self.doing in found.names:
            if self.late(self.preparing):
                found.drop(self.doing, self.deadline.reason_for(self.preparing))
                self.forget(self.doing)
                continue
            self._prepare(self.doing)
            if self.doing in found.reasons and self.doing in self.ways:
                self._close(self.doing)
            free_memory(self.device)
        begun = itertools.count()
        least = min(self.least_rounds, self.rounds)
        runs = {name: lambda number, name=name: self._round(name, number) for name in self.ways}
        rounds_in_turn(runs, self.rounds, lambda: next(begun) >= least and self.late())
        for name, way in self.ways.items():
            self.doing = name
            found.drop(name, self.ranks.first_reason(way.complaint()))
            if name not in found.reasons and not found.samples[name]:
                found.drop(name, self.deadline.reason)
            if name not in found.reasons:
                found.extras[name] |= self.after(way)
        for name in list(self.ways):
            self._close(name)
        free_memory(self.device)
        self.finish()

    def _prepare(self, name: str) -> None:
        """Make a way, capture, warm it up, check what it computes, measure its memory."""
        free_memory(self.device)
        before, began = self.begin(name)

        def alone() -> None:
            self.ways[name] = self.make(name)
            self.warm_up(self.ways[name])
            synchronize(self.device)

        reason = self.ranks.attempt(alone)[1]
        if reason is None:
            reason = self.ranks.first_reason(self.build(self.ways[name]))
        if reason is not None:
            self.results.drop(name, reason)
            return
        synchronize(self.device)
        prepared = round(max(self.ranks.gather(time.monotonic() - began)), 3)
        way = self.ways[name]
        check = self._attempt(name, lambda: self.check(way))
        if check is None:
            return
        self.results.checks[name] = check
        free_memory(self.device)
        peak = self._attempt(name, lambda: peak_bytes(self.device, lambda: self.heaviest(way)))
        facts = self._of_ranks(way.facts() | {"peak_bytes": above(peak, before)})
        self.results.extras[name] = {"prepare_seconds": prepared} | facts

    def _of_ranks(self, mine: Row) -> Row:
        """Each fact as a list by rank; None where no rank has it."""
        if not self.communicates:
            return mine
        every = self.ranks.gather(mine)
        lists: dict[str, list[Any]] = {key: [facts[key] for facts in every] for key in mine}
        return {
            key: None if all(part is None for part in parts) else parts
            for key, parts in lists.items()
        }

    def _round(self, name: str, number: int) -> None:
        self.doing = name
        if name not in self.results.reasons:
            found = self._attempt(name, lambda: self.time(self.ways[name], number))
            self.results.samples[name] += found or []

    def _close(self, name: str) -> None:
        self._attempt(name, self.ways.pop(name).close)
