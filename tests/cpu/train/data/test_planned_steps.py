"""Steps that are planned as a whole: every document once, nobody waits for ever, the stream goes on
from any step."""

import dataclasses
import json
from collections import Counter

import pytest
import torch
from contextkit import Source, Tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from trainkit import tiny

from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.context.request import ContextRequest
from packgraph.parallel.layout import Layout, context_sizes
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.data import DataConfig, DataError, PlannedSteps
from packgraph.train.data.microbatches import take_step
from packgraph.train.features.context import context_request, rank_tokens, with_context_buckets
from packgraph.train.feed import MicrobatchAssignment, groups_of
from packgraph.train.validate import validate
from packgraph.verification.matrix import SwitchingSteps

WORLD, TOKENS = 4, 16


def stream(
    *, microsteps=3, world=WORLD, count=60, epochs=1, window=8, overlong="error", longest=None
):
    source = Source(longest or WORLD * TOKENS, count)
    request = ContextRequest(
        world=world,
        tokens=TOKENS,
        sizes=context_sizes(WORLD),
        places=(4, 64),
        microsteps=microsteps,
    )
    config = DataConfig(window=window, epochs=epochs, overlong=overlong)
    return PlannedSteps(
        config,
        source,
        Tokens(source),
        [Capacity(WORLD * TOKENS, 4), Capacity(WORLD * TOKENS, 64)],
        request,
    )


def steps_of(planned):
    found = []
    while step := take_step(planned, 1):
        found.append(step)
    return found


def texts(steps):
    """The documents of all packs, as tokens."""
    return Counter(
        tuple(document.tolist())
        for step in steps
        for pack in step
        for document in pack.tokens[: pack.num_tokens].split(list(pack.lengths))
    )


@pytest.mark.parametrize("microsteps", [1, 3, 50])
def test_every_document_is_in_one_pack_and_every_step_in_whole_microsteps(microsteps):
    planned = stream(microsteps=microsteps)
    source = Source(WORLD * TOKENS, 60)
    steps = steps_of(planned)
    expected = Counter(
        tuple(document.tokens.tolist())
        for index in range(60)
        for document in Tokens(source).encode(source[index])
    )
    assert texts(steps) == expected
    for step in steps:
        shares = [
            MicrobatchAssignment(WORLD, rank, rank_tokens=TOKENS).share(step)
            for rank in range(WORLD)
        ]
        assert len({len(share) for share in shares}) == 1 and 1 <= len(shares[0]) <= microsteps
        sizes = [[pack.capacity.tokens for pack in share] for share in shares]
        assert all(row == sorted(row, reverse=True) for row in sizes), "large groups first"
    assert planned.report.tokens == int(source.lengths.sum()) and planned.report.documents == 60


def test_a_step_is_as_full_as_its_waves_allow():
    planned = stream(count=400, window=64)
    for _ in range(5):
        step = planned.next_step()
        assert sum(pack.capacity.tokens for pack in step) == 3 * WORLD * TOKENS
        assert planned.plan.padding < 0.05 and 0 < planned.plan.balance <= 1
    told = planned.summary()
    assert 0 < told["balance_least"] <= told["balance_mean"] <= 1 and not stream().summary()
    assert sum(int(size) * count for size, count in told["rows_by_ranks"].items()) == 5 * 3 * WORLD


@pytest.mark.parametrize("after", [0, 1, 4])
def test_the_stream_goes_on_from_any_step(after):
    first, second = stream(count=200, epochs=None), stream(count=200, epochs=None)
    for _ in range(after):
        first.next_step()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(4):
        for left, right in zip(first.next_step(), second.next_step(), strict=True):
            assert left.capacity == right.capacity and left.lengths == right.lengths
            assert torch.equal(left.data, right.data)
    assert first.state_dict() == second.state_dict()


def test_the_stream_goes_on_with_another_number_of_ranks():
    first, second = stream(), stream(world=8)
    taken = [first.next_step() for _ in range(2)]
    second.load_state_dict(first.state_dict())
    assert texts(taken) + texts(steps_of(second)) == texts(steps_of(stream()))


def test_documents_that_fit_no_group_are_split_or_refused():
    with pytest.raises(DataError, match=r"has 100 tokens, .*\(data\.overlong\)"):
        steps_of(stream(longest=100))
    split = stream(longest=100, overlong="split")
    assert (
        max(max(pack.lengths, default=0) for step in steps_of(split) for pack in step)
        == WORLD * TOKENS
    )
    assert split.report.split_documents


def test_single_packs_of_a_planned_step_are_refused():
    with pytest.raises(TypeError, match="next_step"):
        next(stream())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3).map(lambda power: 2**power), st.lists(st.integers(0, 3), max_size=40))
def test_groups_follow_from_the_order_of_packs(world, powers):
    """What a plan writes down as microsteps of aligned blocks is read back from sizes alone;
    anything else is refused."""
    packs = [PackedBatch.empty(Capacity(TOKENS * 2**power, 1)) for power in powers]
    expected, first, wrong = [], 0, False
    for power in powers:
        size = 2**power
        wrong = wrong or first % size > 0 or first + size > world
        expected.append(range(first, first + size))
        first = (first + size) % world
    if wrong or first:
        with pytest.raises(ValueError, match="microstep"):
            list(groups_of(packs, TOKENS, world))
    else:
        assert [ranks for _, ranks in groups_of(packs, TOKENS, world)] == expected


def test_switching_steps_are_whole_microsteps_of_every_kind():
    steps, sizes, lengths = SwitchingSteps(WORLD, TOKENS, (1, 2, 4), (4, 12), 32), [], []
    for _ in range(15):
        step = steps.next_step()
        share = MicrobatchAssignment(WORLD, 0, rank_tokens=TOKENS).share(step)
        sizes += [pack.capacity.tokens // TOKENS for pack in share]
        lengths += [pack.lengths for pack in step]
    assert sizes[:6] == [1, 4, 2, 1, 4, 2] and () in lengths
    assert (WORLD * TOKENS,) in lengths, "one document over all ranks, to the last token"
    assert any(len(found) == 12 and max(found) <= 2 for found in lengths), (
        "as many as there are places"
    )
    assert any(length % 2 for found in lengths for length in found), "odd lengths"


def run_config(**changes):
    made = tiny(graph=True, steps=6)
    parallel = {"cp": 4, "dynamic_cp": True} | {
        name: changes.pop(name) for name in ("cp", "dp", "tp", "pp") if name in changes
    }
    graph = {"capacities": (Capacity(64, 8), Capacity(64, 16))} | changes
    return dataclasses.replace(
        made,
        model=dataclasses.replace(made.model, num_heads=4),
        graph=dataclasses.replace(made.graph, **graph),
        parallel=ParallelConfig(**parallel),
    )


def test_what_a_run_is_asked_for_follows_from_its_options():
    config = run_config(dp=2)
    request = context_request(config, 8, torch.device("cpu"))
    assert (request.world, request.tokens, request.sizes, request.places) == (
        8,
        16,
        (1, 2, 4),
        (8, 16),
    )
    assert request.microsteps == 1, "60 tokens a step, and 8 ranks have 128 places"
    buckets = with_context_buckets(config).graph.capacities
    assert [(bucket.tokens, bucket.documents) for bucket in buckets] == [
        (16, 8),
        (16, 16),
        (32, 8),
        (32, 16),
        (64, 8),
        (64, 16),
    ]
    assert rank_tokens(with_context_buckets(config)) == rank_tokens(config) == 16
    assert config.parallel.layout() == Layout(dp=2, cp=4, contexts=(1, 2, 4))
    capped = run_config(dp=2, max_documents=4)
    assert context_request(capped, 8, torch.device("cpu")).places == (4, 8, 16)
    captured = with_context_buckets(capped).graph.captured_capacities()
    assert [(bucket.tokens, bucket.documents) for bucket in captured] == [(16, 4), (32, 4), (64, 4)]
    assert context_sizes(12) == (1, 2, 4, 12) and context_sizes(1) == (1,)
    static = dataclasses.replace(config, parallel=ParallelConfig(cp=4))
    assert rank_tokens(static) is None and with_context_buckets(static) is static


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cp": 1}, "up to parallel.cp ranks, and that is 1"),
        ({"granularity": "step"}, "granularity = step is not there"),
        ({"capacities": "auto"}, "capacities that are named"),
        ({"capacities": (Capacity(32, 8), Capacity(64, 8))}, "of one number of tokens"),
        ({"capacities": (Capacity(64, 8, 32),)}, "cannot have a longest document"),
        ({"capacities": (Capacity(66, 8),)}, "must be a multiple of that, not 66"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(changes, reason):
    world = changes.get("cp", 4)
    found = validate(run_config(**changes), "cpu", world=world)
    assert any(reason in problem for problem in found), found
    assert not validate(run_config(), "cpu", world=4)


def test_timing_rows_without_plans_is_refused():
    config = dataclasses.replace(run_config(), parallel=ParallelConfig(cp=4, time_rows=True))
    assert any(
        "it goes with parallel.dynamic_cp = true" in found
        for found in validate(config, "cpu", world=4)
    )
