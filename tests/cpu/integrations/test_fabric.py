"""Loops of Lightning Fabric: a graphed module is set up like any other."""

import contextlib
import copy
import pickle

import pytest
import torch

import packgraph

pytest.importorskip("transformers", reason="the models are of this library")
pytest.importorskip("lightning_fabric", reason="the loops are of this library")

import lightning_fabric as fabric_library
from lightning_utilities.core.apply_func import apply_to_collection
from packed_families import CAPACITY, batch_of, build, random_batches

from packgraph.integrations.transformers import packed


def loop(precision="32-true", eager=False):
    """Losses of a loop, its fabric, module and model."""
    fabric = fabric_library.Fabric(accelerator="cpu", devices=1, precision=precision)
    model = build("llama")
    graphed = packgraph.graph(packed(model), capacities=[CAPACITY], warmup=1, strict=True)
    module, optimizer = fabric.setup(graphed, torch.optim.AdamW(model.parameters(), lr=0.01))
    batches = torch.utils.data.DataLoader(random_batches(6), batch_size=None)
    losses = []
    with packgraph.eager("comparison") if eager else contextlib.nullcontext():
        for batch in fabric.setup_dataloaders(batches):
            loss = module(batch)
            fabric.backward(loss)
            fabric.clip_gradients(module, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return losses, fabric, module, model, packgraph.control(graphed).stats


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.few(3)
def test_graphs_change_no_bit(precision):
    losses, _, _, model, stats = loop(precision)
    assert stats.replayed == 5 and dict(stats.fallbacks) == {"warm-up": 1}
    expected, _, _, twin, _ = loop(precision, eager=True)
    assert all(map(torch.equal, losses, expected))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert next(model.parameters()).dtype == (
        torch.bfloat16 if precision == "bf16-true" else torch.float32
    )


def test_states_are_saved_and_loaded(tmp_path):
    _, fabric, module, model, stats = loop()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fabric.save(tmp_path / "state.ckpt", {"module": module})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fabric.load(tmp_path / "state.ckpt", {"module": module})
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    module(random_batches(1)[0]).backward()
    assert stats.replayed == 6, "in place, so graphs hold"


def test_packed_batches_travel_whole():
    batch = batch_of()
    batches = {"pair": (batch, [torch.ones(2)])}
    found = apply_to_collection(batches, torch.Tensor, lambda tensor: tensor + 1)
    assert found["pair"][0] is batch and found["pair"][1][0].tolist() == [2, 2]
    for again in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert torch.equal(again.data, batch.data) and again.capacity == batch.capacity
        assert again.lengths == batch.lengths
    for change in (lambda: setattr(batch, "data", None), lambda: delattr(batch, "data")):
        with pytest.raises(AttributeError, match="a PackedBatch cannot be changed"):
            change()
