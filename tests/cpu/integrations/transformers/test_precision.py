"""Live models in float8: over the same parameters, bit by bit through graphs, adapters apart."""

import copy

import pytest
import torch
from torch import nn

import packgraph

pytest.importorskip("transformers", reason="the integration is of this library")

from packed_families import CAPACITY, DOCUMENTS, batch_of, build, random_batches

from packgraph.integrations.transformers import packed
from packgraph.ops.float8.linear import Float8Linear

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def kinds(model):
    """The classes of linear layers in each layer."""
    return [
        {type(part) for part in layer.modules() if isinstance(part, nn.Linear)}
        for layer in model.model.layers
    ]


def trained(model, batches, graphs, **options):
    """Losses of steps, eagerly or by graphs."""
    call = packgraph.graph(model, capacities=[CAPACITY], warmup=1, strict=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = call(batch) if graphs else call.run_eagerly(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert not graphs or packgraph.control(call).stats.replayed >= 3
    return losses


def test_layers_between_the_ends_change_their_product_and_nothing_else():
    model = build("llama", **SIZES)
    parameters, plain = dict(model.named_parameters()), packed(copy.deepcopy(model))
    found = packed(model, precision="fp8")
    assert kinds(model) == [{nn.Linear}, {Float8Linear}, {nn.Linear}]
    assert type(model.lm_head) is nn.Linear
    assert all(parameters[name] is value for name, value in model.named_parameters())
    batch = batch_of(DOCUMENTS)
    exact, ours = plain(batch), found(batch)
    assert ours != exact
    assert abs(ours - exact) < 0.05 * exact
    model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=2, do_sample=False)
    assert torch.equal(packed(model)(batch), exact)
    assert kinds(model) == [{nn.Linear}] * 3


COMPILED = {"granularity": "chunk", "compile": "aot_eager"}


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("fp8", {}),
        ("fp8_weight_gradients", {}),
        ("fp8", COMPILED),
        pytest.param("fp8_weight_gradients", COMPILED, marks=pytest.mark.slow),
    ],
)
@pytest.mark.few(3)
def test_graphs_replay_it_bit_by_bit(options, precision):
    batches = random_batches(6)
    model = build("llama", **SIZES)
    runs = [
        trained(
            packed(copy.deepcopy(model), precision=precision, bf16_ends=0),
            batches,
            graphs,
            **options,
        )
        for graphs in (False, True)
    ]
    assert all(map(torch.equal, *runs))


def test_adapters_stay_as_they_are():
    peft = pytest.importorskip("peft", reason="the adapters are of this library")
    lora = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build("llama", **SIZES), lora)
    found = packed(model, precision="fp8", bf16_ends=0)
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear) and ".layers." in name:
            assert type(part) is (nn.Linear if "lora_" in name else Float8Linear), name
    found(batch_of(DOCUMENTS)).backward()
    with_gradient = {name for name, value in model.named_parameters() if value.grad is not None}
    assert with_gradient == {name for name, _ in model.named_parameters() if "lora_" in name}


def test_what_cannot_be_in_float8_is_refused_with_all_reasons():
    model = build("llama", hidden_size=32, intermediate_size=24, num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"layer 1: mlp.gate_proj: 32 x 24.*mlp.down_proj: 24 x"):
        packed(model, precision="fp8")
    assert kinds(model) == [{nn.Linear}] * 3
    with pytest.raises(
        ValueError, match="precision 'fp4' is unknown; known are bf16, fp8, fp8_weight"
    ):
        packed(model, precision="fp4")
    with pytest.raises(ValueError, match="bf16_ends 2 leaves none of 3 layers"):
        packed(model, precision="fp8", bf16_ends=2)
    with pytest.raises(ValueError, match="experts of transformers, and their routers"):
        packed(build("qwen3_moe", num_hidden_layers=3, hidden_size=32), precision="fp8")
    with pytest.raises(ValueError, match=r"it has no nn\.Linear"):
        packed(build("gpt2"), precision="fp8", bf16_ends=0)
