"""One CUDA graph for forward and backward of a whole microbatch, padded to the largest shape: the
usual recipe.

    batch, hidden, gradient ── copy ──▶ static inputs ──▶ one replay ──▶ .grad, loss

Made by hand from `torch.cuda.graph`, as trainers do it: warm up on another stream, capture once,
copy inputs in. There is one shape, so rows are padded to the most tokens and the most documents,
and the longest document may fill the row.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from packgraph.bench.parts import TimedPart
from packgraph.packing.batch import PackedBatch

WARM_UP_CALLS = 3
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]
Result = TypeVar("Result")


def record_on_cuda(run: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
    """Capture `run` into a graph: (its result, how to replay it)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_CALLS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return out, graph.replay


class WholeGraph:
    """Forward and backward of one microbatch as one graph. Gradients must be there before it is
    made.

    sample: a microbatch of the only capacity. record: makes a function repeatable.
    """

    def __init__(
        self, work: TimedPart, sample: PackedBatch, record: Record = record_on_cuda
    ) -> None:
        self.work, self.capacity = work, sample.capacity
        self.data = sample.data.clone()
        self.batch = PackedBatch(self.data, sample.capacity)
        _, *rest = work.arguments(self.batch)
        self.rest = tuple(
            value.clone().detach().requires_grad_() if isinstance(value, Tensor) else value
            for value in rest
        )
        incoming = work.incoming(self.batch)
        self.incoming = None if incoming is None else incoming.clone()
        began = time.perf_counter()
        self.out, self.replay = record(self._pass)
        self.capture_seconds = time.perf_counter() - began

    def _pass(self) -> Tensor:
        for value in self.rest:
            if isinstance(value, Tensor):
                value.grad = None  # made anew by every pass, where a graph then writes it
        out = self.work.model(self.batch, *self.rest)
        torch.autograd.backward(out, self.incoming)
        return out.detach()

    def run(self, batch: PackedBatch) -> Tensor:
        """Forward and backward of `batch`; what comes out is overwritten by the next call.

        Raises ValueError for a microbatch of another capacity.
        """
        if batch.capacity != self.capacity:
            raise ValueError(
                f"this graph is of {self.capacity}, the microbatch is of {batch.capacity}"
            )
        self.data.copy_(batch.data)
        _, *rest = self.work.arguments(batch)
        with torch.no_grad():
            for static, now in zip(self.rest, rest, strict=True):
                if isinstance(static, Tensor):
                    static.copy_(now)
        incoming = self.work.incoming(batch)
        if self.incoming is not None and incoming is not None:
            self.incoming.copy_(incoming)
        self.replay()
        return self.out
