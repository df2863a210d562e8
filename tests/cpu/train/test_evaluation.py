"""Evaluations between the steps of a run."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from evalkit import (
    EVALUATED,
    config,
    documents,
    held_out,
    learned,
    made,
    naive_loss,
    perplexity,
    rows,
)
from trainkit import StopAfter, ended, equal, state_of

from packgraph.train.checkpoint.state_file import CheckpointError, checkpoints_by_step
from packgraph.train.checkpoint.writer import best_checkpoint, load_state
from packgraph.train.config.sections import EvalConfig
from packgraph.train.data import DataError, open_documents
from packgraph.train.data.files import OpenedFiles
from packgraph.train.data.held_out import is_held_out, split
from packgraph.train.data.order import SourcePart
from packgraph.train.evaluation import STOPPED_EARLY, Best
from packgraph.train.run_files import read_json
from packgraph.train.run_folder import SUMMARY
from packgraph.train.trainer import COMPLETED

KINDS = {
    "layer": {},
    "chunk": {"granularity": "chunk"},
    "step": {"granularity": "step"},
    "whole update": {"granularity": "step", "optimizer": True},
}
SHARE = EvalConfig(every=2, share=0.2)


def run(folder, options, stop=None, resume=False):
    """A run's trainer and its summary, after it has ended."""
    one = made(folder, replace(options, run=replace(options.run, resume=resume)))
    return ended(one, stop, bool(resume))


@pytest.mark.parametrize(
    "kind",
    [
        "layer",
        pytest.param("chunk", marks=pytest.mark.slow),
        pytest.param("step", marks=pytest.mark.slow),
        "whole update",
    ],
)
def test_a_run_with_evaluations_trains_as_one_without(tmp_path, kind):
    data = documents(tmp_path / "data.jsonl")
    base = config(data, EvalConfig(share=0.2), graph_=KINDS[kind])
    plain, told = run(tmp_path / "plain", base)
    evaluated, _ = run(tmp_path / "evaluated", replace(base, eval=SHARE))
    eager, _ = run(
        tmp_path / "eager", replace(base, eval=SHARE, graph=replace(base.graph, enabled=False))
    )
    equal(state_of(plain), state_of(evaluated))
    equal(state_of(plain), state_of(eager))
    found = {name: rows(tmp_path / name) for name in ("plain", "evaluated", "eager")}
    assert [learned(row) for row in found["plain"]] == [learned(row) for row in found["evaluated"]]
    assert told["replayed"] > 0
    for name in ("evaluated", "eager"):
        due = [row["step"] for row in found[name] if "eval_loss" in row]
        assert due == [2, 4, 6, 8]
    for ours, theirs in zip(found["evaluated"], found["eager"], strict=True):
        for key in ("loss", "gradient_norm", "eval_loss", "eval_perplexity", "eval_tokens"):
            assert ours.get(key) == theirs.get(key), (key, ours["step"])
    assert not any(key in row for row in found["plain"] for key in EVALUATED)


def test_the_loss_is_that_of_one_document_after_another(tmp_path):
    options = config(documents(tmp_path / "data.jsonl"), SHARE)
    one, summary = run(tmp_path / "run", options)
    (model,) = one.model.chunks
    expected, labels = naive_loss(model, [(options, held_out(options))])
    row = rows(tmp_path / "run")[-1]
    assert row["eval_tokens"] == labels
    # Sums of float32 in another order.
    assert row["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert row["eval_perplexity"] == pytest.approx(perplexity(row["eval_loss"]), rel=1e-12)
    last = summary["evaluation"]["last"]
    assert last["eval_loss"] == row["eval_loss"]
    assert summary["evaluation"]["evaluations"] == 4


def test_evaluations_replay_graphs_once_there_are_any(tmp_path):
    options = config(documents(tmp_path / "data.jsonl"), SHARE, graph_={"warmup": 3})
    one = made(tmp_path / "run", options)
    counts = []
    evaluate = one.executor.evaluate

    def counted(batches):
        before = one.executor.totals()
        found = evaluate(batches)
        after = one.executor.totals()
        replayed = after["replayed"] - before["replayed"]
        counts.append((one.step, len(batches), replayed, after["fallbacks"]))
        return found

    one.executor.evaluate = counted
    _, summary = ended(one)
    last = sum(packs for step, packs, *_ in counts if step == 8)
    assert summary["evaluation"]["replayed"] == last and not summary["evaluation"]["fallbacks"]
    assert {step for step, *_ in counts} == {2, 4, 6, 8}
    for step, packs, replayed, fallbacks in counts:
        assert replayed == (0 if step == 2 else packs), step
        assert set(fallbacks) <= {"warm-up"}


def test_losses_of_sources_are_told_apart_and_add_up(tmp_path):
    names = [
        documents(tmp_path / f"{name}.jsonl", count, seed, name)
        for name, count, seed in (("abc", 20, 1), ("xyzuvw", 12, 2))
    ]
    data = documents(tmp_path / "data.jsonl")
    evaluation = EvalConfig(every=4, path=tuple(names))
    one, _ = run(tmp_path / "run", config(data, evaluation, graph=False))
    row, (model,) = rows(tmp_path / "run")[-1], one.model.chunks
    total = labels = 0
    for name in names:
        options = config(name)
        expected, count = naive_loss(model, [(options, open_documents(options.data))])
        assert row[f"eval_loss/{name}"] == pytest.approx(expected, rel=1e-5)
        total, labels = total + row[f"eval_loss/{name}"] * count, labels + count
    assert row["eval_tokens"] == labels
    assert row["eval_loss"] == pytest.approx(total / labels, rel=1e-12)
    text = (tmp_path / "log-run-0").read_text()
    assert "evaluation loss" in text and names[0] in text


def test_documents_that_are_held_out_are_never_trained_on(tmp_path):
    data = documents(tmp_path / "data.jsonl", 50)
    options = config(data, SHARE)
    every = open_documents(options.data)
    texts = {every[index].where for index in range(len(every))}
    seen = []
    for seed in (0, 1):
        ours = replace(options, data=replace(options.data, seed=seed))
        one = made(tmp_path / f"run{seed}", ours)
        source = one.microbatches._source
        trained = {source[index].where for index in range(len(source))}
        held = held_out(ours)
        evaluated = {held[index].where for index in range(len(held))}
        assert trained | evaluated == texts and not trained & evaluated
        assert 4 <= len(evaluated) <= 16
        seen.append(evaluated)
        one.close()
    assert seen[0] == seen[1]


def test_what_is_held_out_depends_on_the_place_alone():
    many = is_held_out(np.arange(100_000), 0.05)
    assert abs(many.mean() - 0.05) < 0.003
    assert (is_held_out(np.arange(1000), 0.05) == many[:1000]).all()
    larger = is_held_out(np.arange(100_000), 0.1)
    assert (larger | ~many).all(), "a larger share holds out the same ones, and more"
    assert not is_held_out(np.arange(1000), 0.0).any()


class _Parts(OpenedFiles):
    """A source of two parts without documents to read."""

    def __init__(self, *sizes):
        super().__init__()
        self.parts = [SourcePart(size, weight) for weight, size in enumerate(sizes, 1)]

    def __len__(self):
        return sum(part.documents for part in self.parts)

    def __getitem__(self, index):
        return index


def test_every_part_of_a_mixture_gives_its_share():
    training, held = split(_Parts(100, 300), 0.1, ["web", "code"])
    indices = {name: [own[index] for index in range(len(own))] for name, own in held.items()}
    assert max(indices["web"]) < 100 <= min(indices["code"])
    assert [part.weight for part in training.parts] == [1, 2]
    assert [part.documents for part in training.parts] == [
        100 - len(indices["web"]),
        300 - len(indices["code"]),
    ]
    left = {training[index] for index in range(len(training))}
    assert left.isdisjoint(indices["web"] + indices["code"]) and len(left) == len(training)
    with pytest.raises(DataError, match=r"holds out 0 of the 3 documents of code: raise it"):
        split(_Parts(1000, 3), 0.01, ["web", "code"])


def test_a_limit_takes_the_same_documents_every_time(tmp_path):
    data = documents(tmp_path / "data.jsonl")
    limited = replace(SHARE, tokens=60)
    found = []
    for number in (0, 1):
        run(tmp_path / f"run{number}", config(data, limited, graph=False, steps=4))
        found.append([row.get("eval_tokens") for row in rows(tmp_path / f"run{number}")])
    assert found[0] == found[1] and 30 < found[0][1] < 90
    run(tmp_path / "whole", config(data, SHARE, graph=False, steps=4))
    assert rows(tmp_path / "whole")[1]["eval_tokens"] > found[0][1]


def _falling(one, losses):
    """Let the evaluations of a run find these losses."""
    sums = iter(losses)
    one.evaluation._sums = lambda: ({"data": [10 * next(sums)]}, {"data": 10})


def test_the_best_checkpoint_is_kept_and_named(tmp_path):
    data = documents(tmp_path / "data.jsonl")
    options = config(data, SHARE, graph=False, keep_checkpoints=1, steps=12)
    one = made(tmp_path / "run", options)
    _falling(one, [3.0, 2.0, 2.5, math.nan, 2.0, 2.1])
    _, summary = ended(one)
    folder = tmp_path / "run" / "checkpoints"
    assert best_checkpoint(folder).name == "step-00000004"
    assert [path.name for path in checkpoints_by_step(folder)] == ["step-00000012", "step-00000004"]
    assert load_state(best_checkpoint(folder))[1]["evaluation"]["loss"] == 2.0
    found = summary["evaluation"]
    assert (found["step"], found["loss"], found["in_vain"]) == (4, 2.0, 4)
    assert [row.get("eval_loss", 0) for row in rows(tmp_path / "run")][7] is None
    assert summary["ended"] == COMPLETED


def test_a_run_goes_on_from_the_best_checkpoint(tmp_path):
    data = documents(tmp_path / "data.jsonl")
    options = config(data, SHARE, graph=False, steps=8, keep_checkpoints=2)
    one = made(tmp_path / "run", options)
    _falling(one, [3.0, 2.0, 2.5, 2.6])
    ended(one)
    tensors = state_of(one)
    again, _ = run(tmp_path / "run", options, resume="best")
    equal(tensors, state_of(again))
    found = [row["eval_loss"] for row in rows(tmp_path / "run") if "eval_loss" in row]
    assert found[:2] == [3.0, 2.0] and len(found) == 4 and found[2] > 3, "the last two are new"
    empty = made(
        tmp_path / "other",
        replace(options, eval=EvalConfig(), run=replace(options.run, resume="best")),
    )
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        empty.resume()
    empty.close()


def test_a_run_stops_early_and_goes_on_when_asked(tmp_path):
    data = documents(tmp_path / "data.jsonl")
    options = config(data, replace(SHARE, patience=2), graph=False, steps=12)
    one = made(tmp_path / "run", options)
    _falling(one, [3.0, 2.0, 2.5, 2.0, 1.0])
    _, summary = ended(one)
    assert summary["ended"] == f"{STOPPED_EARLY}: no better evaluation since step 4"
    assert one.step == 8 == summary["steps"] and "exit_code" not in summary
    assert read_json(tmp_path / "run" / SUMMARY)["evaluation"]["in_vain"] == 2

    again, summary = run(tmp_path / "run", options, resume=True)
    assert again.step == 8 and summary["ended"].startswith(STOPPED_EARLY)
    more, summary = run(tmp_path / "run", replace(options, eval=SHARE), resume=True)
    assert more.step == 12 and summary["ended"] == COMPLETED
    assert summary["evaluation"]["evaluations"] == 6


def test_a_resumed_run_evaluates_as_one_that_never_stopped(tmp_path):
    data = documents(tmp_path / "data.jsonl")
    options = config(data, replace(SHARE, every=3), steps=9, checkpoint_every=5)
    whole, told = run(tmp_path / "whole", options)
    run(tmp_path / "run", options, StopAfter(4))
    resumed, summary = run(tmp_path / "run", options, resume=True)
    equal(state_of(whole), state_of(resumed))
    found = [
        [(*learned(row)[:4], row.get("eval_loss")) for row in rows(tmp_path / name)]
        for name in ("whole", "run")
    ]
    assert found[0] == found[1]
    for key in ("evaluations", "loss", "step", "in_vain"):
        assert summary["evaluation"][key] == told["evaluation"][key]


def test_other_documents_begin_a_best_loss_of_their_own(tmp_path):
    data = documents(tmp_path / "data.jsonl")
    paths = [(documents(tmp_path / f"{seed}.jsonl", 9, seed),) for seed in (1, 2)]
    options = config(data, EvalConfig(every=2, path=paths[0]), graph=False, steps=4)
    run(tmp_path / "run", options)
    longer = replace(options, run=replace(options.run, steps=6))
    longer = replace(longer, eval=EvalConfig(every=2, path=paths[1]))
    _, summary = run(tmp_path / "run", longer, resume=True)
    assert summary["evaluation"]["evaluations"] == 1
    assert "the best loss begins anew" in (tmp_path / "log-run-0").read_text()


def test_another_share_is_another_run(tmp_path):
    data = documents(tmp_path / "data.jsonl")
    options = config(data, SHARE, graph=False, steps=4)
    run(tmp_path / "run", options)
    other = replace(options, eval=replace(SHARE, share=0.3))
    with pytest.raises(DataError, match="other data than before"):
        run(tmp_path / "run", other, resume=True)


def test_a_bad_document_ends_the_run_with_its_last_step_written(tmp_path):
    data = documents(tmp_path / "data.jsonl")
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"text": "a" * 500}) + "\n")
    with pytest.raises(DataError, match=r"50\d tokens"):
        run(tmp_path / "run", config(data, EvalConfig(every=2, path=(str(bad),)), graph=False))
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
    assert len(checkpoints_by_step(tmp_path / "run" / "checkpoints")) == 1


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({"every": 2}, ["needs documents to evaluate on"]),
        ({"share": 0.1, "every": 2, "path": ("a",)}, ["give one of them"]),
        ({"share": 1.0}, ["share must lie in"]),
        ({"patience": 3}, ["they need every"]),
        ({"every": -1, "tokens": -1}, ["every must not", "tokens must not"]),
        ({"every": 1, "path": ("a", "a")}, ["twice"]),
    ],
)
def test_what_cannot_be_is_refused_with_all_reasons(options, reasons):
    with pytest.raises(ValueError) as caught:
        EvalConfig(**options)
    assert all(reason in str(caught.value) for reason in reasons)


def test_better_is_lower_and_finite():
    best = Best("x")
    for step, loss in enumerate([math.inf, 3.0, 3.0, math.nan, 2.0]):
        best.add(step, loss)
    assert (best.loss, best.step, best.in_vain, best.evaluations) == (2.0, 4, 0, 5)
