"""Steps that go wrong: found by a robust limit, left out, rolled back or the end of the run; the
best checkpoint."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch
from trainkit import StopAfter, ended, equal, state_of, tiny, trainer

from packgraph.train.checkpoint.writer import (
    best_checkpoint,
    checkpoints_by_step,
    latest_checkpoint,
)
from packgraph.train.config.sections import TrainConfig
from packgraph.train.signals import StopRequest
from packgraph.train.spikes import (
    LEAST,
    MOST_IN_A_ROW,
    MOST_RETURNS,
    Limits,
    NonFiniteLossError,
    SpikeError,
    Spikes,
)
from packgraph.train.trainer import Trainer

STEPS = 34
# the number of a pack in step 20 or so: the first steps are what later ones are held against
BAD = 57


def config(policy: str, graph: bool = False, **run: object) -> TrainConfig:
    return tiny(
        graph,
        **{"steps": STEPS, "checkpoint_every": 7, "keep_checkpoints": 2, "on_spike": policy} | run,
    )


def poisoned(run: Trainer, factor: float, bad: range = range(BAD, BAD + 1)) -> Trainer:
    """Let the steps that hold these packs have `factor` times their loss and gradients."""
    runner = run.executor
    original = runner.run_step

    def run_step(batches, *others):
        loss = original(batches, *others)
        position = run.feed.state_dict()["position"]
        if any(position - len(batches) <= number < position for number in bad):
            for gradient in run.optimizer.gradients().values():
                gradient.mul_(factor)
            loss = loss * abs(factor)
        return loss

    runner.run_step = run_step
    return run


def trained(
    folder: Path,
    settings: TrainConfig,
    factor: float,
    stop: StopRequest | None = None,
    resume: bool = False,
    bad: range = range(BAD, BAD + 1),
) -> tuple[Trainer, dict]:
    folder.mkdir(parents=True, exist_ok=True)
    run = poisoned(trainer(folder / "run", settings), factor, bad)
    return ended(run, stop, resume)


def rows(folder: Path) -> list[dict]:
    return [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


def usual(count: int) -> Spikes:
    made = Spikes()
    for step in range(1, count + 1):
        made.add(step, 3.0 + 0.01 * (step % 5), 1.0 + 0.05 * (step % 3))
    return made


def test_limits_are_robust_and_known_two_steps_later():
    assert usual(LEAST - 1).limits(10**6) == Limits()
    known = usual(LEAST)
    assert known.limits(LEAST + 1) == Limits(), "the step before is not known yet"
    limits = known.limits(LEAST + 2)
    assert 3.1 < limits.loss < 6 and 1.2 < limits.norm < 8 and 0 < limits.least_norm < 1e-5
    for step in range(LEAST + 1, LEAST + 6):  # a few that went wrong move the limits by little
        known.add(step, 1e5, 1e5)
    assert known.limits(10**6).loss < 2 * limits.loss


@pytest.mark.parametrize(
    ("loss", "norm", "said"),
    [
        (182054.0, 1.0, "loss 1.8205e\\+05 is far above"),
        (3.0, 60.0, "gradient norm 60 is far above"),
        (math.nan, 1.0, "loss nan"),
        (3.0, math.inf, "norm inf"),
        (3.0, 0.0, "stopped to learn"),
        (3.3, 2.0, None),
    ],
)
def test_what_is_a_spike(loss, norm, said):
    found = usual(40).problem(50, loss, norm)
    if said is None:
        assert found is None
    else:
        assert re.search(said, found)


def test_state_is_json_and_comes_back():
    known = usual(80)
    known.seen = 3
    assert known.is_best(80) and not known.is_best(80)
    again = Spikes.restored(json.loads(json.dumps(known.state())))
    assert (
        again.limits(90) == known.limits(90)
        and again.state() == known.state()
        and again.best_step == 80
    )
    assert Spikes.restored({}).limits(5) == Limits()


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("factor", [1e4, math.nan])
@pytest.mark.few(2)
def test_a_step_that_went_wrong_is_left_out(tmp_path, graph, factor):
    run, summary = trained(tmp_path, config("skip", graph), factor)
    assert summary["spikes"]["skipped"] == 1 and summary["ended"] == "all steps done"
    (left_out,) = [row for row in rows(tmp_path) if row.get("skipped")]
    assert (left_out["loss"] is None) == math.isnan(factor)
    # As if its update had not been there: the same run with an update of nothing, by hand.
    twin = trainer(tmp_path / "twin", config("warn", graph))
    step, update = [0], twin.optimizer.step

    def without(learning_rate, loss=None):
        step[0] += 1
        if step[0] != left_out["step"]:
            return update(learning_rate)
        kept = {name: value.clone() for name, value in twin.tensors().items()}
        norm = update(learning_rate)
        for name, value in twin.tensors().items():
            value.copy_(kept[name])
        return norm

    twin.optimizer.step = without
    ended(twin)
    equal(state_of(run), state_of(twin))


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize(
    "stop_after",
    [20, 22, *(pytest.param(step, marks=pytest.mark.slow) for step in (19, 21, 23, 26, 30))],
)
def test_a_run_that_is_stopped_and_goes_on_is_bitwise_the_one_that_never_stopped(
    tmp_path, policy, stop_after
):
    whole, told = trained(tmp_path / "whole", config(policy), 1e4)
    assert told["spikes"]["skipped" if policy == "skip" else "rolled_back"] == 1
    stopped, _ = trained(tmp_path / "parts", config(policy), 1e4, StopAfter(stop_after))
    assert stopped.step < STEPS
    again, summary = trained(tmp_path / "parts", config(policy), 1e4, resume=True)
    equal(state_of(whole), state_of(again))
    assert summary["spikes"] == told["spikes"]
    losses = [
        [(row["step"], row["loss"]) for row in rows(tmp_path / name)] for name in ("whole", "parts")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS


def test_the_limits_of_a_step_do_not_depend_on_when_they_are_asked_for(tmp_path, monkeypatch):
    """At the launch and when its numbers are read, in a run that never stops and in one that
    does."""
    found, limits = {}, Spikes.limits

    def recorded(self, step):
        found.setdefault(step, set()).add(limits(self, step))
        return limits(self, step)

    monkeypatch.setattr(Spikes, "limits", recorded)
    trained(tmp_path / "whole", config("skip"), 1e4)
    for steps, reached in ((20, 20), (4, 24), (5, 29), (50, STEPS)):
        run, _ = trained(
            tmp_path / "parts", config("skip"), 1e4, StopAfter(steps), resume=reached > 20
        )
        assert run.step == reached
    assert all(len(values) == 1 for values in found.values()) and len(found) == STEPS
    assert len(set.union(*found.values())) > 10


def test_rollback_loads_the_checkpoint_and_takes_other_data(tmp_path):
    run, summary = trained(tmp_path, config("rollback"), 1e4)
    plain, _ = trained(tmp_path / "plain", config("warn"), 1.0)
    assert summary["spikes"]["rolled_back"] == 1 and summary["steps"] == STEPS
    assert run.feed.state_dict()["position"] > plain.feed.state_dict()["position"]
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1)) and max(
        row["loss"] for row in found
    ) < 10


def test_rollback_has_a_first_checkpoint_and_gives_up_some_time(tmp_path):
    with pytest.raises(SpikeError, match=f"gone back to one checkpoint {MOST_RETURNS} times"):
        trained(tmp_path, config("rollback", checkpoint_every=100), math.nan, bad=range(3, 10**6))
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == "step-00000000"


def test_skipping_gives_up_some_time_and_says_where_to_go_on(tmp_path):
    with pytest.raises(
        SpikeError,
        match=f"updates of {MOST_IN_A_ROW} steps in a row.*last good checkpoint is .*step-",
    ):
        trained(tmp_path, config("skip"), math.nan, bad=range(BAD, 10**6))


def test_stop_ends_the_run_and_warn_says_it(tmp_path):
    with pytest.raises(
        SpikeError, match=r"far above the usual.*last good checkpoint is .*step-000000\d\d"
    ):
        trained(tmp_path / "stop", config("stop"), 1e4)
    _, summary = trained(tmp_path / "warn", config("warn"), 1e4)
    assert summary["spikes"]["seen"] >= 1 and summary["spikes"]["skipped"] == 0
    assert "far above the usual" in (tmp_path / "warn" / "log").read_text()
    with pytest.raises(NonFiniteLossError):
        trained(tmp_path / "nan", config("warn"), math.nan)


def test_the_limits_are_read_by_a_captured_update(tmp_path, monkeypatch):
    """graph.optimizer: the update is part of a graph that was captured under other limits."""
    monkeypatch.setattr(
        Spikes, "limits", lambda self, step: Limits(loss=-1.0) if step == 9 else Limits()
    )
    settings = config("skip", True, steps=12)
    settings = dataclasses.replace(
        settings, graph=dataclasses.replace(settings.graph, granularity="step", optimizer=True)
    )
    seen = []
    run = trainer(tmp_path / "run", settings)
    launch = run.executor.train_step

    def recorded(*arguments):
        before = {name: value.clone() for name, value in run.tensors().items()}
        found = launch(*arguments)
        seen.append(all(torch.equal(before[name], value) for name, value in run.tensors().items()))
        return found

    run.executor.train_step = recorded
    _, summary = ended(run)
    assert seen == [number == 9 for number in range(1, 13)]
    assert summary["spikes"]["skipped"] == 1 and summary["replayed"] > 0


def test_the_best_checkpoint_is_never_replaced_by_a_worse_one(tmp_path):
    """Gradients of the wrong sign from a pack on: the loss rises, and newer checkpoints are
    worse."""
    _, summary = trained(tmp_path, config("warn", checkpoint_every=4), -3.0, bad=range(50, 10**6))
    folder = tmp_path / "run" / "checkpoints"
    best = best_checkpoint(folder)
    assert (
        best is not None
        and summary["spikes"]["best_step"] == int(best.name.removeprefix("step-")) < STEPS - 8
    )
    assert {path.name for path in checkpoints_by_step(folder)} == {
        best.name,
        "step-00000034",
        "step-00000032",
    }
    again = trainer(tmp_path / "run", config("warn"))
    again.resume()
    assert again.spikes.best_loss == summary["spikes"]["best_loss"]
    again.close()
