"""Captures that failed, and when they may be tried again.

Memory comes back: a data loader lets go of its own, another model is freed, a slot is given back. A
capture costs a pause, so it is tried a few times only, each time after more calls. Other failures
go when the module is changed. But calls may change it themselves, by hooks or in their backward:
what fails in the same way again and again is given up.
"""

from collections import Counter
from collections.abc import Hashable

import torch

CALLS_BETWEEN = (8, 64)  # eager calls of the same key between one try and the next
MOST_TRIES = 3  # of a capture that fails with the same words, though the module has changed
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
FREE_MEMORY = (
    "free memory, or declare fewer or smaller capacities, or fewer slots: graphs keep their "
    "activations"
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the allocator, or the driver itself, had no memory."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, torch.AcceleratorError)
        and getattr(error, "error_code", None) == _OUT_OF_MEMORY
    )


class Retries:
    """The keys whose capture failed."""

    def __init__(self) -> None:
        self._failures: Counter[tuple[Hashable, str]] = Counter()
        self._tries: dict[Hashable, int] = {}
        self._left: dict[Hashable, int] = {}

    def is_news(self, key: Hashable, error: Exception) -> bool:
        """Note that a capture of `key` failed; whether it did so for the first time with these
        words."""
        self._failures[key, str(error)] += 1
        return self._failures[key, str(error)] == 1

    def is_hopeless(self, key: Hashable) -> bool:
        """Whether a capture of `key` has failed too often in one way."""
        return any(
            known == key and tries >= MOST_TRIES for (known, _), tries in self._failures.items()
        )

    def wait(self, key: Hashable) -> bool:
        """Note that a capture of `key` found no memory; whether it may be tried again."""
        tries = self._tries[key] = self._tries.get(key, 0) + 1
        if tries > len(CALLS_BETWEEN):
            return False
        self._left[key] = CALLS_BETWEEN[tries - 1]
        return True

    def is_due(self, key: Hashable) -> bool:
        """Whether a capture of `key` has found no memory before."""
        return key in self._tries

    def must_wait(self, key: Hashable) -> bool:
        """Whether it is too early to try `key` again; asked once per call."""
        if not self._left.get(key):
            return False
        self._left[key] -= 1
        return True
