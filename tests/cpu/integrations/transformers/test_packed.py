"""`packed` itself: what stays as it is, what is refused, and how people train."""

import copy
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import packgraph

pytest.importorskip("transformers", reason="the integration is of this library")

from packed_families import (
    CAPACITY,
    DOCUMENTS,
    batch_of,
    build,
    document_loss,
    gradients,
    plain,
    random_batches,
)
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, LlamaConfig, LlamaModel

from packgraph.integrations.transformers import packed

# as in test_families.py
TOLERANCE = {"rtol": 2e-5, "atol": 1e-6}
TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


def graphed_steps(model, batches, **options):
    """The losses of training through graphs, and the graphed module."""
    graphed = packgraph.graph(model, capacities=[CAPACITY], warmup=1, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = graphed(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, graphed


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gpt2", "gemma2"])
@pytest.mark.few(2)
def test_the_model_itself_stays_what_it_was(family, tmp_path):
    model = build(family).eval()
    names = list(model.state_dict())
    expected = model(TOKENS).logits
    generated = model.generate(TOKENS, max_new_tokens=4, do_sample=False)
    model.save_pretrained(tmp_path / "before")
    made = packed(model)
    assert made.model is model and list(model.state_dict()) == names
    assert {id(p) for p in made.parameters()} == {id(p) for p in model.parameters()}
    torch.testing.assert_close(model(TOKENS).logits, expected, **TOLERANCE)
    assert torch.equal(model.generate(TOKENS, max_new_tokens=4, do_sample=False), generated)
    model.save_pretrained(tmp_path / "after")
    for path in sorted((tmp_path / "before").iterdir()):
        assert path.read_bytes() == (tmp_path / "after" / path.name).read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    torch.testing.assert_close(loaded.eval()(TOKENS).logits, expected, **TOLERANCE)


def test_hidden_states_and_log_probabilities():
    model = build("gemma2")
    reference = plain(model)
    batch = batch_of()
    hidden = packed(model, output="hidden")(batch)
    found = packed(model, output="log_probabilities")(batch)
    start = 0
    for document in DOCUMENTS:
        tokens, rows = torch.tensor([document]), slice(start, start + len(document))
        out = reference(tokens, output_hidden_states=True)
        torch.testing.assert_close(hidden[rows], out.hidden_states[-1][0], rtol=2e-5, atol=1e-5)
        expected = out.logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        torch.testing.assert_close(found[rows], F.pad(expected, (0, 1)), **TOLERANCE)
        start += len(document)
    assert (hidden[start:] == 0).all() and (found[start:] == 0).all()
    assert found.dtype == torch.float32
    weights = torch.linspace(-1, 1, CAPACITY.tokens)
    options = {"capacities": [CAPACITY], "warmup": 1, "strict": True}
    for output in ("hidden", "log_probabilities"):
        made = packed(copy.deepcopy(model), output=output)
        loss = (lambda out: (out * weights).sum()) if output == "log_probabilities" else None
        assert packgraph.verify(made, random_batches(3), loss=loss, **options)


def test_the_loss_can_be_divided_by_the_tokens_of_a_step():
    model = packed(build("llama"))
    batch = batch_of()
    count = batch.num_loss_tokens
    torch.testing.assert_close(model(batch, torch.tensor(4 * count)) * 4, model(batch))
    assert model(packgraph.PackedBatch.empty(CAPACITY)) == 0
    with pytest.raises(TypeError, match=r"not 12: write torch\.tensor\(12, device="):
        model(batch, 12)


def biased(model):
    head = nn.Linear(16, 29)
    head.weight = model.lm_head.weight
    model.lm_head = head
    return model


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.few(2)
def test_a_head_that_is_more_than_a_matrix_is_called(family):
    model = biased(build(family))
    reference = plain(model)
    expected = document_loss(reference)
    wanted = gradients(expected, reference)
    loss = packed(model)(batch_of())
    torch.testing.assert_close(loss, expected, **TOLERANCE)
    for name, gradient in gradients(loss, model).items():
        torch.testing.assert_close(gradient, wanted[name], **TOLERANCE)
    probabilities = packed(model, output="log_probabilities")(batch_of())
    torch.testing.assert_close(-probabilities.sum() / batch_of().num_loss_tokens, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss"])
@pytest.mark.few(4)
def test_gradient_checkpointing_as_the_model_asks_for_it(family, reentrant):
    model = build(family)
    expected = {name: g.clone() for name, g in gradients(packed(model)(batch_of()), model).items()}
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    calls = []
    module = next(
        m
        for m in model.modules()
        if hasattr(m, "gradient_checkpointing") and m is not model.base_model
    )
    inner = next(iter(module.children()))
    handle = inner.register_forward_hook(lambda *facts: calls.append(1))
    found = gradients(packed(model.train())(batch_of()), model)
    handle.remove()
    assert len(calls) == 2, "once in the forward, once again in the backward"
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def is_checkpointed(model):
    return any(getattr(part, "gradient_checkpointing", False) for part in model.modules())


def test_recompute_turns_checkpointing_on_and_off():
    model = build("llama")
    made = packed(model.train())
    expected = {name: g.clone() for name, g in gradients(made(batch_of()), model).items()}
    assert packgraph.recompute(made, "full") is made and is_checkpointed(model)
    found = gradients(made(batch_of()), model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ValueError, match="recomputes whole layers or nothing"):
        packgraph.recompute(made, "selective")
    packgraph.recompute(made, "none")
    assert not is_checkpointed(model)


def test_reentrant_checkpointing_says_why_it_runs_eagerly():
    model = build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.warns(packgraph.PackgraphWarning, match="capture failed") as caught:
        _, graphed = graphed_steps(packed(model.train()), random_batches(3))
    assert graphed.stats.replayed == 0 and len(caught) < 4
    assert any("checkpoint" in str(warning.message) for warning in caught)


@pytest.mark.parametrize(
    ("granularity", "scope"),
    [
        ("layer", None),
        ("chunk", ["layer"]),
        ("layer", ["embed", "head"]),
        pytest.param("chunk", None, marks=pytest.mark.slow),
        pytest.param("layer", ["layer"], marks=pytest.mark.slow),
        pytest.param("chunk", ["embed", "head"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.few(3)
def test_scopes_and_granularities(granularity, scope):
    options = {"granularity": granularity, "scope": scope, "strict": True, "warmup": 1}
    found = packgraph.verify(
        packed(build("gemma3_text")), random_batches(4), capacities=[CAPACITY], **options
    )
    assert found and found.replayed == 3, found


def test_what_layers_save_can_be_offloaded():
    batches = random_batches(6)
    expected, _ = graphed_steps(packed(build("qwen3")), batches)
    model = packed(build("qwen3"))
    graphed = packgraph.graph(model, capacities=[CAPACITY], warmup=1)
    offloading = packgraph.offload(graphed, modules=["layer"], min_bytes=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch, loss in zip(batches, expected):
        optimizer.zero_grad()
        found = graphed(batch)
        found.backward()
        optimizer.step()
        offloading.end_step()
        assert torch.equal(found, loss)
    assert offloading.trace is not None and len(offloading.trace.groups) == 2
    assert graphed.stats.replayed > 2


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "gemma3_text")]


@pytest.mark.parametrize("family", ["qwen3", *SLOW])
def test_compiled_layers(family):
    torch._dynamo.reset()
    found = packgraph.verify(
        packed(build(family)),
        random_batches(3),
        capacities=[CAPACITY],
        strict=True,
        warmup=1,
        compile="aot_eager",
    )
    assert found, found


@pytest.mark.slow
def test_mixed_precision_and_frozen_parts():
    model = packed(build("qwen2"))
    for parameter in model.model.model.layers[0].parameters():
        parameter.requires_grad_(False)
    twin = copy.deepcopy(model)
    graphed = packgraph.graph(model, capacities=[CAPACITY], warmup=1, strict=True)
    for batch in random_batches(4):
        found = []
        for call, owner in ((graphed, model), (twin, twin)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = call(batch)
            found.append([loss.detach(), *gradients(loss, owner).values()])
        assert any(gradient is None for gradient in found[0])
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert graphed.stats.replayed == 3


def test_dropout_draws_new_numbers_at_every_replay():
    model = packed(build("gpt2", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2).train())
    found = packgraph.verify(model, random_batches(4), capacities=[CAPACITY], strict=True, warmup=1)
    assert found, found
    losses, _ = graphed_steps(packed(build("gpt2", attn_pdrop=0.5).train()), [batch_of()] * 4)
    assert len({float(loss) for loss in losses}) == 4
    model.eval()
    torch.testing.assert_close(model(batch_of()), document_loss(plain(model.model)), **TOLERANCE)


class Printing(nn.Module):
    """A norm with a look at its numbers, as people put in to debug."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        if x.abs().max().item() > 1e6:
            raise ValueError("too large")
        return self.norm(x)


@pytest.mark.slow
def test_a_model_that_cannot_be_captured_says_why_once_and_trains():
    model = build("llama")
    model.model.layers[1].input_layernorm = Printing(model.model.layers[1].input_layernorm)
    twin = packed(copy.deepcopy(model))
    batches = random_batches(5)
    with warnings.catch_warnings(record=True, action="always") as caught:
        losses, graphed = graphed_steps(packed(model), batches)
    said = [str(w.message) for w in caught if issubclass(w.category, packgraph.PackgraphWarning)]
    assert len(said) == 1 and "test_packed.py" in said[0] and "item" in said[0], said
    assert graphed.stats.replayed == 0
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    for batch, loss in zip(batches, losses):
        optimizer.zero_grad()
        expected = twin(batch)
        expected.backward()
        optimizer.step()
        assert torch.equal(expected, loss)


def test_what_cannot_be_packed_is_refused_with_all_reasons():
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    with pytest.raises(TypeError, match="language-model head, not Linear"):
        packed(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="its decoder is not an embedding, layers and a norm"):
        packed(BertForMaskedLM(BertConfig(vocab_size=9, intermediate_size=8, **small)))
    with pytest.raises(ValueError, match="no language-model head"):
        packed(LlamaModel(LlamaConfig(vocab_size=9, intermediate_size=8, **small)))
    with pytest.raises(ValueError, match="output must be one of"):
        packed(build("llama"), output="logits")
    model = build("qwen3_moe", output_router_logits=True)
    model.config.rope_parameters["rope_type"] = "dynamic"
    model.register_forward_hook(lambda *facts: None)
    with pytest.raises(
        ValueError, match=r"the model has hooks.*'dynamic'.*output_router_logits = False"
    ):
        packed(model)


def test_illegal_numbers_are_named_beforehand():
    with pytest.raises(ValueError, match="vocabulary of 29"):
        packed(build("llama"))(batch_of([[29, 1]]))
    with pytest.raises(ValueError, match="33 tokens, but the model has learned positions for 32"):
        packed(build("gpt2"))(batch_of([[1] * 33], packgraph.Capacity(40, 1)))
    blind = batch_of([[29, 1]]).without_lengths()
    assert packed(build("llama"))(blind).isnan()


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_weights_that_accelerate_fetches_for_each_module(family):
    """The head's too, which is then called: its weight is elsewhere."""
    accelerate = pytest.importorskip("accelerate", reason="the hooks are of this library")
    model = build(family).eval()
    expected = document_loss(plain(model))
    call = packed(model)
    accelerate.cpu_offload(model, execution_device="cpu")
    for made in (call, packed(model)):
        with torch.no_grad():
            torch.testing.assert_close(made(batch_of()), expected, **TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_gradient_checkpointing_through_graphs(family):
    model = build(family)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    made = packed(model.train())
    found = packgraph.verify(made, random_batches(4), capacities=[CAPACITY], warmup=1, strict=True)
    assert found and found.replayed == 3, found


def test_prompt_learning_is_refused():
    wrapper = nn.Module()
    wrapper.inner = build("llama")
    wrapper.get_base_model = lambda: wrapper.inner
    adapter = types.SimpleNamespace(is_prompt_learning=True, peft_type="LORA")
    wrapper.peft_config = {"default": adapter}
    with pytest.raises(ValueError, match="adapter default adds tokens"):
        packed(wrapper)
    adapter.is_prompt_learning = False
    model = packed(wrapper)
    assert model.causal is wrapper.inner
    torch.testing.assert_close(model(batch_of()), document_loss(plain(wrapper.inner)), **TOLERANCE)
