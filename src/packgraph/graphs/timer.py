"""The timer of everything that is measured: points in the work of a device, and the time between.

On CUDA a point is an event on the current stream, so that the host may run ahead and the device's
time is measured, gaps between kernels included. On a CPU it is the wall clock.
"""

import time
from collections.abc import Callable
from typing import Any

import torch


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Marks points in the work of a device; the laps between them are read later.

    now: seconds of the host, which are what is marked where there are no events; tests tell times
    of their own.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._now = device, now
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark the end of all work given to the device so far, without waiting for it."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(self._now())

    def wait(self) -> None:
        """Wait until the device is idle."""
        synchronize(self._device)

    def take_laps(self) -> list[float]:
        """Milliseconds between consecutive marks, which are then forgotten; waits for the
        device."""
        self.wait()
        pairs = list(zip(self._marks, self._marks[1:]))
        self._marks = []
        if self._device.type == "cuda":
            return [first.elapsed_time(second) for first, second in pairs]
        return [1000 * (second - first) for first, second in pairs]
