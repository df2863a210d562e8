"""Steps, losses and log-probabilities of a model of transformers by every way: the same numbers,
and rows that say why there are none."""

import pytest
import torch
from bench_integrations import WAYS, IntegrationArguments, bench_integrations

from packgraph.bench.comparison import Deadline
from packgraph.bench.rows import Rows

CPU = torch.device("cpu")


def measured(ways, model="tiny", **options):
    rows = Rows({}, write=False)
    asked = {"layers": 2, "tokens": (64,), "step_tokens": 128, "steps": 2, "mean": 20.0} | options
    bench_integrations(
        IntegrationArguments(model=model, ways=ways, documents=12, **asked),
        CPU,
        rows,
        Deadline(None),
    )
    return rows.all


def test_ways_without_compiling_train_on_the_same_and_begin_with_the_same_loss():
    rows = measured(("transformers", "live", "own"))
    assert [row["reason"] for row in rows] == [None] * 3
    assert rows[1]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-5)
    assert rows[2]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-5)
    # 2 microbatches in each of 3 steps ahead, 1 lead, 2 timed and 1 for memory; 1 of warm-up
    assert [row["replayed"] for row in rows] == [None, 13, 13]
    assert all(row["tokens_per_second"] > 0 for row in rows) and rows[0]["ratio"] == 1
    assert {row["microbatches"] for row in rows} == {2}
    compiled = {f"{name}+compile" for name in ("transformers", "live", "own")}
    assert set(WAYS) == compiled | {"transformers", "live", "own", "eager"}


@pytest.mark.parametrize("work", ["loss", "logprobs"])
@pytest.mark.few(2)
def test_forwards_without_gradients_give_the_same_numbers_from_the_pools_that_are_there(work):
    rows = measured(("transformers", "live", "own", "eager"), work=work)
    assert [row["reason"] for row in rows] == [None] * 4
    first, *others = (row["loss"] for row in rows)
    assert others == pytest.approx([first] * 3, rel=1e-5)
    assert rows[2]["loss"] == rows[3]["loss"]  # graphs have the bits of eager
    assert rows[1]["replayed"] >= 12 and rows[2]["replayed"] >= 12
    growth = [row["pool_growth"] for row in rows]
    assert growth == ([0] * 4 if work == "loss" else [None] * 4)
