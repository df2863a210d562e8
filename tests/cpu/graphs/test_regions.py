"""Cutting stages into regions, and the recorder's placement of memory."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packgraph.graphs.recorder.backend import RecordedStorage, RecorderPool
from packgraph.graphs.stages import (
    GRANULARITIES,
    Run,
    cut_runs,
    in_scope,
    scope_errors,
)


@dataclass(frozen=True)
class Named:
    name: str
    layer: int
    eager: str = ""


DECODER = [
    Named("embed", -1),
    *[Named(n, i) for i in range(2) for n in ("attn", "mlp")],
    Named("head", 2),
]


@pytest.mark.parametrize(
    ("scope", "granularity", "expected"),
    [
        (None, "chunk", [(0, 6, True)]),
        (None, "layer", [(0, 1, True), (1, 3, True), (3, 5, True), (5, 6, True)]),
        (["attn", "mlp"], "chunk", [(0, 1, False), (1, 5, True), (5, 6, False)]),
        (["attn", "mlp"], "layer", [(0, 1, False), (1, 3, True), (3, 5, True), (5, 6, False)]),
        (
            ["mlp"],
            "chunk",
            [(0, 2, False), (2, 3, True), (3, 4, False), (4, 5, True), (5, 6, False)],
        ),
    ],
)
def test_runs_of_a_decoder(scope, granularity, expected):
    assert cut_runs(DECODER, scope, granularity) == tuple(Run(*run) for run in expected)


STAGE_NAMES = ("embed", "attn", "mlp", "moe_router", "moe_experts", "vision", "head")


@given(
    st.lists(st.tuples(st.sampled_from(STAGE_NAMES), st.integers(0, 3)), min_size=1, max_size=20),
    st.sets(st.sampled_from(STAGE_NAMES), min_size=1),
    st.sampled_from(GRANULARITIES),
)
def test_runs_cover_all_stages_in_order_and_colour_them_right(stages, scope, granularity):
    stages = [Named(*stage) for stage in sorted(stages, key=lambda stage: stage[1])]
    if scope_errors(stages, scope, granularity):
        return
    runs = cut_runs(stages, scope, granularity)
    assert [i for run in runs for i in range(run.start, run.stop)] == list(range(len(stages)))
    for run in runs:
        for stage in stages[run.start : run.stop]:
            assert in_scope(stage.name, scope) == run.captured
        if run.captured and granularity == "layer":
            assert len({stage.layer for stage in stages[run.start : run.stop]}) == 1
    for left, right in itertools.pairwise(runs):
        assert left.captured != right.captured or granularity == "layer"


def test_the_moe_scope_means_every_moe_stage():
    stages = [
        Named(name, 0)
        for name in ("attn", "moe_router", "moe_preprocess", "moe_dispatch", "moe_experts")
    ]
    assert cut_runs(stages, ["moe"], "chunk") == (Run(0, 1, False), Run(1, 5, True))
    assert scope_errors(stages, ["moe", "moe_router"], "chunk") == [
        "'moe' already means every moe_* stage: give either 'moe' or the single stages"
    ]


def test_a_model_may_have_stages_of_any_name():
    stages = [Named(name, i) for i, name in enumerate(("vision_in", "vision_out", "bridge"))]
    assert cut_runs(stages, None, "chunk") == (Run(0, 3, True),)
    assert cut_runs(stages, ["vision"], "chunk") == (Run(0, 2, True), Run(2, 3, False))
    assert cut_runs(stages, ["bridge"], "chunk") == (Run(0, 2, False), Run(2, 3, True))
    assert scope_errors(stages, ["bridges", "sound"], "chunk") == [
        "scope names 'bridges', but the model has only the stages bridge, vision_in, vision_out: "
        "did you mean 'bridge'?",
        "scope names 'sound', but the model has only the stages bridge, vision_in, vision_out",
    ]


lifetimes = st.lists(
    st.tuples(st.integers(1, 500), st.integers(0, 40), st.integers(1, 40)), max_size=40
)


@given(st.lists(lifetimes, min_size=1, max_size=3))
def test_blocks_that_live_together_never_share_memory(variants):
    pool = RecorderPool()
    top = 0
    for variant in variants:
        blocks = [
            RecordedStorage(size, birth, None, birth + life)
            for size, birth, life in sorted(variant, key=lambda b: b[1])
        ]
        places = pool.place(blocks)
        for i, (a, pa) in enumerate(zip(blocks, places, strict=True)):
            for b, pb in list(zip(blocks, places, strict=True))[:i]:
                if a.birth < b.death and b.birth < a.death and pa[0] is pb[0]:
                    assert pa[1] + a.nbytes <= pb[1] or pb[1] + b.nbytes <= pa[1]
            assert pa[1] % 64 == 0 and pa[1] + a.nbytes <= pa[0].numel()
        top = max(top, sum(-(-b.nbytes // 64) * 64 for b in blocks))
    assert pool.nbytes() <= sum(
        -(-size // 64) * 64 for variant in variants for size, _, _ in variant
    )


def test_a_block_still_referenced_keeps_its_own_memory():
    pool = RecorderPool()
    assert pool.place([RecordedStorage(10, 0, None), RecordedStorage(10, 0, None, 4)])[0] is None


def test_fresh_memory_is_poisoned():
    pool = RecorderPool()
    segment, _ = pool.place([RecordedStorage(64, 0, None, 4)])[0]
    assert segment.view(torch.float32).isnan().all()
