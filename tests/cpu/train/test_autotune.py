"""Timing graphs against eager in real steps: no number changes, and the faster way stays.

Where a test asks which way was chosen, it tells the times (`Hands`): what else the machine does is
none of its matter.
"""

import dataclasses
import itertools
import math
import random

import pytest
import torch
from trainkit import CAPACITIES, CPU, RandomPacks, ended, state_of, tiny, trainer

from packgraph.graphs.backend import Stopwatch
from packgraph.graphs.graphed import Control, control, graph
from packgraph.graphs.replay import ReplayHandle
from packgraph.graphs.slots import Slots
from packgraph.graphs.step import GraphedStep
from packgraph.packing.batch import PackedBatch
from packgraph.parallel.mesh import single_process
from packgraph.train import autotune
from packgraph.train.autotune import (
    EAGER,
    FASTER,
    FEWEST_SAMPLES,
    MARGIN,
    MOST_SAMPLES,
    REPLAY,
    SAMPLES,
    TIMED,
    Autotune,
    Choice,
    choose,
)
from packgraph.train.build import build_model
from packgraph.train.config.reading import render
from packgraph.train.config.sections import GraphConfig
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.signals import StopRequest
from packgraph.train.strategies import Executor, MicrobatchExecutor, sample_batch
from packgraph.verification.verify import verify

# Two of warm-up, five timed each way, and some after the choice; every step times all buckets.
STEPS = 2 + 2 * SAMPLES + 4
TOKENS = 108
NAMES = [render(capacity) for capacity in CAPACITIES]
WAYS = [
    {},
    {"granularity": "chunk"},
    {"granularity": "step"},
    {"granularity": "step", "optimizer": True},
]


def config(steps: int = STEPS, *, enabled: bool = True, **graph):
    made = tiny(graph=enabled, steps=steps, checkpoint_every=1000, tokens_per_step=TOKENS)
    return dataclasses.replace(
        made, graph=dataclasses.replace(made.graph, **({"autotune": True} | graph))
    )


class EachPacks(RandomPacks):
    """Packs of each capacity by turns, those of a step of `TOKENS` tokens once."""

    def __next__(self) -> PackedBatch:
        return self.filled(self.position % 3, (14, 30, 64)[self.position % 3])

    def filled(self, capacity: int, tokens: int) -> PackedBatch:
        """The next pack: two documents of random tokens, `tokens` together."""
        draw = random.Random(self.position)
        self.position += 1
        drawn = [draw.randrange(32) for _ in range(tokens)]
        return PackedBatch.build([drawn[:5], drawn[5:]], CAPACITIES[capacity])


class AlikePacks(EachPacks):
    """Packs of one capacity: graphs of whole steps differ in the number of microbatches only, which
    is 2, 2, 3, ...

    So the first that is captured is the larger one, which a smaller one leaves room for.
    """

    def __next__(self) -> PackedBatch:
        return self.filled(2, (54, 54, 54, 54, 36, 36, 36)[self.position % 7])


class Hands:
    """The hands of a clock, which go on only when a run does something that the test says takes
    time.

    eager, replay: milliseconds of a microbatch by its capacity.
    """

    def __init__(self, monkeypatch, eager, replay) -> None:
        self.seconds = 0.0
        acquire, step = Control.acquire, GraphedStep.replay

        def acquiring(module, args, kwargs):
            result = acquire(module, args, kwargs)
            took = replay if isinstance(result, ReplayHandle) else eager
            self.seconds += took(args[0].capacity) / 1000
            return result

        def stepping(whole, tokens_in_step, *batches):
            self.seconds += sum(replay(batch.capacity) for batch in batches) / 1000
            return step(whole, tokens_in_step, *batches)

        monkeypatch.setattr(Control, "acquire", acquiring)
        monkeypatch.setattr(GraphedStep, "replay", stepping)

    def read(self) -> float:
        return self.seconds


def always(milliseconds):
    return lambda capacity: milliseconds


def noisy(milliseconds):
    """Around `milliseconds`, by up to 3 ms: any five times in a row of one capacity have that
    median."""
    offsets = {capacity: itertools.cycle((0, 3, -3, 2, -2)) for capacity in CAPACITIES}
    return lambda capacity: milliseconds + next(offsets[capacity])


def train(folder, settings, hands=None):
    """State at the end, loss and norm of every step, the summary, what was noted, the stats.

    hands: of the clock that ways are timed by; None = the real one.
    """
    run = trainer(
        folder, settings, AlikePacks() if settings.graph.granularity == "step" else EachPacks()
    )
    if hands is not None:
        run.executor.autotune.clock = Stopwatch(CPU, hands.read)
    _, summary = ended(run)
    log = (folder.parent / "log").read_text()
    stats = run.executor.graphed[0].stats if settings.graph.enabled else None
    return (
        state_of(run),
        [(row["loss"], row["gradient_norm"]) for row in read_metrics(folder / METRICS)],
        summary,
        log,
        stats,
    )


@pytest.fixture(scope="module")
def untimed(tmp_path_factory):
    """What `train` gives without timing, once for all tests that compare with it; enabled=False:
    without graphs."""
    runs = {}

    def found(**options):
        key = tuple(sorted(options.items()))
        if key not in runs:
            runs[key] = train(
                tmp_path_factory.mktemp("untimed") / "run", config(autotune=False, **options)
            )
        return runs[key]

    return found


def assert_equal(left, right):
    assert left[1] == right[1]
    assert not [name for name, value in left[0].items() if not torch.equal(value, right[0][name])]


@pytest.mark.parametrize(
    "ways",
    [WAYS[0], *(pytest.param(ways, marks=pytest.mark.slow) for ways in WAYS[1:3]), WAYS[3]],
    ids=str,
)
def test_timing_changes_no_number(ways, untimed, tmp_path):
    """By the real clock, whichever way is the faster one."""
    tuned = train(tmp_path / "tuned", config(**ways))
    assert tuned[2]["fallbacks"][TIMED] > 0 and tuned[2]["replayed"] > 0
    assert all(
        choice["eager_ms"] > 0 and choice["replay_ms"] > 0
        for choice in tuned[2]["choices"].values()
    )
    assert_equal(tuned, untimed(**ways))
    assert_equal(
        tuned, untimed(enabled=False, granularity="step" if "step" in ways.values() else "layer")
    )


def test_eager_is_kept_where_replay_is_slower_and_the_graphs_are_freed(
    untimed, tmp_path, monkeypatch
):
    freed = []
    drop = Slots.drop
    monkeypatch.setattr(Slots, "drop", lambda self, key: freed.append(drop(self, key)) or freed[-1])
    run = train(tmp_path / "tuned", config(), Hands(monkeypatch, always(10), always(20)))
    choices = run[2]["choices"]
    assert choices == run[4].choices
    assert list(choices) == NAMES
    for choice in choices.values():
        assert choice["way"] == "eager" and choice["decided"] and choice["gain"] == pytest.approx(2)
        assert choice["replay_ms"] == pytest.approx(20) and choice["eager_ms"] == pytest.approx(10)
        assert choice["eager_samples"] == choice["replay_samples"] == SAMPLES
    assert [count for count in freed if count] == [1, 1, 1] and run[2]["pool_bytes"] == 0
    assert run[2]["fallbacks"][FASTER] > 0
    assert all(f"{name}: runs eagerly from here on, which is faster" in run[3] for name in NAMES)
    assert_equal(run, untimed(enabled=False))


def test_only_the_bucket_that_is_slower_runs_eagerly(untimed, tmp_path, monkeypatch):
    hands = Hands(monkeypatch, always(20), lambda capacity: 60 if capacity == CAPACITIES[1] else 5)
    run = train(tmp_path / "tuned", config(), hands)
    assert [run[2]["choices"][name]["way"] for name in NAMES] == ["replay", "eager", "replay"]
    assert [round(run[2]["choices"][name]["gain"], 6) for name in NAMES] == [4, 3, 4]
    assert run[2]["captured"] == untimed()[2]["captured"], (
        "giving up one bucket's graphs must not cost the others theirs"
    )
    assert run[2]["pool_bytes"] > 0 and run[2]["fallbacks"][FASTER] > 0
    assert_equal(run, untimed(enabled=False))


def test_replay_is_kept_where_eager_is_slower(tmp_path, monkeypatch):
    summary = train(tmp_path / "tuned", config(), Hands(monkeypatch, always(20), always(10)))[2]
    assert {choice["way"] for choice in summary["choices"].values()} == {"replay"}
    assert all(
        choice["decided"] and choice["gain"] == pytest.approx(2)
        for choice in summary["choices"].values()
    )
    assert FASTER not in summary["fallbacks"] and summary["autotune"] == "ms per microbatch"
    rows = read_metrics(tmp_path / "tuned" / METRICS)
    last = max(row["step"] for row in rows if row["starting"])
    assert last < STEPS and rows[last - 1]["fallbacks"] == rows[-1]["fallbacks"], (
        "the timing comes to an end"
    )


def test_noise_does_not_hide_what_is_clearly_slower(tmp_path, monkeypatch):
    summary = train(tmp_path / "tuned", config(), Hands(monkeypatch, noisy(10), noisy(40)))[2]
    for choice in summary["choices"].values():
        assert choice["way"] == "eager" and choice["replay_samples"] == SAMPLES


@pytest.mark.parametrize("ways", WAYS[2:], ids=str)
def test_whole_steps_are_given_up_as_one(ways, untimed, tmp_path, monkeypatch):
    run = train(tmp_path / "tuned", config(**ways), Hands(monkeypatch, always(16), always(32)))
    (choice,) = run[2]["choices"].values()
    assert (
        choice["way"] == "eager"
        and run[2]["pool_bytes"] == 0
        and run[2]["autotune"] == "ms per 1,000 places"
    )
    places = CAPACITIES[-1].tokens / 1000
    assert choice["eager_ms"] == pytest.approx(16 / places) and choice[
        "replay_ms"
    ] == pytest.approx(32 / places)
    assert_equal(run, untimed(enabled=False, granularity="step"))


def test_the_device_is_waited_for_between_steps_only(tmp_path, monkeypatch):
    """R13, and the negative control: the waits are there."""
    inside, waits = [], []
    run_step, wait = MicrobatchExecutor.run_step, Stopwatch.wait

    def stepping(self, *args):
        inside.append(True)
        result = run_step(self, *args)
        inside.pop()
        return result

    monkeypatch.setattr(MicrobatchExecutor, "run_step", stepping)
    monkeypatch.setattr(Stopwatch, "wait", lambda self: waits.append(bool(inside)) or wait(self))
    train(tmp_path / "tuned", config())
    assert waits and not any(waits)


def test_a_timed_step_goes_one_way_as_a_whole(tmp_path, monkeypatch):
    steps = []
    begin, reason = Autotune.begin, Autotune._reason
    monkeypatch.setattr(
        Autotune,
        "begin",
        lambda self, *args: (timed := begin(self, *args), steps.append([timed]))[0],
    )

    def noted(self, bucket):
        steps[-1].append(reason(self, bucket))
        return reason(self, bucket)

    monkeypatch.setattr(Autotune, "_reason", noted)
    train(tmp_path / "tuned", config(), Hands(monkeypatch, always(20), always(10)))
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
        control(graphed).forget((sample, tokens))
    loss.backward()
    captured = graphed.stats.captured
    assert control(graphed).forget((sample_batch(CAPACITIES[1]), tokens)) == 0
    assert control(graphed).forget((sample, tokens)) == 1 and graphed.stats.pool_bytes == 0
    graphed(sample, tokens).backward()
    assert graphed.stats.captured == 2 * captured and graphed.stats.replayed == 2
    assert control(graphed).capturer.forget_all() == 1 and graphed.stats.pool_bytes == 0


def test_without_room_for_eager_steps_graphs_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "free_bytes", lambda device: 0)
    run = train(tmp_path / "tuned", config(4))
    assert TIMED not in run[2]["fallbacks"] and run[2]["autotune"].startswith(
        "off: an eager step beside the graphs"
    )
    assert "replay is not timed against eager" in run[3]


def test_a_bucket_that_is_captured_again_each_time_is_not_judged(tmp_path, monkeypatch):
    changes = iter(range(10**6))
    monkeypatch.setattr(Executor, "changes", lambda self: (next(changes), 0))
    run = train(tmp_path / "tuned", config())
    assert all(
        choice["decided"] and choice["way"] == "replay" and choice["eager_ms"] is None
        for choice in run[2]["choices"].values()
    )
    assert "could not be timed against eager" in run[3]


def test_eager_is_the_default_on_no_cpu():
    assert GraphConfig().is_autotuned("cuda") and not GraphConfig().is_autotuned("cpu")
    assert not GraphConfig(autotune=False).is_autotuned("cuda") and GraphConfig(
        autotune=True
    ).is_autotuned("cpu")


def test_a_run_without_tuning_says_nothing_of_it(tmp_path):
    assert "choices" not in train(tmp_path / "plain", config(3, autotune="auto"))[2]


def test_verify_times_nothing():
    """What is compared must be replayed."""
    report = verify("tuned", config(5), EachPacks(), CPU)
    assert report.good and set(report.fallbacks) == {"warm-up"}


def test_a_capacity_over_the_memory_budget_is_not_timed(untimed, tmp_path, monkeypatch):
    memory = untimed()[2]["memory"]
    budget = f"{(memory['predicted_pool_bytes'] + sum(memory['buffer_bytes'])) / 2**10 - 1}KiB"
    run = train(
        tmp_path / "tuned", config(memory_budget=budget), Hands(monkeypatch, always(20), always(10))
    )
    assert (
        run[2]["memory"]["dropped"] == NAMES[2:]
        and run[2]["fallbacks"]["over the memory budget"] > 0
    )
    assert list(run[2]["choices"]) == NAMES[:2] and all(
        choice["decided"] for choice in run[2]["choices"].values()
    )
    assert_equal(run, untimed(enabled=False))


def test_after_a_rebuild_there_are_no_graphs_of_what_runs_eagerly(tmp_path):
    run = trainer(tmp_path / "run", config(3))
    run.run(StopRequest())
    with run.executor.rebuilding():
        run.executor.autotune.choices[CAPACITIES[1]] = Choice(EAGER)
    (slot,) = run.executor.graphed[0].slots.all
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


@pytest.mark.parametrize(
    ("eager", "replay", "way"),
    [
        (10.0, 5.0, REPLAY),
        (10.0, 10.0, REPLAY),
        (10.0, 10.0 * (1 + MARGIN) - 0.001, REPLAY),
        (10.0, 10.0 * (1 + MARGIN) + 0.001, EAGER),
        (10.0, 20.0, EAGER),
    ],
)
def test_replay_stays_unless_it_is_slower_by_more_than_the_margin(eager, replay, way):
    choice = choose([(eager, replay)])
    assert choice == Choice(way, eager, replay)
    assert choice.gain == max(eager, replay) / min(eager, replay) or way == REPLAY


def test_the_slowest_rank_decides_and_ranks_without_timings_have_no_vote():
    """Replay is faster on two ranks, but all wait for the third."""
    assert choose([(10, 5), (10, 6), (11, 13)]).way == EAGER
    assert choose([(10, 5), (14, 6), (11, 13)]).way == REPLAY
    nothing = (math.nan, math.nan)
    assert choose([(10, 5), nothing]) == choose([(10, 5)]) and choose([nothing]).way == REPLAY


class Replicas:
    """Graphs of all capacities, and who runs which of `shares` of a step; `batches` are capacities,
    a list for each replica."""

    def __init__(self, replicas):
        self.replicas = replicas

    def shares(self, batches):
        return batches[: self.replicas]

    def bank(self):
        return CAPACITIES

    def changes(self):
        return 0, 0

    def pool_bytes(self):
        return 0

    def tell_choices(self, choices):
        pass

    def free_graphs(self, bucket):
        pass


def turns_of(steps, replicas):
    """The way of each of `steps`, run as replica 0; the choices at the end."""
    graphs = Replicas(replicas)
    tuning = Autotune(graphs, single_process(), CPU, whole_steps=False, sharing=graphs)
    ways = []
    for shares in steps:
        batches = [[sample_batch(capacity) for capacity in share] for share in shares]
        ways.append(tuning._way if tuning.begin(batches, lambda note: None) else None)
        for batch in batches[0]:
            with tuning.microbatch(batch):
                pass
    return ways, tuning.choices


def test_turns_alternate_from_replay_on_and_end():
    ways, choices = turns_of([[[CAPACITIES[0]]]] * 14, 1)
    assert ways == [REPLAY, EAGER] * SAMPLES + [None] * 4 and list(choices) == [CAPACITIES[0]]


def test_buckets_that_take_turns_are_timed_both_ways():
    ways, choices = turns_of([[[CAPACITIES[step % 2]]] for step in range(24)], 1)
    for bucket in range(2):
        of_bucket = ways[bucket::2]
        assert of_bucket.count(REPLAY) == of_bucket.count(EAGER) == SAMPLES
    assert set(choices) == set(CAPACITIES[:2])


def test_every_replica_gets_a_vote_and_one_to_which_a_bucket_never_comes_is_not_waited_for_long():
    one, both = [[CAPACITIES[0]], []], [[CAPACITIES[0]], [CAPACITIES[0]]]
    ways, _ = turns_of([one] * 2 * (MOST_SAMPLES + 2), 2)
    assert len([way for way in ways if way]) == 2 * MOST_SAMPLES
    ways, _ = turns_of([one] * 2 * SAMPLES + [both] * 10, 2)
    assert len([way for way in ways if way]) == 2 * (SAMPLES + FEWEST_SAMPLES)
