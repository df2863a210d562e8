"""Protocol of a capture backend, the same for CUDA graphs and for the CPU recorder.

A *pool* holds temporary memory. A *window* is the capture of one variant: forward graphs of all
regions in order into the slot's own pool, then backward graphs in reverse. What a backward makes is
gone when it ends, so all slots share one pool for that (`scratch`); what must stay, a tensor from
`allocate` in the slot's pool takes in. While the window is open its tensors are ordinary tensors
and keep their blocks for as long as someone holds them; after it closes every block belongs to its
pool again and the next variant may use it. `static` gives a non-owning view of a tensor that stays
valid for replays.

    with backend.window(pool, scratch, journal) as window:
        graph, out = window.capture(run)     # runs Python once; on CUDA nothing executes
        window.materialise()                 # out now holds data (an eager stage may read it)
        handle = window.static(out)
    graph.replay(); handle.tensor

Ranges that profilers show around a replay, as `torch.profiler.record_function` makes them.

    packgraph layer 2 forward slot 1 1024x32     what, which pass, which slot, which capacity

`torch.profiler` shows them, and with `torch.autograd.profiler.emit_nvtx` so do tools that read
NVTX. They are of the host alone: a replay's range lies around the launch, never in captured code.
Without a profiler none is made.
"""

import abc
import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch.autograd import profiler
from torch.utils._pytree import tree_leaves

from packgraph.graphs.checks.host_sync import Journal
from packgraph.graphs.copy_streams import CopyStreams, HostMemories
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity, in_short
from packgraph.torch_internals import is_profiled

Result = TypeVar("Result")


class Static(Protocol):
    """A tensor in a pool: `tensor` is a view of its memory that does not keep the block from being
    reused."""

    @property
    def tensor(self) -> torch.Tensor: ...


class Graph(abc.ABC):
    """One captured program. name: of the range that profilers show around a replay, empty = none.

    copy_streams: of its capture. eager_streams: of eager work, which is told of every launch.
    """

    name = ""

    def __init__(self, copy_streams: CopyStreams, eager_streams: CopyStreams) -> None:
        self._copy_streams, self._eager_streams = copy_streams, eager_streams
        self._scope = copy_streams.scope

    def replay(self) -> None:
        """Launch the program on its static memory."""
        if self.name and is_profiled():
            with profiler.record_function(self.name):
                self._launch()
        else:
            self._launch()
        self._copy_streams.replayed.add(self._scope)
        if self._eager_streams.postponed:
            self._eager_streams.launched()

    @abc.abstractmethod
    def _launch(self) -> None: ...

    @abc.abstractmethod
    def reset(self) -> None:
        """Free the program; it cannot be replayed afterwards."""


class Pool(Protocol):
    """Memory that graphs share: the forwards of one slot, or the backwards of all slots. host: that
    of their copies."""

    @property
    def host(self) -> HostMemories: ...

    def nbytes(self) -> int:
        """Bytes reserved for the pool."""

    def poison(self) -> None:
        """Overwrite the pool with NaN patterns (tests: what is read must have been written by the
        same replay)."""


class Window(Protocol):
    """The capture of one variant."""

    def capture(self, run: Callable[[], Result], scratch: bool = False) -> tuple[Graph, Result]:
        """Capture `run`. scratch: nothing it allocates is read after its replay and the copies made
        right behind it."""

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Memory of the slot's pool in `like`'s form, for as long as the tensor is held."""

    def materialise(self) -> None: ...

    def static(self, tensor: torch.Tensor) -> Static: ...


class Backend(Protocol):
    """Makes pools and windows. name: `cuda` or `recorder`. device_type: where its tensors live.

    extra_generators: random generators of the module to capture, besides the default ones; set
        before every capture.
    copy_streams: copies between device and host beside eager work; those of a capture are told by
        `captured_copy_streams`.
    """

    name: str
    device_type: str
    guard_device: str | None
    extra_generators: list[torch.Generator]

    @property
    def copy_streams(self) -> CopyStreams: ...

    def new_pool(self) -> Pool: ...

    def window(self, pool: Any, scratch: Any, journal: Journal) -> AbstractContextManager[Window]:
        """Open the capture of one variant into `pool`, scratch memory into `scratch`."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run eagerly what is about to be captured (lazy handles, compiled kernels)."""

    def generators(self) -> list[torch.Generator]:
        """The default random generators whose state a capture must leave alone."""


_NO_RANGE: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


def profiler_range(*words: object) -> contextlib.AbstractContextManager[object]:
    """A range called `packgraph` and `words` while a profiler runs, else nothing. Not for code that
    is captured."""
    if not is_profiled():
        return _NO_RANGE
    return profiler.record_function(range_name(*words))


def range_name(*words: object) -> str:
    """The name of a range: `packgraph` and `words`, capacities in short, empty ones left out."""
    texts = (in_short(word) if isinstance(word, Capacity) else str(word) for word in words)
    return " ".join(("packgraph", *filter(None, texts)))


def sizes_in_short(arguments: Any) -> str:
    """The capacities of the packed batches among a call's arguments; without any, the shape of its
    first tensor."""
    leaves = tree_leaves(arguments, is_leaf=lambda leaf: isinstance(leaf, PackedBatch))
    batches = [in_short(leaf.capacity) for leaf in leaves if isinstance(leaf, PackedBatch)]
    shapes = ["x".join(map(str, leaf.shape)) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return ",".join(batches or shapes[:1])


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
