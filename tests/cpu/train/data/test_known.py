"""Documents that are looked up many at a time give the packs and the states of documents that are
looked up one by one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from shardkit import shards_of, write_rows

from packgraph.packing.capacity import Capacity
from packgraph.parallel.context.request import ContextRequest
from packgraph.train.data import (
    DataError,
    Microbatches,
    PlannedSteps,
    build_tokenizer,
    open_documents,
    order,
)
from packgraph.train.data.held_out import split
from packgraph.train.data.order import WeightedSource
from packgraph.train.data.shards import MANIFEST, Shard
from packgraph.train.data.source import StoredSource
from packgraph.train.run_files import read_json, write_json

CAPACITIES = (Capacity(16, 2), Capacity(24, 4))
KINDS = ("folder", "share", "mixture")


class OneByOne:
    """A source without lengths of many documents."""

    def __init__(self, source):
        self._source = source
        if isinstance(source, WeightedSource):
            self.parts = source.parts

    def __len__(self):
        return len(self._source)

    def __getitem__(self, index):
        return self._source[index]

    def __getattr__(self, name):
        if name in ("lengths", "made", "parts"):
            raise AttributeError(name)
        return getattr(self._source, name)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """By kind the config and the source."""
    monkeypatch.setattr(order, "LOOKED_UP", 5)  # many chunks, also broken off by epochs
    names = ("first", "second")
    rows = [write_rows(tmp_path / f"{name}.jsonl", 60, seed=len(name)) for name in names]
    folders = [shards_of(one, tmp_path / name) for one, name in zip(rows, names, strict=True)]
    mixture = replace(
        folders[0], path=None, mixture=tuple(f"{one.path}={n + 1}" for n, one in enumerate(folders))
    )
    whole = open_documents(folders[0])
    return {
        "folder": (folders[0], whole),
        "share": (folders[0], split(whole, 0.3).training),
        "mixture": (mixture, open_documents(mixture)),
    }


def opened(config, source, capacities=CAPACITIES):
    return Microbatches(config, source, build_tokenizer(config), capacities)


def facts(pack):
    return pack.capacity, pack.num_documents, pack.num_tokens, pack.num_loss_tokens


@pytest.mark.parametrize("overlong", ["split", "drop"])
@pytest.mark.parametrize("kind", KINDS)
def test_packs_and_states_are_those_of_one_by_one(sources, kind, overlong):
    config, source = sources[kind]
    config = replace(config, overlong=overlong)
    ours, theirs = opened(config, source), opened(config, OneByOne(source))
    assert isinstance(source, StoredSource) and not isinstance(OneByOne(source), StoredSource)
    for _ in range(120):  # several epochs
        (one,), (other,) = ours.plan_step(1), theirs.plan_step(1)
        assert facts(one) == facts(other)
        assert torch.equal(one.load().data, other.load().data)
        assert ours.state_dict() == theirs.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_on_the_other_way(sources, kind):
    config, source = sources[kind]
    first, second = opened(config, source), opened(config, OneByOne(source))
    for _ in range(17):
        next(first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    third = opened(config, source)
    next(third)
    third.load_state_dict(second.state_dict())
    for _ in range(60):
        packs = [next(stream) for stream in (first, second, third)]
        assert all(torch.equal(packs[0].data, pack.data) for pack in packs[1:])


def test_planned_steps_are_those_of_one_by_one(sources):
    config, source = sources["folder"]
    request = ContextRequest(world=2, tokens=16, sizes=(1, 2), places=(4, 64), microsteps=3)
    ours, theirs = (
        PlannedSteps(config, one, build_tokenizer(config), [Capacity(32, 64)], request)
        for one in (source, OneByOne(source))
    )
    for _ in range(12):
        steps = ours.plan_step(), theirs.plan_step()
        assert list(map(facts, steps[0])) == list(map(facts, steps[1]))
        assert all(
            torch.equal(one.load().data, other.load().data)
            for one, other in zip(*steps, strict=True)
        )
        assert ours.state_dict() == theirs.state_dict()


def test_documents_are_looked_up_where_they_are_read_alone(sources, monkeypatch):
    config, source = sources["folder"]
    stream = opened(config, source, [Capacity(64, 8)])
    seen = []
    row = Shard.row
    monkeypatch.setattr(Shard, "row", lambda *given: seen.append(given) or row(*given))
    packs = [pack for _ in range(10) for pack in stream.plan_step(1)]
    before, position = len(seen), stream.state_dict()["position"]
    assert before < position / 2 + 5  # those of several documents, and of none
    packs[0].load()
    assert before < len(seen) <= before + packs[0].num_documents


def test_a_document_that_is_not_what_was_planned_is_refused(sources, monkeypatch):
    config, source = sources["folder"]
    (pack,) = opened(config, source, [Capacity(64, 8)]).plan_step(1)
    row = Shard.row
    monkeypatch.setattr(
        Shard, "row", lambda *given: tuple(one.part(0, len(one) - 1) for one in row(*given))
    )
    with pytest.raises(DataError, match=r"document [0-9]+: damaged: it has not [0-9]+ tokens"):
        pack.load()


def test_a_folder_of_another_tokenizer_is_refused_in_a_mixture(sources):
    config, _ = sources["mixture"]
    path = Path(config.weights().popitem()[0]) / MANIFEST
    write_json(path, {**read_json(path), "tokenizer": "other", "tokenizer_name": "other"})
    with pytest.raises(DataError, match=r"tokenized with other .* not with data\.tokenizer"):
        opened(config, open_documents(config)).plan_step(40 * 64)
