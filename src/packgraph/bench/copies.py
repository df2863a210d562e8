"""Copies between device and pinned host memory: how fast they can be, and how fast those of a program were."""
from collections.abc import Callable

import torch

from packgraph.offload.speed import copy_speed
from packgraph.plan.offload.plan import CopySpeed

BYTES = 256 * 2**20


def copy_ceiling(device: torch.device) -> CopySpeed:
    """What plain copies of large memory reach."""
    return copy_speed(device, BYTES)


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
