"""Steps that are made ahead are the same steps, and a run on shards is the run on their source."""

import dataclasses

import pytest
from shardkit import shards_of, write_rows
from trainkit import CAPACITIES, CPU, RandomPacks, StopAfter, ended, equal, state_of, tiny, trainer

from packgraph.train.data import (
    DataConfig,
    DataError,
    Microbatches,
    build_tokenizer,
    open_documents,
)
from packgraph.train.feed import MicrobatchAssignment, StepFeed
from packgraph.train.metrics import METRICS, read_metrics


def stream_of(config):
    return Microbatches(config, open_documents(config), build_tokenizer(config), CAPACITIES)


def feed_of(config, ahead, sharing=None):
    return StepFeed(stream_of(config), 60, sharing or MicrobatchAssignment(), CPU, ahead)


def run_of(folder, data, graph=False, **run):
    config = dataclasses.replace(tiny(graph, steps=8, **run), data=data)
    return trainer(folder, config, stream_of(data))


def losses(folder):
    return [row["loss"] for row in read_metrics(folder / METRICS)]


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", 40)


@pytest.mark.parametrize("graph", [False, True])
def test_a_run_on_shards_is_bitwise_the_run_on_their_source(rows, tmp_path, graph):
    source = state_of(ended(run_of(tmp_path / "source", rows, graph))[0])
    shards = shards_of(rows, tmp_path / "folder")
    run, summary = ended(run_of(tmp_path / "shards", shards, graph))
    assert losses(tmp_path / "shards") == losses(tmp_path / "source")
    equal(state_of(run), source)
    assert 0 <= summary["data_wait_fraction"] < 1 and summary["documents"]["packed"] > 20


def mixture(tmp_path):
    for name in ("a", "b"):
        shards_of(write_rows(tmp_path / f"{name}.jsonl", 30, seed=ord(name)), tmp_path / name)
    weights = tuple(f"{tmp_path / name}={weight}" for name, weight in (("a", 2), ("b", 1)))
    return DataConfig(source="shards", mixture=weights, window=16, overlong="split")


def test_a_run_on_a_mixture_goes_on_bitwise_in_the_middle_of_an_epoch(tmp_path):
    data = mixture(tmp_path)
    straight = run_of(tmp_path / "straight", dataclasses.replace(data, prefetch=0))
    expected = state_of(ended(straight)[0])
    assert ended(run_of(tmp_path / "run", data), StopAfter(3))[1]["steps"] == 3
    resumed, _ = ended(run_of(tmp_path / "run", data), resume=True)
    equal(state_of(resumed), expected)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert resumed.feed.state_dict() == straight.feed.state_dict()


def tokens_of(step):
    return [batch.tokens.tolist() for batch in step.share]


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_feed_is_where_its_last_step_left_it_whatever_was_made_ahead(rows, ahead):
    plain, feed = feed_of(rows, 0), feed_of(rows, ahead)
    for number in range(12):
        expected, found = plain.take(), feed.take()
        feed.go_on()
        assert tokens_of(expected) == tokens_of(found) and len(found.packs)
        assert feed.state_dict() == plain.state_dict() and feed.counts == plain.counts
        if number == 5:
            feed.load_state_dict(feed.state_dict())
        if number == 8:
            state = feed.state_dict()
            feed.take()
            feed.go_on()
            feed.load_state_dict(state)
    feed.close()


def test_the_end_of_the_data_is_a_step_without_packs(rows):
    once = dataclasses.replace(rows, epochs=1)
    plain, feed = feed_of(once, 0), feed_of(once, 2)
    while (expected := plain.take()).packs:
        assert tokens_of(expected) == tokens_of(feed.take())
        feed.go_on()
    assert not feed.take().packs and not feed.take().packs
    assert feed.counts == plain.counts


def test_an_error_comes_in_the_place_of_the_step_that_met_it():
    packs = RandomPacks(bad=9)
    feed = StepFeed(packs, 60, MicrobatchAssignment(), CPU, ahead=3)
    with pytest.raises(DataError, match="bad document"):
        list(iter(feed.take, None))
    assert 4 <= feed.state_dict()["position"] <= 9  # of the last whole step
    feed.close()


def test_replicas_share_a_step_out_whole(rows, tmp_path):
    shards = dataclasses.replace(shards_of(rows, tmp_path / "folder"), overlong="drop")
    whole = feed_of(shards, 0)
    parts = [feed_of(shards, 2, MicrobatchAssignment(2, replica)) for replica in range(2)]
    for _ in range(6):
        step, shares = whole.take(), [feed.take() for feed in parts]
        assert [fed.loss_tokens for fed in shares] == [step.loss_tokens] * 2
        assert sum(len(fed.share) for fed in shares) == len(step.share)
        found = sorted(batch.tokens.tolist() for fed in shares for batch in fed.share)
        assert found == sorted(tokens_of(step))
