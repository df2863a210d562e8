"""Time and memory of work on one device: CUDA events and the allocator's counters, or the wall
clock on a CPU.

On CUDA the host runs ahead of the device, so time is taken between events on the stream, after
everything before has ended. Memory counts what a graph's private pool reserves in full, whether a
tensor lives there at the moment or not.

`busy_time` is how much of the time a device has something to do: the union of its kernels' times
over the time that passes.

Kernel times come from torch.profiler (CUPTI), which slows the host and puts gaps between the
kernels of a graph, but hardly touches the kernels. So only they are taken from a profiled run; the
time that passes is that of the same calls without a profiler, measured just before. Copies and
fills count as work. A profiled kernel lasts from its launch to its end, so the microsecond between
two kernels of a graph counts as work, and the sum may be a few percent above the time that passed:
the share is then 1. Profile after everything that is timed: the profiler's library stays loaded.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType

from packgraph.graphs.backend import Stopwatch, synchronize
from packgraph.graphs.memory.allocator import Stretch, free_memory
from packgraph.ops.symmetric_memory import symmetric_bytes

CUDA_DEFAULT_POOL = (0, 0)
WALL_RUNS = 3


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


def time_block(
    device: torch.device, run: Callable[[], object], lead: Callable[[], object] | None = None
) -> tuple[float, float]:
    """(milliseconds on the device, milliseconds of the host) of `run`; lead: see `time_calls`."""

    def once(mark: Callable[[], None]) -> None:
        run()
        mark()

    laps, host = time_calls(device, once, lead)
    return laps[0], host


def start_anew(device: torch.device) -> None:
    """Forget compiled code, and let go of all that graphs had, which are gone.

    cuBLAS's workspaces, too: torch keeps those that were made inside a capture, and with them whole
    segments of pools that nobody uses any more, until somebody clears them. Whatever is measured
    then would seem to need less than none.
    """
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
    free_memory(device)


def _private(device: torch.device) -> tuple[int, int]:
    """(bytes reserved, bytes of live tensors) in private pools."""
    segments = [
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index
        and tuple(segment["segment_pool_id"]) != CUDA_DEFAULT_POOL
    ]
    return sum(s["total_size"] for s in segments), sum(s["allocated_size"] for s in segments)


def held_bytes(device: torch.device) -> int | None:
    """Bytes of live tensors outside private pools, plus bytes that private pools reserve and those
    of symmetric memory; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    reserved, live = _private(device)
    return torch.cuda.memory_allocated(device) - live + reserved + symmetric_bytes()


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int | None:
    """The most bytes held (see `held_bytes`) while `run` runs; None on a CPU."""
    if device.type != "cuda":
        run()
        return None
    torch.cuda.synchronize(device)
    stretch = Stretch(device)
    run()
    torch.cuda.synchronize(device)
    reserved, live = _private(device)
    return stretch.most_allocated() - live + reserved + symmetric_bytes()


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


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (begin, end)."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def device_intervals(events: Iterable[Any]) -> list[tuple[float, float]]:
    """(begin, end) in microseconds of the kernels, copies and fills among a profiler's events, on
    any stream."""
    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


class Busy(NamedTuple):
    """Milliseconds of the kernels of some calls, each moment counted once, and their share of the
    time of these calls without a profiler, at most 1."""

    kernel_ms: float
    share: float


def busy_time(
    device: torch.device, run: Callable[[], object], lead: Callable[[], object]
) -> Busy | None:
    """Measures how busy the device is while `run` runs, right after `lead`; None on a CPU.

    Raises RuntimeError where the profiler sees nothing of the device.
    """
    if device.type != "cuda":
        return None
    wall = statistics.median(time_block(device, run, lead)[0] for _ in range(WALL_RUNS))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    intervals = device_intervals(profiler.events() or ())
    if not intervals:
        raise RuntimeError("torch.profiler recorded no kernel: CUPTI does not work here")
    kernels = union_length(intervals) / 1000
    return Busy(kernels, min(1.0, kernels / wall))
