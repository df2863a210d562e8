"""Runs whose rows are spread over as many ranks as they need: plans, graphs, one process, data that go on."""
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from distkit import CPU, run_ranks
from rich.console import Console
from trainkit import tiny

from packgraph.packing.capacity import Capacity
from packgraph.packing.document import Document
from packgraph.parallel.collect import collect
from packgraph.parallel.mesh import Layout, context_sizes
from packgraph.train.data import DataConfig, PlannedSteps
from packgraph.train.data.source import SourceDocument
from packgraph.train.dynamic_context import context_request
from packgraph.train.options import ParallelConfig
from packgraph.train.progress import ProgressView
from packgraph.train.signals import StopRequest
from packgraph.train.trainer import Trainer

pytestmark = pytest.mark.dist

TOKENS = 16  # of a rank
STEPS = 5  # two of warm-up
CP2, CP4 = Layout(dp=1, cp=2), Layout(dp=1, cp=4)
CP2_DP2, CP2_PP2, CP2_TP2 = Layout(dp=2, cp=2), Layout(dp=1, cp=2, pp=2), Layout(dp=1, cp=2, tp=2)


class Source:
    """Documents of heavy-tailed lengths: number n depends on n alone. One fills the largest row to its last token."""

    def __init__(self, longest, count=400):
        draw = np.random.default_rng(longest)
        self.lengths = np.minimum(longest, np.maximum(2, draw.lognormal(2.0, 1.2, count).astype(int)))
        self.lengths[7], self.lengths[8:20] = longest, 2

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return SourceDocument(f"document {index}", text=str(index))

    def fingerprint(self):
        return "lengths"


class Tokens:
    """Reads the numbers that `Source` gives as documents."""

    fingerprint, vocab_size = "numbers", 32

    def __init__(self, source):
        self.source = source

    def encode(self, document):
        index = int(document.text)
        tokens = np.random.default_rng(index).integers(32, size=self.source.lengths[index])
        return [Document(tokens)]


def config(layout, steps=STEPS, *, dropout=0.0, waves=3, model=None, dynamic=True, **graph):
    made = tiny(graph=True, steps=steps, checkpoint_every=100)
    shape = dataclasses.replace(made.model, dropout=dropout, num_heads=4, num_kv_heads=2, tie_embeddings=False,
                                **(model or {}))
    capacities = tuple(Capacity(layout.cp * TOKENS, places) for places in (8, 64))
    return dataclasses.replace(
        made, model=shape, graph=dataclasses.replace(made.graph, **{"capacities": capacities} | graph),
        data=DataConfig(window=16),
        parallel=ParallelConfig(dp=layout.dp, pp=layout.pp, cp=layout.cp, tp=layout.tp, ep=layout.ep, expert_room=4.0,
                                dynamic_cp=dynamic),
        run=dataclasses.replace(made.run, tokens_per_step=waves * layout.dp * layout.cp * TOKENS, device="cpu"),
        optimizer=dataclasses.replace(made.optimizer, decay_steps=20))


def stream(settings, world):
    source = Source(settings.graph.capacities[0].tokens)
    return PlannedSteps(settings.data, source, Tokens(source), settings.graph.capacities,
                        context_request(settings, world, CPU))


def go(mesh, folder, settings, resume=False):
    """Run to the end; on rank 0 all tensors whole; this rank's graph counts."""
    view = ProgressView(settings.run.steps, 100, Console(quiet=True))
    run = Trainer(settings, Path(folder), stream(settings, mesh.world), CPU, view, mesh)
    try:
        if resume:
            run.resume()
        run.run(StopRequest())
        return dict(collect(mesh, run.tensors())), run.executor.totals()
    finally:
        run.close()


def ranks(layout, folder, settings, *more):
    layout = dataclasses.replace(layout, contexts=context_sizes(layout.cp))
    world = layout.dp * layout.pp * layout.cp * layout.tp
    return run_ranks(go, world, str(folder), settings, *more, layout=layout, seconds=120.0)


def equal(left, right):
    assert left.keys() == right.keys()
    assert not [name for name in left if not torch.equal(left[name], right[name])]


@pytest.mark.parametrize(("layout", "granularities"), [
    (CP4, ("chunk",)), (CP2_PP2, ("layer",)),
    pytest.param(CP2_DP2, ("layer", "chunk"), marks=pytest.mark.slow),
    pytest.param(CP2_TP2, ("chunk",), marks=pytest.mark.slow)], ids=str)
def test_graphs_equal_eager_bitwise(layout, granularities, tmp_path):
    eager, *_ = ranks(layout, tmp_path / "eager", config(layout, dropout=0.1, enabled=False))
    for granularity in granularities:
        settings = config(layout, dropout=0.1, granularity=granularity)
        graphs = ranks(layout, tmp_path / granularity, settings)
        equal(eager[0], graphs[0][0])
        for _, totals in graphs:
            assert totals["replayed"] >= (STEPS - 2) * 3 and set(totals["fallbacks"]) <= {"warm-up"}
