"""The CUDA backend: `torch.cuda.CUDAGraph` with private memory pools.

Rules it keeps: `thread_local` capture mode, so that other threads (data loading, NCCL's watchdog)
may go on; one capture stream per backend, since pool segments belong to a stream; every graph
registers its random generators; a failed capture is ended before the error leaves, so that the
stream and the generators are usable afterwards.

What the code of a module is told when it asks whether it is captured: no, as in an eager call.

`torch.cuda.is_current_stream_capturing` lets code take another way in a capture (transformers
builds masks that it would leave out), and a replay would then have other numbers than an eager
call. Code of torch and packgraph, which asks in order to be capturable at all, is told the truth,
and so is every other thread.

Memory that cuBLAS works in, owned for as long as graphs write to it.

torch keeps one workspace per cuBLAS handle and stream, a handle per thread, and graphs bake its
address. That memory belongs to a map of torch's own, which anybody may clear:
`torch.compile(mode="reduce-overhead")` does so around each of its captures, and the allocator may
then unmap what the graphs of others still write to (an illegal memory access at their next replay).

The invariant: workspaces of a capture stream lie in a private pool of the allocator, so they stay
mapped, and nothing else is placed there. Whoever clears torch's map gives the block back to that
pool; the next capture finds it there again, at the same address. (`torch.cuda.MemPool` would say
the same, but corrupts the interpreter's heap in torch 2.11 when some twenty of them are used one
after another.)
"""

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.cuda.graphs

from packgraph.graphs.backend import Graph, Result
from packgraph.graphs.checks.host_sync import Journal
from packgraph.graphs.copy_streams import HostMemories, capturing_copy_streams
from packgraph.graphs.cuda.copy_streams import CudaCopyStreams, pinned, streams_beside
from packgraph.graphs.errors import PACKAGE
from packgraph.graphs.key import with_bits
from packgraph.torch_internals import clear_cublas_workspaces


class CudaPool:
    """A private memory pool of the caching allocator.

    live: graphs that use it. The allocator forgets a pool without graphs, so the next capture needs
    a new handle.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.live = 0
        self.host = HostMemories(pinned)  # of copies that its graphs hold
        self.handle = torch.cuda.graph_pool_handle()

    def begin(self, graph: torch.cuda.CUDAGraph) -> None:
        """Begin the capture of another graph into this pool, on the current stream."""
        if self.live == 0:
            self.handle = torch.cuda.graph_pool_handle()
        graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
        self.live += 1

    def segments(self) -> list[dict[str, int]]:
        """The allocator's segments of this pool."""
        return [
            s
            for s in torch.cuda.memory_snapshot()
            if tuple(s["segment_pool_id"]) == tuple(self.handle)
        ]

    def nbytes(self) -> int:
        """Bytes reserved by the allocator for this pool."""
        return sum(segment["total_size"] for segment in self.segments())

    def poison(self) -> None:
        """Fill all segments with NaN patterns; they stay mapped while a graph of the pool lives."""
        torch.cuda.synchronize(self.device)
        for segment in self.segments():
            storage = torch._C._construct_storage_from_data_pointer(  # type: ignore[attr-defined]
                segment["address"], self.device, segment["total_size"]
            )
            torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage).fill_(0xFF)
        self.host.arenas.poison()


class CudaStatic:
    """A non-owning view of a tensor in a pool."""

    def __init__(self, tensor: torch.Tensor) -> None:
        owner = tensor.untyped_storage()
        storage = torch._C._construct_storage_from_data_pointer(  # type: ignore[attr-defined]
            owner.data_ptr(), tensor.device, owner.nbytes()
        )
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        self.tensor = with_bits(empty, tensor.is_conj(), tensor.is_neg())


class CudaGraph(Graph):
    """One captured graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: CudaPool, window: "CudaWindow") -> None:
        super().__init__(window.copy_streams, window.backend.copy_streams)
        self.graph: torch.cuda.CUDAGraph | None = graph
        # Host memory that the graph knows by its address only, as it does clocks of copy streams.
        self.pool, self.host = pool, window.pool.host

    def _launch(self) -> None:
        """Launch the graph on the current stream."""
        if self.graph is None:
            raise RuntimeError("this graph was reset")
        self.graph.replay()

    def reset(self) -> None:
        """Free the executable graph and its claim on the pool."""
        if self.graph is not None:
            if (
                self.host.arenas.pieces
            ):  # torch takes it for free when nobody holds it: a replay may be copying yet
                torch.cuda.synchronize(self.pool.device)
            self.graph.reset()
            self.graph = None
            self.pool.live -= 1


class CudaWindow:
    """The capture of one variant."""

    def __init__(self, backend: "CudaBackend", pool: CudaPool, scratch: CudaPool) -> None:
        self.backend, self.pool, self.scratch = backend, pool, scratch
        self.copy_streams: CudaCopyStreams = CudaCopyStreams(
            backend.device, backend.out_stream, backend.back_stream, pool.host
        )
        self.graphs: list[CudaGraph] = []
        self._waiting: list[CudaGraph] = []

    def capture(self, run: Callable[[], Result], scratch: bool = False) -> tuple[CudaGraph, Result]:
        """Capture the work that `run` launches; nothing executes."""
        graph, pool = self._new_graph(), self.scratch if scratch else self.pool
        self.copy_streams.next_capture()
        with (
            torch.cuda.stream(self.backend.stream),
            capturing_copy_streams(self.copy_streams),
            told_as_in_eager_calls(),
        ):
            pool.begin(graph)
            try:
                result = run()
                self.copy_streams.join()
                graph.capture_end()
            except BaseException:
                self._abandon(graph, pool)
                raise
        holder = CudaGraph(graph, pool, self)
        self.graphs.append(holder)
        self._waiting.append(holder)
        return holder, result

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: CudaPool) -> None:
        """End a capture that an error left open, so that the stream, allocator and generators are
        usable again.

        When the driver has voided the capture, ending it fails too, and torch then skips the rest
        of its own end: telling the allocator, and taking the generators out of capture mode. The
        first is said here; the second a small capture that succeeds does on the way.
        """
        with contextlib.suppress(RuntimeError):  # of a capture that the driver has voided already
            self.copy_streams.join()
        try:
            graph.capture_end()
        except RuntimeError:
            index = self.backend.device.index
            torch._C._cuda_endAllocateToPool(index, pool.handle)  # type: ignore[attr-defined]
            torch._C._cuda_releasePool(index, pool.handle)  # type: ignore[attr-defined]
            small = self._new_graph()
            small.capture_begin(capture_error_mode="thread_local")
            self.backend.spare.zero_()
            small.capture_end()
        graph.reset()
        pool.live -= 1

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Memory of the slot's pool in `like`'s form. The pool must have a graph already."""
        index, handle = self.backend.device.index, self.pool.handle
        with torch.cuda.stream(self.backend.stream):
            torch._C._cuda_beginAllocateCurrentThreadToPool(index, handle)  # type: ignore[attr-defined]
            try:
                return torch.empty_like(like)
            finally:
                torch._C._cuda_endAllocateToPool(index, handle)  # type: ignore[attr-defined]
                torch._C._cuda_releasePool(index, handle)  # type: ignore[attr-defined]

    def _new_graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self.backend.extra_generators:
            if generator.device.type == "cuda":
                graph.register_generator_state(generator)
        return graph

    def materialise(self) -> None:
        """Replay what was captured so far, in order, so that an eager stage can read its
        results."""
        for graph in self._waiting:
            graph.replay()
        self._waiting = []

    def static(self, tensor: torch.Tensor) -> CudaStatic:
        """A non-owning view of `tensor`."""
        return CudaStatic(tensor)


class CudaBackend:
    """Captures modules on one CUDA device."""

    name = "cuda"
    device_type = "cuda"
    guard_device: str | None = "cuda"

    def __init__(
        self, device: torch.device, extra_generators: Sequence[torch.Generator] = ()
    ) -> None:
        self.device = torch.device(
            "cuda", device.index if device.index is not None else torch.cuda.current_device()
        )
        self.workspaces = CublasWorkspaces(self.device)
        self.stream = self.workspaces.stream
        # Copies beside the captured work, and beside eager work.
        self.out_stream, self.back_stream, eager_out, eager_back = streams_beside(self.stream, 4)
        self.copy_streams = CudaCopyStreams(self.device, eager_out, eager_back)
        self.spare = torch.zeros(1, device=self.device)
        self.extra_generators = list(extra_generators)

    def new_pool(self) -> CudaPool:
        """An empty private pool."""
        return CudaPool(self.device)

    @contextlib.contextmanager
    def window(self, pool: CudaPool, scratch: CudaPool, journal: Journal) -> Iterator[CudaWindow]:
        """See Backend; on an error the window's graphs are freed."""
        self.workspaces.ensure()
        torch.cuda.empty_cache()  # for the pools: an allocator that captures frees nothing
        window = CudaWindow(self, pool, scratch)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        done = False
        try:
            yield window
            done = True
        finally:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            if not done:
                torch.cuda.synchronize(self.device)
                for graph in window.graphs:
                    graph.reset()

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run once on the current stream, whose memory is there: library handles and compiled
        kernels come to life here."""
        self.workspaces.ensure()
        try:
            run()
        finally:
            torch.cuda.synchronize(self.device)

    def generators(self) -> list[torch.Generator]:
        """The device's and the host's default generators, and those the module holds."""
        index = self.device.index or 0
        return [
            torch.default_generator,
            torch.cuda.default_generators[index],
            *self.extra_generators,
        ]


_KNOWING = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(torch.__file__).parent,
        PACKAGE / "graphs",
        PACKAGE / "moe",
        PACKAGE / "ops",
    )
)
_is_capturing = torch._C._cuda_isCurrentStreamCapturing


class _Here(threading.local):
    """Per-thread state. captures: number of captures that the thread is in."""

    captures = 0


_HERE, _LOCK = _Here(), threading.Lock()
_capturing_threads = 0


@contextlib.contextmanager
def told_as_in_eager_calls() -> Iterator[None]:
    """Within the block, which captures, code of this thread that asks is told that it is not
    captured."""
    _count(1)
    _HERE.captures += 1
    try:
        yield
    finally:
        _HERE.captures -= 1
        _count(-1)


def _count(change: int) -> None:
    """The function that torch's asks is another one as long as any thread captures."""
    global _capturing_threads
    with _LOCK:
        _capturing_threads += change
        torch.cuda.graphs._cuda_isCurrentStreamCapturing = (
            _answer if _capturing_threads else _is_capturing
        )


def _answer() -> bool:
    asking = sys._getframe(
        2
    ).f_code.co_filename  # whoever calls torch.cuda.is_current_stream_capturing
    return (not _HERE.captures or asking.startswith(_KNOWING)) and bool(_is_capturing())


STREAMS = 32  # torch hands out streams of one pool in turn: this many differ


class CublasWorkspaces:
    """A capture stream, and the workspaces of the host's and autograd's handles on it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle = torch.cuda.graph_pool_handle()
        self._claimed = False
        for _ in range(STREAMS):
            self.stream = torch.cuda.Stream(device)
            if self._takes_both():
                return
        # Every stream had workspaces before, in memory of modules that are gone or not ours: let
        # torch forget them.
        clear_cublas_workspaces()
        self.ensure()
        if not self.nbytes():
            raise RuntimeError(
                f"cuBLAS takes no workspace of packgraph's on {device}: graphs would write to "
                "memory "
                "that may be freed under them. Does CUBLAS_WORKSPACE_CONFIG say :0:0, or is "
                "another "
                "library setting workspaces?"
            )

    def _takes_both(self) -> bool:
        """Makes the workspaces of both handles on the stream; returns whether both are new. One may
        have existed before."""
        sizes = [self.nbytes()]
        for backward in (False, True):
            self.ensure(backward)
            sizes.append(self.nbytes())
        return sizes[0] < sizes[1] < sizes[2]

    def ensure(self, backward: bool = True) -> None:
        """Make the workspaces that are missing: the host's, and with `backward` autograd's. Not
        inside a capture."""
        index = self.device.index
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream), torch.enable_grad():
            torch._C._cuda_beginAllocateToPool(
                index, self.handle
            )  # of all threads: autograd has its own
            try:
                matrix = torch.zeros(
                    16, 16, dtype=torch.bfloat16, device=self.device, requires_grad=True
                )
                product = torch.addmm(
                    matrix[0], matrix, matrix
                ).sum()  # by both of cuBLAS's interfaces
                if backward:
                    product.backward()
            finally:
                torch._C._cuda_endAllocateToPool(index, self.handle)
                if (
                    self._claimed
                ):  # each beginning claims the pool once more; the first claim is kept
                    torch._C._cuda_releasePool(index, self.handle)
        if not self._claimed:
            self._claimed = True
            weakref.finalize(self, torch._C._cuda_releasePool, index, self.handle).atexit = False

    def segments(self) -> list[dict[str, object]]:
        """The allocator's segments that hold the workspaces."""
        return [
            s
            for s in torch.cuda.memory_snapshot()
            if tuple(s["segment_pool_id"]) == tuple(self.handle)
        ]

    def nbytes(self) -> int:
        """Bytes in use by workspaces in the pool."""
        return sum(
            block["size"]
            for segment in self.segments()
            for block in segment["blocks"]  # type: ignore[attr-defined]
            if block["state"] == "active_allocated"
        )
