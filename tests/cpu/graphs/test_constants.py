"""Tensors that forward makes of Python numbers, numbers that vary, objects among outputs, and hooks
that only mark."""

import itertools
import time
import types
import warnings

import pytest
import torch
from statekit import One, X, quietly, wheres
from torch import nn

from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.graphed import graph


def equal(function, calls=6, make=One):
    """Train an eager twin and a graphed module; the graphed module once all agrees bit by bit."""
    runs, graphed = [], None
    for wrap in (False, True):
        module = make(function)
        model = graphed = graph(module, warmup=2, strict=True) if wrap else module
        torch.manual_seed(3)
        seen = []
        for _ in range(calls):
            x = torch.randn(3, 4, requires_grad=True)
            out = model(x)
            quietly(out.pow(2).sum().backward)
            seen += [
                out.detach(),
                x.grad,
                *(p.grad.clone() for p in module.parameters() if p.grad is not None),
            ]
        runs.append(seen)
    assert len(runs[0]) == len(runs[1]) and all(
        torch.equal(a, b) for a, b in zip(*runs, strict=True)
    )
    assert graphed.stats.replayed == calls - 2
    return graphed


def written_to(make):
    def forward(m, x):
        total = make([0.0] * 4)
        total += m.linear(x).detach().sum(0)
        return m.linear(x) + total

    return forward


MADE = {
    "empty": lambda m, x: torch.cat([torch.tensor([], device=x.device), m.linear(x).flatten()]),
    "numbers": lambda m, x: m.linear(x) + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
    "nested": lambda m, x: (
        m.linear(x) @ torch.tensor([[0.5, 1], (2, True)] * 2, dtype=torch.float32)
    ),
    "one number": lambda m, x: m.linear(x) * torch.as_tensor(2.5) + torch.asarray([1.0]),
    "like another": lambda m, x: m.linear(x) + x.new_tensor([1.0, 0.0, 0.0, 1.0]),
    "as an index": lambda m, x: m.linear(x)[:, torch.tensor([3, 1, 0, 0])],
    "of attributes": lambda m, x: (
        m.linear(x) * torch.tensor([m.linear.in_features, m.linear.out_features] * 2)
    ),
    "several": lambda m, x: sum(
        (torch.tensor([float(i)]) * m.linear(x) for i in range(3)), start=torch.tensor(0.0)
    ),
    "written to": written_to(torch.tensor),
    "written to, by another maker": written_to(torch.Tensor),
}


@pytest.mark.parametrize("function", MADE.values(), ids=MADE)
def test_constants_are_captured(function):
    equal(function)


def test_a_constant_that_needs_a_gradient_inside_equals_eager():
    def energy(m, x):
        point = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
        (slope,) = torch.autograd.grad((m.linear(x) * point).sum(), point, create_graph=True)
        return m.linear(x) * slope

    eager, graphed = One(energy), graph(One(energy), warmup=0)
    for _ in range(3):
        for model in (eager, graphed):
            quietly(lambda model=model: model(X).pow(2).sum().backward())
    assert torch.equal(eager.linear.weight.grad, graphed.linear.weight.grad)
    assert graphed.stats.replayed + graphed.stats.fallbacks["capture failed"] == 3


COUNT = itertools.count()


VARIES = {
    "a clock": lambda m, x: m.linear(x) * time.perf_counter(),
    "an iterator": lambda m, x: m.linear(x) * next(COUNT),
    "an iterator in a constant": lambda m, x: m.linear(x) + torch.tensor([float(next(COUNT))]),
    "a branch": lambda m, x: m.linear(x).relu() if next(COUNT) % 2 else m.linear(x),
    "an iterator in a shape": lambda m, x: m.linear(x).repeat(1 + next(COUNT) % 2, 1),
    "an iterator in a list of indices": lambda m, x: m.linear(x)[:, [next(COUNT) % 4, 0]],
}


@pytest.mark.parametrize("function", VARIES.values(), ids=VARIES)
def test_what_varies_or_may_is_refused_at_its_line(function):
    with pytest.raises(CaptureError) as caught:
        graph(One(function), warmup=0, strict=True)(X)
    assert caught.value.where in wheres(function)


def test_a_number_that_changes_between_two_captures_is_seen():
    """Two microbatches in flight need two captures."""
    holder = types.SimpleNamespace(value=1.0)
    graphed = graph(One(lambda m, x: m.linear(x) + torch.tensor([holder.value])), warmup=0)
    first = graphed(X)
    holder.value = 2.0
    with pytest.warns(PackgraphWarning, match="value == 1.0"):
        second = graphed(X)
    assert torch.equal(second, graphed.module.linear(X) + 2.0) and torch.equal(
        first, graphed.module.linear(X) + 1.0
    )


class Cache:
    """As language models return it: what is in it belongs to the call."""

    def __init__(self):
        self.layers, self.length, self.self_again = [], 0, self

    def update(self, keys):
        self.layers.append(keys)
        self.length += keys.shape[0]
        return keys


def test_an_object_among_the_outputs_is_made_anew():
    def forward(m, x):
        cache = Cache()
        hidden = cache.update(m.linear(x))
        return {"hidden": hidden * 2, "cache": cache}

    runs = []
    for wrap in (False, True):
        module = One(forward)
        model = graph(module, warmup=2, strict=True) if wrap else module
        torch.manual_seed(0)
        outs = []
        for _ in range(5):
            out = model(torch.randn(3, 4))
            (out["hidden"].sum() + out["cache"].layers[0].pow(2).sum()).backward()
            outs.append(out)
        caches = [out["cache"] for out in outs]
        assert all(type(c) is Cache and c.self_again is c and c.length == 3 for c in caches)
        assert len(set(map(id, caches))) == 5
        runs.append(
            [
                *(c.layers[0] for c in caches),
                *(o["hidden"] for o in outs),
                module.linear.weight.grad,
            ]
        )
    assert model.stats.replayed == 3
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_an_object_that_forward_keeps_is_not_made_anew():
    kept = []

    def forward(m, x):
        cache = Cache()
        kept.append(cache)
        return {"hidden": m.linear(x), "cache": cache}

    with pytest.raises(CaptureError):
        graph(One(forward), warmup=0, strict=True)(X)
    assert not kept
    graphed = graph(One(forward), warmup=0)
    for _ in range(3):
        assert quietly(graphed, X)["cache"] is kept[-1]
    assert len(kept) == 3


def marked(module, input, output):
    output.requires_grad_(True)


def counted(module, input, output):
    output.requires_grad_(print() is None)


class Embeds(nn.Module):
    """A frozen embedding before a layer that trains."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.linear = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
        self.embedding.register_forward_hook(function)

    def forward(self, x):
        return self.linear(self.embedding(x.detach()).tanh())


def test_a_hook_that_only_marks_is_captured():
    runs = []
    for wrap in (False, True):
        module = Embeds(marked)
        model = graph(module, warmup=2, strict=True) if wrap else module
        torch.manual_seed(1)
        outs = [model(torch.randn(3, 4)) for _ in range(5)]
        for out in outs:
            quietly(out.pow(2).sum().backward)
        runs.append([*outs, module.linear.weight.grad])
    assert model.stats.replayed == 3 and all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_another_hook_is_named():
    with pytest.raises(
        CaptureError, match=r"submodule 'embedding' \(Linear\) has forward hooks: .*counted"
    ):
        graph(Embeds(counted), strict=True)


FAMILIES = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    "LlamaForCausalLM": ("LlamaConfig", {}),
    "Qwen3ForCausalLM": ("Qwen3Config", {"head_dim": 8}),
    "MistralForCausalLM": ("MistralConfig", {}),
    "Phi3ForCausalLM": ("Phi3Config", {"pad_token_id": 0}),
    "OlmoeForCausalLM": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "MixtralForCausalLM": ("MixtralConfig", {"num_local_experts": 4}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
    ),
    "BertForMaskedLM": ("BertConfig", {}),
}


def language_model(name, **options):
    transformers = pytest.importorskip("transformers")
    kind, given = FAMILIES[name]
    sizes = {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    torch.manual_seed(0)
    return getattr(transformers, name)(
        getattr(transformers, kind)(**{**sizes, **given}, **options)
    ).train()


def trained(name, wrap, prepare=lambda model: None, **options):
    model = language_model(name, **options)
    prepare(model)
    called = graph(model) if wrap else model
    torch.manual_seed(7)
    seen = []
    for _ in range(6):
        tokens, labels = torch.randint(3, 64, (2, 12)), torch.randint(3, 64, (2, 12))
        with warnings.catch_warnings(action="ignore"):
            out = called(input_ids=tokens, labels=labels)
            out.loss.backward()
        cache = getattr(out, "past_key_values", None)
        seen += [
            out.loss.detach(),
            out.logits.detach(),
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]
        seen += [layer.keys.detach() for layer in getattr(cache, "layers", ())]
    return seen, called


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.few(3)
def test_language_models_replay_at_their_defaults(name):
    (eager, _), (got, graphed) = trained(name, False), trained(name, True)
    assert len(eager) == len(got) and all(
        torch.equal(a, b) for a, b in zip(eager, got, strict=True)
    )
    assert graphed.stats.replayed == 4


@pytest.mark.parametrize(
    "prepare",
    [
        lambda model: model.enable_input_require_grads(),
        lambda model: (
            model.get_input_embeddings().weight.requires_grad_(False),
            model.enable_input_require_grads(),
        ),
        lambda model: model.gradient_checkpointing_enable(),
    ],
    ids=["marked", "frozen", "checkpointed"],
)
def test_the_hook_of_transformers_on_the_embedding_is_captured(prepare):
    name = "BertForMaskedLM"
    (eager, _), (got, graphed) = trained(name, False, prepare), trained(name, True, prepare)
    assert len(eager) == len(got) and all(
        torch.equal(a, b) for a, b in zip(eager, got, strict=True)
    )
    assert graphed.stats.replayed == 4


def test_a_mask_whose_values_are_looked_at_is_refused_with_the_way_out():
    model = language_model("LlamaForCausalLM")
    tokens = torch.randint(3, 64, (2, 12))
    with pytest.raises(CaptureError, match="complete attention_mask"):
        graph(model, warmup=0, strict=True)(
            input_ids=tokens, attention_mask=torch.ones_like(tokens)
        )
    complete = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12).contiguous()
    graphed = graph(model, warmup=0, strict=True)
    graphed(input_ids=tokens, attention_mask=complete).logits.square().sum().backward()
    assert graphed.stats.replayed == 1
