"""Documents are apart in every packed call, whatever somebody has done to the model: the losses are
those of the documents one by one, or the call is refused."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import packgraph

pytest.importorskip("transformers", reason="the integration is of this library")

from packed_families import CAPACITY, DOCUMENTS, batch_of, build, document_loss, plain
from transformers import AttentionInterface

from packgraph.integrations.transformers import packed
from packgraph.integrations.transformers.mixers import runner_of

TOLERANCE = {"rtol": 2e-5, "atol": 1e-6}  # as in test_families.py
HYBRIDS = ("bamba", "falcon_h1", "nemotron_h", "qwen3_next")


class Own(nn.Module):
    """Attention as people write it, over the whole row."""

    def __init__(self, theirs):
        super().__init__()
        self.theirs = theirs

    def forward(self, hidden_states, **others):
        inner = self.theirs
        shape = (*hidden_states.shape[:-1], -1, inner.head_dim)
        projections = inner.q_proj, inner.k_proj, inner.v_proj
        q, k, v = (part(hidden_states).view(shape).transpose(1, 2) for part in projections)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return inner.o_proj(out.transpose(1, 2).flatten(2)), None


class Forgetful(nn.Module):
    """A layer around a layer, which hands on only what it knows."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, position_embeddings=None, **others):
        return self.layer(hidden_states, position_embeddings=position_embeddings)


def last(model):
    return model.model.layers[1]


def other_config(model):
    config = copy.deepcopy(model.config)
    config._attn_implementation = "sdpa"
    last(model).self_attn.config = config


def own_attention(model):
    last(model).self_attn = Own(last(model).self_attn)


def own_forward(model):
    last(model).self_attn.forward = Own(last(model).self_attn).forward


def wrapped(model):
    model.model.layers[1] = Forgetful(last(model))


def replaced(model):
    model.model.layers[1] = build("llama").model.layers[1]


def appended(model):
    layer = build("llama").model.layers[1]
    layer.self_attn.layer_idx = 2
    model.model.layers.append(layer)
    model.config.num_hidden_layers = 3


# What is done to a packed model, and whether packing it again is enough.
CHANGES = {
    "sdpa": (lambda model: model.set_attn_implementation("sdpa"), True),
    "eager": (lambda model: setattr(model.config, "_attn_implementation", "eager"), True),
    "a config": (other_config, True),
    "a layer": (replaced, True),
    "one more layer": (appended, True),
    "own attention": (own_attention, False),
    "own forward": (own_forward, False),
    "a wrapper": (wrapped, False),
}


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore::packgraph.PackgraphWarning")
@pytest.mark.few(8)
def test_a_change_behind_packed_is_refused(change, graphed):
    model = build("llama")
    call = packed(model)
    if graphed:
        call = packgraph.graph(call, [CAPACITY], warmup=1)
    for _ in range(3):
        torch.testing.assert_close(call(batch_of()), document_loss(plain(model)), **TOLERANCE)
    assert not graphed or packgraph.control(call).stats.replayed == 2
    make, mends = CHANGES[change]
    make(model)
    for _ in range(3):
        with pytest.raises(ValueError, match="packed"):
            call(batch_of())
    if mends:
        packed(model)
        for _ in range(3):
            torch.testing.assert_close(call(batch_of()), document_loss(plain(model)), **TOLERANCE)
    else:
        with pytest.raises(ValueError, match="documents would see each other"):
            packed(model)(batch_of())


def test_documents_that_see_each_other_make_another_loss():
    """The control: what is refused above would be seen in the loss."""
    model = build("llama")
    row = torch.tensor([[token for document in DOCUMENTS for token in document]])
    logits, labels = plain(model)(row).logits[0], batch_of().labels[: row.shape[1]].long()
    together = F.cross_entropy(logits, labels)
    assert abs(together - document_loss(plain(model))) > 1e-2


def grown(model):
    layer = copy.deepcopy(last(model))
    layer.self_attn.layer_idx = 2
    model.model.layers.append(layer)
    model.config.num_hidden_layers = 3


def grafted(model):
    model.model.layers[1] = build("llama", initializer_range=0.5).model.layers[1]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("granite", "embedding_multiplier"),
        ("granite", "logits_scaling"),
        ("falcon_h1", "embedding_multiplier"),
        ("falcon_h1", "lm_head_multiplier"),
    ],
)
@pytest.mark.few(2)
def test_factors_are_those_of_the_forward_of_the_model(family, name):
    """Some decoders read their config once, others at each call."""
    model = build(family)
    call = packed(model)
    setattr(model.config, name, 3 * getattr(model.config, name))
    torch.testing.assert_close(call(batch_of()), document_loss(plain(model)), **TOLERANCE)


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
@pytest.mark.filterwarnings("ignore::packgraph.PackgraphWarning")
@pytest.mark.few(2)
def test_layers_that_the_config_does_not_count_are_refused(graphed):
    """GPT-2 runs all that it has."""
    model = build("gpt2")
    call = packed(model)
    if graphed:
        call = packgraph.graph(call, [CAPACITY], warmup=1)
    for _ in range(3):
        call(batch_of())
    model.transformer.h.append(copy.deepcopy(model.transformer.h[1]))
    with pytest.raises(ValueError, match=r"it has 3 layers, and config.num_hidden_layers = 2"):
        call(batch_of())


@pytest.mark.parametrize("make", [grown, grafted, other_config])
@pytest.mark.few(3)
def test_layers_with_configs_of_their_own(make):
    model = build("llama")
    make(model)
    expected = document_loss(plain(model))
    torch.testing.assert_close(packed(model)(batch_of()), expected, **TOLERANCE)
    torch.testing.assert_close(document_loss(model), expected, **TOLERANCE)
    assert packgraph.verify(packed(model), [batch_of()] * 3, capacities=[CAPACITY], warmup=1)


def test_layers_of_one_place_are_refused():
    model = build("llama")
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])
    with pytest.raises(ValueError, match="layers 0 and 1 both have layer_idx 0; set that of"):
        packed(model)


def with_mask(model):
    attention = last(model).self_attn
    theirs, mask = attention.forward, torch.zeros(1, 1, CAPACITY.tokens, CAPACITY.tokens)
    attention.forward = lambda **given: theirs(**{**given, "attention_mask": mask})


def with_more_keys(model):
    """Keys and values before the first document, as of a prefix."""
    name = model.config._attn_implementation
    inner = AttentionInterface()[name]

    def longer(module, query, key, value, *args, **given):
        key, value = (torch.cat([part[:, :, :2], part], 2) for part in (key, value))
        return inner(module, query, key, value, *args, **given)

    AttentionInterface.register("longer", longer)
    model.config._attn_implementation = "longer"


def turned(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


@pytest.mark.parametrize(
    ("family", "make", "told"),
    [
        ("llama", lambda model: setattr(last(model).self_attn, "is_causal", False), "no causal"),
        ("llama", with_mask, "a mask of its own"),
        ("llama", with_more_keys, "28 keys"),
        ("qwen2", turned, "a window of None, not 4"),
        ("mistral", lambda model: setattr(model.config, "sliding_window", None), None),
    ],
)
def test_attention_of_another_kind_is_refused(family, make, told):
    model = build(family)
    call = packed(model)
    make(model)
    if told is None:  # what masks of the model would follow is followed
        torch.testing.assert_close(call(batch_of()), document_loss(plain(model)), **TOLERANCE)
        return
    with pytest.raises(ValueError, match=told):
        call(batch_of())


def test_rows_of_other_modules():
    model = build("llama")
    last(model).mlp.more = nn.Conv1d(16, 16, 3)
    with pytest.raises(ValueError, match="Conv1d reads several rows"):
        packed(model)


def hooked(model):
    model.model.register_forward_hook(lambda *facts: None)


def patched(model):
    theirs = model.forward
    model.forward = lambda *args, **given: 2 * theirs(*args, **given)


def other_rotary(model):
    model.config.rope_parameters["rope_type"] = "dynamic"


def both_ways(model):
    """As transformers' masks read it."""
    model.config.is_causal = False


@pytest.mark.parametrize("change", [hooked, patched, other_rotary, both_ways])
@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
@pytest.mark.filterwarnings("ignore::packgraph.PackgraphWarning")
def test_what_surrounds_layers_is_looked_at_again(change, graphed):
    model = build("llama")
    call = packed(model)
    if graphed:
        call = packgraph.graph(call, [CAPACITY], warmup=1)
    for _ in range(3):
        call(batch_of())
    change(model)
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot be packed"):
        call(batch_of())


def test_a_class_with_a_forward_of_its_own_is_refused():
    llama = build("llama")

    class Louder(type(llama)):
        def forward(self, *args, **given):
            return super().forward(*args, **given)

    class Quiet(type(llama)):
        """Adds nothing."""

    torch.testing.assert_close(
        packed(Quiet(llama.config))(batch_of()).isfinite(), torch.tensor(True)
    )
    with pytest.raises(ValueError, match="the model has a forward of its own"):
        packed(Louder(llama.config))
    bamba = build("bamba")
    mixer = next(filter(runner_of, bamba.modules()))
    mixer.__class__ = type("Own", (type(mixer),), {"forward": lambda self, x, **given: x})
    with pytest.raises(ValueError, match="Own has a forward of its own"):
        packed(bamba)


@pytest.mark.parametrize("family", ["qwen3_moe", "nemotron_h"])
@pytest.mark.filterwarnings("ignore::packgraph.PackgraphWarning")
@pytest.mark.few(2)
def test_other_experts_are_refused(family):
    model = build(family)
    call = packgraph.graph(packed(model), [CAPACITY], warmup=1)
    for _ in range(3):
        call(batch_of())
    model.set_experts_implementation("grouped_mm")
    for _ in range(2):
        with pytest.raises(ValueError, match="would run as 'grouped_mm'"):
            call(batch_of())
    packed(model)
    torch.testing.assert_close(call(batch_of()), document_loss(plain(model)), **TOLERANCE)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.few(4)
def test_a_mixer_put_in_later_is_refused(family):
    model = build(family)
    call = packed(model)
    fresh = dict(build(family).named_modules())
    name = next(name for name, module in model.named_modules() if runner_of(module))
    model.set_submodule(name, fresh[name])
    with pytest.raises(ValueError, match=r"packed\(model\) again"):
        call(batch_of())
    packed(model)
    torch.testing.assert_close(call(batch_of()), document_loss(plain(model)), **TOLERANCE)


@pytest.mark.parametrize("family", [*HYBRIDS, "gpt_oss"])
@pytest.mark.few(5)
def test_a_packed_model_is_pickled(family, tmp_path):
    """In another process, too, where no implementation is registered yet."""
    model = build(family)
    expected = document_loss(plain(model))
    torch.save((packed(model), batch_of()), tmp_path / "model.pt")
    call, batch = torch.load(tmp_path / "model.pt", weights_only=False)
    torch.testing.assert_close(call(batch), expected, **TOLERANCE)
    torch.testing.assert_close(packed(copy.deepcopy(call).model)(batch), expected, **TOLERANCE)
    if family == "bamba":
        code = (
            "import sys, torch\n"
            "call, batch = torch.load(sys.argv[1], weights_only=False)\n"
            "print(call(batch).item())"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "model.pt")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) == pytest.approx(expected.item(), rel=1e-5)
