"""Several ways of doing the same work, measured in turn: their samples, and why some have none.

A way that fails drops out with its reason; the others go on. The first way asked for is what the
others are compared with, so it takes part in every group.

`BenchRanks` are ranks that measure together: what one finds out, all know before they go on.

A rank that fails alone between two agreements leaves the others waiting; so everything that can
fail on one rank only is attempted before it is agreed on, and what communicates runs after all
ranks have said yes.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from packgraph.bench.rows import FAILURES, Row, Rows, figures, why
from packgraph.bench.timing import Deadline

Result = TypeVar("Result")


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


class Comparison:
    """What is known of each way of one group."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
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
        samples, first = self.samples[name], self.samples[self.names[0]]
        row: Row = {"figures": {}, "ratio": None, "against": self.names[0], "rounds": len(samples)}
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
        mine, first = self.checks.get(name), self.checks.get(self.names[0])
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
    among them.

    Fewer at a time need less memory and more time. Raises ValueError when fewer than two are to be
    compared.
    """
    if together is not None and together < 2:
        raise ValueError(
            f"ways are compared with the first one: at least 2 at a time, not {together}"
        )
    first, others, size = names[0], list(names[1:]), (together or len(names) + 1) - 1
    return [[first, *others[start : start + size]] for start in range(0, max(1, len(others)), size)]


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
