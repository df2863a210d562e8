"""packgraph: train on packed variable-length documents through CUDA graphs.

    capacity = packgraph.Capacity(tokens=512, documents=32)
    packs = packgraph.pack(documents, [capacity])
    graphed = packgraph.graph(module, capacities=[capacity])
    loss = graphed(packs[0])

The names are imported at their first use: the command line is there at once and can end on Ctrl-C,
although importing torch takes seconds.
"""

import difflib
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packgraph.bench.trial import try_module as try_module
    from packgraph.graphs.errors import CaptureError as CaptureError
    from packgraph.graphs.errors import PackgraphWarning as PackgraphWarning
    from packgraph.graphs.fallback import Stats as Stats
    from packgraph.graphs.fallback import eager as eager
    from packgraph.graphs.graphed import GraphedModule as GraphedModule
    from packgraph.graphs.graphed import control as control
    from packgraph.graphs.graphed import graph as graph
    from packgraph.graphs.stages import Stage as Stage
    from packgraph.models.recompute import recompute as recompute
    from packgraph.offloading.api import offload as offload
    from packgraph.offloading.marks import offload_block as offload_block
    from packgraph.ops.attention.api import packed_attention as packed_attention
    from packgraph.ops.log_probabilities import logprobs as logprobs
    from packgraph.ops.loss import linear_cross_entropy as linear_cross_entropy
    from packgraph.packing.batch import PackedBatch as PackedBatch
    from packgraph.packing.buckets.planner import plan_buckets as plan_buckets
    from packgraph.packing.capacity import Capacity as Capacity
    from packgraph.packing.pack import PackReport as PackReport
    from packgraph.packing.pack import pack as pack
    from packgraph.packing.pack import pack_stream as pack_stream
    from packgraph.parallel.replicate import replicate as replicate
    from packgraph.parallel.shard import shard as shard
    from packgraph.verification.module import verify as verify

__all__ = [
    "Capacity",
    "CaptureError",
    "GraphedModule",
    "PackReport",
    "PackedBatch",
    "PackgraphWarning",
    "Stage",
    "Stats",
    "control",
    "eager",
    "graph",
    "linear_cross_entropy",
    "logprobs",
    "offload",
    "offload_block",
    "pack",
    "pack_stream",
    "packed_attention",
    "plan_buckets",
    "recompute",
    "replicate",
    "shard",
    "try_module",
    "verify",
]
__version__ = "0.1.0"

_HOMES = {
    "Capacity": "packing.capacity",
    "CaptureError": "graphs.errors",
    "GraphedModule": "graphs.graphed",
    "PackReport": "packing.pack",
    "PackedBatch": "packing.batch",
    "PackgraphWarning": "graphs.errors",
    "Stage": "graphs.stages",
    "Stats": "graphs.fallback",
    "control": "graphs.graphed",
    "eager": "graphs.fallback",
    "graph": "graphs.graphed",
    "linear_cross_entropy": "ops.loss",
    "logprobs": "ops.log_probabilities",
    "offload": "offloading.api",
    "offload_block": "offloading.marks",
    "pack": "packing.pack",
    "pack_stream": "packing.pack",
    "packed_attention": "ops.attention.api",
    "plan_buckets": "packing.buckets.planner",
    "recompute": "models.recompute",
    "replicate": "parallel.replicate",
    "shard": "parallel.shard",
    "try_module": "bench.trial",
    "verify": "verification.module",
}


NO_TORCH = (
    "PyTorch is not installed; see https://pytorch.org/get-started/locally for the command that "
    "fits this machine"
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        near = difflib.get_close_matches(name, __all__, n=1)
        # With its name, so that Python adds no hint of its own.
        raise AttributeError(
            f"module 'packgraph' has no attribute {name!r}"
            + (f", did you mean {near[0]}?" if near else ""),
            name=name,
        )
    try:
        value = getattr(importlib.import_module(f"packgraph.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"packgraph.{name}: {NO_TORCH}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
