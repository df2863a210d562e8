"""Ranks that measure together: what one finds out, all know before they go on.

A rank that fails alone between two agreements leaves the others waiting; so everything that can
fail on one rank only is attempted before it is agreed on, and what communicates runs after all
ranks have said yes.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from packgraph.bench.comparison import Comparison
from packgraph.bench.rows import FAILURES, Rows, why

Result = TypeVar("Result")


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

    def first_reason(self, reason: str | None) -> str | None:
        """The first rank's reason that there is, with the rank's name; None when no rank has
        one."""
        for rank, other in enumerate(self.gather(reason)):
            if other is not None:
                return other if self.size == 1 else f"rank {rank}: {other}"
        return None

    @contextlib.contextmanager
    def leaving(self, contest: Comparison, doing: list[str], rows: Rows) -> Iterator[None]:
        """A failure of this rank alone ends the block: the others wait for it and cannot be told,
        so this one writes what is known, and leaves. doing: the way that it is at."""
        try:
            yield
        except FAILURES as error:
            contest.drop(doing[0], f"rank {self.rank}: {why(error)}")
            for name in contest.running:
                if not contest.samples[name]:
                    contest.drop(name, f"not measured: the run ended when way {doing[0]} failed")
            rows.write = True
            raise
