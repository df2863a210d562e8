"""Comparisons of several ranks that measure together.

`BenchRanks` are ranks of which all know what one finds out before they go on. A rank that fails
alone between two agreements leaves the others waiting; so everything that can fail on one rank only
is attempted before it is agreed on, and what communicates runs after all ranks have said yes.

`RankComparison` is the loop of `packgraph.bench.comparison` in their hands.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from packgraph.bench.comparison import Comparison, Deadline, W
from packgraph.bench.rows import FAILURES, Row, Rows, gibibytes, why
from packgraph.graphs.backend import synchronize
from packgraph.graphs.errors import PackgraphWarning

Result = TypeVar("Result")
OUTSIDE = 2 * 2**30  # bytes for what allocates by itself: NCCL, graphs, libraries


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


def most_gibibytes(name: str) -> Callable[[Row], str]:
    """Cell with the most of the ranks' bytes as GiB."""

    def cell(row: Row) -> str:
        found = row.get(name)
        parts = found if isinstance(found, list) else [found]
        most = max((part for part in parts if part is not None), default=None)
        return gibibytes(name)({name: most})

    return cell


class RankComparison(Comparison[W]):
    """Ways that communicate, on this rank.

    A failure of one rank within a step ends the run, after its rows are written, unless it is a
    `WayFailedError`. What a benchmark overrides is collective, but for `make` and `warm_up`.

    Attributes:
        preparing: Share of the time after which nothing else is prepared.
    """

    main: ClassVar[str] = "step_ms"
    preparing: ClassVar[float] = 1.0

    def __init__(
        self,
        ways: Sequence[str],
        rounds: int,
        device: torch.device,
        deadline: Deadline,
        ranks: BenchRanks,
    ) -> None:
        super().__init__(ways, rounds, device, deadline)
        self.ranks = ranks

    def build(self, way: W) -> str | None:
        """Capture, and run what communicates; why that failed on this rank or another, or None."""
        return None

    def ready(self, name: str) -> W:
        """Make a way and warm it up without communication, which finds what fails on this rank
        alone; then build it. Raises WayFailedError on all ranks."""
        way, reason = self.ranks.attempt(partial(super().ready, name))
        if way is not None and reason is None:
            reason = self.agreed(self.build(way))
        if way is None or reason is not None:
            raise WayFailedError(reason)
        synchronize(self.device)
        return way

    def attempt(self, name: str, work: Callable[[], Result]) -> Result | None:
        """Returns the result of `work`; None when it failed in a way that all ranks know."""
        try:
            return work()
        except WayFailedError as error:
            self.results.drop(name, str(error))
            return None

    def late(self, share: float = 1.0) -> bool:
        """Returns whether that share of the time is up on any rank."""
        return any(self.ranks.gather(self.deadline.passed(share)))

    def too_late(self, name: str) -> str | None:
        """Why a way is not prepared any more, or None."""
        if not self.late(self.preparing):
            return None
        if self.preparing >= 1.0:
            return self.deadline.reason
        return (
            f"not prepared: {self.preparing:.0%} of the {self.deadline.seconds:g} seconds had "
            "passed, and the rest is for timing what is ready: more --seconds, fewer --ways"
        )

    def agreed(self, reason: str | None) -> str | None:
        """The first rank's reason that there is."""
        return self.ranks.first_reason(reason)

    def known(self, seconds: float, facts: Row) -> Row:
        """The slowest rank's seconds, and each fact as a list by rank; None where no rank has
        it."""
        every = self.ranks.gather((seconds, facts))
        row: Row = {"prepare_seconds": max(seconds for seconds, _ in every)}
        for key in facts:
            parts = [facts[key] for _, facts in every]
            row[key] = None if all(part is None for part in parts) else parts
        return row

    def end(self, reason: str, rows: Rows) -> None:
        """Write the rows here: the others wait for this rank and cannot be told."""
        rows.write = True
        super().end(f"rank {self.ranks.rank}: {reason}", rows)

    def slowest(self, step: Callable[[], object]) -> dict[str, float]:
        """step_ms and host_ms of a step on the slowest rank, from a common start."""
        synchronize(self.device)
        self.ranks.gather(None)
        begin = time.perf_counter()
        step()
        launched = time.perf_counter() - begin
        synchronize(self.device)
        every = self.ranks.gather((time.perf_counter() - begin, launched))
        whole, host = (1000 * max(times) for times in zip(*every, strict=True))
        return {"step_ms": whole, "host_ms": host}
