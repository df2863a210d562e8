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

from packed_families import CAPACITY, build, random_batches
from trainer_runs import documents, logged, model, options, tokenizer, trained

STEPS, ACCUMULATED = 4, 2
WEIGHTS = {"rtol": 1e-3, "atol": 1e-4}  # Adam divides gradients by their own size


@contextlib.contextmanager
def torchrun(mesh):
    """What torchrun tells a process about its place; the group of processes is there already."""
    facts = {"RANK": mesh.rank, "LOCAL_RANK": mesh.rank, "WORLD_SIZE": dist.get_world_size()}
    facts |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29511, "LOCAL_WORLD_SIZE": 2}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in facts.items()}):
        yield


def weights(made):
    return {name: tensor.detach().clone() for name, tensor in made.named_parameters()}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def assert_near(ours, theirs):
    """Within the rounding of sums over ranks."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], **WEIGHTS)


def own_loop(rank):
    """By `replicate`; rank None: one process with all microbatches. Each counts alike, as in
    Accelerate."""
    from packgraph.integrations.transformers import packed

    made = build("llama")
    called = packgraph.graph(packed(made), capacities=[CAPACITY], warmup=1)
    if rank is not None:
        called = packgraph.replicate(called)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    batches = random_batches(2 * STEPS * ACCUMULATED)
    share = ACCUMULATED * (2 if rank is None else 1)
    mine = batches if rank is None else batches[rank::2]
    for number, batch in enumerate(mine, 1):
        last = number % share == 0
        waits = rank is not None and not last
        with called.no_sync() if waits else contextlib.nullcontext():
            (called(batch) / share).backward()
        if last:
            torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return weights(made)


def with_accelerate(mesh):
    import accelerate

    from packgraph.integrations.accelerate import prepare
    from packgraph.integrations.transformers import packed

    found = []
    for eager in (False, True):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        with torchrun(mesh), tempfile.TemporaryDirectory() as folder:
            accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
            assert accelerator.num_processes == 2
            made = build("llama")
            module = prepare(accelerator, packed(made), capacities=[CAPACITY], warmup=1)
            optimizer, loader = accelerator.prepare(
                torch.optim.AdamW(made.parameters(), lr=0.01),
                torch.utils.data.DataLoader(
                    random_batches(2 * STEPS * ACCUMULATED), collate_fn=lambda rows: rows[0]
                ),
            )
            with packgraph.eager("comparison") if eager else contextlib.nullcontext():
                for batch in loader:
                    with accelerator.accumulate(module):
                        accelerator.backward(module(batch))
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(made.parameters(), 1.0)
                        optimizer.step()
                        optimizer.zero_grad()
            found.append(weights(made))
            accelerator.save_state(folder)
            assert bool(os.listdir(folder)) and accelerator.is_main_process == (mesh.rank == 0)
            with torch.no_grad():
                losses = accelerator.gather(module.eval()(random_batches(2)[mesh.rank])[None])
            assert len(losses) == 2 and losses[0] != losses[1]
    return *found, own_loop(mesh.rank), module.stats.fallbacks["comparison"]


def test_accelerate():
    alone = own_loop(None)
    for graphs, eager, own, compared in run_ranks(with_accelerate, 2):
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


def trainer_of(folder, library="transformers", capacities=None, **changes):
    """A trainer, and what it logs. Six steps; four microbatches of four examples in each."""
    from packgraph.integrations.transformers import PackedTrainer

    data, test = documents(120), documents(16, seed=1)
    changes = {"gradient_accumulation_steps": 4, "eval_strategy": "steps", **changes}
    changes |= {"eval_steps": 3, "save_strategy": "steps", "save_steps": 6}
    if library == "trl":
        import trl

        class Packed(PackedTrainer, trl.SFTTrainer):
            """The trainer of this test."""

        import datasets

        return Packed(
            model(),
            trl.SFTConfig(**options(folder, **changes, max_length=None, bf16=False)),
            train_dataset=datasets.Dataset.from_list(data),
            eval_dataset=datasets.Dataset.from_list(test),
            processing_class=tokenizer(),
        )
    import transformers

    class Packed(PackedTrainer, transformers.Trainer):
        """The trainer of this test."""

    arguments = transformers.TrainingArguments(**options(folder, **changes))
    more = {"capacities": capacities, "token_accuracy": True}
    return Packed(model(), arguments, train_dataset=data, eval_dataset=test, **more)


def facts(trainer):
    return {
        "weights": weights(trainer.model),
        "losses": logged(trainer, "loss"),
        "evaluated": logged(trainer, "eval_loss"),
        "accuracies": logged(trainer, "mean_token_accuracy"),
        "replayed": trainer.stats.replayed,
        "packs": trainer.packing.packs,
    }


def with_trainer(mesh, folder, library, changes):
    import accelerate
    import transformers

    found = []
    for eager in (False, True):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        with torchrun(mesh):
            where = f"{folder}/{'eager' if eager else 'graphs'}"
            trainer = trainer_of(where, library, **{"gradient_accumulation_steps": 2, **changes})
            assert trainer.accelerator.num_processes == 2
            found.append(facts(trained(trainer, eager=eager)))
            dist.barrier()
            kept = transformers.AutoModelForCausalLM.from_pretrained(f"{where}/checkpoint-6")
            assert_same(weights(kept), weights(trainer.model))
    return found


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
    results = run_ranks(with_trainer, 2, str(tmp_path), library, changes, seconds=120)
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
