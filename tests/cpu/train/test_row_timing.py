"""Rows that are timed: what is timed tells the costs, nothing of it stays, and plans go by it from
then on."""

import dataclasses
import json

import pytest
import torch
from contextkit import Source, Tokens
from trainkit import tiny

from packgraph import cli
from packgraph.models.decoder import DecoderModel
from packgraph.packing.capacity import Capacity
from packgraph.parallel.context.plan import plan_context
from packgraph.parallel.context.request import COEFFICIENTS, ContextCost, ContextRequest
from packgraph.train.config.sections import GraphConfig
from packgraph.train.data import DataConfig, PlannedSteps
from packgraph.train.features.context import (
    is_wanted,
    measured_cost,
    sample_rows,
    time_row,
    undisturbed,
)
from packgraph.train.random_state import random_states
from packgraph.train.strategies import MicrobatchExecutor

CPU = torch.device("cpu")
PRIOR = ContextCost(
    microbatch_us=1000.0,
    token_us=1.0,
    attention_us=1e-4,
    group_us=500.0,
    exchange_us=0.5,
    document_us=10.0,
    gather_us=0.2,
)


@pytest.mark.parametrize("zigzag", [(), (4,), (2, 4)])
@pytest.mark.parametrize("places", [(16,), (16, 64)])
@pytest.mark.parametrize("factor", [1.0, 200.0])
def test_the_rows_that_are_timed_tell_what_any_row_costs(zigzag, places, factor):
    """A machine on which everything but tokens has another price than the estimates have, and one
    that is slower by far besides: fitted rows are right to a few percent, estimated ones far
    off."""
    real = ContextCost(
        microbatch_us=3000.0 * factor,
        token_us=3.0 * factor,
        attention_us=8e-4 * factor,
        group_us=2500.0 * factor,
        exchange_us=3.0 * factor,
        document_us=25.0 * factor,
        gather_us=1.0 * factor,
        zigzag=zigzag,
    )
    request = ContextRequest(
        world=4, tokens=2048, places=places, cost=dataclasses.replace(PRIOR, zigzag=zigzag)
    )

    def time_of(row):
        size = row.capacity.tokens // 2048
        return real.row_us(
            size, 2048, row.capacity.documents, sum(length * length for length in row.lengths)
        )

    found = measured_cost(request, 100, time_of)
    assert found.cost.zigzag == zigzag and "4 ranks" in found.note and "fitted within" in found.note
    for size in (1, 2, 4):
        for pairs in (1e5, 2e6, (size * 2048) ** 2):
            for count in places:
                expected = real.row_us(size, 2048, count, pairs)
                assert found.cost.row_us(size, 2048, count, pairs) == pytest.approx(
                    expected, rel=0.03
                )
                assert request.cost.row_us(size, 2048, count, pairs) < 0.7 * expected


@pytest.mark.parametrize("zigzag", [(), (2, 4)])
def test_timed_rows_fit_what_graphs_are_captured_for(zigzag):
    request = ContextRequest(
        world=4, tokens=64, places=(4, 16), cost=dataclasses.replace(PRIOR, zigzag=zigzag)
    )
    rows = sample_rows(request, 7)
    assert [size for size, _ in rows] == [4, 4, 4, 2, 2, 2, 1, 1, 1], "largest first"
    for size, row in rows:
        assert row.capacity.tokens == 64 * size and row.capacity.documents in (4, 16)
        assert len(row.lengths) <= row.capacity.documents and row.num_tokens <= row.capacity.tokens
        assert int(row.tokens.max()) < 7
        if size in zigzag:
            assert not any(length % (2 * size) for length in row.lengths), (
                "no place is lost to padding"
            )
    assert all(
        torch.equal(one.data, other.data)
        for (_, one), (_, other) in zip(rows, sample_rows(request, 7))
    )


def test_times_that_nothing_explains_leave_the_estimates(monkeypatch):
    def nonsense(*_, **__):
        raise ValueError("ContextCost: token_us must be positive numbers")

    monkeypatch.setattr("packgraph.train.features.context.fit", nonsense)
    found = measured_cost(ContextRequest(world=2, tokens=64, cost=PRIOR), 7, lambda row: 1.0)
    assert found.cost is None and "plans go on by estimates" in found.note


@pytest.mark.parametrize("enabled", [False, True])
def test_timing_leaves_nothing_behind_but_gradients(enabled):
    config = tiny(graph=enabled)
    shape = dataclasses.replace(config.model, dropout=0.1)
    model = DecoderModel(shape).train()
    model.register_buffer("seen", torch.zeros(()))
    if not enabled:  # graphs refuse hooks
        model.register_forward_pre_hook(lambda module, _: [module.seen.add_(1)][1:] or None)
    capacity = Capacity(32, 4)
    options = GraphConfig(enabled=enabled, capacities=(capacity,), warmup=1, autotune=False)
    executor = MicrobatchExecutor(model, options, CPU)
    request = ContextRequest(world=1, tokens=32, places=(4,), cost=PRIOR)
    (_, row), *_ = sample_rows(request, shape.vocab_size)
    executor.run_step([row], 1)
    executor.before_step(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random, counts = random_states(CPU), executor.totals()
    timed = time_row(executor.run_step, CPU, lambda number: number)
    with executor.aside(), undisturbed([model], CPU):
        assert timed(row) > 0
        assert not torch.equal(random_states(CPU)["cpu"], random["cpu"]), "dropout has drawn"
        assert executor.totals() != counts or not enabled
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(random_states(CPU)["cpu"], random["cpu"]) and executor.totals() == counts
    executor.close()


def stream(cost=PRIOR):
    source = Source(64, 120)
    request = ContextRequest(world=4, tokens=16, places=(4, 64), microsteps=3, cost=cost)
    return PlannedSteps(
        DataConfig(window=8), source, Tokens(source), [Capacity(64, 4), Capacity(64, 64)], request
    )


DEAR = dataclasses.replace(PRIOR, group_us=90000.0, exchange_us=500.0)


def test_plans_go_by_measured_costs_and_a_run_goes_on_with_them():
    first, other = stream(), stream()
    first.next_step()
    assert not first.is_measured and "cost" not in first.state_dict()
    first.plan_by(DEAR)
    assert first.is_measured and first.summary()["cost_is_measured"]
    state = json.loads(json.dumps(first.state_dict()))
    other.load_state_dict(state)
    assert other.is_measured and other.request == first.request
    ours = [first.next_step() for _ in range(4)]
    theirs = [other.next_step() for _ in range(4)]
    assert [[pack.lengths for pack in step] for step in ours] == [
        [pack.lengths for pack in step] for step in theirs
    ]
    assert first.plan.request.cost == DEAR and first.plan == plan_context(
        first.plan.lengths, first.request
    )
    assert first.plan.step_us != plan_context(first.plan.lengths, stream().request).step_us, (
        "costs that matter"
    )


def test_a_stream_goes_back_to_estimates_with_a_state_that_has_none():
    planned = stream()
    early = planned.state_dict()
    planned.plan_by(DEAR)
    planned.load_state_dict(early)
    assert not planned.is_measured and planned.request.cost == PRIOR
    cut = stream(dataclasses.replace(PRIOR, zigzag=(2, 4)))
    other = stream()
    other.plan_by(DEAR)
    cut.load_state_dict(json.loads(json.dumps(other.state_dict())))
    assert cut.request.cost.zigzag == (2, 4), "how rows are cut is this run's affair"


def test_the_command_plans_by_the_costs_of_a_run(tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"text": "x" * size}) + "\n" for size in range(20, 400, 7)),
        encoding="utf-8",
    )
    run = tmp_path / "run"
    run.mkdir()
    words = ["plan", str(data), "--world", "4", "--tokens-per-rank", "256", "--microbatches", "3"]
    assert cli.main([*words, "--costs", str(run)]) == 2
    assert (
        "holds no measured costs; name a run made with --parallel.dynamic-cp true"
        in capsys.readouterr().err
    )
    costs = {name: 1e6 * getattr(PRIOR, name) for name in COEFFICIENTS}
    (run / "summary.json").write_text(
        json.dumps({"context": {"cost": costs, "cost_is_measured": True}})
    )
    for told in (run, run / "summary.json"):
        assert cli.main([*words, "--costs", str(told)]) == 0
        shown = capsys.readouterr().out
        assert f"costs as measured by {told}" in shown
        predicted = next(line for line in shown.splitlines() if line.startswith("step"))
        assert float(predicted.split()[1]) > 1e5, "in milliseconds of that machine"
    assert cli.main(words) == 0 and "costs estimated for qwen3-tiny" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wish", "device", "deterministic", "wanted"),
    [
        ("auto", "cuda", False, True),
        ("auto", "cuda", True, False),
        ("auto", "cpu", False, False),
        (True, "cpu", True, True),
        (False, "cuda", False, False),
    ],
)
def test_rows_are_timed_where_times_mean_something(wish, device, deterministic, wanted):
    assert is_wanted(wish, torch.device(device), deterministic) is wanted
