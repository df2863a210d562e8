"""`bench offload`: a row for each way, plans that are followed, and the search for what
fits."""

import gc
import itertools
import json
import weakref
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from bench import main
from bench_models import build_part, draw_batches, shape, zero_gradients
from bench_offload import OffloadArguments, OffloadCase, OffloadRun
from hypothesis import given
from hypothesis import strategies as st
from offload_measures import (
    HeldBytes,
    copy_ceiling,
    copy_times,
    free_host_bytes,
    kept_for_backward,
    most_tokens,
    search,
)
from step_figures import attempt_alone

from packgraph.bench.comparison import Deadline
from packgraph.graphs.checks.host_sync import capturing
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.memory.allocator import free_memory
from packgraph.offloading.group import SavedGroup
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


def test_ways_that_are_asked_for_are_compared_with_what_is_kept_where_that_is_asked_for(capsys):
    words = (
        "offload --device cpu --layers 1 --min-bytes 1 --rounds 1 --tokens 32 --modules mlp_act "
        "--ways"
    )
    for ways in (["kept", "everything"], ["everything"]):
        assert main([*words.split(), *ways]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["way"] for row in rows] == ways
        assert ("time_ratio" in rows[-1]) == ("kept" in ways)


@pytest.mark.parametrize("calls", [3])
def test_a_round_has_as_many_microbatches_as_are_asked_for(capsys, calls):
    words = (
        "offload --device cpu --layers 1 --min-bytes 1 --rounds 1 --tokens 32 --modules mlp_act "
        f"--ways everything --calls {calls}"
    )
    drawn = []

    def draw(capacity, count, *others, **more):
        drawn.append(count)
        return draw_batches(capacity, count, *others, **more)

    with mock.patch("bench_offload.draw_batches", draw):
        assert main(words.split()) == 0
    assert drawn == [calls]
    assert json.loads(capsys.readouterr().out)["reason"] is None


def test_where_nothing_can_be_kept_others_are_measured_and_compared_with_nothing(capsys):
    """What offloading is for: eager activations have no room."""
    words = "offload --device cpu --layers 1 --min-bytes 1 --rounds 1 --tokens 32 --modules mlp_act"
    with mock.patch.object(
        OffloadCase, "kept_bytes", side_effect=torch.OutOfMemoryError("no room")
    ):
        main(words.split())
    kept, everything, planned = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "no room" in kept["reason"] and everything["reason"] is planned["reason"] is None
    assert all("ms" in row["figures"] and "time_ratio" not in row for row in (everything, planned))


def test_pools_of_experts_are_predicted(capsys):
    words = (
        "offload --device cpu --model moonlight-tiny --layers 2 --min-bytes 1 --rounds 1 --tokens "
        "32"
    )
    assert main([*words.split(), "--ways", "kept", "everything"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 2 and all(
        row["predicted_pool_bytes"] == row["pool_bytes"] > 0 for row in rows
    )
    assert rows[1]["planned_saved_bytes"] > 0 < rows[1]["predicted_fell_bytes"]


def test_what_has_no_room_for_a_trace_is_measured_without_a_prediction(capsys):
    words = (
        "offload --device cpu --layers 1 --min-bytes 1 --rounds 1 --tokens 32 --modules mlp_act "
        "--ways kept everything"
    )
    error = CaptureError("no room", "here", "none")
    error.__cause__ = torch.OutOfMemoryError("no room")
    with mock.patch("bench_offload.trial_memory", side_effect=error):
        assert main(words.split()) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(
        row["predicted_pool_bytes"] is None and row["fell_bytes"] is not None for row in rows
    )
    assert all("predicted_fell_bytes" not in row for row in rows)


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


@pytest.mark.parametrize("at", [5, 70])
def test_what_had_no_room_keeps_no_host_memory_from_the_next_trial(at, monkeypatch):
    """Of a reload in an eager pass, and of one in a capture, which ends with an error that explains
    the first."""
    start, count, pieces = SavedGroup.start_reload, itertools.count(), []

    def start_reload(group):
        if next(count) == at:
            pieces.extend(
                weakref.ref(piece.untyped_storage())
                for piece in group.copy_streams.memories.arenas.pieces
            )
            pieces.append(capturing())
            raise torch.OutOfMemoryError("CUDA out of memory")
        start(group)

    monkeypatch.setattr(SavedGroup, "start_reload", start_reload)
    model = build_part("layers", shape("tiny", 2), CPU, torch.float32)
    zero_gradients([model])
    options = OffloadArguments(model="tiny", layers=2, part="layers", tokens=(64,), min_bytes=1)
    _, reason = attempt_alone(
        partial(OffloadCase(options, model, CPU, 64, CopySpeed()).run_once, "everything"),
        Deadline(None),
    )
    assert "CUDA out of memory" in reason and pieces.pop() == (at == 70)
    free_memory(CPU)
    assert pieces and all(of() is None for of in pieces)


def test_a_search_that_runs_out_of_time_says_at_least(capsys):
    words = (
        "offload --device cpu --layers 1 --min-bytes 1 --rounds 1 --tokens 32 --modules mlp_act "
        "--largest 32 --ways kept everything"
    )
    passed = iter([False] * 3)
    with mock.patch.object(
        Deadline, "passed", lambda self: next(passed, True) if self.seconds else False
    ):
        assert main([*words.split(), "--seconds", "1000"]) == 0
    said = capsys.readouterr()
    *_, kept, moved = [json.loads(line) for line in said.out.splitlines()]
    assert kept["way"] == "kept, at least" and kept["tokens"] == 32 and kept["reason"] is None
    assert kept["stopped"].startswith("not measured") and "not measured" in moved["reason"]
    assert f"kept, at least at 32 tokens: {kept['stopped']}" in " ".join(said.err.split())


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


def test_a_cpu_has_no_copies_to_time():
    assert copy_ceiling(torch.device("cpu")) == CopySpeed()
    assert copy_times(torch.device("cpu"), lambda: None) is None


# ---- what a forward keeps for its backward


def test_saved_storages_count_once_while_they_live():
    weight, x = torch.ones(8, 8, requires_grad=True), torch.ones(4, 8, requires_grad=True)

    def forward():
        hidden = x @ weight  # saves what is there anyway
        F.silu(torch.ones(99, requires_grad=True) * 2)  # nobody needs it when the forward ends
        return F.silu(hidden[:2]).sum() + F.silu(hidden[2:]).sum()  # two views of one storage

    assert kept_for_backward(forward, [weight, x]) == 4 * 8 * 4
    assert kept_for_backward(forward, [x]) == (4 * 8 + 8 * 8) * 4
    assert kept_for_backward(lambda: x.sum(), []) == 0


def kept_by(layers):
    model = build_part("layers", shape("tiny", layers), torch.device("cpu"), torch.float32)
    zero_gradients([model])
    options = OffloadArguments(model="tiny", layers=layers, part="layers", tokens=(32,))
    return OffloadCase(options, model, torch.device("cpu"), 32, CopySpeed()).kept_bytes()


def test_every_layer_keeps_as_much_as_another():
    one, two, three = kept_by(1), kept_by(2), kept_by(3)
    assert three - two == two - one > 32 * 3 * shape("tiny", 1).intermediate_size * 4, (
        "gate, up and their product"
    )


# ---- the search for the most tokens that run


LOTS = HeldBytes(0.0, 2.0**60)


@given(most=st.integers(0, 100), good=st.integers(0, 100), guess=st.integers(0, 120))
def test_the_largest_number_that_fits_is_found(most, good, guess):
    asked, good = [], min(good, most)
    assert search(lambda number: asked.append(number) or number <= most, good, guess) == most
    assert len(set(asked)) == len(asked) <= 15 and all(number > good for number in asked)


def test_a_good_guess_takes_two_trials():
    asked = []
    assert search(lambda number: asked.append(number) or number <= 13, 4, 13) == 13
    assert asked == [13, 14]


@pytest.mark.parametrize(("asks", "good"), [(0, 2), (1, 4), (3, 16), (4, 16), (5, 24)])
def test_what_is_known_when_the_time_is_up_is_told(asks, good):
    """4, 8 and 16 fit, 32 does not, 24 fits, 28 does not."""
    asked = []
    assert (
        search(
            lambda number: None if len(asked) == asks else asked.append(number) or number <= 27, 2
        )
        == good
    )


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


def test_a_search_begins_with_what_should_fit():
    assert trials(1000, HeldBytes(1.0, 0.0), HeldBytes(1040.0, 2.0**60)) == (
        992,
        None,
        [960, 992, 1056, 1024],
    )
    assert trials(1000, HeldBytes(), LOTS)[:2] == (992, None)


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


def test_a_search_without_time_tells_what_was_known():
    most, why, asked = trials(10**6, HeldBytes(), LOTS, deadline=Deadline(-1.0))
    assert (most, asked) == (32, []) and why.startswith("not measured")


def test_below_a_guess_that_does_not_fit_the_next_ones_are_tried():
    asked = []
    assert search(lambda number: asked.append(number) or number <= 12, 1, 14) == 12
    assert asked == [14, 13, 11, 12]
