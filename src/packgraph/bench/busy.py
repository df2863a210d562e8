"""How much of the time a device has something to do: the union of its kernels' times over the time that passes.

Kernel times come from torch.profiler (CUPTI), which slows the host and puts gaps between the kernels of a graph, but
leaves the kernels as they are. So only they are taken from a profiled run; the time that passes is that of the same
calls without a profiler, measured just before. Copies and fills count as work. Profile after everything that is timed:
the profiler's library stays loaded.
"""
import statistics
from collections.abc import Callable, Iterable
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
    """(begin, end) in microseconds of the kernels, copies and fills among a profiler's events, on any stream."""
    return [(event.time_range.start, event.time_range.end) for event in events
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation]


def busy_share(device: torch.device, run: Callable[[], object]) -> float | None:
    """Share of the time of `run` in which the device is at work; None on a CPU.

    Raises RuntimeError where the profiler sees nothing of the device.
    """
    if device.type != "cuda":
        return None
    wall = statistics.median(time_block(device, run)[0] for _ in range(WALL_RUNS))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    intervals = device_intervals(profiler.events() or ())
    if not intervals:
        raise RuntimeError("torch.profiler recorded no kernel: CUPTI does not work here")
    return union_length(intervals) / 1000 / wall
