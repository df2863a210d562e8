"""A run knows what its graphs will take, and leaves out what a budget does not allow."""

import dataclasses
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from trainkit import CAPACITIES, CPU, ran, state_of, tiny

from packgraph.graphs.errors import CaptureError
from packgraph.graphs.graphed import control, graph
from packgraph.graphs.key import OVER_BUDGET, CapturedCapacities
from packgraph.graphs.memory import trial as memory_trial
from packgraph.graphs.memory.budget import budget_bytes, shown
from packgraph.graphs.undone import explained
from packgraph.packing.capacity import Capacity
from packgraph.train import memory as memory_budget
from packgraph.train.build import build_model
from packgraph.train.config.sections import BucketConfig, TrainConfig
from packgraph.train.memory import plan_memory
from packgraph.train.plan import bucket_request
from packgraph.train.strategies import sample_batch
from packgraph.train.validate import validate


def with_graph(config: TrainConfig, **values: Any) -> TrainConfig:
    return dataclasses.replace(config, graph=dataclasses.replace(config.graph, **values))


def arguments(chunk: int, capacity: Capacity) -> tuple[Any, ...]:
    return sample_batch(capacity), torch.ones((), dtype=torch.int64)


def graphed_model(
    slots: int | None = 1, granularity: str = "layer", compile: bool | str = False
) -> Any:
    return graph(
        build_model(tiny(True), CPU),
        capacities=CAPACITIES,
        warmup=0,
        slots=slots,
        granularity=granularity,
        compile=compile,
    )


def run(folder: Path, config: TrainConfig) -> tuple[dict[str, Any], dict[str, torch.Tensor], str]:
    made, summary = ran(folder, config)
    return summary, state_of(made), (folder.parent / "log").read_text().replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12GiB", 12 * 2**30),
        ("512MiB", 2**29),
        (" .5 KiB", 512),
        ("80GB", 80 * 10**9),
        ("1.5 tb", 15 * 10**11),
        ("2gib", 2**31),
        ("40%", 400),
        ("1.5%", 15),
        ("100%", 1000),
    ],
)
def test_budgets_are_read(text, expected):
    assert budget_bytes(text, 1000) == expected


@pytest.mark.parametrize(
    ("text", "total", "why"),
    [
        ("12", 1000, "is written 12GiB"),
        ("0GiB", 1000, "is written"),
        ("-1GiB", 1000, "is written"),
        ("12G", 1000, "is written 12GiB, 12GB"),
        ("101%", 1000, "more than there is"),
        ("40%", None, "needs a CUDA device"),
    ],
)
def test_what_is_no_budget_is_refused(text, total, why):
    with pytest.raises(ValueError, match=why):
        budget_bytes(text, total)


def test_bytes_are_shown_for_people():
    assert [shown(n) for n in (100, 2**20, 3 * 2**30)] == ["0.10 KiB", "1.00 MiB", "3.00 GiB"]


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.parametrize("slots", [1, 3, None])
@pytest.mark.few(3)
def test_predicted_pools_of_a_decoder_are_within_five_percent(slots, granularity):
    graphed = graphed_model(slots, granularity)
    plan = plan_memory([graphed], arguments, [slots or 1], CAPACITIES)
    graphed.build([arguments(0, capacity) for capacity in CAPACITIES], slots or 1)
    assert graphed.failures == 0 and plan.kept == CAPACITIES and not plan.dropped
    assert plan.pools == pytest.approx(graphed.stats.pool_bytes, rel=0.05)
    assert (plan.banks[0].shared > 0) == (slots != 1)


def test_graphs_that_hold_compiled_code_are_predicted_too():
    graphed = graphed_model(compile="aot_eager")
    plan = plan_memory([graphed], arguments, [1], CAPACITIES[:1])
    compiled = graphed.stats.compiled
    graphed.build([arguments(0, CAPACITIES[0])], 1)
    assert graphed.failures == 0 and plan.pools == pytest.approx(graphed.stats.pool_bytes, rel=0.05)
    assert graphed.stats.compiled == compiled > 0, "what the trial has run is what the graphs hold"


def test_a_run_says_what_its_graphs_take(tmp_path: Path) -> None:
    summary, _, log = run(tmp_path / "run", tiny(True))
    memory = summary["memory"]
    assert memory["predicted_to_measured"] == pytest.approx(1, abs=0.05)
    assert memory["measured_pool_bytes"] == summary["pool_bytes"] and memory["dropped"] == []
    assert "graphs of 3 capacities up to 64x8 will take" in log
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["memory"] == memory


def budget_for(*capacities: Capacity) -> str:
    """A budget that just holds graphs of these capacities."""
    total = plan_memory([graphed_model()], arguments, [1], capacities).banks[0].total
    return f"{total / 1024 + 1}KiB"


def test_a_budget_drops_the_largest_and_changes_no_number(tmp_path: Path) -> None:
    whole, state, _ = run(tmp_path / "whole", tiny(True))
    config = with_graph(tiny(True), memory_budget=budget_for(*CAPACITIES[:2]))
    summary, other, log = run(tmp_path / "less", config)
    assert (
        summary["memory"]["dropped"] == ["64x8"]
        and "capacity 64x8 is dropped: its graphs need" in log
    )
    assert summary["fallbacks"][OVER_BUDGET] > 0 and summary["replayed"] > 0
    assert summary["replayed"] + summary["fallbacks"][OVER_BUDGET] == whole["replayed"]
    assert summary["pool_bytes"] < whole["pool_bytes"] and summary["captured"] < whole["captured"]
    assert float(config.graph.memory_budget.removesuffix("KiB")) * 1024 >= summary["pool_bytes"]
    assert [name for name in state if not torch.equal(state[name], other[name])] == []


def test_a_budget_that_holds_nothing_trains_eagerly(tmp_path: Path) -> None:
    _, state, _ = run(tmp_path / "whole", tiny(False))
    summary, other, _ = run(tmp_path / "none", with_graph(tiny(True), memory_budget="1KiB"))
    assert summary["memory"]["dropped"] == ["64x8", "32x4", "16x2"]
    assert summary["captured"] == summary["replayed"] == 0 and summary["fallbacks"][OVER_BUDGET] > 0
    assert [name for name in state if not torch.equal(state[name], other[name])] == []


def test_another_rank_without_room_decides_for_all():
    graphed, asked = graphed_model(), []

    def agree(mine: bool) -> bool:
        asked.append(mine)
        return len(asked) > 1

    plan = plan_memory([graphed], arguments, [1], CAPACITIES, budget=2**40, agree=agree)
    assert plan.dropped == CAPACITIES[2:] and plan.kept == CAPACITIES[:2] and asked == [True, True]
    assert any("another rank" in note for note in plan.notes)
    assert graphed.acquire(arguments(0, CAPACITIES[2]), {}) == OVER_BUDGET


def test_graphs_without_room_are_over_any_budget(monkeypatch):
    trial = memory_trial.trial_memory

    def no_room(graphed: Any, samples: list[Any], slots: int) -> Any:
        if samples[0][0].capacity == CAPACITIES[2]:
            with explained():
                raise torch.OutOfMemoryError("CUDA out of memory")
        return trial(graphed, samples, slots)

    monkeypatch.setattr(memory_budget, "trial_memory", no_room)
    plan = plan_memory([graphed_model()], arguments, [1], CAPACITIES, budget=2**40)
    assert plan.dropped == CAPACITIES[2:] and plan.banks
    assert any(
        "is dropped: there is no room for its graphs, graph.memory_budget is" in note
        for note in plan.notes
    )
    unlimited = plan_memory([graphed_model()], arguments, [1], CAPACITIES)
    assert not unlimited.dropped and not unlimited.banks and "not predicted" in unlimited.notes[0]


def test_a_trial_without_room_keeps_nothing_from_the_next_one(monkeypatch):
    held = []

    class Saved:
        def __init__(self) -> None:
            self.itself = self

    def no_room(graphed: Any, samples: list[Any], slots: int) -> Any:
        assert all(of() is None for of in held)
        saved = Saved()
        held.append(weakref.ref(saved))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory_budget, "trial_memory", no_room)
    gc.disable()
    try:
        plan_memory([graphed_model()], arguments, [1], CAPACITIES, budget=2**40)
    finally:
        gc.enable()
    assert len(held) == len(CAPACITIES) > 1


def test_arguments_without_room_are_voted_on_too():
    """Who dies instead leaves the others waiting for its vote."""
    asked: list[CaptureError | None] = []

    def no_room(number: int, capacity: Capacity) -> tuple[Any, ...]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def vote(what: str, error: CaptureError | None) -> CaptureError | None:
        asked.append(error)
        return error

    plan = plan_memory(
        [graphed_model()], no_room, [1], CAPACITIES[:1], budget=2**40, consensus=vote
    )
    assert plan.dropped == CAPACITIES[:1] and asked[-1] is not None


def test_ranks_ask_each_other_before_and_after_every_chunk(monkeypatch):
    """A rank whose module is refused traces nothing. The trial of the next chunk exchanges data,
    too: whoever went on would wait for the rank that failed."""
    chunks, traced, asked = [graphed_model() for _ in range(3)], [], []
    for chunk in chunks:
        chunk.capturer.compiled.add("a key that all ranks have compiled")
    trial = memory_trial.trial_memory

    def noted(graphed: Any, samples: list[Any], slots: int) -> Any:
        traced.append(chunks.index(graphed))
        return trial(graphed, samples, slots)

    def vote(what: str, error: CaptureError | None) -> CaptureError | None:
        asked.append(error)
        return CaptureError("no room", "line 1", "on rank 1") if len(asked) == 4 else error

    monkeypatch.setattr(memory_budget, "trial_memory", noted)
    plan = plan_memory(chunks, arguments, [1, 1, 1], CAPACITIES, consensus=vote)
    assert (
        traced == [0, 1] and asked == [None] * 4 and not plan.banks and "no room" in plan.notes[0]
    )
    assert not any(chunk.capturer.compiled or chunk.capturer.dry_runs for chunk in chunks), (
        "all ranks begin at the same point again"
    )


def test_dropped_capacities_are_no_undeclared_ones():
    kept = CapturedCapacities([], {CAPACITIES[0]: OVER_BUDGET})
    assert kept and not CapturedCapacities([], {})
    assert list(CapturedCapacities(CAPACITIES[::-1], {})) == list(CAPACITIES)
    graphed = graphed_model()
    control(graphed).capacities = kept
    assert graphed.acquire(arguments(0, CAPACITIES[0]), {}) == OVER_BUDGET
    assert graphed.acquire(arguments(0, Capacity(16, 1)), {}) == "capacity not declared"
    assert graphed.acquire(arguments(0, Capacity(16, 3)), {}) == "more documents than any capacity"


def test_the_budget_of_graphs_limits_what_is_chosen():
    chosen = with_graph(tiny(True), memory_budget="2GiB")
    assert bucket_request(tiny(True)).budget is None and bucket_request(chosen).budget == 2 * 2**30
    tighter = dataclasses.replace(chosen, buckets=BucketConfig(memory_gib=1.0))
    assert bucket_request(tighter).budget == 2**30
    share = with_graph(tiny(True), memory_budget="40%")
    assert bucket_request(share).budget is None, "of a device that is not known"


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="is written 12GiB"):
        with_graph(tiny(True), memory_budget="plenty")
    assert validate(with_graph(tiny(True), memory_budget="2GiB"), "cpu") == []
    assert "needs a CUDA device" in validate(with_graph(tiny(True), memory_budget="40%"), "cpu")[0]
    assert validate(with_graph(tiny(True), memory_budget="40%"), "cuda") == []
    assert (
        "not there yet"
        in validate(with_graph(tiny(True), memory_budget="2GiB", granularity="step"), "cpu")[0]
    )
