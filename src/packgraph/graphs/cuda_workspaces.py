"""Memory that cuBLAS works in, owned for as long as graphs read it.

torch keeps one workspace per cuBLAS handle and stream, a handle per thread, and graphs bake its address. That memory
belongs to a map of torch's own, which anybody may clear: `torch.compile(mode="reduce-overhead")` does so around each of
its captures, and the allocator may then unmap what the graphs of others still write to (an illegal memory access at
their next replay).

The invariant: workspaces of a capture stream lie in a memory pool that is kept beside the graphs, so they stay mapped,
and nothing else is ever placed there. Whoever clears torch's map gives the block back to that pool; the next capture
finds it there again, at the same address.
"""
from collections.abc import Callable
from typing import Any

import torch

STREAMS = 32  # torch hands out streams of one pool in turn: this many differ


class CublasWorkspaces:
    """A capture stream, and the workspaces of the host's and autograd's handles on it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.pool = torch.cuda.MemPool()
        for _ in range(STREAMS):
            self.stream = torch.cuda.Stream(device)
            self.ensure()
            if self.nbytes():
                return
        # Every stream had a workspace before, in memory that is not ours: let torch forget them.
        torch._C._cuda_clearCublasWorkspaces()
        self.ensure()
        if not self.nbytes():
            raise RuntimeError(f"cuBLAS takes no workspace of packgraph's on {device}: graphs would write to memory "
                               "that may be freed under them. Is another library setting cuBLAS workspaces?")

    def ensure(self) -> None:
        """Make the workspaces that are missing. To be called outside of captures."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream), torch.enable_grad():
            start = torch.zeros((), device=self.device, requires_grad=True)
            _OnBothThreads.apply(start, self._products).backward()

    def nbytes(self) -> int:
        """Bytes in use by workspaces in the pool."""
        return sum(block["size"] for segment in self.pool.snapshot() for block in segment["blocks"]
                   if block["state"] == "active_allocated")

    @torch.no_grad()
    def _products(self) -> None:
        """Products that take a workspace, of either of cuBLAS's interfaces, placed in the pool."""
        with torch.cuda.use_mem_pool(self.pool, self.device):
            matrix = torch.zeros(16, 16, dtype=torch.bfloat16, device=self.device)
            torch.addmm(matrix[0], matrix, matrix)
            torch.mm(matrix, matrix)


class _OnBothThreads(torch.autograd.Function):
    """Runs a function on this thread in the forward, and on autograd's thread of the device in the backward."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, run: Callable[[], None]) -> torch.Tensor:
        run()
        ctx.run = run
        return start.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.run()
        return gradient, None
