"""How long the device exchanges data with other GPUs, and how long it does nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from packgraph.bench.timing import device_intervals, union_length

# In the names of what exchanges data: NCCL's kernels, copies from other GPUs, barriers.
EXCHANGES = ("nccl", "PtoP", "symmetric_memory")


def exposed_length(
    exchanges: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> float:
    """Length of the part of `exchanges` in which none of `others` runs; intervals (begin, end)."""
    return union_length([*exchanges, *others]) - union_length(others)


@dataclass(frozen=True)
class ExchangeTimes:
    """Milliseconds of some calls in which the device runs collectives, and those of them in which
    it runs nothing else."""

    whole_ms: float
    exposed_ms: float


def _is_exchange(name: str) -> bool:
    return any(part in name for part in EXCHANGES)


def exchange_times(
    device: torch.device, run: Callable[[], object], lead: Callable[[], object]
) -> ExchangeTimes | None:
    """How long NCCL's kernels, copies from other GPUs and barriers with them run while `run` runs,
    right after `lead`; None on a CPU. A copy of a rank's own part counts as other work.

    Raises RuntimeError where the profiler sees nothing of the device.
    """
    if device.type != "cuda":
        return None
    lead()
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    events = profiler.events() or ()
    others = device_intervals(event for event in events if not _is_exchange(event.name))
    exchanges = device_intervals(event for event in events if _is_exchange(event.name))
    if not others:
        raise RuntimeError("torch.profiler recorded no kernel: CUPTI does not work here")
    return ExchangeTimes(union_length(exchanges) / 1000, exposed_length(exchanges, others) / 1000)
