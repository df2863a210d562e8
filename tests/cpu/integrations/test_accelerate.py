"""Loops of Accelerate: what `prepare` makes of a module, through graphs and without."""

import contextlib
import types

import pytest
import torch

import packgraph

pytest.importorskip("transformers", reason="the models are of this library")
pytest.importorskip("accelerate", reason="the integration is of this library")

import accelerate
from packed_families import CAPACITY, build, random_batches

from packgraph.integrations.accelerate import prepare
from packgraph.integrations.transformers import packed

pytestmark = pytest.mark.usefixtures("one_process")


def loop(precision="no", eager=False, accumulated=2):
    """Losses of a loop, its module, and the model."""
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulated
    )
    model = build("llama")
    module = prepare(accelerator, packed(model), capacities=[CAPACITY], warmup=1, strict=True)
    optimizer, batches = accelerator.prepare(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        torch.utils.data.DataLoader(random_batches(6), batch_size=None),
    )
    losses = []
    with packgraph.eager("comparison") if eager else contextlib.nullcontext():
        for batch in batches:
            with accelerator.accumulate(module):
                loss = module(batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    return losses, module, model, accelerator


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.few(2)
def test_graphs_change_no_bit(precision):
    losses, module, model, _ = loop(precision)
    assert module.stats.replayed == 5 and dict(module.stats.fallbacks) == {"warm-up": 1}
    expected, _, twin, _ = loop(precision, eager=True)
    assert all(map(torch.equal, losses, expected))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert losses[0].dtype == torch.float32


@pytest.mark.slow
def test_precision_and_accumulation_are_the_accelerators():
    losses, _, model, accelerator = loop()
    accelerator.free_memory()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    rounded = loop("bf16")[0]
    assert float(rounded[0]) != float(losses[0])
    assert float(rounded[0]) == pytest.approx(float(losses[0]), rel=0.02)  # eight bits
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    other = loop(accumulated=1)[2]
    assert not all(map(torch.equal, model.parameters(), other.parameters()))


def test_states_are_saved_and_loaded_by_the_names_of_the_model(tmp_path):
    _, module, model, accelerator = loop()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accelerator.save_state(tmp_path)
    replayed = module.stats.replayed
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[name])
    assert {name.removeprefix("model.") for name in module.state_dict()} == saved.keys()
    module(random_batches(1)[0]).backward()
    assert module.stats.replayed == replayed + 1, "in place, so graphs hold"


def test_what_a_plain_prepare_makes_runs_eagerly_and_says_so():
    """The control: without a module around it the stages would not be in the accelerator's
    precision."""
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    module = packgraph.graph(packed(build("llama")), capacities=[CAPACITY], warmup=1)
    module = accelerator.prepare(module)
    first, second, third = random_batches(3)
    module(first).backward()  # as many as are warm-up are quiet
    with pytest.warns(packgraph.PackgraphWarning, match="forward was replaced"):
        module(second).backward()
    module(third).backward()
    assert packgraph.control(module).stats.replayed == 0


def test_what_cannot_be_prepared_is_refused():
    model = packed(build("llama"))
    sharding = types.SimpleNamespace(distributed_type="FSDP", num_processes=2)
    with pytest.raises(ValueError, match="whose processes have whole parameters, not FSDP"):
        prepare(sharding, model)
    compiling = accelerate.Accelerator(cpu=True, dynamo_backend="inductor")
    with pytest.raises(ValueError, match="pass compile=True"):
        prepare(compiling, model)
