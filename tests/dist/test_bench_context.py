"""The benchmark of dynamic context parallelism: every way computes the same, all ranks know the
same rows."""

import json

from bench_context import ContextArguments, measure_context
from distkit import CPU, run_ranks

from packgraph.bench.comparison import Deadline
from packgraph.bench.rows import Rows, facts
from packgraph.parallel.layout import Layout

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
