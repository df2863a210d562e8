"""Mamba-2 layers and hybrids: the definition, documents by themselves, graphs, dtypes, fresh
values."""

import dataclasses
import itertools
import math
import random

import pytest
import torch
from graphedkit import assert_graphs_are_eager
from hypothesis import given, settings
from hypothesis import strategies as st
from mambakit import CHUNK, EXPERTS, MAMBA, hybrid, naive_mixer, random_hybrid, with_bias
from model_batches import hand_batch, random_documents

from packgraph.graphs.stages import scope_errors
from packgraph.models import stack
from packgraph.models.decoder import DecoderModel, named_stages
from packgraph.models.layers.mamba import FIRST_DECAY, FIRST_STEP, MambaMixer
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.verification.matrix import random_packs, tiny_hybrid_config
from packgraph.verification.verify import verify

EDGES = (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)
SCOPES = [
    ("layer", None),
    ("chunk", None),
    ("layer", ("mamba",)),
    ("chunk", ("mamba", "attn", "mlp", "moe_router")),
]
WITH_MAMBA = [
    ("mamba", *mixer, *dense, *experts)
    for mixer, dense, experts in itertools.product(
        ((), ("attn",)),
        ((), ("mlp",)),
        ((), ("moe_router",), ("moe_router", "moe_preprocess"), ("moe",)),
    )
]


def ids_of(lengths, rows):
    ids = [number for number, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor(ids + [-1] * (rows - len(ids)), dtype=torch.int32)


def mixer_of(config, seed):
    return next(
        module
        for module in random_hybrid(config, seed).double().modules()
        if isinstance(module, MambaMixer)
    )


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.sampled_from((0, 2, 3, *EDGES)), min_size=1, max_size=4),
    st.integers(0, 9),
    st.booleans(),
)
def test_the_layer_is_its_definition(lengths, padding, other):
    """Outputs and all gradients in float64, for lengths around chunks and below the convolution's
    width."""
    mixer = mixer_of(with_bias(hybrid()) if other else hybrid(), seed=sum(lengths))
    rows = sum(lengths) + padding or 1
    ids = ids_of(lengths, rows)
    x = torch.randn(rows, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(padding))
    weights = torch.randn(rows, 16, dtype=torch.float64) * (ids >= 0)[:, None]
    results = []
    for run in (mixer, lambda x, ids: naive_mixer(mixer, x, ids)):
        mixer.zero_grad()
        leaf = x.clone().requires_grad_()
        out = torch.where((ids >= 0)[:, None], run(leaf, ids), 0)
        (out * weights).sum().backward()
        results.append(
            [
                out.detach(),
                leaf.grad,
                *(
                    torch.zeros_like(p) if p.grad is None else p.grad.clone()
                    for p in mixer.parameters()
                ),
            ]
        )
    for ours, naive in zip(*results, strict=True):
        torch.testing.assert_close(ours, naive, rtol=1e-9, atol=1e-11)


def test_packed_documents_are_those_run_alone():
    model = random_hybrid(hybrid("(M-)(*-)", num_layers=3, rotary_share=0.5)).double()
    documents = random_documents([*EDGES, 2], 40, seed=2)
    packed = model.logits(hand_batch(documents, 80, 8))
    start = 0
    for document in documents:
        alone = model.logits(hand_batch([document], len(document), 1))
        torch.testing.assert_close(
            packed[start : start + len(document)], alone, rtol=1e-9, atol=1e-11
        )
        start += len(document)


def test_a_changed_document_leaves_the_bits_of_others():
    """Outputs of, and gradients through, all other documents; in one chunk with it and in
    others."""
    model = random_hybrid(hybrid())
    documents = random_documents([3, 9, 2, 11, 4], 40, seed=5)
    changed = [list(document) for document in documents]
    changed[2] = [39, 1]
    rows = torch.tensor([row < 12 or 14 <= row < 29 for row in range(32)])
    found = []
    for tokens in (documents, changed):
        batch = hand_batch(tokens, 32, 6)
        state = model.begin(batch)
        *inner, head = model.stages()
        state = inner[0].run(state)
        state["hidden"] = leaf = state["hidden"].detach().requires_grad_()
        for stage in inner[1:]:
            state = stage.run(state)
        out = state["hidden"]
        loss = head.run({**state, "tokens_in_step": torch.tensor(20)})["output"]
        (gradient,) = torch.autograd.grad(loss, leaf)
        found.append((out.detach()[rows], gradient[rows], out.detach()[~rows]))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][2], found[1][2])


def test_what_padding_holds_reaches_nothing():
    """NaN in the padding of the hidden states of a Mamba-2 layer: its other rows and all gradients
    stay as they are."""
    mixer = mixer_of(hybrid(), seed=1)
    ids = ids_of([5, 9], 20)
    x = torch.randn(20, 16, dtype=torch.float64)
    results = []
    for fill in (0.0, 1e30):
        mixer.zero_grad()
        leaf = torch.where((ids >= 0)[:, None], x, fill).requires_grad_()
        out = mixer(leaf, ids)[:14]
        out.square().sum().backward()
        results.append(
            [out.detach(), leaf.grad[:14], *(p.grad.clone() for p in mixer.parameters())]
        )
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


def batches(count):
    chance = random.Random(0)
    for _ in range(count):
        capacity = chance.choice((Capacity(24, 6), Capacity(48, 8)))
        lengths = [chance.choice((1, 2, 3, 7, 8, 9)) for _ in range(chance.randrange(1, 5))]
        while sum(lengths) > capacity.tokens:
            lengths.pop()
        yield PackedBatch.build(
            [[chance.randrange(1, 40) for _ in range(length)] for length in lengths], capacity
        )


@pytest.mark.parametrize(("granularity", "scope"), SCOPES)
@pytest.mark.few(2)
def test_graphs_equal_eager_bitwise(granularity, scope):
    """Outputs and gradients of 8 microbatches of changing shapes, with dropout, on the recorder."""
    config = hybrid("M*-E", num_layers=4, dropout=0.1, rotary_share=0.5 if scope is None else 0.0)
    capacities = [Capacity(24, 6), Capacity(48, 8)]
    assert_graphs_are_eager(config, list(batches(8)), capacities, granularity, scope)


@pytest.mark.parametrize("scope", WITH_MAMBA)
@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.few(7)
def test_every_scope_with_mamba_is_bitwise_eager(granularity, scope):
    """Alone and with any other stages; feed-forward blocks and experts without gates, dropout."""
    config = hybrid(
        "M*-E",
        num_layers=4,
        dropout=0.1,
        rotary_share=0.0,
        activation="relu2",
        experts=dataclasses.replace(EXPERTS, latent_size=12),
    )
    assert not scope_errors(named_stages(config), scope, granularity)
    packs = list(batches(6))
    capacities = sorted({batch.capacity for batch in packs})
    assert_graphs_are_eager(config, packs, capacities, granularity, scope)


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.few(2)
def test_whole_steps_of_hybrids_are_bitwise_eager(optimizer):
    """Loss, gradients, parameters and random states of steps with changing numbers of
    microbatches."""
    config = tiny_hybrid_config("chunk", 0.1, 5)
    config = dataclasses.replace(
        config,
        graph=dataclasses.replace(
            config.graph, granularity="step", optimizer=optimizer, strict=True
        ),
    )
    report = verify("whole steps", config, random_packs(1), torch.device("cpu"))
    assert report.good and report.replayed > 0 and set(report.fallbacks) <= {"warm-up"}


def test_what_layers_read_of_a_batch_is_made_once(monkeypatch):
    """Rotary tables, boundaries and document ids, however many layers of each kind there are."""
    made = []

    def count(name, make):
        monkeypatch.setattr(
            stack, name, lambda *args, **options: made.append(name) or make(*args, **options)
        )

    count("live_document_ids", stack.live_document_ids)
    count("attention_metadata", stack.attention_metadata)
    model = random_hybrid(hybrid("M*E-", num_layers=12))
    model.rotary.register_forward_hook(lambda *_: made.append("rotary"))
    model(next(batches(1))).backward()
    assert sorted(made) == ["attention_metadata", "live_document_ids", "rotary"]


def test_decays_and_steps_stay_float32():
    model = DecoderModel(hybrid(), dtype=torch.bfloat16)
    exact = {
        name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32
    }
    assert exact == {
        f"layers.{layer}.mamba.{name}" for layer in (0, 2) for name in ("A_log", "D", "dt_bias")
    }
    before = {name: model.get_parameter(name).clone() for name in exact}
    assert all(torch.equal(model.half().get_parameter(name), before[name]) for name in exact)
    assert model.layers["0"].mamba.conv1d.weight.dtype == torch.float16
    assert model.double().layers["0"].mamba.A_log.dtype == torch.float64
    wide = DecoderModel(hybrid()).double().logits(hand_batch([[1, 2, 3] * 5], 16, 2))
    torch.testing.assert_close(
        DecoderModel(hybrid()).logits(hand_batch([[1, 2, 3] * 5], 16, 2)).double(),
        wide,
        rtol=1e-4,
        atol=1e-4,
    )


def test_fresh_values_are_those_of_the_paper_and_of_their_names():
    config = hybrid("M", mamba=dataclasses.replace(MAMBA, num_heads=64), num_layers=3)
    model, again = DecoderModel(config, seed=4), DecoderModel(config, seed=4, stage=1, stages=3)
    mixer = model.layers["1"].mamba
    assert all(
        torch.equal(value, again.layers["1"].mamba.state_dict()[name])
        for name, value in mixer.state_dict().items()
    )
    assert not torch.equal(mixer.A_log, model.layers["0"].mamba.A_log)
    decay, step = mixer.A_log.detach().exp(), torch.nn.functional.softplus(mixer.dt_bias.detach())
    assert FIRST_DECAY[0] <= decay.min() < 4 and 12 < decay.max() <= FIRST_DECAY[1]
    assert FIRST_STEP[0] * 0.99 <= step.min() < 0.01 < step.max() <= FIRST_STEP[1] * 1.01
    assert math.isclose(float(mixer.conv1d.weight.detach().abs().max()), 0.5, abs_tol=0.01)
    assert torch.equal(mixer.D, torch.ones(64)) and not mixer.conv1d.bias.any()
