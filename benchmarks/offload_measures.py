"""What `bench offload` measures beside steps: copies between device and pinned host memory, what a
forward keeps for its backward, and the most tokens that run.

`copy_ceiling` is how fast copies can be, `copy_times` how fast those of a program were.

`kept_for_backward` is all memory that autograd's graph holds when the forward has ended.

Offloading can move no more than that. A pool's size says more: gradients and other temporaries of
the backward lie in it, too, which are there whatever waits on the host.

`search` finds the most tokens by few trials, since each runs at the limit of the device and may
take minutes.

What smaller rows took says where to begin: memory of the device grows with the tokens, and pinned
memory of the host does. So the usual search is two trials: the guess runs, and one step more does
not.
"""

import os
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from packgraph.bench.comparison import Deadline
from packgraph.graphs.memory.allocator import Stretch
from packgraph.graphs.parameters import local_tensor
from packgraph.offloading.plan import CopySpeed
from packgraph.offloading.timing import copy_speed

Result = TypeVar("Result")
BYTES = 256 * 2**20
# of the tokens that fit by what a smaller row took: holes in pools do not grow with it alone
SURE = 0.95


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


class _Saved:
    """What autograd's graph holds in place of a saved tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # without its graph, in which this is


def free_bytes(device: torch.device) -> int:
    """Bytes of the device that nobody has; 0 on a CPU, where this is not known."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def pinned_bytes(device: torch.device) -> int | None:
    """Bytes of pinned host memory that torch has now, as it rounds them and with what it keeps for
    later; None on a CPU."""
    return (
        torch.cuda.host_memory_stats()["allocated_bytes.current"] if device.type == "cuda" else None
    )


def pinned_peak_bytes(device: torch.device) -> int | None:
    """The most of `pinned_bytes` since the last look; None on a CPU."""
    if device.type != "cuda":
        return None
    peak: int = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
    torch.cuda.reset_peak_host_memory_stats()
    return peak


def with_most_bytes(device: torch.device, run: Callable[[], Result]) -> tuple[Result, int | None]:
    """What `run` returns, and the most bytes of tensors while it runs, which may make pools; None
    on a CPU."""
    stretch = Stretch(device) if device.type == "cuda" else None
    result = run()
    return result, None if stretch is None else stretch.most_allocated()


def kept_for_backward(forward: Callable[[], object], before: Iterable[Tensor]) -> int:
    """Bytes that `forward` has saved and that are alive when it ends, every storage once. before:
    tensors that are there anyway, such as parameters, buffers and arguments, whose memory does not
    count."""
    there = {_storage(tensor)._cdata for tensor in before}
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        holder = _Saved(tensor)
        saved.add(holder)
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        result = forward()
    sizes = {
        storage._cdata: storage.nbytes()
        for storage in (_storage(holder.tensor) for holder in saved)
    }
    del result  # and with it the graph
    return sum(nbytes for storage, nbytes in sizes.items() if storage not in there)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return local_tensor(tensor.detach()).untyped_storage()


class HeldBytes(NamedTuple):
    """Bytes on the device and pinned ones on the host: that there are, or that a token takes; 0
    where nobody knows."""

    device: float = 0.0
    host: float = 0.0


def most_tokens(
    runs: Callable[[int], bool],
    step: int,
    deadline: Deadline,
    known: int,
    takes: HeldBytes,
    there: HeldBytes,
) -> tuple[int, str | None]:
    """The most tokens, in steps of `step`, for which `runs`, and what kept from trying more; None
    where more do not run.

    known: tokens that run. takes: by a token. A host that has no more pinned memory ends the
    process, so nothing is tried that would take more than is `there`.
    """
    stopped: str | None = None

    def on_host(steps: int) -> float:
        return steps * step * takes.host

    def fits(steps: int) -> bool | None:
        nonlocal stopped
        if deadline.passed():
            stopped = deadline.reason
            return None
        return on_host(steps) <= there.host and runs(steps * step)

    steps = search(fits, known // step, _guess(takes, there) // step)
    if stopped is None and on_host(steps + 1) > there.host:
        stopped = (
            f"{(steps + 1) * step} would take {on_host(steps + 1) / 2**30:.0f} GiB of pinned host "
            "memory, more "
            f"than the {there.host / 2**30:.0f} GiB of --host-gib"
        )
    return step * steps, stopped


def _guess(takes: HeldBytes, there: HeldBytes) -> int:
    """Tokens that should fit; 0 where the device's memory is not known."""
    if not takes.device or not there.device:
        return 0
    most = SURE * there.device / takes.device
    return int(min(most, there.host / takes.host) if takes.host else most)


def search(fits: Callable[[int], bool | None], good: int = 0, guess: int = 0) -> int:
    """The largest number for which `fits`, 0 if it does not fit 1; what fits a number fits all
    smaller ones.

    fits: None where there is no time to find out, which ends the search with the largest that is
    known to fit. good: a number that fits. guess: what is tried first (at least one more than
    `good`); what follows is one more or less, then two, four and so on, up to where it does not fit
    or down to where it does. Without a guess twice what fits is tried. Then what is between is
    halved.
    """
    ahead, bad = 1, max(guess, good + 1) if guess else max(1, 2 * good)
    while found := fits(bad):
        good, bad, ahead = bad, bad + ahead if guess else 2 * bad, 2 * ahead
    less = 1 if guess and ahead == 1 else bad - good  # below a guess that did not fit
    while found is not None and bad - good > 1:
        tried = bad - less if less < bad - good else (good + bad) // 2
        found = fits(tried)
        if found:
            good, less = tried, bad - good
        elif found is not None:
            bad, less = tried, 2 * less
    return good
