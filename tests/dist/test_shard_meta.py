"""`packgraph.shard` of modules without memory: no rank holds them, and they train alike."""

import packed_families
import pytest
import torch
import torch.distributed.checkpoint as dcp
from distkit import run_ranks
from memorykit import counting
from replicakit import CAPACITY, Tied, microbatches

import packgraph
from packgraph.integrations.transformers import load_deferred, packed

STEPS = 4


def own():
    torch.manual_seed(7)
    return Tied(layers=4)


def on_meta():
    with torch.device("meta"):
        made = Tied(layers=4)
    for name, buffer in own().named_buffers():
        owner, _, key = name.rpartition(".")
        setattr(made.get_submodule(owner), key, buffer)
    return made


def train(mesh, model, **options):
    shards = packgraph.shard(model, **options)
    graphed = packgraph.graph(model, capacities=[CAPACITY], warmup=1)
    optimizer = torch.optim.AdamW(shards.parameters(), lr=0.02)
    trace = [shards.full_state_dict()]
    for step in range(STEPS):
        batch = microbatches(step, mesh.rank)[0]
        graphed(batch, torch.tensor(batch.num_loss_tokens)).backward()
        shards.step(optimizer)
        trace.append(shards.full_state_dict())
    return trace


def both(mesh):
    stored = own().state_dict()
    fill = lambda name, whole: whole.copy_(stored[name])  # noqa: E731
    return train(mesh, own()), train(mesh, on_meta(), values=fill)


def test_a_module_on_the_meta_device_trains_as_one_that_was_whole():
    for whole, parts in run_ranks(both, 2):
        for one, two in zip(whole, parts, strict=True):
            assert one.keys() == two.keys()
            assert all(torch.equal(one[name], two[name]) for name in one)


def live(mesh, folder):
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = {f"model.{name}": value for name, value in whole.state_dict().items()}
    with counting() as held:
        model = packed(load_deferred(folder, dtype=torch.float32))
        made = held.peak
        shards = packgraph.shard(model)
        beside = held.peak - held.now
    found = shards.full_state_dict()
    count = sum(value.numel() * 4 for value in whole.parameters())
    return [name for name in found if not torch.equal(found[name], expected[name])], (
        len(found),
        made / count,
        beside / count,
    )


def test_a_model_of_transformers_is_read_in_parts(tmp_path):
    packed_families.build("llama", num_hidden_layers=6).save_pretrained(tmp_path)
    (different, (count, made, beside)), _ = run_ranks(live, 2, str(tmp_path))
    assert count > 20 and not different and made < 0.3 and beside < 0.1


def save(mesh, folder):
    shards = packgraph.shard(own())
    dcp.save(shards.sharded_state_dict(), checkpoint_id=folder)
    return shards.full_state_dict()


def load(mesh, folder):
    shards = packgraph.shard(on_meta(), values=lambda name, whole: whole.zero_())
    before = shards.full_state_dict()
    dcp.load(shards.sharded_state_dict(), checkpoint_id=folder)
    return before, shards.full_state_dict()


def test_a_distributed_checkpoint_is_loaded_into_parts_of_more_ranks(tmp_path):
    stored = run_ranks(save, 2, str(tmp_path))[0]
    before, found = run_ranks(load, 4, str(tmp_path))[0]
    assert stored.keys() == found.keys() and len(found) > 4
    assert all(torch.equal(stored[name], found[name]) for name in stored)
    assert not any(value.any() for name, value in before.items() if name != "scale")


def refused(mesh):
    with pytest.raises(ValueError, match="meta device") as error:
        packgraph.shard(on_meta())
    return str(error.value)


def test_what_has_no_values_is_refused():
    assert all("values=" in told for told in run_ranks(refused, 2))
