"""Memory that cuBLAS works in, owned for as long as graphs write to it.

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

import weakref

import torch

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
        torch._C._cuda_clearCublasWorkspaces()
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
        """Whether both handles come to have their workspaces on the stream from here. One may have
        had its own."""
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
