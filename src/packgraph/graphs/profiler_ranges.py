"""Ranges that profilers show around a replay, as `torch.profiler.record_function` makes them.

    packgraph layer 2 forward slot 1 1024x32     what, which pass, which slot, which capacity

`torch.profiler` shows them, and with `torch.autograd.profiler.emit_nvtx` so do tools that read
NVTX. They are of the host alone: a replay's range lies around the launch, never in captured code.
Without a profiler none is made.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler
from torch.utils._pytree import tree_leaves

from packgraph.graphs.backend import Graph
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity, in_short

_NO_RANGE: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


def profiler_range(*words: object) -> contextlib.AbstractContextManager[object]:
    """A range called `packgraph` and `words` while a profiler runs, else nothing. Not for code that
    is captured."""
    if not profiler._is_profiler_enabled:
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


@dataclass(frozen=True)
class ProfiledGraph:
    """A captured graph whose replays are ranges called `name` while a profiler runs."""

    name: str
    graph: Graph

    def replay(self) -> None:
        """Replay the graph."""
        if not profiler._is_profiler_enabled:
            self.graph.replay()
            return
        with profiler.record_function(self.name):
            self.graph.replay()

    def reset(self) -> None:
        """Free the graph."""
        self.graph.reset()
