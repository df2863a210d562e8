"""Cache of captured graphs by slot and key, shared by graphed modules and graphed steps.

A slot excludes its captures from each other, so the cache evicts by slot: a larger call makes room
by dropping smaller ones. Keys whose capture failed are remembered. A capture that found no memory
is tried again a few times, each time after more calls, because memory comes back: a data loader
lets go of its own, another model is freed, a slot is given back. Other failures are forgotten when
the module changes, unless they repeat: calls may change the module themselves, by hooks or in their
backward.

Ranks that share rows, matrices or experts must capture a call together: `agreement.py` says when
they do. Whoever captures with others asks for consensus after each capture, before anything relies
on it.
"""

import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from packgraph.graphs import fallback
from packgraph.graphs.agreement import Consensus, JointCaptures
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.fallback import Stats
from packgraph.graphs.key import Signature
from packgraph.graphs.memory.allocator import free_memory
from packgraph.graphs.slots import Slot
from packgraph.packing.batch import PackedBatch

CALLS_BETWEEN = (8, 64)  # eager calls of the same key between one try and the next
MAX_TRIES = 3  # of a capture that fails with the same words, though the module has changed
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
FREE_MEMORY = (
    "free memory, or declare fewer or smaller capacities, or fewer slots: graphs keep their "
    "activations"
)


def call_name(module: nn.Module, args: tuple[Any, ...]) -> str:
    """A call of `module` with these arguments in words, for messages."""
    shapes = [str(arg.capacity) for arg in args if isinstance(arg, PackedBatch)]
    return f"{type(module).__name__} for {', '.join(shapes) or 'these arguments'}"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether the allocator, or the driver itself, had no memory."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, torch.AcceleratorError)
        and getattr(error, "error_code", None) == _OUT_OF_MEMORY
    )


class GraphCache:
    """Captured graphs by slot and key, and the keys that could not be captured.

    Attributes:
        joint: Decides about captures that other ranks make, too.
        failed: Keys whose capture has failed.
        waiting: Keys whose capture found no memory, with the calls to wait before the next try.
    """

    def __init__(self, stats: Stats, device: torch.device) -> None:
        self.joint = JointCaptures()
        self._stats, self._device = stats, device
        self.failed, self.waiting = set[Hashable](), dict[Hashable, int]()
        self._failures = Counter[tuple[Hashable, str]]()  # by key and words
        self._tries = Counter[Hashable]()  # that found no memory

    def join(self, consensus: Consensus) -> None:
        """Ask `consensus` before and after every capture, which other ranks must make, too: a
        failure of one is a failure of all."""
        self.joint = JointCaptures(consensus)

    def must_wait(self, key: Hashable) -> bool:
        """Returns whether it is too early to capture `key` again, which found no memory; asked once
        per call."""
        left = self.waiting.pop(key, 0)
        if left > 1:
            self.waiting[key] = left - 1
        return left > 0

    def give_up(self, key: Hashable, error: CaptureError) -> tuple[str, bool]:
        """Notes that a capture of `key` failed with `error`: for good, or until there is more
        memory.

        Other ranks would not try again with this one, so with consensus it is for good.

        Returns:
            The reason to run such calls eagerly, and whether it is news to the user.
        """
        if self.joint.is_alone and is_out_of_memory(error.__cause__):
            self._tries[key] += 1
            if self._tries[key] <= len(CALLS_BETWEEN):
                self.waiting[key] = CALLS_BETWEEN[self._tries[key] - 1]
                return fallback.NO_MEMORY, True
        self.failed.add(key)
        self._failures[key, str(error)] += 1
        return fallback.CAPTURE_FAILED, self._failures[key, str(error)] == 1

    def forgive(self) -> None:
        """Lets failed keys be captured again, except for those that always fail in one way."""
        self.failed &= {key for (key, _), tries in self._failures.items() if tries >= MAX_TRIES}

    def capture(self, call: Signature, slot: Slot, capture: Callable[[], Any]) -> None:
        """Captures a call into a slot; what is larger than the slot drops its other graphs.
        capture: returns a `Variant` or `StepVariant`.

        Raises:
            CaptureError: As `capture` does.
        """
        started = time.perf_counter()
        if call.key in self._tries:
            free_memory(self._device)
        self._stats.dropped(_LARGER, slot.make_room(call.size))
        made = capture()
        slot.variants[call.key] = made
        self._stats.dropped(_LARGER, slot.forget_smaller(call.key))
        self._stats.captured += made.segments
        self._stats.capture_seconds += time.perf_counter() - started

    def agree(
        self, what: str, key: Hashable, slot: Slot, error: CaptureError | None
    ) -> CaptureError | None:
        """Asks the other ranks whether their capture went well, too.

        Args:
            what: The captured call in words.
            key: Its key.
            slot: The slot that it was captured into.
            error: Why the capture failed on this rank, or None.

        Returns:
            Why the capture failed on any rank, or None; the graphs are freed and the key has failed
            then.
        """
        failed = self.joint.consensus(what, error)
        if failed is not None:
            self.failed.add(key)
            slot.drop(key)  # where it is another rank that failed
        return failed


_LARGER = "a larger variant took the slot"
