"""`bench offload`: a row for each way, plans that are followed, and the search for what
fits."""

import gc
import json
import weakref
from unittest import mock

import torch
from bench import main
from bench_models import build_part, shape, zero_gradients
from bench_offload import OffloadArguments, OffloadCase, OffloadRun
from hypothesis import given
from hypothesis import strategies as st
from offload_measures import (
    HeldBytes,
    free_host_bytes,
    most_tokens,
    search,
)

from packgraph.bench.comparison import Deadline
from packgraph.offloading.plan import CopySpeed

CPU = torch.device("cpu")


def test_every_way_has_a_row_and_needs_less_memory(capsys, tmp_path):
    words = "offload --device cpu --layers 3 --min-bytes 1 --rounds 1 --tokens 32 --lost 0.5"
    assert main([*words.split(), "--modules", "core_attn", "mlp_act", "--draw", str(tmp_path)]) == 0
    kept, everything, planned = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["way"] for row in (kept, everything, planned)] == ["kept", "everything", "planned"]
    assert all(
        row["reason"] is None and row["figures"]["ms"]["n"] == 1
        for row in (kept, everything, planned)
    )
    assert everything["groups"] == 6 and everything["groups_moved"] == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"tiny-32-{way}.{kind}"
        for way in ("everything", "planned")
        for kind in ("svg", "trace.json")
    ]
    assert (
        planned["lost"] <= 0.5
        and planned["pool_bytes"] < kept["pool_bytes"]
        and kept["pool_ratio"] == 1.0
    )
    assert planned["fell_bytes"] == kept["pool_bytes"] - planned["pool_bytes"] > 0
    assert all(
        row["predicted_pool_bytes"] == row["pool_bytes"] for row in (kept, everything, planned)
    )
    assert all(row["predicted_fell_bytes"] == row["fell_bytes"] for row in (everything, planned))
    assert "predicted_fell_bytes" not in kept and planned["predicted_fell_bytes"] > 0
    saved = kept["kept_for_backward_bytes"]
    assert (
        all(row["kept_for_backward_bytes"] == saved for row in (everything, planned))
        and kept["pool_bytes"] > saved
    )
    assert planned["moved_of_kept_for_backward"] == round(planned["moved_bytes"] / saved, 4)
    assert everything["fell_of_kept_for_backward"] == round(everything["fell_bytes"] / saved, 4) > 0
    assert planned["forward_room_bytes"] == 0, "nobody counts a CPU's memory"
    assert (
        planned["graph_compute_ms"] > 0 < planned["eager_compute_ms"]
        and planned["planned_out_gb_s"] == 50.0
    )


def test_a_prediction_changes_no_gradient_no_pool_and_no_plan():
    options = OffloadArguments(
        model="tiny",
        layers=2,
        tokens=(32,),
        modules=("core_attn", "mlp_act"),
        min_bytes=1,
    )
    found = []
    for predicted in (False, True):
        model = build_part("layers", shape("tiny", 2), CPU, torch.float32)
        zero_gradients([model])
        case = OffloadCase(options, model, CPU, 32, CopySpeed())
        with OffloadRun(case, case.policy("everything")[0], calls=2) as run:
            run.prepare_foretold() if predicted else run.prepare()
            run.calls()
            found.append(
                (
                    run.way.facts()["pool_bytes"],
                    run.runtime.plan.moves,
                    run.runtime.copy_streams.scope,
                    [parameter.grad.clone() for parameter in model.parameters()],
                )
            )
    assert found[0][:3] == found[1][:3] and found[0][2] == 0
    assert all(torch.equal(a, b) for a, b in zip(found[0][3], found[1][3], strict=True))


def test_a_run_that_is_over_keeps_no_host_memory():
    """Whoever keeps its engine, as compiled code in torch's caches keeps modules."""
    model = build_part("layers", shape("tiny", 2), CPU, torch.float32)
    zero_gradients([model])
    options = OffloadArguments(model="tiny", layers=2, part="layers", tokens=(64,), min_bytes=1)
    case = OffloadCase(options, model, CPU, 64, CopySpeed())
    with OffloadRun(case, case.policy("everything")[0], calls=1) as run:
        run.runtime.times_graphs = True
        run.prepare()
        run.calls()
        runtime, slots = run.runtime, run.way.graphed.slots.all
        pieces = [
            weakref.ref(piece.untyped_storage())
            for slot in slots
            for piece in slot.pool.host.arenas.pieces
        ]
        assert all(of() is not None for of in pieces) and runtime._captured
        del slots
    del run
    gc.collect()
    assert pieces and runtime.plan is not None and all(of() is None for of in pieces)


def test_what_runs_out_of_memory_ends_the_search_and_what_fails_otherwise_is_an_error(capsys):
    words = (
        "offload --device cpu --layers 1 --min-bytes 1 --rounds 1 --tokens 32 --modules mlp_act "
        "--largest 32 --ways kept everything"
    )
    for error, most, reason in (
        (torch.OutOfMemoryError("CUDA out of memory"), 96, None),
        (ValueError("rows are too long"), 32, "at 128 tokens: ValueError: rows are too long"),
    ):

        def run_once(case, way, error=error):
            if case.tokens > 96:
                raise error
            return True

        with mock.patch.object(OffloadCase, "run_once", run_once):
            main(words.split())
        *_, kept, moved = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        for row, way in ((kept, "kept"), (moved, "everything")):
            assert row["tokens"] == most and row["way"] == f"{way}, largest"
            assert row["reason"] is None if reason is None else reason in row["reason"]
    assert 2**20 < free_host_bytes() < 2**50


# ---- what a forward keeps for its backward


# ---- the search for the most tokens that run


@given(most=st.integers(0, 100), good=st.integers(0, 100), guess=st.integers(0, 120))
def test_the_largest_number_that_fits_is_found(most, good, guess):
    asked, good = [], min(good, most)
    assert search(lambda number: asked.append(number) or number <= most, good, guess) == most
    assert len(set(asked)) == len(asked) <= 15 and all(number > good for number in asked)


def trials(most, takes, there, known=32, deadline=None):
    asked = []
    found = most_tokens(
        lambda tokens: asked.append(tokens) or tokens <= most,
        32,
        deadline or Deadline(None),
        known,
        takes,
        there,
    )
    return *found, asked


def test_a_search_stops_before_the_host_has_no_memory_left():
    gib = 2.0**30
    most, why, asked = trials(10**6, HeldBytes(1.0, gib), HeldBytes(10.0**6, 1000 * gib))
    assert most == 992 and asked == [992]
    assert (
        why
        == "1024 would take 1024 GiB of pinned host memory, more than the 1000 GiB of --host-gib"
    )
    most, why, asked = trials(10**6, HeldBytes(0.0, gib), HeldBytes(0.0, 40 * gib))
    assert (most, asked) == (32, []) and why.startswith("64 would take 64 GiB")
    assert trials(900, HeldBytes(1.0, gib), HeldBytes(10.0**6, 1000 * gib))[:2] == (896, None)
