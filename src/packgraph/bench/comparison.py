"""The loop of every comparison: ways of doing the same work, measured in turn.

    of every way    build ─▶ warm up ─▶ check, memory
    of all          timed rounds, alternating ─▶ a row each

`Comparison` is the loop; a benchmark says how a way is made and timed, and what its rows say. A way
that fails drops out with its reason; the others go on. The first way asked for is what the others
are compared with, so it takes part in every group.

Time and memory of work on one device: CUDA events and the allocator's counters, or the wall
clock on a CPU.

On CUDA the host runs ahead of the device, so time is taken between events on the stream, after
everything before has ended. Memory counts what a graph's private pool reserves in full, whether a
tensor lives there at the moment or not.
"""

import contextlib
import copy
import itertools
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn
from torch._dynamo import config as dynamo_config

from packgraph.bench.rows import FAILURES, Row, Rows, figures, why
from packgraph.graphs.backend import Stopwatch, synchronize
from packgraph.graphs.memory.allocator import Stretch, free_memory
from packgraph.ops.symmetric_memory import symmetric_bytes
from packgraph.torch_internals import clear_cublas_workspaces

M = TypeVar("M", bound=nn.Module)
CUDA_DEFAULT_POOL = (0, 0)


class Deadline:
    """A limit of `seconds` from now; None is no limit."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._began = time.monotonic()

    def passed(self, share: float = 1.0) -> bool:
        """Returns whether that share of the time is up."""
        return self.seconds is not None and time.monotonic() - self._began > share * self.seconds

    @property
    def reason(self) -> str:
        """Entry of a row that was not measured."""
        return f"not measured: the limit of {self.seconds:g} seconds was reached before"


def time_calls(
    device: torch.device,
    run: Callable[[Callable[[], None]], object],
    lead: Callable[[], object] | None = None,
) -> tuple[list[float], float]:
    """(milliseconds on the device of each call, milliseconds of the host for all).

    run: makes the calls, and calls what it is given after each of them. lead: work that the device
    is given before, so that the host may run ahead; without it the device is idle when the first
    call comes.
    """
    watch = Stopwatch(device)
    synchronize(device)
    if lead is not None:
        lead()
    begin = time.perf_counter()
    watch.mark()
    run(watch.mark)
    host = 1000 * (time.perf_counter() - begin)
    return watch.take_laps(), host


def start_anew(device: torch.device) -> None:
    """Forget compiled code, and let go of all that graphs had, which are gone.

    cuBLAS's workspaces, too: torch keeps those that were made inside a capture, and with them whole
    segments of pools that nobody uses any more, until somebody clears them. Whatever is measured
    then would seem to need less than none.
    """
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        clear_cublas_workspaces()
    free_memory(device)


def _held(device: torch.device, allocated: int) -> int:
    """Bytes held while `allocated` are: private pools count as what they reserve."""
    private = [
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index
        and tuple(segment["segment_pool_id"]) != CUDA_DEFAULT_POOL
    ]
    reserved = sum(segment["total_size"] - segment["allocated_size"] for segment in private)
    return allocated + reserved + symmetric_bytes()


def held_bytes(device: torch.device) -> int | None:
    """Bytes of live tensors outside private pools, plus bytes that private pools reserve and those
    of symmetric memory; None on a CPU."""
    synchronize(device)
    if device.type != "cuda":
        return None
    return _held(device, torch.cuda.memory_allocated(device))


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int | None:
    """The most bytes held (see `held_bytes`) while `run` runs; None on a CPU."""
    synchronize(device)
    stretch = Stretch(device) if device.type == "cuda" else None
    run()
    synchronize(device)
    return None if stretch is None else _held(device, stretch.most_allocated())


def shared_copy(module: M, replaced: Mapping[int, Any] | None = None) -> M:
    """Another module over the same values and gradients.

    Its parameters are objects of their own: torch keeps an accumulator of gradients with every
    parameter, bound to the stream that it was made on, and a capture that keeps one alive would
    move the gradients of all others there. Gradients must be there already, and stay the same
    tensors.

    Args:
        module: Must work with `copy.deepcopy`.
        replaced: What the copy has in place of further objects, by their ids.

    Raises:
        ValueError: Naming a parameter that is trained and has no gradient.
    """
    memo: dict[int, Any] = dict(replaced or {})
    for name, parameter in module.named_parameters():
        if parameter.grad is None and parameter.requires_grad:
            raise ValueError(f"{name} has no gradient that a copy could share: zero them first")
        other = nn.Parameter(parameter.data, parameter.requires_grad)
        other.grad = parameter.grad
        memo[id(parameter)] = other
    return copy.deepcopy(module, memo)


def rounds_in_turn(
    runs: Mapping[str, Callable[[int], None]], rounds: int, stop: Callable[[], bool]
) -> None:
    """Call every run once per round with the round's number, each round beginning with another one.

    So slow changes of the machine (clocks, heat, neighbours) touch all alike. stop: asked before
    every round.
    """
    names = list(runs)
    for number in range(rounds):
        if stop() or not names:
            return
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            runs[name](number)


@dataclass(frozen=True)
class Sample:
    """One timed call (or the mean of a few). times: figure -> milliseconds. tokens: that are
    real."""

    times: dict[str, float]
    tokens: float


@dataclass(frozen=True)
class Check:
    """Figures that a way computed on the first microbatches: the loss (or what stands for it), the
    norm of all gradients."""

    loss: float
    gradient_norm: float


class Results:
    """Results of each way of one group. against: the group of the first way, which others are
    compared with; None = this one."""

    def __init__(self, names: Sequence[str], against: "Results | None" = None) -> None:
        self.names, self.against = list(names), self if against is None else against
        self.samples: dict[str, list[Sample]] = {name: [] for name in names}
        self.checks: dict[str, Check] = {}
        self.extras: dict[str, Row] = {name: {} for name in names}
        self.reasons: dict[str, str] = {}

    def drop(self, name: str, reason: str | None) -> None:
        """Take a way out, if there is a reason; the first reason stays."""
        if reason is not None:
            self.reasons.setdefault(name, reason)

    def row(self, name: str, main: str, tolerance: float) -> Row:
        """The row of one way, with how far its first microbatches are from those of the first way.

        Args:
            name: Of the way.
            main: The figure that ratios and the price per token are made of.
            tolerance: Largest relative difference of losses that is rounding, and for gradient
                norms ten times that.
        """
        samples, against = self.samples[name], self.against.names[0]
        row: Row = {"figures": {}, "ratio": None, "against": against, "rounds": len(samples)}
        row |= dict.fromkeys(("loss", "loss_difference", "gradient_difference", "agrees"))
        row |= self.extras[name]
        mine, first = self.checks.get(name), self.against.checks.get(against)
        if mine is not None and math.isfinite(mine.loss):  # JSON has no other numbers
            row["loss"] = mine.loss
        if mine is not None and first is not None:
            row["loss_difference"] = loss = _relative(mine.loss, first.loss)
            row["gradient_difference"] = norm = _relative(mine.gradient_norm, first.gradient_norm)
            row["agrees"] = loss <= tolerance and norm <= 10 * tolerance
        row["reason"] = self.reasons.get(name)
        if row["reason"] is None and not samples:
            row["reason"] = "not measured: no round was run"
        if row["reason"] is None:
            for kind in samples[0].times:
                row["figures"][kind] = figures([sample.times[kind] for sample in samples])
            prices = [1000 * sample.times[main] / sample.tokens for sample in samples]
            row["figures"]["ms_per_1000_tokens"] = figures(prices)
            if others := [sample.times[main] for sample in self.against.samples[against]]:
                median = max(row["figures"][main]["median"], 1e-9)
                row["ratio"] = round(figures(others)["median"] / median, 4)
        return row


def _relative(mine: float, other: float) -> float:
    """Relative difference; 0 only for equal numbers, infinite (as a number that JSON has) for no
    number."""
    difference = abs(mine - other) / max(abs(other), 1e-12)
    return difference if difference == difference and difference < 1e30 else 1e30


def agreement(row: Row) -> str:
    """The verdict in a word, for the table."""
    if row["agrees"] is None:
        return "-"
    if row["loss_difference"] == 0.0:
        return "equal" if row["agrees"] else "GRADIENTS DIFFER"
    return f"{row['loss_difference']:.0e}" if row["agrees"] else "DIFFERS"


def groups(names: Sequence[str], together: int | None) -> list[list[str]]:
    """Groups ways that are measured side by side: all, or `together` at a time, the first one
    always among them; or each by itself, which the machine's slow changes may touch.

    Fewer at a time need less memory and more time.
    """
    if together == 1:
        return [[name] for name in names]
    first, others, size = names[0], list(names[1:]), (together or len(names) + 1) - 1
    return [[first, *others[start : start + size]] for start in range(0, max(1, len(others)), size)]


@contextlib.contextmanager
def room_for_code() -> Iterator[None]:
    """Several ways compile the same functions: within the block torch keeps as much code as that
    takes, and code that is compiled too often raises RuntimeError instead of running eagerly."""
    with (
        dynamo_config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True),
        warnings.catch_warnings(),
    ):
        # Cached functions of batches and models are pure.
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
        yield


def above(peak: int | None, before: int | None) -> int | None:
    """Difference of a peak from what was held before, where both are known."""
    return None if peak is None or before is None else peak - before


W = TypeVar("W", bound=Any)  # a way that is ready to run: facts, complaint, close


class Comparison(ABC, Generic[W]):
    """Ways at one size, measured in groups; a benchmark derives from it.

    Attributes:
        main: Figure that ratios and the price per token are made of.
        least_rounds: Of ways that are ready when the time is up.
        doing: The way that is at work, for what fails beside it.
    """

    main: ClassVar[str]
    least_rounds: ClassVar[int] = 0

    def __init__(
        self, ways: Sequence[str], rounds: int, device: torch.device, deadline: Deadline
    ) -> None:
        self.names, self.rounds, self.device, self.deadline = ways, rounds, device, deadline
        self.results, self.ways, self.doing = Results(ways), dict[str, W](), ways[0]

    @abstractmethod
    def make(self, name: str) -> W:
        """The way called `name`. Raises where it cannot run."""

    @abstractmethod
    def check(self, way: W) -> Check:
        """Computes the figures of a way on the first microbatches."""

    @abstractmethod
    def heaviest(self, way: W) -> object:
        """Run what takes most memory."""

    @abstractmethod
    def time(self, way: W, number: int) -> list[Sample]:
        """The calls of a round."""

    @abstractmethod
    def what(self, name: str) -> Row:
        """Returns what the row of a way says beside its figures."""

    def warm_up(self, way: W) -> object:
        """Run a way for the first time."""

    def after(self, way: W) -> Row:
        """Returns figures that are measured after all rounds."""
        return {}

    def row(self, name: str) -> Row:
        """The row of one way."""
        return self.what(name) | self.results.row(name, self.main, self.tolerance(name))

    def tolerance(self, name: str) -> float:
        """Largest relative difference of the losses of a way that is rounding."""
        return 1e-2 if self.device.type == "cuda" else 1e-5

    def measure(self, rows: Rows, together: int | None = None) -> None:
        """Measure all ways, `together` at a time; write their rows."""
        first: Results | None = None
        for number, names in enumerate(groups(self.names, together)):
            self.results, self.ways, self.doing = Results(names, first), {}, names[0]
            first = first or self.results
            try:
                with room_for_code():
                    self.measure_group()
            except FAILURES as error:
                self.end(why(error), rows)
                raise
            finally:  # what was measured before an interruption is a result, too
                for name in names[1:] if number and names[0] == self.names[0] else names:
                    rows.add(self.row(name))
            start_anew(self.device)

    def measure_group(self) -> None:
        """Prepare the ways of `results`, time them in turn, and free them."""
        found = self.results
        for self.doing in found.names:
            reason = self.too_late(self.doing)
            found.drop(self.doing, reason)
            if reason is None:
                self.attempt(self.doing, partial(self.prepare, self.doing))
            if self.doing in found.reasons and self.doing in self.ways:
                self.attempt(self.doing, self.ways.pop(self.doing).close)
            free_memory(self.device)
        begun = itertools.count()
        least = min(self.least_rounds, self.rounds)
        runs = {name: lambda number, name=name: self._round(name, number) for name in self.ways}
        rounds_in_turn(runs, self.rounds, lambda: next(begun) >= least and self.late())
        for name, way in self.ways.items():
            self.doing = name
            found.drop(name, self.agreed(way.complaint()))
            if name not in found.reasons and found.samples[name]:
                found.extras[name] |= self.after(way)
        for name in list(self.ways):
            self.attempt(name, self.ways.pop(name).close)
        free_memory(self.device)

    def prepare(self, name: str) -> None:
        """Make a way, warm it up, check what it computes, measure its memory. Raises where that
        fails."""
        free_memory(self.device)
        before, began = self.begin(name)
        way = self.ready(name)
        seconds = round(time.monotonic() - began, 3)
        self.results.checks[name] = self.check(way)
        free_memory(self.device)
        peak = peak_bytes(self.device, lambda: self.heaviest(way))
        facts = way.facts() | {"peak_bytes": above(peak, before)}
        self.results.extras[name] = self.known(seconds, facts)

    def begin(self, name: str) -> tuple[int | None, float]:
        """(bytes held before a way is made, when its making began)."""
        return held_bytes(self.device), time.monotonic()

    def ready(self, name: str) -> W:
        """A way that is made and warmed up."""
        way = self.ways[name] = self.make(name)
        self.warm_up(way)
        synchronize(self.device)
        return way

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        """Returns the result of `work`; None when it failed, which takes the way out."""
        try:
            return work()
        except FAILURES as error:
            self.results.drop(name, why(error))
            return None

    def late(self) -> bool:
        """Returns whether the time is up."""
        return self.deadline.passed()

    def too_late(self, name: str) -> str | None:
        """Returns the reason why a way is not prepared any more, or None."""
        return self.deadline.reason if self.late() else None

    def agreed(self, reason: str | None) -> str | None:
        """A reason as the row says it."""
        return reason

    def known(self, seconds: float, facts: Row) -> Row:
        """Returns what the row says of getting ready."""
        return {"prepare_seconds": seconds} | facts

    def end(self, reason: str, rows: Rows) -> None:
        """Note what ends the run, for the rows that are written before it does."""
        self.results.drop(self.doing, reason)
        for name, samples in self.results.samples.items():
            if not samples:
                self.results.drop(name, f"not measured: the run ended when way {self.doing} failed")

    def _round(self, name: str, number: int) -> None:
        self.doing = name
        if name not in self.results.reasons:
            found = self.attempt(name, lambda: self.time(self.ways[name], number))
            self.results.samples[name] += found or []
