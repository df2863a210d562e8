"""Offloading changes no bit: every module, eager and captured, copies as early and as late as they
may run."""

import pytest
import torch
from offloadkit import CAPACITIES, DENSE, EXPERTS, by_hand, config, runtime_of, same, train

from packgraph.graphs.copy_streams import captured_copy_streams
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.graphed import graph
from packgraph.graphs.recorder.backend import RecorderBackend
from packgraph.graphs.recorder.copy_streams import EmulatedCopyStreams
from packgraph.models.decoder import DecoderModel
from packgraph.offloading.api import attach
from packgraph.offloading.plan import KEPT, OffloadPlan, OffloadTrace
from packgraph.offloading.runtime import OffloadRuntime
from packgraph.packing.batch import PackedBatch

VARIED = {"counts": (1, 2, 1, 3), "capacities": CAPACITIES}
SETS = [
    ("attn_norm",),
    ("qkv_linear",),
    ("core_attn",),
    ("core_attn", "attn_proj"),
    ("mlp_norm",),
    ("mlp_act",),
]


@pytest.fixture(scope="module")
def dense():
    return train(config())[0]


@pytest.fixture(scope="module")
def experts():
    return train(config(experts=True))[0]


@pytest.mark.parametrize("late", [("out",), ("back",)])
@pytest.mark.parametrize("granularity", [None, "layer", "chunk"])
@pytest.mark.few(3)
def test_all_modules_are_bitwise_what_stays(granularity, late, dense):
    found, runtime, graphed = train(config(), DENSE, granularity=granularity, late=late)
    assert same(found, dense)
    assert runtime.trace.bytes > 0
    if graphed is not None:
        assert graphed.stats.replayed == 3


@pytest.mark.parametrize("granularity", [None, "chunk"])
@pytest.mark.few(2)
def test_any_number_of_microbatches_of_several_shapes(granularity):
    found, _, _ = train(config(), DENSE, granularity=granularity, late=("out", "back"), **VARIED)
    assert same(found, train(config(), **VARIED)[0])


@pytest.mark.parametrize("modules", SETS)
@pytest.mark.few(3)
def test_every_module_by_itself(modules, dense):
    found, runtime, _ = train(config(), modules, granularity="chunk", late=("out", "back"))
    assert same(found, dense)
    assert {group.name for group in runtime.trace.groups} == set(modules)
    assert all(group.bytes > 0 for group in runtime.trace.groups if group.name != "attn_proj")


@pytest.mark.parametrize("granularity", [None, "chunk"])
@pytest.mark.parametrize(
    "knobs", [{"fraction": 0.0}, {"fraction": 0.5}, {"margin": None}, {"in_flight": 0}]
)
@pytest.mark.few(4)
def test_plans_are_followed_without_a_changed_bit(granularity, knobs, dense):
    found, runtime, _ = train(
        config(), DENSE, granularity=granularity, late=("out",), policy=by_hand(**knobs)
    )
    assert same(found, dense)
    if granularity is not None:
        assert runtime.plan is not None
        assert sum(runtime.plan.moves) == {0.0: 0, 0.5: 6}.get(
            knobs.get("fraction"), sum(runtime.plan.moves)
        )


def every_other(trace: OffloadTrace) -> OffloadPlan:
    """Parts that move beside parts of the same block that stay; reloads with the first of the
    block."""
    moves = tuple(place % 2 == 0 for place in range(len(trace.groups)))
    return OffloadPlan(
        moves, tuple(place if moved else KEPT for place, moved in enumerate(moves)), 64
    )


@pytest.mark.parametrize(
    "late",
    [
        *(pytest.param(one, marks=pytest.mark.slow) for one in (("out",), ("back",))),
        ("out", "back"),
    ],
)
@pytest.mark.parametrize(
    "granularity",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in (None, "layer")), "chunk"],
)
def test_parts_of_what_a_block_saves_move_by_themselves(granularity, late, dense):
    found, runtime, _ = train(
        config(), DENSE, granularity=granularity, late=late, policy=every_other, parts=4
    )
    assert same(found, dense)
    groups = runtime.trace.groups
    assert max(group.part for group in groups) >= 2 and runtime.trace.blocks[-1] == 2 * len(DENSE)
    whole = train(config(), DENSE, granularity=granularity, policy=by_hand())[1].trace
    for block, one in enumerate(whole.groups, 1):
        parts = [
            group for group, of in zip(groups, runtime.trace.blocks, strict=True) if of == block
        ]
        assert {(group.layer, group.name) for group in parts} == {(one.layer, one.name)}
        assert sum(group.bytes for group in parts) == one.bytes and [g.part for g in parts] == [
            *range(len(parts))
        ]


@pytest.mark.parametrize("granularity", [None, "chunk"])
@pytest.mark.few(2)
def test_parts_of_rows_of_several_shapes(granularity):
    varied = {"counts": (2, 2, 3, 2), "capacities": CAPACITIES}
    found, runtime, _ = train(
        config(experts=True),
        EXPERTS,
        granularity=granularity,
        late=("out",),
        policy=every_other,
        parts=8,
        **varied,
    )
    assert same(found, train(config(experts=True), **varied)[0])
    assert sum(runtime.plan.moves) > 10


@pytest.mark.parametrize("scope", [("attn",), ("mlp",)])
@pytest.mark.parametrize("postpones", [False, True])
@pytest.mark.few(4)
def test_eager_stages_between_captured_ones(scope, postpones, dense):
    found, _, graphed = train(
        config(), DENSE, granularity="layer", scope=scope, late=("out",), postpones=postpones
    )
    assert same(found, dense)
    assert graphed.stats.replayed == 3


@pytest.mark.parametrize("granularity", [None, "layer", "chunk"])
@pytest.mark.few(3)
def test_experts(granularity, experts):
    found, runtime, _ = train(
        config(experts=True), EXPERTS, granularity=granularity, late=("out", "back")
    )
    assert same(found, experts)
    assert {group.name for group in runtime.trace.groups} == set(EXPERTS)


def test_evaluation_between_steps_changes_nothing(dense):
    """Calls without gradients, and forwards whose backward never comes, go by and leave no host
    memory taken. What eager passes took goes to the captures."""
    model = DecoderModel(config(), seed=1)
    graphed = graph(model, capacities=CAPACITIES, warmup=2, strict=True)
    runtime = OffloadRuntime(DENSE, graphed.capture_backend.copy_streams, min_bytes=1)
    attach(runtime, model)
    batch = PackedBatch.build([[1, 2, 3], [4, 5]], CAPACITIES[0])
    taken = []
    for _ in range(4):
        with torch.no_grad():
            model.eval()
            graphed(batch, torch.tensor(5))
            model.train()
        graphed(batch, torch.tensor(5))
        graphed(batch, torch.tensor(5)).backward()
        runtime.end_step()
        taken.append(runtime.copy_streams.memories.arenas.nbytes())
    assert taken[0] > 0 and taken[1:] == [0, 0, 0], "captured in the second step"


def test_captures_before_anything_was_traced_are_refused():
    model = DecoderModel(config(), seed=1)
    graphed = graph(model, capacities=CAPACITIES, warmup=0, strict=True)
    attach(
        OffloadRuntime(
            DENSE, graphed.capture_backend.copy_streams, min_bytes=1, policy=by_hand(fraction=0.5)
        ),
        model,
    )
    with pytest.raises(CaptureError, match="nothing to plan offloading by"):
        graphed(PackedBatch.build([[1, 2, 3]], CAPACITIES[0]), torch.tensor(3))


def test_another_engine_means_other_graphs():
    model = DecoderModel(config(), seed=1)
    graphed = graph(model, capacities=CAPACITIES, warmup=0)
    batch = PackedBatch.build([[1, 2, 3]], CAPACITIES[0])
    graphed(batch, torch.tensor(3)).backward()
    attach(OffloadRuntime(DENSE, graphed.capture_backend.copy_streams, min_bytes=1), model)
    with pytest.warns(UserWarning, match="offload"):
        graphed(batch, torch.tensor(3)).backward()
    assert graphed.stats.captured == 2 and graphed.stats.replayed == 2


def test_a_module_without_marks_is_refused():
    with pytest.raises(ValueError, match="no module with an attribute"):
        attach(OffloadRuntime(DENSE, None), torch.nn.Linear(2, 2))


def test_a_compiled_layer_is_one_group():
    """In bfloat16, where a product that is added to a gradient in place is rounded once, and not
    twice."""
    settings, batch = config(), PackedBatch.build([[1, 2, 3], [4, 5, 6, 7]], CAPACITIES[0])
    facts = []
    for modules in ((), ("core_attn",)):
        model = DecoderModel(settings, seed=1).bfloat16()
        graphed = graph(
            model, capacities=CAPACITIES[:1], warmup=1, strict=True, compile="aot_eager"
        )
        if modules:
            runtime = OffloadRuntime(
                modules, graphed.capture_backend.copy_streams, min_bytes=1, policy=by_hand()
            )
            runtime.copy_streams.queues.late.add("out")
            attach(runtime, model)
        torch.manual_seed(3)
        for _ in range(4):
            graphed(batch, torch.tensor(7)).backward()
        facts.append([parameter.grad.clone() for parameter in model.parameters()])
        assert graphed.stats.replayed == 3
    assert same(*facts)
    assert [(group.name, group.layer) for group in runtime.trace.groups] == [
        ("layer", 0),
        ("layer", 1),
    ]


def test_clocks_are_read_before_a_capture_begins(monkeypatch):
    """As on CUDA, where the call is dry-run first and a capture holds no wait for the device."""
    monkeypatch.setattr(RecorderBackend, "warm_up", lambda backend, run: run())
    elapsed_us = EmulatedCopyStreams.elapsed_us

    def outside(copy_streams, start, end):
        assert captured_copy_streams() is None
        return elapsed_us(copy_streams, start, end)

    monkeypatch.setattr(EmulatedCopyStreams, "elapsed_us", outside)
    model = DecoderModel(config(), seed=1)
    graphed = graph(model, capacities=CAPACITIES[:1], warmup=1, strict=True)
    runtime = runtime_of(graphed, model, DENSE, policy=by_hand(fraction=0.5))
    arguments = PackedBatch.build([[1, 2, 3], [4, 5, 6, 7]], CAPACITIES[0]), torch.tensor(7)
    for _ in range(2):
        graphed(*arguments).backward()
    assert graphed.stats.replayed == 1 and runtime.plan is not None
