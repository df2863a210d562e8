"""Models with an encoder: what is refused says why, and text of models with images trains through
their text model."""

import pytest
import torch

import packgraph

pytest.importorskip("transformers", reason="the integration is of this library")

from packed_families import (
    CAPACITY,
    WITH_ENCODERS,
    batch_of,
    build_with_encoder,
    document_loss,
    gradients,
    random_batches,
)
from transformers import AutoModelForCausalLM

from packgraph.integrations.transformers import packed

WORDS = {
    "gemma3": "images are no tokens; for text alone, pack its text model",
    "llava": "images are no tokens; for text alone, pack its text model",
    "qwen2_vl": "images are no tokens, and positions of its text model have three axes",
    "qwen3_vl": "images are no tokens, and positions of its text model have three axes",
    "qwen2_5_vl": "images are no tokens",  # by its config: no name says it
    "t5": "an encoder and a decoder read two rows",
    "bart": "an encoder and a decoder read two rows",
    "marian": "an encoder and a decoder read two rows",  # by its config
}


@pytest.mark.parametrize("name", WITH_ENCODERS)
def test_a_clear_no(name):
    model = build_with_encoder(name)
    with pytest.raises(
        ValueError, match=f"^{type(model).__name__} cannot be packed: {WORDS[name]}"
    ):
        packed(model)


@pytest.mark.parametrize("name", ["gemma3", "llava"])
@pytest.mark.few(2)
def test_text_of_a_model_with_images_trains_through_its_text_model(name):
    """As the guide has it. The vision tower gets no gradient, as it gets none without images."""
    model = build_with_encoder(name)
    model.set_attn_implementation("eager")
    expected = document_loss(model)
    wanted = gradients(expected, model)
    text = AutoModelForCausalLM.from_config(model.config.get_text_config())
    text.model, text.lm_head = model.model.language_model, model.lm_head
    graphed = packgraph.graph(packed(text), capacities=[CAPACITY], warmup=1)
    loss = graphed(batch_of())
    found = gradients(loss, model)
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=2e-5, atol=0)
    for key, theirs in wanted.items():
        assert (found[key] is None) == (theirs is None), key
        if theirs is not None:
            torch.testing.assert_close(found[key], theirs, rtol=1e-4, atol=1e-6)
    assert any(value is None for value in wanted.values()), "the vision tower"
    for batch in random_batches(3):
        graphed(batch).backward()
    assert graphed.stats.replayed == 3
