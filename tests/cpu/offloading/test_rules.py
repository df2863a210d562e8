"""Offloading by hand and its files: knobs, sets of modules that are refused, traces as JSON."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offloadtraces import compiled_trace, decoder_trace, make_trace, small_traces, speeds

from packgraph.graphs.stages import Run, Stage, cut_runs
from packgraph.offloading.plan import KEPT, CopySpeed, OffloadKnobs, OffloadTrace, plan_errors
from packgraph.offloading.rules import MODULES, why_not
from packgraph.offloading.search import knob_moves, plan_by_knobs
from packgraph.offloading.simulate import simulate_offload


def moved(trace: OffloadTrace, pp_rank: int = 0, **knobs) -> list[int]:
    return [
        index
        for index, moves in enumerate(knob_moves(trace, OffloadKnobs(**knobs), pp_rank))
        if moves
    ]


def test_the_usual_margin_is_all_parts_of_the_last_layer() -> None:
    trace = compiled_trace("qwen3-8b", parts=4)
    stay = [
        group.layer
        for group, moves in zip(trace.groups, knob_moves(trace, OffloadKnobs()))
        if not moves
    ]
    for margin in (0, 1, 3):
        moves = knob_moves(trace, OffloadKnobs(margin=margin))
        assert [group.layer for group, moved in zip(trace.groups, moves) if not moved] == sorted(
            [7, 6, 5][:margin] * 4
        )
    assert stay == [7, 7, 7, 7] and trace.blocks == tuple(
        layer for layer in range(1, 9) for _ in range(4)
    )


def test_the_usual_margin_is_the_last_group_of_each_module() -> None:
    trace = decoder_trace(3)
    assert moved(trace) == list(range(12))
    assert moved(trace, margin=0) == list(range(18)) and moved(trace, fraction=0.0) == []
    ten = make_trace([2**20] * 10, [1.0] * 10)
    assert len(moved(ten, margin=0, fraction=0.7)) == 7


@given(
    small_traces(),
    speeds(),
    st.floats(0, 1),
    st.integers(0, 20),
    st.sampled_from([None, 0, 1, 3]),
    st.integers(0, 30),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_knobs_make_legal_plans(
    trace: OffloadTrace,
    speed: CopySpeed,
    fraction: float,
    min_bytes: int,
    margin: int | None,
    delta: int,
    in_flight: int,
    pp_rank: int,
) -> None:
    knobs = OffloadKnobs(fraction, min_bytes, margin, delta, in_flight)
    plan = plan_by_knobs(trace, speed, knobs, pp_rank)
    assert plan_errors(trace, plan) == [] and plan.in_flight == in_flight
    assert plan.peak_bytes == simulate_offload(trace, speed, plan).peak_bytes
    assert all(
        group.bytes >= max(min_bytes, 1) for group, moves in zip(trace.groups, plan.moves) if moves
    )
    later = plan_by_knobs(trace, speed, knobs, pp_rank + 1)
    assert sum(later.moves) <= sum(plan.moves), "later ranks move less"
    if margin and plan.moves:
        assert sum(plan.moves) <= max(len(plan.moves) - margin, 0)


def test_reloads_take_no_memory_that_the_forward_did_not() -> None:
    plan = plan_by_knobs(decoder_trace(8, 2), CopySpeed(), OffloadKnobs(fraction=0.4))
    first = next(index for index in reversed(range(48)) if plan.moves[index])
    assert plan.reload_at[first] > first + 6 and plan.reload_at[-1] == KEPT
    assert plan.peak_bytes <= plan.kept_peak_bytes - plan.host_bytes + 3 * 7 * 2**26


def test_knobs_that_make_no_sense_are_refused_at_once() -> None:
    with pytest.raises(
        ValueError,
        match=r"min_bytes must be at least 0, got -1; margin .* -2; delta.* -3; in_flight .*"
        r" -4; fraction must be 0 to 1, got 1.5",
    ):
        OffloadKnobs(1.5, -1, -2, -3, -4)


DENSE = [Stage("embed", -1, dict)] + [
    Stage(name, layer, dict) for layer in range(3) for name in ("attn", "mlp")
]
MOE_STAGES = ("moe_router", "moe_preprocess", "moe_dispatch", "moe_experts", "moe_combine")
EXPERTS = DENSE[:3] + [
    Stage(name, layer, dict) for layer in (1, 2) for name in ("attn", *MOE_STAGES)
]
EAGER = (Run(0, len(DENSE), False),)


def test_all_modules_go_with_eager_and_with_chunk_graphs() -> None:
    known = [name for name in MODULES if "mamba" not in name and name != "layer_input"]
    dense = [name for name in known if name not in ("expert_fc1", "moe_act")]
    assert (
        why_not(dense, DENSE, EAGER) == why_not(dense, DENSE, cut_runs(DENSE, None, "chunk")) == []
    )
    assert why_not(known, EXPERTS, cut_runs(EXPERTS, None, "chunk")) == []
    assert (
        why_not(known, EXPERTS, (Run(0, len(EXPERTS), False),)) == [] == why_not((), DENSE, EAGER)
    )
    hybrid = [Stage("mamba", 0, dict), *DENSE[1:3], Stage("mamba", 2, dict)]
    moved = ["mamba_norm", "mamba_scan", "core_attn", "mlp_act"]
    assert why_not(moved[1:], hybrid, cut_runs(hybrid, None, "layer")) == []
    assert (
        "mamba_norm saves a hidden state"
        in why_not(moved, hybrid, cut_runs(hybrid, ["mamba"], "layer"))[0]
    )
    # Without the embedding in it a chunk's first norm reads what comes in; the others read what the
    # chunk makes.
    assert why_not(["attn_norm"], DENSE, cut_runs(DENSE, ["attn", "mlp"], "chunk")) == [
        "attn_norm saves a hidden state that a region takes in or hands on (layers 0), in memory "
        "that its slot owns "
        "anyway: leave it out, capture the stages around it together (granularity chunk), or none "
        "of them"
    ]
    assert why_not(["attn_norm"], DENSE[1:], cut_runs(DENSE[1:], ["attn", "mlp"], "chunk")) == []


@pytest.mark.parametrize(
    ("modules", "stages", "scope", "granularity", "layers"),
    [
        ("attn_norm", DENSE, None, "layer", "0, 1, 2"),
        ("mlp_norm", DENSE, None, "layer", ""),
        ("mlp_norm", DENSE, ["attn"], "chunk", "0, 1, 2"),
        ("mlp_norm", DENSE, ["mlp"], "chunk", "0, 1, 2"),
        ("mlp_norm", EXPERTS, ["attn", "mlp", "moe_router"], "chunk", "1, 2"),
        ("mlp_norm", EXPERTS, ["attn", "mlp", "moe"], "layer", ""),
        ("mlp_norm", EXPERTS, ["moe_experts"], "layer", ""),
        ("attn_norm", EXPERTS, ["moe_experts"], "layer", ""),
        ("core_attn", EXPERTS, ["attn"], "layer", ""),
    ],
)
def test_norms_between_regions_free_nothing(
    modules: str, stages: list[Stage], scope: list[str] | None, granularity: str, layers: str
) -> None:
    reasons = why_not([modules], stages, cut_runs(stages, scope, granularity))
    assert len(reasons) == bool(layers) and all(
        f"(layers {layers})" in reason for reason in reasons
    )


def test_inputs_of_layers_move_where_something_is_recomputed() -> None:
    chunk = cut_runs(DENSE, None, "chunk")
    assert why_not(["layer_input"], DENSE, chunk, recomputed=["attn", "mlp"]) == []
    (reason,) = why_not(["layer_input"], DENSE, chunk)
    assert reason.startswith("layer_input is what recomputation begins with")
    (reason,) = why_not(["layer_input"], DENSE, cut_runs(DENSE, None, "layer"), recomputed=["attn"])
    assert reason.startswith("layer_input saves a hidden state that a region takes in")


def test_all_reasons_are_given_at_once() -> None:
    reasons = why_not(
        ["attn_proj", "mlp_act", "moe_act", "core_atn", "x"],
        EXPERTS,
        cut_runs(EXPERTS, None, "chunk"),
        recomputed=["mlp_act", "moe_experts"],
        stashed=True,
    )
    said = [
        "there is no module 'core_atn': did you mean 'core_attn'",
        "there is no module 'x', only .*attn_norm, ",
        "attn_proj needs core_attn",
        "mlp_act is computed again .*recomputation of mlp_act",
        "moe_act is computed again .*recomputation of moe_experts",
        "moe_act is in the stash",
    ]
    assert len(reasons) == len(said)
    for reason, pattern in zip(reasons, said):
        assert re.match(pattern, reason)
    assert (
        "part of moe_experts, and the model has only the stages attn, embed, mlp"
        in why_not(["expert_fc1"], DENSE, EAGER)[0]
    )
    assert why_not("core_attn", DENSE, EAGER) == [
        "modules is a collection of names, not the string 'core_attn': write ['core_attn']"
    ]
