"""The ways of running forward and backward of one microbatch, all on the same model and the same gradients."""
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from packgraph.bench.compiled import CompiledStack
from packgraph.graphs.graphed import GraphedModule, graph
from packgraph.models.stack import DecoderStack
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

STEP_WAYS = ("eager", "compile", "reduce-overhead", "layer", "chunk", "layer+compile", "chunk+compile")
EXPECTED_FALLBACKS = {"warm-up": 1}


class Way:
    """One way of running a microbatch. name: one of STEP_WAYS."""

    def __init__(self, name: str, call: Callable[[PackedBatch], Tensor], graphed: GraphedModule | None = None) -> None:
        self.name, self._call, self.graphed = name, call, graphed

    def run(self, batch: PackedBatch) -> Tensor:
        """Forward and backward; the loss, float32 []."""
        if self.name == "reduce-overhead":
            # Says that nothing of the call before is needed any more, so that its memory may be written over.
            torch.compiler.cudagraph_mark_step_begin()
        loss = self._call(batch)
        loss.backward()
        return loss.detach()

    def facts(self) -> dict[str, Any]:
        """What capturing and compiling has cost: seconds, bytes that the pools hold, and pieces of compiled code."""
        if self.graphed is None:
            return {"capture_seconds": None, "pool_bytes": None, "compiled": None}
        stats = self.graphed.stats
        return {"capture_seconds": round(stats.capture_seconds, 3), "pool_bytes": stats.pool_bytes,
                "compiled": stats.compiled}

    def complaint(self) -> str | None:
        """Why the times are not those of this way, if microbatches ran eagerly after all."""
        if self.graphed is None or dict(self.graphed.stats.fallbacks) == EXPECTED_FALLBACKS:
            return None
        return f"microbatches ran eagerly: {dict(self.graphed.stats.fallbacks)}"

    def close(self) -> None:
        """Free the graphs."""
        if self.graphed is not None:
            self.graphed.close()


def make_way(name: str, model: DecoderStack, capacity: Capacity) -> Way:
    """The way called `name` for microbatches of `capacity`. Raises what torch raises where it cannot run."""
    device = next(model.parameters()).device
    if name == "eager":
        return Way(name, model)
    if name == "compile":
        return Way(name, CompiledStack(model))
    if name == "reduce-overhead":
        if device.type != "cuda":
            raise ValueError("torch.compile's reduce-overhead makes CUDA graphs: there is none on a CPU")
        return Way(name, CompiledStack(model, mode="reduce-overhead"))
    granularity, _, compiled = name.partition("+")
    graphed = graph(model, capacities=[capacity], granularity=granularity, warmup=1, slots=1, strict=True,
                    compile=bool(compiled))
    return Way(name, graphed, graphed)
