"""How much of the time a device has something to do: the union of its kernels' times over the time
that passes.

Kernel times come from torch.profiler (CUPTI), which slows the host and puts gaps between the
kernels of a graph, but hardly touches the kernels. So only they are taken from a profiled run; the
time that passes is that of the same calls without a profiler, measured just before. Copies and
fills count as work. A profiled kernel lasts from its launch to its end, so the microsecond between
two kernels of a graph counts as work, and the sum may be a few percent above the time that passed:
the share is then 1. Profile after everything that is timed: the profiler's library stays loaded.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType

from packgraph.bench.timing import time_block

WALL_RUNS = 3


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


@dataclass(frozen=True)
class Busy:
    """Milliseconds of some calls: of all kernels, each moment counted once, and of the calls
    without a profiler."""

    kernel_ms: float
    wall_ms: float

    @property
    def share(self) -> float:
        """Share of the time in which the device is at work, at most 1."""
        return min(1.0, self.kernel_ms / self.wall_ms)


def busy_time(
    device: torch.device, run: Callable[[], object], lead: Callable[[], object]
) -> Busy | None:
    """How busy the device is while `run` runs, right after `lead`; None on a CPU.

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
    return Busy(union_length(intervals) / 1000, wall)
