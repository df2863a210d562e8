"""Models of transformers split over tensor parallel ranks by their own plans, against the whole."""

import copy
from typing import Any

import pytest
import torch
from distkit import run_ranks
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

pytest.importorskip("transformers", reason="the models are of this library")

from packed_families import CASES, any_decoder, batch_of, build

from packgraph.graphs.agreement import alone, consensus_of
from packgraph.integrations.transformers import proof, tensor
from packgraph.integrations.transformers.model import packed
from packgraph.integrations.transformers.tensor import parallelize, prove, tensor_problems
from packgraph.parallel.layout import Layout

TENSOR = Layout(dp=1, tp=2)
UNLISTED = (
    *("arcee", "cohere", "cohere2", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "glm"),
    *("ministral", "minimax_m2", "olmoe", "qwen2_moe", "seed_oss", "starcoder2"),
    *("qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"),
)
REFUSED = {
    **dict.fromkeys(("gpt2", "gpt_oss", "bamba", "falcon_h1", "nemotron_h"), "has no plan"),
    **dict.fromkeys(("granitemoe", "hunyuan_v1_dense", "persimmon"), "has no plan"),
    "apertus": r"does not name model.layers.0.mlp.act_fn \(alpha_p, alpha_n\)",
    "phi": "its head is not one matrix",
}
TOLERANCE = 2e-5  # float32 on both sides: sums in other orders


def made(kind: str, **changes: Any) -> Any:
    return (build if kind in CASES else any_decoder)(kind, **changes).eval()


def distances(mesh: Any, kinds: list[str], sequence: bool) -> dict[str, dict[str, float]]:
    """Of all outputs and of every gradient of each family, relative to the largest value."""
    return {kind: distance(mesh, kind, sequence) for kind in kinds}


def distance(mesh: Any, kind: str, sequence: bool) -> dict[str, float]:
    model, batch = made(kind), batch_of()
    part, whole = packed(copy.deepcopy(model)), packed(model)
    parallelize(part, mesh["tp"], sequence=sequence)
    assert any(isinstance(value, DTensor) for value in part.parameters())
    assert consensus_of(part) is not alone
    losses = [one(batch) for one in (part, whole)]
    for loss in losses:
        loss.backward()
    found = {"loss": float((losses[0] - losses[1]).abs() / losses[1])}
    with torch.no_grad():
        for output in ("hidden", "log_probabilities"):
            mine, expected = (one(batch, None, output) for one in (part, whole))
            found[output] = float((mine - expected).abs().max() / expected.abs().max())
    theirs = dict(whole.named_parameters())
    for name, value in part.named_parameters():
        gradient, expected = value.grad, theirs[name].grad
        if expected is not None:
            mine = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            largest = max(float(expected.abs().max()), 1e-3)
            found[name] = float((mine - expected).abs().max()) / largest
    return found


def test_all_gradients_are_those_of_the_whole_model() -> None:
    kinds = [kind for kind in (*CASES, *UNLISTED) if kind not in REFUSED]
    assert len(kinds) > 25
    for found in run_ranks(distances, 2, kinds, False, layout=TENSOR):
        assert not wrong(found)


def wrong(found: dict[str, dict[str, float]]) -> list[tuple[str, str, float]]:
    return [
        (kind, name, size)
        for kind, sizes in found.items()
        for name, size in sizes.items()
        if not size <= TOLERANCE
    ]


def test_norms_may_work_on_a_part_of_the_rows() -> None:
    kinds = [kind for kind in (*CASES, *UNLISTED) if kind not in REFUSED]
    able = [kind for kind in kinds if not tensor_problems(packed(made(kind)), 2, sequence=True)]
    assert {"llama", "qwen3", "cohere", "granite", "seed_oss"} <= {*able}
    assert not {"deepseek_v3", "qwen3_moe", "phi3", "olmo2"} & {*able}
    for found in run_ranks(distances, 2, able, True, layout=TENSOR):
        assert not wrong(found)


def reductions(mesh: Any, kind: str) -> int:
    """All-reduces of a backward."""
    part = packed(made(kind))
    parallelize(part, mesh["tp"])
    loss = part(batch_of())
    with CommDebugMode() as seen:
        loss.backward()
    return seen.get_comm_counts()[torch.ops.c10d_functional.all_reduce]


def test_layers_that_read_one_input_reduce_its_gradient_once() -> None:
    layers = made("llama").config.num_hidden_layers
    for found in run_ranks(reductions, 2, "llama", layout=TENSOR):
        assert found == 2 * layers + 1  # of attention, of the feed-forward; the head


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_split_is_named(kind: str) -> None:
    problems = tensor_problems(packed(made(kind)), 2)
    with pytest.raises(ValueError, match=REFUSED[kind]):
        raise ValueError("; ".join(problems))


def test_sizes_that_do_not_divide_are_named() -> None:
    problems = "; ".join(tensor_problems(packed(made("llama")), 4))
    assert "16 features of model.layers.0.self_attn.k_proj are no multiple of 4 x 8" in problems
    assert "q_proj" not in problems


def test_a_plan_may_name_embedding_and_head() -> None:
    """Configs of transformers 5.17 do where both are one matrix; the split is our own."""
    model = made("llama", tie_word_embeddings=True)
    plan = model.config.base_model_tp_plan
    model.config.base_model_tp_plan = {**plan, "embed_tokens": "embedding_rowwise"}
    assert not tensor_problems(packed(model), 2)


def proven(mesh: Any, kind: str) -> None:
    prove(packed(made(kind)), mesh["tp"])


def without_norms(mesh: Any, kind: str) -> str:
    """What the proof says of a plan that takes norms of heads for whole ones."""
    plan = tensor.tensor_plan

    def shorter(causal: Any) -> dict[str, str]:
        return {name: word for name, word in plan(causal).items() if "_norm" not in name}

    model = packed(made(kind))
    tensor.tensor_plan = shorter
    refused = "; ".join(tensor_problems(model, 2))
    assert "does not name model.layers.0.self_attn.q_norm (weight)" in refused
    tensor.tensor_problems = lambda *_: []
    with pytest.raises(ValueError) as told:
        prove(model, mesh["tp"])
    return str(told.value)


def test_a_split_is_proven_before_it_is_made() -> None:
    run_ranks(proven, 2, "qwen3", layout=TENSOR)
    for told in run_ranks(without_norms, 2, "qwen3", layout=TENSOR):
        assert "the gradient of model.model.layers.0.self_attn.q_norm.weight" in told
    assert proof.LIMIT >= TOLERANCE
