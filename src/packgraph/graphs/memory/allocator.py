"""torch's allocator for CUDA: the most it has held, and memory that it gives back.

Who asks for the peak of one module or one stretch starts the allocator's statistics again, and what
came before would be forgotten: `torch.cuda.max_memory_allocated` is of the time since then. So
whoever does that does it by `look`, and who wants the peak of a stretch in which others may look
asks a `Stretch`.
"""

import gc
import weakref
from collections import Counter
from typing import Any

import torch

from packgraph.torch_internals import empty_host_cache

COLLECTIONS = 8  # at the most: each may find what the last has freed
_MOST: Counter[tuple[int, str]] = Counter()  # by device and kind


def free_memory(device: torch.device) -> None:
    """Let go of garbage and of the allocators' cached blocks, pinned ones of the host, too.

    An exception and its frames are a cycle; only when that is gone does autograd's graph go that
    the frames had, and what it had saved may be cycles again, such as groups that are offloaded. So
    garbage is looked for until there is no more. Of a graph whose backward has failed torch's
    engine keeps the rest until the thread's next backward: here.
    """
    with torch.enable_grad():
        torch.ones(1, requires_grad=True, device="cpu").backward()
    for _ in range(COLLECTIONS):
        if not gc.collect():
            break
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        empty_host_cache()


class Stretch:
    """The time since this was made, on `device`."""

    all: "weakref.WeakSet[Stretch]" = weakref.WeakSet()

    def __init__(self, device: torch.device) -> None:
        self.device, self.ended = device, 0  # the peak up to the last look
        look(device)
        self.all.add(self)

    def most_allocated(self) -> int:
        """Bytes of tensors at the most."""
        return max(self.ended, torch.cuda.max_memory_allocated(self.device))


def look(device: torch.device) -> dict[str, Any]:
    """The allocator's statistics, nested (torch.cuda.memory_stats); its peaks begin anew."""
    found = torch.cuda.memory.memory_stats_as_nested_dict(device)
    for kind in ("allocated_bytes", "reserved_bytes"):
        place = _number(device), kind
        _MOST[place] = max(_MOST[place], found[kind]["all"]["peak"])
    peak = found["allocated_bytes"]["all"]["peak"]
    for stretch in Stretch.all:
        if _number(stretch.device) == _number(device):
            stretch.ended = max(stretch.ended, peak)
    torch.cuda.reset_peak_memory_stats(device)
    return found


def most_allocated(device: torch.device) -> int:
    """Bytes of tensors at the most, in this process."""
    return max(_MOST[_number(device), "allocated_bytes"], torch.cuda.max_memory_allocated(device))


def most_reserved(device: torch.device) -> int:
    """Bytes that the allocator has held at the most, in this process."""
    return max(_MOST[_number(device), "reserved_bytes"], torch.cuda.max_memory_reserved(device))


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
