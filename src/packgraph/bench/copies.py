"""Copies between device and pinned host memory: how fast they can be, and how fast those of a program were."""
import statistics
from collections.abc import Callable

import torch

from packgraph.bench.timing import time_block
from packgraph.plan.offload.plan import CopySpeed

BYTES = 256 * 2**20
SMALL = 4096
ROUNDS = 5


def copy_ceiling(device: torch.device, nbytes: int = BYTES) -> CopySpeed:
    """What plain copies of `nbytes` reach, one direction at a time; on a CPU, which copies nothing, what plans assume.
    """
    if device.type != "cuda":
        return CopySpeed()
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
    on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    out = _milliseconds(device, lambda: on_host.copy_(on_device, non_blocking=True))
    back = _milliseconds(device, lambda: on_device.copy_(on_host, non_blocking=True))
    small = _milliseconds(device, lambda: on_host[:SMALL].copy_(on_device[:SMALL], non_blocking=True))
    return CopySpeed(nbytes / (1000 * out), nbytes / (1000 * back), round(1000 * small, 3))


def _milliseconds(device: torch.device, copy: Callable[[], object]) -> float:
    copy()
    return statistics.median(time_block(device, copy, copy)[0] for _ in range(ROUNDS))


def copy_times(device: torch.device, run: Callable[[], object]) -> tuple[float, float] | None:
    """Microseconds of all copies to pinned memory and of all copies from it while `run` runs; None on a CPU.

    By torch.profiler, whose library stays loaded: call it after everything that is timed.
    """
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    spent = {"DtoH": 0.0, "HtoD": 0.0}
    for event in profiler.events() or ():
        for kind in spent:
            if event.name.startswith(f"Memcpy {kind}"):
                spent[kind] += event.time_range.end - event.time_range.start
    return spent["DtoH"], spent["HtoD"]
