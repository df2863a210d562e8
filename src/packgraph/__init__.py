"""packgraph: train on packed variable-length documents through CUDA graphs.

    capacity = packgraph.Capacity(tokens=512, documents=32)
    packs = packgraph.pack(documents, [capacity])
    graphed = packgraph.graph(module, capacities=[capacity])
    loss = graphed(packs[0])
"""
from packgraph.graphs.errors import CaptureError as CaptureError
from packgraph.graphs.fallback import eager as eager
from packgraph.graphs.graphed import graph as graph
from packgraph.packing.batch import PackedBatch as PackedBatch
from packgraph.packing.capacity import Capacity as Capacity
from packgraph.packing.pack import pack as pack

__all__ = ["Capacity", "CaptureError", "PackedBatch", "eager", "graph", "pack"]
__version__ = "0.1.0"
