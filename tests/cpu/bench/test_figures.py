"""What benchmarks compute from shapes and profiles: operations, busy time, lengths, padding."""

from types import SimpleNamespace

import pytest
import torch
from bench_models import (
    TimedPart,
    build_part,
    draw_batches,
    shape,
    zero_gradients,
)
from bench_shard import exposed_length
from hypothesis import given
from hypothesis import strategies as st
from step_figures import (
    busy_time,
    device_intervals,
    model_flops,
    union_length,
)
from torch.autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode

from packgraph.bench.comparison import start_anew
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
