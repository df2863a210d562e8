"""Copies between device and pinned host memory: how fast they can be, how fast those of a program
were, and how much memory of the host there is for them."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from packgraph.offloading.plan import CopySpeed
from packgraph.offloading.timing import copy_speed

BYTES = 256 * 2**20


def copy_ceiling(device: torch.device) -> CopySpeed:
    """What plain copies of large memory reach."""
    return copy_speed(device, BYTES)


def copy_times(device: torch.device, run: Callable[[], object]) -> tuple[float, float] | None:
    """Microseconds of all copies to pinned memory and of all copies from it while `run` runs; None
    on a CPU.

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


def free_host_bytes() -> int:
    """Memory that the host has available, caches included where it says so (Linux). Raises OSError
    where it does not say anything."""
    said = Path("/proc/meminfo")
    for line in said.read_text(encoding="ascii").splitlines() if said.exists() else []:
        name, _, size = line.partition(":")
        if name == "MemAvailable":
            return int(size.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
