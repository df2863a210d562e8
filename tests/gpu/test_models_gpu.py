"""The dense model on CUDA: no host sync in a step, close to float32, repeatable, clean of
padding."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from model_batches import gradients, random_documents

from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = DecoderConfig(
    vocab_size=500,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    initializer_range=0.05,
)


@contextmanager
def sync_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def batch_of(lengths: list[int]) -> PackedBatch:
    return PackedBatch.build(random_documents(lengths, 500, 1), Capacity(256, 8)).to("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_never_waits_for_the_device(dtype):
    model = DecoderModel(CONFIG, device="cuda", dtype=dtype)
    gradients(model, batch_of([9]))  # libraries set themselves up here
    batch, tokens = batch_of([60, 100, 30]), torch.tensor(187, device="cuda")
    with sync_is_an_error():
        model(batch, tokens).backward()
        model(batch).backward()


def test_parameters_are_those_of_the_cpu():
    ours, theirs = DecoderModel(CONFIG, seed=5, device="cuda"), DecoderModel(CONFIG, seed=5)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name].cpu(), tensor)


@pytest.mark.parametrize("mode", ["bfloat16", "autocast"])
def test_bfloat16_through_varlen_is_close_to_float32(mode):
    batch = batch_of([60, 100, 30])
    exact = gradients(DecoderModel(CONFIG, device="cuda"), batch)
    model = DecoderModel(
        CONFIG, device="cuda", dtype=torch.float32 if mode == "autocast" else torch.bfloat16
    )
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=mode == "autocast"):
        low = gradients(model, batch)
    for name in exact:  # a few hundred roundings of 2 ** -9 each, random in sign
        assert (low[name].float() - exact[name]).norm() <= 0.06 * exact[name].norm(), name


def test_nan_in_the_padding_token_reaches_nothing():
    model = DecoderModel(CONFIG, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        model.embed_tokens.weight[0] = float("nan")
    assert all(
        torch.isfinite(gradient).all() for gradient in gradients(model, batch_of([60, 3])).values()
    )


def test_repeats_bitwise_with_deterministic_algorithms(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    model, batch = (
        DecoderModel(CONFIG, device="cuda", dtype=torch.bfloat16),
        batch_of([60, 100, 30]),
    )
    torch.use_deterministic_algorithms(True)
    first, second = gradients(model, batch), gradients(model, batch)
    assert all(torch.equal(first[name], second[name]) for name in first)
