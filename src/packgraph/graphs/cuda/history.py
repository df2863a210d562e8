"""What torch's allocator for CUDA does in some private pools, block by block, told by its own
history.

    record ─▶ captures into fresh pools ─▶ snapshot: segments of each pool, and all that was done,
    in order
                                              │ by address
                                              ▼
                                       births and deaths of blocks in those pools

So everything that a capture takes is seen, also what a kernel or compiled code takes and gives back
inside one operation. Somebody who records a history himself, to see where memory goes, keeps his:
it is read, and goes on. (torch.cuda.memory._record_memory_history, which torch's documentation
describes for that purpose.)
"""

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from packgraph.graphs.errors import CaptureError, user_line
from packgraph.graphs.memory.bank import Lifetime

Handle = tuple[int, ...]


class PoolHistory:
    """Records from `start` on. Holds for one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._starts = False

    def start(self) -> None:
        """Begin to record, unless somebody does."""
        self._starts = not torch._C._cuda_isHistoryEnabled()  # type: ignore[attr-defined]
        if self._starts:
            torch.cuda.memory._record_memory_history("all", context=None)

    def stop(self) -> None:
        """End what `start` began."""
        if self._starts:
            torch.cuda.memory._record_memory_history(None)
        self._starts = False

    def lifetimes(self, pools: Mapping[Handle, bool]) -> list[Lifetime]:
        """All blocks of `pools` (handle: whether its blocks are brief) since they have memory,
        oldest first.

        Raises CaptureError where the history, which somebody else began, is too short to tell of
        them all.
        """
        shot = torch.cuda.memory._snapshot()
        segments = [
            segment
            for segment in shot["segments"]
            if segment["device"] == self.device.index and tuple(segment["segment_pool_id"]) in pools
        ]
        return blocks_of(segments, shot["device_traces"][self.device.index], pools)


def blocks_of(
    segments: list[dict[str, Any]], events: list[dict[str, Any]], pools: Mapping[Handle, bool]
) -> list[Lifetime]:
    """The blocks that `events` (of one device, in order) tell of in `segments`, all of `pools`. See
    PoolHistory."""
    segments = sorted(segments, key=lambda segment: segment["address"])
    starts = [segment["address"] for segment in segments]
    mapped: set[int] = set()  # segments that the history knows from their beginning
    blocks: list[_Block] = []
    alive: dict[int, _Block] = {}
    for tick, event in enumerate(events):
        address = event.get("addr", -1)  # an allocation that failed has none
        number = bisect.bisect_right(starts, address) - 1
        if number < 0 or address >= starts[number] + segments[number]["total_size"]:
            continue
        if event["action"] in ("segment_alloc", "segment_map"):
            mapped.add(number)  # what lay there before was of another pool
            end = address + event["size"]
            blocks = [block for block in blocks if not address <= block.address < end]
            alive = {at: block for at, block in alive.items() if not address <= at < end}
        elif event["action"] == "alloc":
            brief = pools[tuple(segments[number]["segment_pool_id"])]
            alive[address] = _Block(address, event["size"], tick, brief)
            blocks.append(alive[address])
        elif event["action"] == "free_completed" and address in alive:
            alive.pop(address).death = tick
    if len(mapped) < len(segments):
        raise CaptureError(
            "the allocator's history begins too late to tell what graphs take",
            user_line(),
            "record it with more entries (max_entries of "
            "torch.cuda.memory._record_memory_history), or "
            "from after the capture on",
        )
    return [Lifetime(block.nbytes, block.birth, block.death, block.brief) for block in blocks]


@dataclass
class _Block:
    address: int
    nbytes: int
    birth: int
    brief: bool
    death: int | None = None
