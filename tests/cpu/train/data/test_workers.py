"""A stream that workers tokenize for is the stream without them: packs, states and errors; and
nothing of them stays."""

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from itertools import islice
from pathlib import Path

import pytest
import torch
from shardkit import write_rows
from trainkit import CAPACITIES as SMALL
from trainkit import StopAfter, ended, equal, state_of, tiny, trainer
from workerkit import Faulty, Mixture, Texts, write_mixed

from packgraph.graphs.errors import PackgraphWarning
from packgraph.packing.capacity import Capacity
from packgraph.parallel.context.request import ContextRequest
from packgraph.parallel.layout import context_sizes
from packgraph.train.config.sections import EvalConfig
from packgraph.train.data import (
    DataConfig,
    DataError,
    Microbatches,
    PlannedSteps,
    build_tokenizer,
    evaluation_stream,
    open_documents,
    open_for_evaluation,
)
from packgraph.train.data.order import DocumentOrder, OrderPlace, SourcePart
from packgraph.train.data.workers import (
    AHEAD,
    BATCH,
    Batch,
    HandedOver,
    TokenizerProcess,
    Work,
)
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.signals import SIGNALS

CAPACITIES = [Capacity(64, 6), Capacity(128, 12), Capacity(128, 40)]
ROOT = Path(__file__).parents[4]


def opened(config, source=None, capacities=CAPACITIES):
    source = open_documents(config) if source is None else source
    return Microbatches(config, source, build_tokenizer(config), capacities)


def with_workers(config, workers):
    return dataclasses.replace(config, workers=workers)


def positions(stream, most=10**9):
    """Each pack with the state after it."""
    return [(pack, json.dumps(stream.state_dict())) for pack in islice(stream, most)]


def same(found, expected):
    assert len(found) == len(expected) > 0
    for (pack, state), (other, other_state) in zip(found, expected, strict=True):
        assert pack.capacity == other.capacity and torch.equal(pack.data, other.data)
        assert state == other_state


def workers():
    return [one for one in multiprocessing.active_children() if "tokenizer" in one.name]


@pytest.fixture
def none_left():
    assert not workers()
    yield
    assert not workers()


@pytest.fixture
def quick_starts(monkeypatch):
    """Workers are forked from a process that has imported all they need, once, and know as little
    of this one as others. Tests of how they start and of signals do without."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["packgraph.train.data.workers", "workerkit"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


def test_packs_and_states_are_those_without_workers_from_every_position(
    tmp_path, none_left, quick_starts
):
    """Also where a share of the documents is held out."""
    config = dataclasses.replace(write_mixed(tmp_path / "rows.jsonl"), epochs=3, window=40)
    options = dataclasses.replace(tiny(), data=config, eval=EvalConfig(every=1, share=0.25))
    training, held_out = open_for_evaluation(
        options, open_documents(config), build_tokenizer(config)
    )
    assert len(training) == 120 - len(held_out["data"]) < 110
    alone, shared = opened(config, training), opened(with_workers(config, 2), training)
    begin = alone.state_dict()
    expected = positions(alone)
    same(positions(shared), expected)
    assert shared.report == alone.report and shared.unlabelled_documents and shared.empty_documents
    assert shared.state_dict() == alone.state_dict()
    # One stream goes back again and again: what was handed out for another position is forgotten.
    for stop in [1, len(expected) - 1, *range(2, len(expected), len(expected) // 12)]:
        shared.load_state_dict(json.loads(expected[stop - 1][1]))
        same(positions(shared, 5), expected[stop : stop + 5])
    shared.load_state_dict(begin)
    same(positions(shared, 3), expected[:3])
    shared.close()
    same(positions(shared, 3), expected[3:6])  # with new processes
    shared.close()
    assert evaluation_stream(with_workers(config, 2)).workers == 0


def test_a_mixture_takes_its_turns_as_without_workers(none_left, quick_starts):
    parts = [SourcePart(30, 0.7), SourcePart(9, 0.2), SourcePart(15, 0.8)]
    config = DataConfig(window=16, overlong="split")
    alone, shared = opened(config, Mixture(parts)), opened(with_workers(config, 1), Mixture(parts))
    expected = positions(alone, 80)
    epochs = [counts[0] for counts in json.loads(expected[-1][1])["parts"]]
    assert len(set(epochs)) > 1 and min(epochs) == 1, epochs
    same(positions(shared, 80), expected)
    for stop in (1, 20, 61):
        shared.load_state_dict(json.loads(expected[stop - 1][1]))
        same(positions(shared, 10), expected[stop : stop + 10])
    shared.close()


def planned_steps(config):
    """Steps with dynamic context parallelism on four ranks, over a mixture."""
    parts = [SourcePart(30, 0.7), SourcePart(25, 0.8)]
    request = ContextRequest(
        world=4, tokens=64, sizes=context_sizes(4), places=(4, 256), microsteps=2
    )
    capacities = [Capacity(256, 8), Capacity(256, 64)]
    source, tokenizer = Mixture(parts), build_tokenizer(config)
    return PlannedSteps(config, source, tokenizer, capacities, request)


def test_planned_steps_over_a_mixture_are_those_without_workers(none_left, quick_starts):
    config = DataConfig(window=8)
    alone, shared = planned_steps(config), planned_steps(with_workers(config, 1))
    begin = shared.state_dict()
    for start in (begin, begin):
        shared.load_state_dict(start)
        alone.load_state_dict(start)
        for _ in range(20):
            for pack, other in zip(shared.next_step(), alone.next_step(), strict=True):
                assert torch.equal(pack.data, other.data)
            assert shared.state_dict() == alone.state_dict()
    shared.close()


def test_coming_places_are_those_of_the_order():
    for parts, epochs in (([SourcePart(7)], 3), ([SourcePart(5, 2.0), SourcePart(3)], None)):
        order = DocumentOrder(parts, seed=5, epochs=epochs)
        order.advance(1, 4)
        coming, found = order.coming(), 0
        while found < 40:
            if order.is_at_end:
                order.begin_epoch()
            if order.is_over:
                assert next(coming[0], None) is None
                break
            assert next(coming[order.turn.place.part]) == order.turn.place
            order.advance(1, 1 + order.turn.place.document)
            found += 1
        assert found == (20 if epochs else 40)


def failure(stream):
    """Packs until an error, and the error."""
    packs = []
    while True:
        try:
            packs.append((next(stream), json.dumps(stream.state_dict())))
        except (DataError, KeyError) as error:
            return packs, error


@pytest.mark.parametrize("kind", ["bad", "bug"])
def test_an_error_of_a_document_is_that_without_workers(none_left, quick_starts, kind, capfd):
    config, source = DataConfig(window=4, overlong="split"), Faulty(kind, faulty=11)
    packs, error = failure(opened(config, source))
    shared = opened(with_workers(config, 1), source)
    found, own = failure(shared)
    same(found, packs)
    assert (type(own), str(own)) == (type(error), str(error))
    # The state is still that before the document: who goes on meets the same error.
    shared.load_state_dict(json.loads(packs[-1][1]))
    assert str(failure(shared)[1]) == str(error)
    shared.close()
    assert not capfd.readouterr().err  # the worker goes on, without words of its own


def test_bad_documents_that_are_skipped_are_counted_once(none_left, quick_starts):
    config = DataConfig(window=4, overlong="split", on_bad="skip", epochs=2)
    source = Faulty("bad", faulty=11)
    alone, shared = opened(config, source), opened(with_workers(config, 1), source)
    same(positions(shared), positions(alone))
    shared.close()
    assert shared.bad == alone.bad and alone.bad.count == 2


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("worker", r"text 11: a worker failed at it \(BadDocumentError: text 11: no good\), but"),
        ("exit", r"a worker that tokenizes ended with exit code 3 .* document \d+ was to come"),
        (
            "kill",
            r"was killed by SIGKILL \(is there enough memory for it\?\); document \d+ .*Resum",
        ),
    ],
)
def test_a_worker_that_fails_alone_ends_the_stream_with_words(none_left, quick_starts, kind, words):
    config, source = DataConfig(window=4, overlong="split"), Faulty(kind, faulty=11)
    shared = opened(with_workers(config, 1), source)
    found, error = failure(shared)
    assert type(error) is DataError
    with pytest.raises(DataError, match=words):
        raise error
    alone = opened(config, source)
    if found:
        same(found, positions(alone, len(found)))
    shared.close()
    # Without workers, the run goes on from where they were lost.
    resumed = opened(config, source)
    if found:
        resumed.load_state_dict(json.loads(found[-1][1]))
    same(positions(resumed, 30), positions(alone, 30))


def test_a_worker_whose_tokenizer_is_another_one_is_not_used(tmp_path, none_left, quick_starts):
    tokenizers = pytest.importorskip("tokenizers")
    file = tmp_path / "tokenizer.json"
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={word: n for n, word in enumerate(alphabet)}, merges=[])
    )
    made.save(str(file))
    stream = opened(DataConfig(tokenizer=str(file), workers=1), Texts())
    file.write_text(file.read_text() + "\n")
    with pytest.raises(DataError, match=r"text \d+: .*tokenizer.json was changed since"):
        next(stream)
    stream.close()


def test_signals_are_left_to_the_parent_from_the_first_moment_on(none_left):
    handed = HandedOver(Work(DataConfig(), Texts(), "bytes"))
    worker = TokenizerProcess(0, handed, 60)
    handed.close()
    for number in SIGNALS:
        os.kill(worker.process.pid, number)
    worker.ask(batch := Batch([OrderPlace(0, 0, 0, 7)], worker))
    worker.receive()
    assert batch.answers[0].where == "text 7" and not worker.asked and not worker.is_lost
    worker.pipe.close()  # a worker that nobody asks ends
    worker.process.join(20)
    assert worker.process.exitcode == 0


def test_a_worker_that_does_not_answer_is_told_and_ends_the_stream(none_left, quick_starts):
    """One that is slow, but answers within the limit, does not."""
    config = dataclasses.replace(DataConfig(window=4, overlong="split"), worker_timeout=4.0)
    stream = opened(with_workers(config, 1), Texts(5000))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PackgraphWarning)  # where its start is slow
        next(stream)
    (worker,) = workers()
    os.kill(worker.pid, signal.SIGSTOP)
    awake = threading.Timer(2.5, os.kill, (worker.pid, signal.SIGCONT))
    awake.start()
    words = rf"process {worker.pid}\) has not answered for 2 s; it has documents \d+, "
    with pytest.warns(PackgraphWarning, match=words):
        positions(stream, AHEAD * BATCH)
    awake.join()
    os.kill(worker.pid, signal.SIGSTOP)
    words = rf"tokenizes \(process {worker.pid}\) did not answer for 4 s .*; document \d+ was to"
    with pytest.warns(PackgraphWarning), pytest.raises(DataError, match=words):
        positions(stream, AHEAD * BATCH)
    stream.close()


def settled(file):
    """Bytes of a file that has not grown for a second."""
    size, since = -1, time.monotonic()
    while time.monotonic() - since < 1:
        if file.stat().st_size != size:
            size, since = file.stat().st_size, time.monotonic()
        time.sleep(0.05)
    return size


def test_workers_read_no_further_ahead_than_is_said(tmp_path, none_left, quick_starts):
    (tmp_path / "reads").touch()
    config = DataConfig(window=1, overlong="split")
    stream = opened(with_workers(config, 2), Texts(5000, tmp_path / "reads"))
    next(stream)
    assert 2 * BATCH < settled(tmp_path / "reads") <= 2 * AHEAD * BATCH
    begin = stream.state_dict()
    for _ in range(5):  # what was handed out for nothing is bounded as well
        stream.load_state_dict(begin)
        next(stream)
    here = 5 * len(begin["waiting"])  # tokenized again by this process
    assert settled(tmp_path / "reads") <= 6 * 2 * AHEAD * BATCH + here
    stream.close()


HOLDER = """
import multiprocessing, os, signal, sys
from workerkit import Texts
from packgraph.graphs.errors import PackgraphWarning
from packgraph.packing.capacity import Capacity
from packgraph.train.data import DataConfig, build_tokenizer, Microbatches
if __name__ == "__main__":
    config = DataConfig(workers=1, overlong="split")
    stream = Microbatches(config, Texts(), build_tokenizer(config), [Capacity(128, 8)])
    next(stream)
    print(*(one.pid for one in multiprocessing.active_children()), flush=True)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "raise":
        raise ValueError("the end")
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("end", "code"), [("kill", -signal.SIGKILL), ("raise", 1)])
def test_workers_end_with_the_process_that_started_them(tmp_path, end, code):
    (tmp_path / "holder.py").write_text(HOLDER)
    paths = [str(ROOT / "src"), str(ROOT / "tests/helpers")]
    done = subprocess.run(
        [sys.executable, tmp_path / "holder.py", end],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)
    assert len(pids) == 1
    said = done.stderr.splitlines()  # nothing of a worker
    assert said[-1:] == (["ValueError: the end"] if end == "raise" else []), done.stderr
    assert done.stderr.count("Traceback") == (end == "raise")


def run_of(folder, data, graph=True):
    config = dataclasses.replace(tiny(graph, steps=8), data=data)
    return trainer(folder, config, opened(data, capacities=SMALL))


def losses(folder):
    return [row["loss"] for row in read_metrics(folder / METRICS)]


class EndOfJob(StopAfter):
    """As StopAfter; a scheduler that ends a job signals every process of it, workers as well."""

    def __bool__(self):
        for worker in workers():
            for number in SIGNALS:
                os.kill(worker.pid, number)
        return super().__bool__()


def test_a_run_goes_on_bitwise_with_other_numbers_of_workers(tmp_path, none_left):
    data = write_rows(tmp_path / "rows.jsonl", 40)
    straight = run_of(tmp_path / "straight", data, graph=False)
    expected = state_of(ended(straight)[0])
    first = run_of(tmp_path / "run", with_workers(data, 2))
    assert first.run(EndOfJob(3))["steps"] == 3
    assert len(workers()) == 2
    first.close()
    assert not workers()
    second = run_of(tmp_path / "run", with_workers(data, 0))
    assert ended(second, StopAfter(2), resume=True)[1]["steps"] == 5
    third, summary = ended(run_of(tmp_path / "run", with_workers(data, 1)), resume=True)
    equal(state_of(third), expected)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert third.feed.state_dict() == straight.feed.state_dict()
    rows = read_metrics(tmp_path / "run" / METRICS)
    # The first step of the process waited until a worker was there.
    assert max(row["data_wait"] for row in rows[5:]) == rows[5]["data_wait"] > 0.5
    assert summary["data_wait_fraction"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": -1}, "workers must be 0 to 1,024, got -1"),
        ({"workers": 2, "source": "shards", "path": "a"}, "source = shards holds tokens"),
        ({"workers": 2, "source": "shards", "mixture": ("a=1",)}, "source = shards holds tokens"),
    ],
)
def test_workers_that_have_nothing_to_do_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        DataConfig(**options)
