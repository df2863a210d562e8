"""Accelerate, Fabric, Trainer and TRL over two processes: each trains what one process with all
documents trains, and through graphs exactly what it trains eagerly."""

import contextlib
import os
import tempfile
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distkit import run_ranks

import packgraph

pytest.importorskip("transformers", reason="the models are of this library")
pytest.importorskip("accelerate", reason="the loops are of this library")

from loopkit import (
    ACCUMULATED,
    STEPS,
    assert_same,
    facts,
    own_loop,
    trainer_of,
    weights,
    with_accelerate,
    with_trainer,
)
from packed_families import CAPACITY, build, random_batches
from trainer_runs import trained

WEIGHTS = {"rtol": 1e-3, "atol": 1e-4}  # Adam divides gradients by their own size


@contextlib.contextmanager
def torchrun(mesh):
    """What torchrun tells a process about its place; the group of processes is there already."""
    facts = {"RANK": mesh.rank, "LOCAL_RANK": mesh.rank, "WORLD_SIZE": dist.get_world_size()}
    facts |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29511, "LOCAL_WORLD_SIZE": 2}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in facts.items()}):
        yield


def assert_near(ours, theirs):
    """Within the rounding of sums over ranks."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], **WEIGHTS)


def accelerated(mesh):
    with torchrun(mesh):
        return *with_accelerate(mesh.rank), own_loop(mesh.rank)


def test_accelerate():
    alone = own_loop(None)
    for graphs, eager, compared, own in run_ranks(accelerated, 2):
        assert compared == STEPS * ACCUMULATED
        assert_same(graphs, eager)
        assert_same(graphs, own)
        assert_near(graphs, alone)


def with_fabric(mesh):
    import lightning_fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import DDPStrategy

    from packgraph.integrations.lightning import ReplicatedStrategy
    from packgraph.integrations.transformers import packed

    class Replicated(ReplicatedStrategy, DDPStrategy):
        """The strategy of this test."""

    with torchrun(mesh):
        fabric = lightning_fabric.Fabric(
            accelerator="cpu",
            devices=2,
            strategy=Replicated(cluster_environment=TorchElasticEnvironment()),
        )
        fabric.launch()
        made = build("llama")
        graphed = packgraph.graph(packed(made), capacities=[CAPACITY], warmup=1)
        module, optimizer = fabric.setup(graphed, torch.optim.AdamW(made.parameters(), lr=0.01))
        batches = random_batches(2 * STEPS * ACCUMULATED)
        loader = torch.utils.data.DataLoader(batches, collate_fn=lambda rows: rows[0])
        for number, batch in enumerate(fabric.setup_dataloaders(loader), 1):
            last = number % ACCUMULATED == 0
            with fabric.no_backward_sync(module, enabled=not last):
                fabric.backward(module(batch) / ACCUMULATED)
            if last:
                fabric.clip_gradients(module, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as folder:
            folder = fabric.broadcast(folder)
            fabric.save(f"{folder}/state.ckpt", {"module": module})
            if mesh.rank == 0:
                saved = torch.load(f"{folder}/state.ckpt")["module"]
                assert_same(
                    {k.removeprefix("model."): v for k, v in saved.items()}, made.state_dict()
                )
            fabric.barrier()
        plain = fabric.setup(torch.nn.Linear(2, 2))
        with fabric.no_backward_sync(plain):
            plain(torch.ones(1, 2)).sum().backward()
    return weights(made), own_loop(mesh.rank), graphed.stats.replayed


def test_fabric():
    pytest.importorskip("lightning_fabric", reason="the loop is of this library")
    alone = own_loop(None)
    for graphs, own, replayed in run_ranks(with_fabric, 2):
        assert replayed == STEPS * ACCUMULATED - 1
        assert_same(graphs, own)
        assert_near(graphs, alone)


def by_trainer(mesh, *arguments):
    with torchrun(mesh):
        return with_trainer(*arguments)


@pytest.mark.parametrize(
    ("library", "changes"),
    [
        ("transformers", {}),
        ("transformers", {"bf16": True}),
        ("transformers", {"capacities": packgraph.Capacity(48, 4)}),
        ("trl", {}),
    ],
    ids=["trainer", "bf16", "rows", "trl"],
)
def test_trainers(library, changes, tmp_path, one_process):
    if library == "trl":
        pytest.importorskip("trl", reason="the loop is of this library")
    alone = facts(trained(trainer_of(tmp_path / "alone", library, **changes)))
    results = run_ranks(by_trainer, 2, str(tmp_path), library, changes, seconds=120)
    for graphs, eager in results:
        assert graphs["replayed"] >= graphs["packs"] - 2 >= 4 and eager["replayed"] == 0
        assert_same(graphs["weights"], eager["weights"])
        assert graphs["losses"] == eager["losses"] and len(graphs["losses"]) == 3
        assert graphs["losses"] == pytest.approx(alone["losses"], rel=2e-3)
        assert graphs["evaluated"] == pytest.approx(alone["evaluated"], rel=2e-3)
        assert graphs["accuracies"] == pytest.approx(alone["accuracies"], abs=0.01)
        if "bf16" not in changes:  # with eight bits gradients differ by more
            assert_near(graphs["weights"], alone["weights"])
    assert_same(results[0][0]["weights"], results[1][0]["weights"])
    assert results[0][0]["losses"] == results[1][0]["losses"]
    packs = [graphs["packs"] for graphs, _ in results]
    assert "capacities" not in changes or packs[0] != packs[1], "other rows on either rank"


def with_adapters(mesh):
    """LoRA by `replicate`, under autocast and with checkpoints; ranks take the first one's
    adapters, and a rank runs eagerly."""
    import peft

    from packgraph.integrations.transformers import packed

    found = []
    for eager in (False, mesh.rank == 1):
        made = build("llama")
        made.gradient_checkpointing_enable()
        torch.manual_seed(mesh.rank)
        wrapped = peft.get_peft_model(
            made, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], use_dora=True)
        )
        graphed = packgraph.graph(packed(wrapped), capacities=[CAPACITY], warmup=1)
        replicated = packgraph.replicate(graphed, reduce="sum")
        optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=0.01)
        with packgraph.eager("comparison") if eager else contextlib.nullcontext():
            for batch in random_batches(10)[mesh.rank :: 2]:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = replicated(batch, replicated.tokens_in_step([batch]))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append((weights(made), graphed.stats.replayed))
    return found


def test_adapters_in_an_own_loop():
    pytest.importorskip("peft", reason="adapters are of this library")
    (first, first_again), (second, second_again) = run_ranks(with_adapters, 2)
    assert [made[1] for made in (first, first_again, second, second_again)] == [4, 4, 4, 0]
    for other in (first_again, second, second_again):
        assert_same(first[0], other[0])
    frozen = weights(build("llama"))
    for name, value in first[0].items():
        if "lora" not in name:
            assert torch.equal(value, frozen[name.replace(".base_layer", "")])
