"""The benchmark of dynamic context parallelism: every way computes the same, all ranks know the
same rows."""

import json
from collections import Counter
from unittest import mock

from bench_context import ContextArguments, measure_context
from context_steps import DYNAMIC, FIXED, ContextWay, plan_steps
from distkit import CPU, run_ranks

from packgraph.bench.comparison import Deadline
from packgraph.bench.rows import Rows, facts
from packgraph.parallel.context.request import ContextRequest
from packgraph.parallel.layout import Layout
from packgraph.parallel.ranks import Launch
from packgraph.train.feed import groups_of

WAYS = ("fixed", "dynamic", "fixed+graph", "dynamic+graph")


def options(**changes):
    given = {
        "model": "tiny",
        "layers": 1,
        "tokens": (32,),
        "places": (8, 32),
        "ways": WAYS,
        "rounds": 2,
        "mean": 16.0,
        "sigma": 1.2,
        "seed": 0,
        "fixed": 2,
        "microbatches": 2,
        "longest": 64,
    }
    return ContextArguments(**given | changes)


def measured(mesh, chosen):
    rows = Rows(facts(CPU, "abc123"), write=False)
    measure_context(chosen, CPU, mesh, rows, Deadline(None))
    return rows.all


def test_bench_context_on_two_ranks():
    one, two = run_ranks(
        measured, 2, options(), layout=Layout(dp=1, cp=2, contexts=(1, 2)), seconds=120.0
    )
    assert one == two, "all ranks know the same"
    assert [row["way"] for row in one] == list(WAYS)
    for row in one:
        json.dumps(row)
        assert row["reason"] is None and row["agrees"] and row["figures"]["step_ms"]["n"] == 2
        assert 0 < row["balance"] <= 1.0 and row["predicted_ms"] >= row["bound_ms"] > 0
        assert (row["pool_bytes"] is None) == ("graph" not in row["way"])
    assert one[3]["captured"] == [4, 4] and 1.0 <= one[3]["pool_ratio"] < 1.05
    assert one[3]["sizes"] == [1, 2] and one[2]["sizes"] == [2]
    assert one[1]["ratio_to_dynamic"] == 1.0 and all(row["ratio_to_dynamic"] > 0 for row in one)
    assert all(row["cost_seconds"] > 0 for row in one) and one[3]["prepare_seconds"] > 0


def hurried(mesh, chosen):
    """The rows of a call whose time for preparing is up once `dynamic` is ready, and the banks that
    were captured."""
    rows, deadline, built = Rows(facts(CPU, "abc123"), write=False), Deadline(1000), []
    build = ContextWay.build

    def counted(way, share):
        built.append(way.name)
        return build(way, share)

    def passed(share=1.0):
        return share < 1.0 and "dynamic" in built

    with (
        mock.patch.object(ContextWay, "build", counted),
        mock.patch.object(deadline, "passed", passed),
    ):
        measure_context(chosen, CPU, mesh, rows, deadline)
    return rows.all, built


def test_what_is_prepared_when_most_of_the_time_is_up_is_timed():
    """The bank that costs were measured with is not built again, and given back where its way is
    not prepared."""
    ways = ("fixed", "dynamic", "dynamic+graph")
    (rows, built), _ = run_ranks(
        hurried, 2, options(ways=ways), layout=Layout(dp=1, cp=2, contexts=(1, 2)), seconds=120.0
    )
    assert built == ["dynamic+graph", "fixed", "dynamic"]
    assert [bool(row["figures"]) for row in rows] == [True, True, False]
    assert rows[2]["reason"].startswith("not prepared")


def test_both_kinds_of_groups_have_the_same_documents():
    request = ContextRequest(world=8, tokens=64, microsteps=4)
    steps = plan_steps(3, request, 4, 100, longest=256, mean=32.0, sigma=1.5, seed=1)
    seen = set()
    for step in steps:
        found = {
            kind: Counter(length for pack in packs for length in pack.lengths)
            for kind, packs in step.packs.items()
        }
        assert found[DYNAMIC] == found[FIXED] and step.tokens > 0.97 * 4 * 8 * 64
        assert {pack.capacity.tokens for pack in step.packs[FIXED]} == {4 * 64}
        for packs in step.packs.values():
            assert len(list(groups_of(packs, 64, 8))) == len(packs)
        assert {pack.num_loss_tokens for pack in step.packs[FIXED]} and step.loss_tokens == sum(
            pack.num_loss_tokens for pack in step.packs[FIXED]
        )
        seen.add(tuple(sorted(found[FIXED].elements())))
    assert len(seen) == 3, "every step has documents of its own"


def test_what_cannot_be_measured_is_said_at_once():
    two = Launch(world=2)
    assert not options().refusals(two)
    assert any("do not cover" in problem for problem in options(fixed=3).refusals(Launch(world=4)))
    assert any("does not fit 2 ranks" in problem for problem in options(longest=65).refusals(two))
    assert any("num_heads (4)" in problem for problem in options(fixed=2).refusals(Launch(world=8)))
