"""The dense model: what packing, padding, seeds, dropout and dtypes do to its numbers."""

import pytest
import torch
from model_batches import HandBatch, hand_batch, random_documents

from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

CONFIG = DecoderConfig(
    vocab_size=40,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    initializer_range=0.2,
)


def changed(**values) -> DecoderConfig:
    return DecoderConfig(**{**vars(CONFIG), **values})


def gradients(model: DecoderModel, batch: HandBatch, **arguments) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(batch, **arguments).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_hand_made_batches_are_packed_batches():
    documents = random_documents([5, 1, 7], 40, 0)
    ours, packed = hand_batch(documents, 16, 4), PackedBatch.build(documents, Capacity(16, 4))
    for name in (
        "tokens",
        "labels",
        "position_ids",
        "loss_mask",
        "padding_mask",
        "document_ids",
        "cu_seqlens",
    ):
        assert torch.equal(getattr(ours, name), getattr(packed, name)), name
    model = DecoderModel(CONFIG)
    assert model(ours) == model(packed)


def test_stages_leave_the_state_they_are_given_alone():
    model = DecoderModel(CONFIG)
    state = model.begin(hand_batch(random_documents([4], 40, 0), 6, 2))
    for stage in model.stages():
        before = dict(state)
        after = stage.run(state)
        assert after is not state
        assert all(state[key] is before[key] for key in before) and state.keys() == before.keys()
        state = after
    assert list(state) == ["output"]


def test_fresh_parameters_follow_the_seed_and_touch_no_global_generator():
    before = torch.get_rng_state()
    first, second, other = (DecoderModel(CONFIG, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embed_tokens.weight"], other["embed_tokens.weight"])
    assert abs(first["layers.0.mlp.up_proj.weight"].std() - 0.2) < 0.02
    assert (first["norm.weight"] == 1).all()
    assert "lm_head.weight" in first
    assert "lm_head.weight" not in DecoderModel(changed(tie_embeddings=True)).state_dict()


def test_rotary_frequencies_stay_float32_and_out_of_the_state_dict():
    model = DecoderModel(CONFIG, dtype=torch.bfloat16)
    assert model.rotary.inv_freq.dtype == torch.float32
    model.to(torch.float16)
    assert torch.equal(model.rotary.inv_freq, DecoderModel(CONFIG).rotary.inv_freq)
    address = model.rotary.inv_freq.data_ptr()
    assert model.to("cpu").rotary.inv_freq.data_ptr() == address
    assert not any("inv_freq" in name for name in model.state_dict())


def test_loss_divides_by_the_tokens_of_the_step():
    model = DecoderModel(CONFIG)
    batch = hand_batch(random_documents([5, 4], 40, 0), 12, 3)
    own, given = model(batch), model(batch, torch.tensor(14))
    assert own.dtype == torch.float32 and own.dim() == 0
    torch.testing.assert_close(given * 2, own)
    assert model(batch, torch.tensor(7.0)) == own
    empty = model(hand_batch([], 12, 3), torch.tensor(0))
    assert empty == 0


def test_another_document_changes_no_bit_of_logits_and_token_gradients():
    model = DecoderModel(CONFIG)
    documents = random_documents([6, 9, 5], 40, 2)
    results = []
    for middle in (documents[1], random_documents([9], 40, 77)[0]):
        batch = hand_batch([documents[0], middle, documents[2]], 24, 4)
        state = model.begin(batch, torch.tensor(17))
        stages = model.stages()
        state = stages[0].run(state)
        state["hidden"].retain_grad()
        hidden = state["hidden"]
        for stage in stages[1:]:
            state = stage.run(state)
        model.end(state).backward()
        results.append((model.logits(batch).detach(), hidden.grad))
    (logits, grads), (other_logits, other_grads) = results
    for before, after in ((logits, other_logits), (grads, other_grads)):
        for part in (slice(0, 6), slice(15, 20)):
            assert torch.equal(before[part], after[part])
        assert not torch.equal(before[6:15], after[6:15])


@pytest.mark.parametrize("options", [{}, {"attention_bias": True}, {"dropout": 0.2}])
@pytest.mark.few(2)
def test_nan_in_a_padding_token_reaches_nothing(options):
    model = DecoderModel(changed(**options))
    batch = hand_batch(random_documents([6, 3], 40, 2), 16, 4, padding_token=0)
    torch.manual_seed(0)
    expected, loss = gradients(model, batch), model(batch)
    with torch.no_grad():
        model.embed_tokens.weight[0] = float("nan")
    torch.manual_seed(0)
    actual = gradients(model, batch)
    assert loss == model(batch)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert torch.isfinite(model.logits(batch)).all()


def test_more_padding_changes_numbers_by_rounding_only():
    model, documents = DecoderModel(CONFIG), random_documents([6, 3], 40, 2)
    tight, wide = (
        gradients(model, hand_batch(documents, rows, slots)) for rows, slots in ((9, 2), (32, 8))
    )
    for name in tight:  # float32, the same sums in other blocks
        torch.testing.assert_close(tight[name], wide[name], rtol=1e-4, atol=1e-6)


def test_dropout_acts_in_training_only_and_follows_the_global_seed():
    model, plain = DecoderModel(changed(dropout=0.3)), DecoderModel(CONFIG)
    batch = hand_batch(random_documents([6, 3], 40, 2), 12, 4)
    torch.manual_seed(1)
    first, second = model(batch), model(batch)
    torch.manual_seed(1)
    assert model(batch) == first != second
    assert model.eval()(batch) == plain(batch)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_runs_close_to_float32(autocast):
    batch = hand_batch(random_documents([9, 7], 40, 3), 20, 4)
    exact = gradients(DecoderModel(CONFIG), batch)
    model = DecoderModel(CONFIG, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        low = gradients(model, batch)
    for name in exact:  # a few hundred roundings of 2 ** -9 each, random in sign
        assert (low[name].float() - exact[name]).norm() <= 0.06 * exact[name].norm(), name


def test_config_names_every_illegal_value_at_once():
    with pytest.raises(
        ValueError,
        match=r"num_layers is 0.*multiple of num_kv_heads 3.*head_dim 7 is odd.*"
        r"dropout is 1\.0.*'fast' is unknown; known are auto, naive",
    ):
        changed(num_layers=0, num_kv_heads=3, head_dim=7, dropout=1.0, attention_backend="fast")


def test_a_batch_with_words_that_the_model_has_not_is_refused():
    """On any device: by what the host knows of the batch, before anything is launched."""
    model = DecoderModel(CONFIG)
    words = model.config.vocab_size
    for document in ([1, words], {"input_ids": [1, 2], "labels": [1, words]}):
        with pytest.raises(
            ValueError, match=f"label {words}, but the model has a vocabulary of {words}"
        ):
            model(PackedBatch.build([document], Capacity(8, 2)))


def test_loss_is_the_cross_entropy_of_the_logits():
    model = DecoderModel(CONFIG)
    batch = hand_batch(random_documents([5, 1, 4], 40, 0), 12, 4)
    expected = torch.nn.functional.cross_entropy(model.logits(batch), batch.labels)
    torch.testing.assert_close(model(batch), expected)
