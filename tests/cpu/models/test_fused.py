"""Layers whose norms and rotation are operations of `ops/norm.py`: as near to plain layers as
rounding, in graphs bitwise as without, and plain where something else wants to see a norm."""

import random
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from packgraph.graphs.graphed import graph
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.models.layers.decoder import NORMED
from packgraph.ops import norm_configs
from packgraph.ops.norm_configs import Normed, Turned
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
IN_LAYERS = {"rms_norm": 2, "added_rms_norm": 2, "turned_rms_norm": 2}  # of two layers


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
    """Whatever the device, all norms and heads are made by the operations."""
    monkeypatch.setattr(norm_configs, "is_measured", lambda device: True)
    monkeypatch.setattr(norm_configs, "NORMED", ((0, Normed("rows")),))
    monkeypatch.setattr(norm_configs, "TURNED", ((0, Turned("heads")),))


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


def trained(model, count: int = 5) -> list[torch.Tensor]:
    """Losses of some batches, and the gradients that they add up to."""
    losses = []
    for batch in batches(count):
        loss = model(batch, torch.tensor(20))
        loss.backward()
        losses.append(loss.detach().clone())
    return losses


def gradients(model) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def forward_calls(model) -> Counter[str]:
    with Calls() as calls:
        model(batches(1)[0], torch.tensor(20))
    return calls.counted


def test_numbers_are_those_of_plain_layers_but_for_rounding(fused, monkeypatch):
    model, plain = DecoderModel(CONFIG, seed=1), DecoderModel(CONFIG, seed=1)
    assert IN_LAYERS.items() <= forward_calls(model).items()
    losses = trained(model)
    monkeypatch.undo()
    assert not IN_LAYERS.keys() & forward_calls(plain).keys()
    torch.testing.assert_close(losses, trained(plain), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("granularity", "scope"),
    [("layer", None), ("chunk", None), ("layer", ("attn",)), ("layer", ("mlp",))],
)
def test_graphs_have_the_bits_of_eager(fused, granularity, scope):
    eager, captured = DecoderModel(CONFIG, seed=1), DecoderModel(CONFIG, seed=1)
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
    assert all(map(torch.equal, gradients(captured), gradients(eager)))
    graphed.close()


def test_compiled_layers_hold_the_operations(fused):
    eager, captured = DecoderModel(CONFIG, seed=1), DecoderModel(CONFIG, seed=1)
    graphed = graph(
        captured, capacities=[CAPACITY], backend="recorder", strict=True, compile="aot_eager"
    )
    torch.testing.assert_close(trained(graphed), trained(eager), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(captured), gradients(eager), rtol=1e-4, atol=1e-5)
    assert graphed.stats.replayed >= 3 and not graphed.stats.recompiles
    graphed.close()


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputation_changes_no_bit(fused, kind):
    plain, again = DecoderModel(CONFIG, seed=1), DecoderModel(CONFIG, seed=1)
    for layer in again.layers.values():
        layer.recompute = {"attn": kind, "mlp": kind}
    assert trained(plain) == trained(again)
    assert all(map(torch.equal, gradients(plain), gradients(again)))


def test_a_norm_with_a_hook_is_called(fused):
    model, seen = DecoderModel(CONFIG, seed=1), []
    for norm in ("input_layernorm", "post_attention_layernorm"):
        getattr(model.layers["0"], norm).register_forward_hook(lambda *_: seen.append(1))
    model.layers["1"].self_attn.q_norm.register_forward_hook(lambda *_: seen.append(1))
    calls = forward_calls(model)
    assert len(seen) == 3
    assert [calls[name] for name in IN_LAYERS] == [1, 1, 1], "the other layer's"


@pytest.mark.parametrize("change", ["offload", "recompute"])
def test_a_sum_is_normed_where_its_norm_belongs(fused, change):
    """Blocks of offloading, and stages that are recomputed alone, keep their norm."""
    (layer, *_) = DecoderModel(CONFIG, seed=1).layers.values()
    hidden = torch.zeros(24, 16)
    assert layer._adds_before_norm(hidden, hidden)
    assert not layer._adds_before_norm(hidden, hidden.double())
    if change == "offload":
        mark = layer.offload
        layer.offload = lambda name, leave=(): mark(name, leave)
    else:
        layer.recompute = {"mlp": "full"}
    assert not layer._adds_before_norm(hidden, hidden)


def test_what_is_handed_on_does_not_outlive_its_layer(fused):
    model = DecoderModel(CONFIG, seed=1)
    state = model.begin(batches(1)[0])
    for stage in model.stages()[:-1]:
        state = stage.run(state)
        assert (NORMED in state) == (stage.name == "attn")
