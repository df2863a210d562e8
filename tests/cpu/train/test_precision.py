"""Float8 in the trainer: what is refused, and what works together."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from trainkit import tiny
from verifykit import one_capacity, packs_of_one

from packgraph.models.recompute import EXCHANGES
from packgraph.ops.float8.linear import Float8Linear, float8_problems
from packgraph.packing.capacity import Capacity
from packgraph.train.build import build_model
from packgraph.train.config.sections import ParallelConfig, TrainConfig
from packgraph.train.memory import DecoderMemory
from packgraph.train.validate import validate
from packgraph.verification.matrix import (
    random_packs,
    tiny_config,
    tiny_experts_config,
    tiny_hybrid_config,
)
from packgraph.verification.verify import verify

CPU = torch.device("cpu")


def in_float8(config: TrainConfig, **model) -> TrainConfig:
    shape = {"precision": "fp8", "num_layers": 3, **model}
    return replace(config, model=replace(config.model, **shape))


def fp8_problems(config, world):
    found = validate(config, "cpu", world=world)
    return [
        problem.removeprefix("model.precision = fp8: ")
        for problem in found
        if "model.precision" in problem
    ]


def test_sizes_are_refused_all_at_once():
    config = in_float8(tiny_config("layer", 0.0, 4), intermediate_size=40)
    assert fp8_problems(config, 1) == [
        "mlp.gate_proj: 32 x 40 is not made of multiples of 16",
        "mlp.up_proj: 32 x 40 is not made of multiples of 16",
        "mlp.down_proj: 40 x 32 is not made of multiples of 16",
    ]


def test_sizes_on_tensor_parallel_ranks_are_refused_all_at_once():
    """Whole matrices are made of multiples of 16, and parts of them are not."""
    config = in_float8(tiny_config("layer", 0.0, 4), intermediate_size=48)
    assert not fp8_problems(config, 1)
    spread = replace(config, parallel=ParallelConfig(tp=2))
    assert fp8_problems(spread, 2) == [
        "self_attn.k_proj: on each of 2 ranks 32 x 8 is not made of multiples of 16",
        "self_attn.v_proj: on each of 2 ranks 32 x 8 is not made of multiples of 16",
        "mlp.gate_proj: on each of 2 ranks 32 x 24 is not made of multiples of 16",
        "mlp.up_proj: on each of 2 ranks 32 x 24 is not made of multiples of 16",
        "mlp.down_proj: on each of 2 ranks 24 x 32 is not made of multiples of 16",
    ]
    assert not fp8_problems(in_float8(spread, intermediate_size=64, head_dim=16), 2)


def test_what_tensor_parallel_ranks_cannot_do_in_float8_either_is_refused_all_at_once():
    config = in_float8(tiny_config("layer", 0.0, 4), head_dim=16)
    config = replace(
        config,
        parallel=ParallelConfig(tp=2),
        lora=replace(config.lora, rank=4),
        run=replace(config.run, recompute="full"),
    )
    found = validate(config, "cpu", world=2)
    for reason in (EXCHANGES, "lora.rank with parallel.tp = 2"):
        assert any(reason in problem for problem in found)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        (tiny_experts_config, "kv_a_proj_with_mqa: 32 x 20"),
        (tiny_hybrid_config, "mamba.in_proj: 32 x "),
    ],
)
def test_sizes_of_every_kind_of_layer_count(kind, layer):
    config = in_float8(kind("layer", 0.0, 4), num_layers=6)
    assert any(layer in problem for problem in validate(config, "cpu"))


@pytest.mark.parametrize(
    ("capability", "experts", "reasons"),
    [
        ((8, 0), False, ["float8 needs compute capability 8.9 or more, A100 has 8.0"]),
        ((9, 0), False, []),
        ((9, 0), True, []),
        ((10, 0), False, []),
        ((10, 0), True, ["experts in float8 need exactly compute capability 9.0, A100 has 10.0"]),
    ],
)
def test_devices_without_float8_are_refused(capability, experts, reasons):
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
        mock.patch("torch.cuda.get_device_name", return_value="A100"),
        mock.patch("torch.cuda.is_available", return_value=True),
    ):
        device = torch.device("cuda", 0)
        assert float8_problems(device, torch.bfloat16, experts) == reasons
        assert float8_problems(device, torch.float32, experts)[len(reasons) :] == [
            "on a GPU float8 goes with bfloat16, not torch.float32"
        ]
        if not experts:
            found = validate(in_float8(tiny_config("layer", 0.0, 4)), "cuda")
            assert all(any(reason in problem for problem in found) for reason in reasons)


def test_bf16_is_asked_nothing():
    assert not [problem for problem in validate(tiny(), "cpu") if "precision" in problem]


@pytest.mark.parametrize("recompute", [pytest.param("selective", marks=pytest.mark.slow), "full"])
def test_recomputation_has_the_same_bits(recompute):
    config = one_capacity(in_float8(tiny_config("layer", 0.1, 4)))
    plain, again = (
        verify("float8", replace(config, run=replace(config.run, recompute=how)), packs, CPU)
        for how, packs in (("none", packs_of_one()), (recompute, packs_of_one()))
    )
    assert plain.good and again.good and again.shows and not again.differences


def test_offloading_has_the_same_bits():
    config = one_capacity(in_float8(tiny_config("layer", 0.0, 5)))
    offload = replace(config.offload, modules=("qkv_linear", "mlp_act"), min_bytes=1)
    report = verify("float8", replace(config, offload=offload), packs_of_one(), CPU)
    assert report.good and report.shows and not report.differences


def test_plans_of_memory_count_codes():
    plain = replace(tiny_config("layer", 0.0, 4).model, num_layers=3)
    found = DecoderMemory(replace(plain, precision="fp8"), 3, 4)(Capacity(128, 4))
    codes = 128 * (64 + 4) + 64 * (32 + 4)
    assert found - DecoderMemory(plain, 3, 4)(Capacity(128, 4)) == codes
    found = DecoderMemory(replace(plain, precision="fp8_weight_gradients"), 3, 4)(Capacity(128, 4))
    columns = (64 + 32) * (128 + 4)
    assert found - DecoderMemory(plain, 3, 4)(Capacity(128, 4)) == columns


def test_adapters_train_over_a_base_in_float8():
    pytest.importorskip("peft", reason="the adapters are of this library")
    config = in_float8(tiny_config("layer", 0.0, 5), bf16_ends=0)
    lora = replace(config.lora, rank=4)
    report = verify("float8", replace(config, lora=lora), random_packs(seed=1), CPU)
    assert report.good and report.shows and not report.differences
    model = build_model(replace(config, lora=lora), CPU)
    kinds = {
        name.rpartition(".")[2] if "lora_" not in name else "lora": type(part)
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and "layers" in name
    }
    assert kinds == {"base_layer": Float8Linear, "lora": nn.Linear}
