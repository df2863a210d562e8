"""How fast plain copies between device and pinned host memory are: what plans count on, and no copy
gets beyond."""

import statistics
from collections.abc import Callable

import torch

from packgraph.offloading.plan import CopySpeed

BYTES = 64 * 2**20
SMALL = 4096
ROUNDS = 5


def copy_speed(device: torch.device, nbytes: int = BYTES) -> CopySpeed:
    """Copies of `nbytes`, one direction at a time; on a CPU, which copies nothing, what plans
    assume. Waits for the device."""
    if device.type != "cuda":
        return CopySpeed()
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
    on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    out = _microseconds(device, lambda: on_host.copy_(on_device, non_blocking=True))
    back = _microseconds(device, lambda: on_device.copy_(on_host, non_blocking=True))
    small = _microseconds(
        device, lambda: on_host[:SMALL].copy_(on_device[:SMALL], non_blocking=True)
    )
    return CopySpeed(nbytes / out, nbytes / back, round(small, 3))


def _microseconds(device: torch.device, copy: Callable[[], object]) -> float:
    """The median of one copy, behind another one that gives the host its lead."""
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        copy()
        start.record(torch.cuda.current_stream(device))
        copy()
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        times.append(1000.0 * start.elapsed_time(end))
    return statistics.median(times)
