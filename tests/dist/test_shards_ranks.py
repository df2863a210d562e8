"""Two replicas on shards: each reads the tokens of its own documents, both make the same plans."""

import dataclasses
from collections import Counter
from pathlib import Path

from distkit import run_ranks
from shardkit import shards_of, write_rows
from trainkit import CAPACITIES, tiny, trainer

from packgraph.parallel.layout import Layout
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.data import (
    DataConfig,
    Microbatches,
    build_tokenizer,
    open_documents,
)
from packgraph.train.data.shards import Shard
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.signals import StopRequest

STEPS = 6


def trained(mesh, folder: Path, data: DataConfig):
    """Documents read by this rank, the position in the data, and the losses of the run."""
    read: Counter[tuple[str, int]] = Counter()
    original = Shard.read

    def counted(shard, number):
        read[shard.path.name, int(number)] += 1
        return original(shard, number)

    Shard.read = counted
    config = dataclasses.replace(
        tiny(steps=STEPS, tokens_per_step=200),
        data=data,
        parallel=ParallelConfig(dp=mesh.size("dp")),
    )
    packs = Microbatches(data, open_documents(data), build_tokenizer(data), CAPACITIES)
    run = trainer(folder, config, packs, mesh=mesh)
    run.run(StopRequest())
    state = run.feed.state_dict()
    run.close()
    return read, state, [row["loss"] for row in read_metrics(folder / METRICS)]


def test_two_ranks_read_their_own_documents_alone(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", 400, longest=30)
    # one epoch is longer than the run, so a document that was read twice would be seen
    data = dataclasses.replace(
        shards_of(rows, tmp_path / "shards", rows_per_shard=50), overlong="drop", prefetch=0
    )
    (first, state, losses), (second, other, _) = run_ranks(
        trained, 2, tmp_path / "run", data, layout=Layout(dp=2)
    )
    assert state == other and state["epoch"] == 0
    assert not first.keys() & second.keys() and {*first.values(), *second.values()} == {1}
    assert len(first) + len(second) == state["report"]["documents"]
    assert len(first) > 5 and len(second) > 5 and len(losses) == STEPS
