"""Multi-token prediction over ranks: what one process learns, graphs that are eager bit by bit, and
the same losses of further tokens in the metrics."""

import dataclasses
import random
from pathlib import Path

import pytest
from distkit import run_ranks
from trainkit import CAPACITIES, RandomPacks, close, equal, finished, tiny

from packgraph.models.config import ExpertConfig
from packgraph.packing.pack import pack
from packgraph.parallel.layout import Layout
from packgraph.parallel.pieces import collect
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.validate import validate

EXPERTS = ExpertConfig(count=4, per_token=2, intermediate_size=16, shared=1)
KINDS = {
    "dp": (2, {"dp": 2}, {}),
    "dp sharded": (2, {"dp": 2, "shard": "parameters"}, {}),
    "pp": (2, {"pp": 2}, {}),
    "pp tied": (2, {"pp": 2}, {"tie_embeddings": True}),
    "pp chunks": (2, {"pp": 2, "chunks": 2}, {"num_layers": 4}),
    "tp": (2, {"tp": 2}, {}),
    "tp whole rows": (2, {"tp": 2, "sequence": False}, {"tie_embeddings": True}),
    "cp": (2, {"cp": 2}, {}),
    "cp zigzag": (2, {"cp": 2, "cp_kind": "zigzag"}, {}),
    "ep": (2, {"dp": 2, "ep": 2, "expert_room": 4.0}, {"experts": EXPERTS}),
    "pp tp": (4, {"pp": 2, "tp": 2}, {}),
}
SLOW = {"pp chunks", "tp whole rows", "cp", "pp tp"}


def config(parallel, changes, **graph):
    made = tiny(graph=True, steps=5, checkpoint_every=100)
    model = {"num_heads": 4, "num_kv_heads": 2, "tie_embeddings": False, "dropout": 0.0} | changes
    return dataclasses.replace(
        made,
        model=dataclasses.replace(made.model, **{"mtp_layers": 2} | model),
        parallel=ParallelConfig(**parallel),
        graph=dataclasses.replace(made.graph, **graph),
    )


class Quarters(RandomPacks):
    """Packs whose documents are multiples of 4 tokens, as a row cut in zigzag needs it."""

    def __next__(self):
        draw = random.Random(self.position)
        self.position += 1
        lengths = [4 * draw.randint(1, 5) for _ in range(draw.randint(1, 3))]
        return pack(
            [[draw.randrange(32) for _ in range(length)] for length in lengths], list(CAPACITIES)
        )[0]


def go(mesh, folder, settings):
    packs = Quarters() if settings.parallel.cp_kind == "zigzag" else RandomPacks()
    with finished(Path(folder), settings, packs, mesh=mesh) as run:
        return dict(collect(mesh, run.tensors())), run.executor.totals()


def both(mesh, folder, parallel, changes):
    """With graphs and without."""
    graphs = go(mesh, f"{folder}/graphs", config(parallel, changes, strict=True))
    return graphs, go(mesh, f"{folder}/eager", config(parallel, changes, enabled=False))


def numbers(folder):
    rows = read_metrics(Path(folder) / METRICS)
    return [(row["loss"], row["mtp_loss/1"], row["mtp_loss/2"]) for row in rows]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in KINDS]
)
def test_ranks_learn_what_one_process_does(kind, tmp_path):
    world, parallel, changes = KINDS[kind]
    settings = config(parallel, changes)
    layout = ParallelConfig(**{"dp": 1} | parallel).layout()
    assert validate(settings, "cpu", world=world) == []
    alone = config({"cp_kind": settings.parallel.cp_kind}, changes, enabled=False)
    ((expected, _),) = run_ranks(go, 1, str(tmp_path / "one"), alone, layout=Layout(dp=1))
    found = run_ranks(both, world, str(tmp_path), parallel, changes, layout=layout, seconds=150.0)
    for (graphs, totals), (eager, _) in found:
        equal(graphs, eager)
        assert totals["replayed"] >= 3
    close(found[0][0][0], expected)
    assert numbers(tmp_path / "graphs") == numbers(tmp_path / "eager")
    for ours, theirs in zip(numbers(tmp_path / "graphs"), numbers(tmp_path / "one"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
