"""Layers whose heads are normalised and rotated by the operation of `ops/heads.py`: as near to
plain layers as rounding, in graphs bitwise as without, and plain where something else wants to see
a norm."""

import random
from collections import Counter

import offloadkit
import pytest
import torch
from headskit import take_everywhere
from torch.utils._python_dispatch import TorchDispatchMode

import packgraph
from packgraph.graphs.graphed import graph
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.ops import heads
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

CAPACITY = Capacity(24, 4)
CONFIG = DecoderConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    initializer_range=0.2,
)


class Calls(TorchDispatchMode):
    """Counts calls of this library's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counter[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "packgraph":
            self.counted[function._schema.name.partition("::")[2]] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def fused(monkeypatch):
    take_everywhere(monkeypatch)


def batches(count: int) -> list[PackedBatch]:
    chance = random.Random(0)
    return [
        PackedBatch.build(
            [
                [chance.randrange(1, 40) for _ in range(chance.randrange(1, 7))]
                for _ in range(chance.randrange(1, 4))
            ],
            CAPACITY,
        )
        for _ in range(count)
    ]


def trained(model, count: int = 5, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Losses of some batches, and the gradients that they add up to. dtype: of autocast."""
    losses = []
    for batch in batches(count):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(batch, torch.tensor(20))
        loss.backward()
        losses.append(loss.detach().clone())
    return losses


def gradients(model) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def same_gradients(model, other) -> bool:
    pairs = zip(gradients(model), gradients(other), strict=True)
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


def calls_of(model) -> int:
    with Calls() as calls:
        model(batches(1)[0], torch.tensor(20))
    return calls.counted["turned_heads"]


def test_numbers_are_those_of_plain_layers_but_for_rounding(fused, monkeypatch):
    model, plain = DecoderModel(CONFIG, seed=1), DecoderModel(CONFIG, seed=1)
    assert calls_of(model) == 2
    losses = trained(model)
    monkeypatch.undo()
    assert not calls_of(plain)
    torch.testing.assert_close(losses, trained(plain), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", [(), ("q_norm",), ("q_norm", "k_norm")], ids=str)
@pytest.mark.parametrize(
    ("granularity", "scope"), [("layer", None), ("chunk", None), ("layer", ("attn",))]
)
@pytest.mark.few(7)
def test_graphs_have_the_bits_of_eager(fused, granularity, scope, frozen):
    eager, captured = DecoderModel(CONFIG, seed=1), DecoderModel(CONFIG, seed=1)
    for model in (eager, captured):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
    graphed = graph(
        captured,
        capacities=[CAPACITY],
        backend="recorder",
        granularity=granularity,
        scope=scope,
        strict=True,
    )
    losses = trained(eager), trained(graphed)
    assert losses[0] == losses[1] and graphed.stats.replayed >= 3
    assert same_gradients(captured, eager)
    assert sum(grad is None for grad in gradients(captured)) == 2 * len(frozen)
    graphed.close()


def test_compiled_layers_hold_the_operation(fused, monkeypatch):
    eager, captured = DecoderModel(CONFIG, seed=1), DecoderModel(CONFIG, seed=1)
    torch.compiler.reset()
    graphed = graph(
        captured, capacities=[CAPACITY], backend="recorder", strict=True, compile="aot_eager"
    )
    torch.testing.assert_close(trained(graphed), trained(eager), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(captured), gradients(eager), rtol=1e-4, atol=1e-5)
    assert graphed.stats.replayed >= 3 and not graphed.stats.recompiles
    graphed.run_eagerly(batches(1)[0], torch.tensor(20))  # checks what was compiled
    seen, own = [], heads.naive_turn
    monkeypatch.setattr(heads, "naive_turn", lambda *operands: seen.append(1) or own(*operands))
    graphed.run_eagerly(batches(1)[0], torch.tensor(20))
    assert len(seen) == 4, "queries and keys of two layers"
    graphed.close()


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.few(2)
def test_recomputation_changes_no_bit(fused, kind):
    plain, again = DecoderModel(CONFIG, seed=1), DecoderModel(CONFIG, seed=1)
    packgraph.recompute(again, kind)
    assert trained(plain) == trained(again)
    assert same_gradients(plain, again)
    with Calls() as calls:
        trained(again, 1)
    assert calls.counted["turned_heads"] == 4, "both layers compute it again"


@pytest.mark.parametrize("granularity", [None, "chunk"])
@pytest.mark.few(2)
def test_offloading_changes_no_bit_and_leaves_tables(fused, granularity):
    settings, late = offloadkit.config(), ("out", "back")
    found, runtime, _ = offloadkit.train(
        settings, ("qkv_linear",), granularity=granularity, late=late
    )
    assert offloadkit.same(found, offloadkit.train(settings)[0])
    numbers = settings.hidden_size + (settings.num_heads + settings.num_kv_heads) * 4
    moved = [group.bytes for group in runtime.trace.groups]
    assert moved and set(moved) == {offloadkit.CAPACITIES[0].tokens * numbers * 4}, (
        "of the block's input, queries and keys"
    )


@pytest.mark.parametrize(
    "watch",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "forward",
    ],
)
@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_a_norm_that_is_watched_is_called(fused, name, watch):
    model, seen = DecoderModel(CONFIG, seed=1), []
    norm = getattr(model.layers["1"].self_attn, name)
    if watch == "forward":
        own = norm.forward
        norm.forward = lambda x: seen.append(1) or own(x)
    else:
        getattr(norm, watch)(lambda *_: seen.append(1))
    with Calls() as calls:
        trained(model, 1)
    assert len(seen) == 1
    assert calls.counted["turned_heads"] == 1, "the other layer's"


def test_other_layers_are_plain(fused):
    """Norms of two kinds of eps, and heads without norms."""
    model = DecoderModel(CONFIG, seed=1)
    model.layers["0"].self_attn.k_norm.eps = 1e-3
    assert calls_of(model) == 1
    for layer in model.layers.values():
        layer.self_attn.q_norm = torch.nn.Identity()
    assert not calls_of(model)
