"""What benchmarks compute from shapes and profiles: operations, busy time, lengths, padding."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import main
from bench_models import (
    WINDOW,
    TimedPart,
    build_part,
    draw_batches,
    draw_lengths,
    planned_buckets,
    refit,
    shape,
    zero_gradients,
)
from bench_padding import DISTRIBUTIONS, PaddingArguments, bench_padding, lengths_like
from bench_shard import exposed_length
from hypothesis import given
from hypothesis import strategies as st
from step_figures import (
    PEAK_TFLOPS,
    busy_time,
    device_intervals,
    model_flops,
    peak_share,
    union_length,
)
from torch.autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode

from packgraph.bench.comparison import Deadline, start_anew
from packgraph.bench.rows import Rows, facts
from packgraph.packing.capacity import Capacity

CPU = torch.device("cpu")
TINY = shape("tiny", 2)
SPANS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda span: (span[0], span[0] + span[1]))
)


@pytest.mark.parametrize("part", ["layers", "model"])
def test_operations_are_those_of_the_matrix_products_that_run(part: str) -> None:
    """Attention is counted by its formula (below): here both its products are left out on both
    sides."""
    model = build_part(part, TINY, CPU, torch.float32)
    zero_gradients([model])
    (batch,) = draw_batches(Capacity(32, 1), 1, TINY.vocab_size, mean=100, sigma=0.1, seed=0)
    assert batch.lengths == (32,), "without padding, which the model does not ask for"
    work = TimedPart(model, 32, 32)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(model(*work.arguments(batch)), work.incoming(batch))
    products = sum(
        count
        for operation, count in counter.get_flop_counts()["Global"].items()
        if operation in (torch.ops.aten.mm, torch.ops.aten.addmm)
    )
    attention = 3 * TINY.num_layers * TINY.num_heads * 4 * TINY.head_dim * (32 * 33 // 2)
    assert model_flops(TINY, batch.lengths, head=part == "model") == products + attention


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_attention_costs_what_pairs_of_tokens_cost(lengths: list[int]) -> None:
    pairs = sum(
        1
        for length in lengths
        for row in range(length)
        for column in range(length)
        if column <= row
    )
    one_by_one = [1] * sum(lengths)
    more = model_flops(TINY, lengths, head=False) - model_flops(TINY, one_by_one, head=False)
    each = 3 * TINY.num_layers * TINY.num_heads * (2 + 2) * TINY.head_dim
    assert more == (pairs - sum(lengths)) * each


def test_share_of_the_peak() -> None:
    assert peak_share(PEAK_TFLOPS * 1e12 * 0.5, 1000.0) == pytest.approx(0.5)


@given(SPANS)
def test_the_union_of_intervals_counts_every_moment_once(spans: list[tuple[int, int]]) -> None:
    covered = {moment for begin, end in spans for moment in range(begin, end)}
    assert union_length(spans) == len(covered)


@given(SPANS, SPANS)
def test_exchanges_are_exposed_while_nothing_else_runs(
    exchanges: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    moments = [
        {moment for begin, end in spans for moment in range(begin, end)}
        for spans in (exchanges, others)
    ]
    assert exposed_length(exchanges, others) == len(moments[0] - moments[1])


def test_only_work_of_the_device_is_busy_time() -> None:
    def event(begin: int, end: int, where: DeviceType, annotation: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            time_range=SimpleNamespace(start=begin, end=end),
            device_type=where,
            is_user_annotation=annotation,
        )

    events = [
        event(0, 9, DeviceType.CPU),
        event(1, 3, DeviceType.CUDA),
        event(0, 8, DeviceType.CUDA, annotation=True),
    ]
    assert device_intervals(events) == [(1, 3)]
    assert busy_time(CPU, lambda: None, lambda: None) is None


def test_torch_profiler_tells_what_busy_time_is_made_of() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(3).sum()
    found = profiler.events()
    assert len(found) > 0 and device_intervals(found) == []


@given(st.integers(1, 50), st.integers(2, 400), st.integers(0, 3))
def test_lengths_are_within_their_limit_and_repeat(count: int, limit: int, seed: int) -> None:
    drawn = draw_lengths(count, limit, mean=40, sigma=1.5, seed=seed)
    assert len(drawn) == count and all(2 <= length <= limit for length in drawn)
    assert drawn == draw_lengths(count, limit, mean=40, sigma=1.5, seed=seed)
    assert drawn[:3] == draw_lengths(3, limit, mean=40, sigma=1.5, seed=seed)[:count]


@pytest.mark.parametrize("name", list(DISTRIBUTIONS))
def test_families_of_lengths(name: str) -> None:
    lengths = lengths_like(name, 4000, 8192, seed=1)
    assert len(lengths) == 4000 and min(lengths) >= 1 and max(lengths) <= 8192
    assert (
        lengths == lengths_like(name, 4000, 8192, seed=1) != lengths_like(name, 4000, 8192, seed=2)
    )
    assert 300 < sum(lengths) / 4000 < 2500


def test_documents_in_another_shape_are_the_same_documents() -> None:
    (batch,) = draw_batches(Capacity(64, 8), 1, 300, mean=9, sigma=0.8, seed=0)
    other = refit(batch, Capacity(80, batch.num_documents, max(batch.lengths)))
    used = batch.num_tokens
    assert other.lengths == batch.lengths and torch.equal(other.tokens[:used], batch.tokens[:used])
    assert (
        torch.equal(other.labels[:used], batch.labels[:used]) and not other.loss_mask[used:].any()
    )
    with pytest.raises(ValueError, match="do not fit"):
        refit(batch, Capacity(used - 1, 8))


def test_draws_fit_the_largest_of_the_buckets_that_were_planned_for_them() -> None:
    buckets = planned_buckets(TINY, 128, 4, "sdpa", None, mean=20, sigma=1.0, seed=0)
    largest = buckets[-1]
    assert 1 <= len(buckets) <= 4 and list(buckets) == sorted(buckets) and largest.tokens == 128
    assert all(
        bucket.documents <= largest.documents and bucket.tokens % 8 == 0 for bucket in buckets
    )
    draws = draw_batches(largest, 20, 300, mean=20, sigma=1.0, seed=0)
    assert (
        all(batch.capacity == largest for batch in draws)
        and sum(batch.num_tokens for batch in draws) > 2400
    )
    few = planned_buckets(TINY, 128, 4, "sdpa", 3, mean=20, sigma=1.0, seed=0)
    assert few[-1] == Capacity(128, 3) and all(bucket.documents <= 3 for bucket in few)


def test_a_draw_begins_where_the_packer_has_its_stride() -> None:
    """Long documents go first in a new stream: its beginning would have too few documents in a
    row."""
    draws = draw_batches(Capacity(256, 64), 40, 300, mean=16, sigma=1.5, seed=0)
    first, second = (
        sum(batch.num_documents for batch in half) for half in (draws[:20], draws[20:])
    )
    assert abs(first - second) < 0.3 * second and WINDOW == 256


def padding_rows(options: PaddingArguments) -> list[dict[str, Any]]:
    rows = Rows(facts(CPU, "abc123"), write=False)
    bench_padding(options, CPU, rows, Deadline(None))
    return rows.all


def test_bench_padding_measures_unseen_documents() -> None:
    rows = padding_rows(PaddingArguments(ways=("chat",), tokens=256, buckets=3, documents=300))
    assert [row["packed"] for row in rows] == [
        "window of 256",
        "64 at a time",
        "32 at a time",
        "16 at a time",
    ]
    for row in rows:
        json.dumps(row)
        assert row["reason"] is None and 1 <= len(row["buckets"]) <= 3
        assert 0 <= row["padding"] <= row["padding_alone"] + 0.01 and row["padding"] < 0.2


def test_bench_padding_stops_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["padding", "--ways", "chat", "--seconds", "1e-9"]) == 1
    captured = capsys.readouterr()
    assert (
        len(captured.out.splitlines()) == 4 and "chat at 8192 tokens: not measured" in captured.err
    )


def test_workspaces_of_graphs_that_are_gone_hold_nothing(monkeypatch):
    """Cleared before the allocator's segments are given back, which workspaces made in a capture
    would keep."""
    asked = []
    for module, name in (
        (torch.cuda, "synchronize"),
        (torch._C, "_cuda_clearCublasWorkspaces"),
        (torch.cuda, "empty_cache"),
        (torch._C, "_host_emptyCache"),
        (torch.compiler, "reset"),
    ):
        monkeypatch.setattr(module, name, lambda *_, name=name: asked.append(name), raising=False)
    start_anew(CPU)
    assert asked == ["reset"]
    start_anew(torch.device("cuda", 0))
    assert asked.index("_cuda_clearCublasWorkspaces") < asked.index("empty_cache")
    assert asked[-1] == "_host_emptyCache", (
        "or runs pin more and more memory of all sizes that were ever asked for"
    )
