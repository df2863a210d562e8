"""The proof that packed documents compute what a model of transformers does one by one: families
without an entry are live, and faults are found."""

import dataclasses
import importlib
import re
from typing import Any

import pytest
import torch
from torch import nn

import packgraph

pytest.importorskip("transformers", reason="the integration is of this library")

from huggingface_hub.errors import StrictDataclassError
from packed_families import (
    CAPACITY,
    any_decoder,
    batch_of,
    document_loss,
    gradients,
    plain,
    random_batches,
)

from packgraph.integrations.transformers import FAMILIES, mixers, model, packed, proof
from packgraph.integrations.transformers.families import family_of
from packgraph.packing.batch import PackedBatch

UNLISTED = (
    *("apertus", "arcee", "cohere", "cohere2", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4"),
    *("glm", "granitemoe", "hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"),
    *("minimax_m2", "olmoe", "persimmon", "phi", "qwen2_moe", "seed_oss", "starcoder2"),
    *("qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "deepseek_v2"),
    "gemma4_text",
)
REFUSED = ("biogpt", "bloom", "doge", "gpt_bigcode", "nemotron", "stablelm")
REFUSES_SIZES = (  # which this test gives to all alike
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError),
    *(ImportError, ArithmeticError, StrictDataclassError),
)
TOLERANCE = 2e-5  # float32 on both sides: sums in other orders


@pytest.fixture(autouse=True)
def nothing_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_KNOWN", {})


@pytest.mark.parametrize("kind", UNLISTED)
@pytest.mark.few(8)
def test_families_without_an_entry_are_live(kind: str) -> None:
    assert kind not in FAMILIES
    made = any_decoder(kind).eval()
    reference = plain(made)
    expected = document_loss(reference)
    wanted = gradients(expected, reference)
    live = packed(made)
    loss = live(batch_of())
    found = gradients(loss, made)
    assert abs(float(loss - expected)) <= TOLERANCE * float(expected)
    for name, theirs in wanted.items():
        if theirs is not None:
            assert float((found[name] - theirs).abs().max()) <= TOLERANCE * max(
                float(theirs.abs().max()), 1e-3
            ), name


@pytest.mark.parametrize("kind", ["cohere2", "olmoe", "qwen3_5_moe_text", "kimi_linear"])
@pytest.mark.few(2)
def test_their_graphs_equal_eager_bit_by_bit(kind: str) -> None:
    live = packed(any_decoder(kind))
    found = packgraph.verify(live, random_batches(4), capacities=[CAPACITY], strict=True, warmup=1)
    assert found and found.replayed == 3, found


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.few(3)
def test_what_differs_is_refused_with_its_place(kind: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be packed: (packed documents|its decoder)"):
        packed(any_decoder(kind))


def test_a_leak_of_one_token_across_documents_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = proof.LENGTHS
    real = mixers.attention_metadata

    def leaks(batch: PackedBatch, *args: Any, **kwargs: Any) -> Any:
        lengths = (first + 1, second - 1, third)
        other = PackedBatch.build([[0] * length for length in lengths], batch.capacity)
        return real(other, *args, **kwargs)

    monkeypatch.setattr(mixers, "attention_metadata", leaks)
    with pytest.raises(ValueError, match=r"behind layer 0 \(ArceeDecoderLayer\): \S+ of the"):
        packed(any_decoder("arcee"))


def test_a_shifted_position_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = model.PackedModel._rotary

    def shifted(self: Any, hidden: Any, positions: Any) -> Any:
        return real(self, hidden, positions + (positions > 3))

    monkeypatch.setattr(model.PackedModel, "_rotary", shifted)
    with pytest.raises(ValueError, match="behind layer 0"):
        packed(any_decoder("seed_oss"))


def test_a_scale_that_begins_behind_all_short_documents_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the place in the row, from 4,096 on, in a model that takes the place in the document."""
    theirs = importlib.import_module("transformers.models.ministral3.modeling_ministral3")
    real, rotary = theirs.get_llama_4_attn_scale, {"rope_type": "default", "rope_theta": 1e4}
    rotary |= {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4096}
    packed(any_decoder("ministral3", rope_parameters=rotary))

    def of_row(positions: torch.Tensor, *others: Any) -> torch.Tensor:
        return real(torch.arange(positions.shape[-1])[None], *others)

    proof._KNOWN.clear()
    monkeypatch.setattr(theirs, "get_llama_4_attn_scale", of_row)
    with pytest.raises(ValueError, match="behind layer 0"):
        packed(any_decoder("ministral3", rope_parameters=rotary))


def test_a_scale_of_the_head_is_found() -> None:
    made: Any = any_decoder("arcee")
    family = dataclasses.replace(family_of(made), factor="hidden_size")
    problem, _ = proof.prove(made, lambda twin: model.pack_twin(family, twin))
    assert problem is not None and "in the loss, behind norm, head and scales" in problem


def test_a_row_of_padding_that_counts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = model.linear_cross_entropy

    def counts(hidden: Any, weight: Any, labels: Any, **kwargs: Any) -> Any:
        labels = torch.cat([labels[:-1], labels.new_tensor([3])])
        return real(hidden, weight, labels, **kwargs)

    monkeypatch.setattr(model, "linear_cross_entropy", counts)
    with pytest.raises(ValueError, match="differ from single ones in the"):
        packed(any_decoder("arcee"))


def test_a_gradient_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = model.linear_cross_entropy

    def detached(hidden: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        return real(hidden, weight.detach(), *args, **kwargs)

    monkeypatch.setattr(model, "linear_cross_entropy", detached)
    with pytest.raises(ValueError, match=r"in the gradient of lm_head\.weight"):
        packed(any_decoder("olmoe"))


def test_a_proof_is_made_once_for_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    packed(any_decoder("arcee"))
    made = any_decoder("arcee")
    monkeypatch.setattr(proof, "_compare", None)  # a second one would call it
    packed(packed(made).model)
    with pytest.raises(TypeError):
        packed(any_decoder("arcee", rms_norm_eps=0.5))
    packed(any_decoder("arcee", rms_norm_eps=0.5), prove=False)


def test_a_proof_changes_no_random_numbers_and_not_the_model() -> None:
    made = any_decoder("exaone4").train()
    before, state = torch.get_rng_state(), {n: v.clone() for n, v in made.state_dict().items()}
    packed(made)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in made.state_dict().items())
    assert made.training and all(value.grad is None for value in made.parameters())


def test_a_later_other_attention_of_an_unlisted_family_is_refused() -> None:
    made: Any = any_decoder("cohere2")
    live = packed(made)
    made.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="documents would see each other"):
        live(batch_of())


def test_layers_of_more_kinds_than_the_proof_shows_are_refused() -> None:
    made: Any = any_decoder("arcee", num_hidden_layers=proof.MOST_LAYERS + 2)
    for number, layer in enumerate(made.model.layers):
        layer.mlp.kind = number  # a setting of its own
    with pytest.raises(ValueError, match="of more kinds than 8 layers show"):
        packed(made)


@pytest.mark.slow
def test_every_decoder_is_live_or_refused_in_words() -> None:
    names = importlib.import_module("transformers.models.auto.modeling_auto")
    live, refused = [], {}
    for kind in sorted({*names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - FAMILIES.keys()):
        try:
            with torch.device("meta"):
                if sum(value.numel() for value in any_decoder(kind).parameters()) > 5_000_000:
                    continue
            made = any_decoder(kind).eval()
            made(input_ids=torch.tensor([[3, 4, 5, 6, 7, 8]]), use_cache=False)
        except REFUSES_SIZES:
            continue
        try:
            packed(made)
            live.append(kind)
        except ValueError as error:
            refused[kind] = str(error)
    print(len(live), *live, sep=" ")
    print(*refused.items(), sep="\n")
    said = re.compile("cannot be packed|a small model of its configuration cannot be made and run")
    assert len(live) >= 52 and all(map(said.search, refused.values()))


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("starcoder2", {"embedding_dropout": 0.5}, "is random in training, as by dropout"),
        ("phi", {"embd_pdrop": 0.5}, "dropout"),
    ],
)
def test_dropout_outside_of_layers_is_refused(kind: str, changes: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        packed(any_decoder(kind, **changes))


def test_what_a_user_put_into_a_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.roll(1, 1)

    made: Any = any_decoder("arcee")
    made.model.layers[1].mlp = Shifts()
    with pytest.raises(ValueError, match="Shifts has a forward of its own, which no proof runs"):
        packed(made)
    made = any_decoder("arcee")
    monkeypatch.setattr(type(made.model.layers[0].mlp), "forward", lambda self, x: x.roll(1, 1))
    with pytest.raises(ValueError, match="ArceeMLP has a forward of its own"):
        packed(made)


def test_an_argument_that_ours_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = mixers.attend

    def with_more(*args: Any, **kwargs: Any) -> Any:
        return real(*args, block_indices=torch.zeros(1), **kwargs)

    monkeypatch.setattr(mixers, "attend", with_more)
    with pytest.raises(ValueError, match="block_indices, which packgraph's does not know"):
        packed(any_decoder("arcee"))


def test_an_attention_that_a_user_registered_is_refused() -> None:
    transformers: Any = importlib.import_module("transformers")
    interface = transformers.AttentionInterface
    interface.register("mine", interface()["sdpa"])
    transformers.AttentionMaskInterface.register(
        "mine", transformers.AttentionMaskInterface()["sdpa"]
    )
    for made in (any_decoder("llama"), any_decoder("arcee")):
        made.set_attn_implementation("mine")
        with pytest.raises(ValueError, match="its attention is 'mine', which packgraph's would"):
            packed(made)


def test_a_scale_that_a_user_set_is_that_of_the_model() -> None:
    made: Any = any_decoder("cohere").eval()
    made.logit_scale = 3.0
    assert float(packed(made)(batch_of())) == pytest.approx(float(document_loss(made)), abs=1e-4)


def test_a_proof_does_not_depend_on_what_is_around_it() -> None:
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        made = any_decoder("arcee")
        packed(made)


def test_without_a_proof_another_attention_is_refused_later() -> None:
    made: Any = any_decoder("cohere2")
    live = packed(made, prove=False)
    made.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="documents would see each other"):
        live(batch_of())
