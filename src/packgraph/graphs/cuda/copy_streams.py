"""The copy streams on CUDA: one stream for each direction, events between them, pinned host memory.

Inside a capture the same calls become nodes of the graph: the copy streams fork from the capture
stream at their first copy and are joined before the capture ends. Waiting for an event of another
capture would be illegal, and is not needed: the graph that recorded it has ended before this one
begins, on the same stream.

Sources are kept by reference until main has waited, not by `record_stream`: that has no effect on
private pools, and elsewhere it gives memory back at times that nobody can plan.
"""

import threading
from typing import Any

import torch

from packgraph.graphs.copy_streams import (
    Copy,
    CopyStreams,
    DeviceMemory,
    HostMemories,
    TimedCopy,
)
from packgraph.graphs.memory.allocator import look
from packgraph.torch_internals import below_modes


def pinned(nbytes: int) -> torch.Tensor:
    """Pinned host memory, uint8 [nbytes]. Made by another thread, since a capturing one must not
    make any.

    Raises RuntimeError when there is not so much.
    """
    made: list[torch.Tensor] = []
    thread = threading.Thread(
        target=lambda: made.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
    )
    thread.start()
    thread.join()
    if not made:
        raise RuntimeError(
            f"{nbytes / 2**20:.0f} MiB of pinned host memory could not be had: offload less "
            "(offload.fraction), or give the process more memory"
        )
    return made[0]


def streams_beside(stream: torch.cuda.Stream, count: int) -> list[torch.cuda.Stream]:
    """`count` streams that are different from each other and from `stream`: torch deals out 32 in
    turn."""
    found: dict[int, torch.cuda.Stream] = {}
    while len(found) < count:
        other = torch.cuda.Stream(stream.device)
        if other.cuda_stream != stream.cuda_stream:
            found[other.cuda_stream] = other
    return list(found.values())


class CudaCopyStreams(CopyStreams):
    """The copy streams of eager work, or, with `memories` of a slot, of the captures of one
    window."""

    def __init__(
        self,
        device: torch.device,
        out: torch.cuda.Stream,
        back: torch.cuda.Stream,
        memories: HostMemories | None = None,
    ) -> None:
        super().__init__(memories or HostMemories(pinned))
        self.device, self._streams = device, {"out": out, "back": back}
        self._clocks: list[torch.cuda.Event] = []  # that graphs know by their handles only

    def next_capture(self) -> None:
        """Another capture of the window begins: copies of those before are done when it runs."""
        self.scope += 1
        self._under_way = []

    def point(self) -> torch.cuda.Event:
        """See CopyStreams."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _queue(
        self,
        copy_stream: str,
        pieces: list[torch.Tensor],
        places: list[torch.Tensor],
        before: Copy | None,
        since: Any,
    ) -> torch.cuda.Event:
        stream = self._streams[copy_stream]
        targets, sources = (places, pieces) if copy_stream == "out" else (pieces, places)
        stream.wait_event(since or self.point())
        if before is not None and before.scope == self.scope:
            stream.wait_event(before.native)
        began = None if self.timed is None else self._clock(stream)
        with below_modes(), torch.no_grad(), torch.cuda.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        if self.timed is not None:
            nbytes = sum(target.numel() for target in targets)
            self.timed.append(
                TimedCopy(copy_stream, nbytes, len(targets), began, self._clock(stream))
            )
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def _wait(self, copy: Copy) -> None:
        if not copy.done and copy.scope == self.scope:
            torch.cuda.current_stream(self.device).wait_event(copy.native)

    def clock(self) -> torch.cuda.Event:
        """See CopyStreams."""
        return self._clock(torch.cuda.current_stream(self.device))

    def _clock(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        captured = self.scope > 0
        event = torch.cuda.Event(enable_timing=True, external=captured)
        event.record(stream)
        if captured:
            self._clocks.append(event)
        return event

    def elapsed_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """See CopyStreams."""
        end.synchronize()
        return 1000.0 * start.elapsed_time(end)

    def memory(self) -> DeviceMemory:
        """See CopyStreams."""
        # The plain dictionary: memory_allocated and max_memory_allocated flatten and sort it first,
        # each for itself.
        found = look(self.device)["allocated_bytes"]["all"]
        return DeviceMemory(found["current"], found["peak"])
