"""Timing graphs against eager in real steps: no number changes, and the faster way stays."""
import dataclasses
import time

import pytest
import torch
from trainkit import CAPACITIES, CPU, RandomPacks, state_of, tiny, trainer

from packgraph.diagnose.verify import verify
from packgraph.graphs.claim import Claim
from packgraph.graphs.forget import forget, forget_all
from packgraph.graphs.graphed import GraphedModule, graph
from packgraph.graphs.slot import Slots
from packgraph.graphs.step import GraphedStep
from packgraph.packing.batch import PackedBatch
from packgraph.parallel.mesh import single_process
from packgraph.plan.choice import EAGER, REPLAY, SAMPLES, Choice, Timing
from packgraph.train import autotune
from packgraph.train.autotune import FASTER, TIMED, Autotune, Clock
from packgraph.train.build import build_model
from packgraph.train.config_values import render
from packgraph.train.executor import Executor, sample_batch
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.options import GraphConfig
from packgraph.train.signals import StopRequest

STEPS = 40
NAMES = [render(capacity) for capacity in CAPACITIES]
WAYS = [{}, {"granularity": "chunk"}, {"granularity": "step"}, {"granularity": "step", "optimizer": True}]


def config(steps: int = STEPS, *, enabled: bool = True, **graph):
    made = tiny(graph=enabled, steps=steps, checkpoint_every=1000)
    return dataclasses.replace(made, graph=dataclasses.replace(made.graph, **({"autotune": True} | graph)))


class AlikePacks(RandomPacks):
    """Packs of one capacity: graphs of whole steps differ in the number of microbatches only."""

    def __next__(self) -> PackedBatch:
        batch = super().__next__()
        return PackedBatch.build([document.tolist() for document in batch.tokens[:batch.num_tokens].split(
            batch.lengths)], CAPACITIES[-1])


def train(folder, settings):
    """State at the end, loss and norm of every step, the summary, what was noted, the stats."""
    run = trainer(folder, settings, AlikePacks() if settings.graph.granularity == "step" else RandomPacks())
    summary = run.run(StopRequest())
    state = state_of(run)
    log = (folder.parent / "log").read_text()
    stats = run.executor._graphed[0].stats if settings.graph.enabled else None
    run.close()
    return state, [(row["loss"], row["gradient_norm"]) for row in read_metrics(folder / METRICS)], summary, log, stats


def assert_equal(left, right):
    assert left[1] == right[1]
    assert not [name for name, value in left[0].items() if not torch.equal(value, right[0][name])]


def slow_replays(monkeypatch, only=None, seconds=0.02):
    """Make replays of the batches with capacity `only` (None = all) slower than eager."""
    claim = GraphedModule.claim

    def slow(self, args, kwargs):
        result = claim(self, args, kwargs)
        if isinstance(result, Claim) and (only is None or args[0].capacity == only):
            time.sleep(seconds)
        return result

    monkeypatch.setattr(GraphedModule, "claim", slow)


def slow_eager(monkeypatch, seconds=0.02):
    fall_back = GraphedModule.fall_back

    def slow(self, reason, args, kwargs):
        time.sleep(seconds)
        return fall_back(self, reason, args, kwargs)

    monkeypatch.setattr(GraphedModule, "fall_back", slow)


@pytest.mark.parametrize("ways", WAYS, ids=str)
def test_timing_changes_no_number(ways, tmp_path):
    tuned = train(tmp_path / "tuned", config(**ways))
    assert tuned[2]["fallbacks"][TIMED] > 0 and tuned[2]["replayed"] > 0
    assert_equal(tuned, train(tmp_path / "plain", config(autotune=False, **ways)))
    assert_equal(tuned, train(tmp_path / "eager", config(enabled=False, **ways)))


def test_eager_is_kept_where_replay_is_slower_and_the_graphs_are_freed(tmp_path, monkeypatch):
    slow_replays(monkeypatch)
    freed = []
    drop = Slots.drop
    monkeypatch.setattr(Slots, "drop", lambda self, key: freed.append(drop(self, key)) or freed[-1])
    run = train(tmp_path / "tuned", config())
    choices = run[2]["choices"]
    assert choices == run[4].choices
    assert list(choices) == NAMES
    for choice in choices.values():
        assert choice["way"] == "eager" and choice["decided"] and choice["gain"] > 1
        assert choice["replay_ms"] > choice["eager_ms"] > 0
        assert min(choice["eager_samples"], choice["replay_samples"]) >= SAMPLES
    assert freed == [1, 1, 1] and run[2]["pool_bytes"] == 0
    assert run[2]["fallbacks"][FASTER] > 0
    assert all(f"{name}: runs eagerly from here on, which is faster" in run[3] for name in NAMES)
    assert_equal(run, train(tmp_path / "eager", config(enabled=False)))


def test_only_the_bucket_that_is_slower_runs_eagerly(tmp_path, monkeypatch):
    slow_eager(monkeypatch)
    slow_replays(monkeypatch, CAPACITIES[1], 0.06)
    captured = train(tmp_path / "plain", config(10, autotune=False))[2]["captured"]
    run = train(tmp_path / "tuned", config())
    assert [run[2]["choices"][name]["way"] for name in NAMES] == ["replay", "eager", "replay"]
    assert run[2]["captured"] == captured, "giving up one bucket's graphs must not cost the others theirs"
    assert run[2]["pool_bytes"] > 0 and run[2]["fallbacks"][FASTER] > 0
    assert_equal(run, train(tmp_path / "eager", config(enabled=False)))


def test_replay_is_kept_where_eager_is_slower(tmp_path, monkeypatch):
    slow_eager(monkeypatch)
    summary = train(tmp_path / "tuned", config())[2]
    assert {choice["way"] for choice in summary["choices"].values()} == {"replay"}
    assert all(choice["decided"] for choice in summary["choices"].values())
    assert FASTER not in summary["fallbacks"] and summary["autotune"] == "ms per microbatch"
    rows = read_metrics(tmp_path / "tuned" / METRICS)
    last = max(row["step"] for row in rows if row["starting"])
    assert last < STEPS and rows[last - 1]["fallbacks"] == rows[-1]["fallbacks"], "the timing comes to an end"


@pytest.mark.parametrize("ways", WAYS[2:], ids=str)
def test_whole_steps_are_given_up_as_one(ways, tmp_path, monkeypatch):
    call = GraphedStep.__call__

    def slow(self, *args):
        time.sleep(0.1)
        return call(self, *args)

    monkeypatch.setattr(GraphedStep, "__call__", slow)
    slow_replays(monkeypatch, seconds=0.1)  # steps that are not in the bank run by chunks
    run = train(tmp_path / "tuned", config(**ways))
    (choice,) = run[2]["choices"].values()
    assert choice["way"] == "eager" and run[2]["pool_bytes"] == 0 and run[2]["autotune"] == "ms per 1,000 places"
    assert_equal(run, train(tmp_path / "eager", config(enabled=False, **ways)))


def test_the_device_is_waited_for_between_steps_only(tmp_path, monkeypatch):
    """R13, and the negative control: the waits are there."""
    inside, waits = [], []
    run_step, wait = Executor.run_step, Clock.wait

    def stepping(self, *args):
        inside.append(True)
        result = run_step(self, *args)
        inside.pop()
        return result

    monkeypatch.setattr(Executor, "run_step", stepping)
    monkeypatch.setattr(Clock, "wait", lambda self: waits.append(bool(inside)) or wait(self))
    train(tmp_path / "tuned", config())
    assert waits and not any(waits)


def test_a_timed_step_goes_one_way_as_a_whole(tmp_path, monkeypatch):
    steps = []
    begin, reason = Autotune.begin, Autotune._reason
    monkeypatch.setattr(Autotune, "begin", lambda self, *args: (timed := begin(self, *args), steps.append([timed]))[0])

    def noted(self, bucket):
        steps[-1].append(reason(self, bucket))
        return reason(self, bucket)

    monkeypatch.setattr(Autotune, "_reason", noted)
    slow_eager(monkeypatch)
    train(tmp_path / "tuned", config())
    timed = [set(reasons) for counts, *reasons in steps if counts]
    assert {TIMED} in timed and {None} in timed and all(len(reasons) == 1 for reasons in timed)
    assert all(set(reasons) <= {None} for counts, *reasons in steps if not counts)


def test_graphs_of_a_slot_in_flight_are_not_given_up():
    """The negative control; between steps it may be done, and a later call captures again."""
    model = build_model(config(), CPU)
    graphed = graph(model, capacities=CAPACITIES, warmup=0)
    sample, tokens = sample_batch(CAPACITIES[0]), torch.ones((), dtype=torch.int64)
    loss = graphed(sample, tokens)
    with pytest.raises(RuntimeError, match="1 slots are in flight"):
        forget(graphed, (sample, tokens))
    loss.backward()
    captured = graphed.stats.captured
    assert forget(graphed, (sample_batch(CAPACITIES[1]), tokens)) == 0
    assert forget(graphed, (sample, tokens)) == 1 and graphed.stats.pool_bytes == 0
    graphed(sample, tokens).backward()
    assert graphed.stats.captured == 2 * captured and graphed.stats.replayed == 2
    assert forget_all(graphed) == 1 and graphed.stats.pool_bytes == 0


def test_without_room_for_eager_steps_graphs_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "free_bytes", lambda device: 0)
    run = train(tmp_path / "tuned", config(12))
    assert TIMED not in run[2]["fallbacks"] and run[2]["autotune"].startswith("off: an eager step beside the graphs")
    assert "replay is not timed against eager" in run[3]


def test_a_bucket_that_is_captured_again_each_time_is_not_judged(tmp_path, monkeypatch):
    changes = iter(range(10**6))
    monkeypatch.setattr(Executor, "changes", lambda self: (next(changes), 0))
    run = train(tmp_path / "tuned", config(120))
    assert all(choice["decided"] and choice["way"] == "replay" and choice["eager_ms"] is None
               for choice in run[2]["choices"].values())
    assert "could not be timed against eager" in run[3]


def test_eager_is_the_default_on_no_cpu():
    assert GraphConfig().is_autotuned("cuda") and not GraphConfig().is_autotuned("cpu")
    assert not GraphConfig(autotune=False).is_autotuned("cuda") and GraphConfig(autotune=True).is_autotuned("cpu")


def test_a_run_without_tuning_says_nothing_of_it(tmp_path):
    assert "choices" not in train(tmp_path / "plain", config(4, autotune="auto"))[2]


def test_verify_times_nothing():
    """What is compared must be replayed."""
    report = verify("tuned", config(8), RandomPacks(), CPU)
    assert report.good and set(report.fallbacks) == {"warm-up"}


def test_a_capacity_over_the_memory_budget_is_not_timed(tmp_path):
    plain = train(tmp_path / "plain", config(6, autotune=False))
    budget = f"{(plain[2]['memory']['predicted_pool_bytes'] + sum(plain[2]['memory']['buffer_bytes'])) / 2**10 - 1}KiB"
    run = train(tmp_path / "tuned", config(memory_budget=budget))
    assert run[2]["memory"]["dropped"] == NAMES[2:] and run[2]["fallbacks"]["over the memory budget"] > 0
    assert list(run[2]["choices"]) == NAMES[:2] and all(choice["decided"] for choice in run[2]["choices"].values())
    assert_equal(run, train(tmp_path / "eager", config(enabled=False)))


def test_after_a_rebuild_there_are_no_graphs_of_what_runs_eagerly(tmp_path):
    run = trainer(tmp_path / "run", config(3))
    run.run(StopRequest())
    run.executor.autotune.choices[CAPACITIES[1]] = Choice(EAGER, Timing(), Timing())
    run.executor.rebuild()
    (slot,) = run.executor._graphed[0]._slots.all
    assert len(slot.variants) == len(CAPACITIES) - 1
    run.close()


def test_a_capture_between_two_microbatches_spoils_their_lap():
    class Captures:
        captures = 0

        def bank(self):
            return CAPACITIES

        def changes(self):
            return self.captures, 0

    graphs = Captures()
    tuning = Autotune(graphs, single_process(), CPU, whole_steps=False)
    tuning._buckets, tuning._way = list(CAPACITIES), REPLAY
    for captures in (0, 0, 1, 1):
        graphs.captures = captures
        with tuning.microbatch(sample_batch(CAPACITIES[0])):
            pass
    assert [good for *_, good in tuning._timed] == [True, True, False, True]
