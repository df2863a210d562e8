"""Loops of Accelerate, Trainer and TRL over several processes, by graphs and eagerly: over gloo in
tests, over NCCL in `tests/gpu/loop_ranks.py`."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import transformers
from packed_families import CAPACITY, build, random_batches
from trainer_runs import documents, logged, model, options, tokenizer, trained

import packgraph
from packgraph.integrations.accelerate import prepare
from packgraph.integrations.transformers import PackedTrainer, packed

STEPS, ACCUMULATED = 4, 2
CPU = torch.device("cpu")
Weights = dict[str, torch.Tensor]


def weights(made: torch.nn.Module) -> Weights:
    """Copies of all parameters."""
    return {name: tensor.detach().clone() for name, tensor in made.named_parameters()}


def assert_same(ours: Weights, theirs: Weights) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def own_loop(rank: int | None, world: int = 2, device: torch.device = CPU) -> Weights:
    """By `replicate`; rank None: one process with all microbatches. Each counts alike, as in
    Accelerate."""
    made = build("llama").to(device)
    called: Any = packgraph.graph(packed(made), capacities=[CAPACITY], warmup=1)
    if rank is not None:
        called = packgraph.replicate(called)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    batches = random_batches(world * STEPS * ACCUMULATED)
    share = ACCUMULATED * (world if rank is None else 1)
    mine = batches if rank is None else batches[rank::world]
    for number, batch in enumerate(mine, 1):
        last = number % share == 0
        waits = rank is not None and not last
        with called.no_sync() if waits else contextlib.nullcontext():
            (called(batch.to(device)) / share).backward()
        if last:
            torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return weights(made)


def with_accelerate(rank: int, device: torch.device = CPU) -> tuple[Weights, Weights, int]:
    """Weights that Accelerate trains by graphs and eagerly, and how often the second fell back."""
    world, found = dist.get_world_size(), []
    for eager in (False, True):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        with tempfile.TemporaryDirectory() as folder:
            accelerator = accelerate.Accelerator(
                cpu=device.type == "cpu", gradient_accumulation_steps=ACCUMULATED
            )
            assert accelerator.num_processes == world
            made = build("llama").to(device)
            module = prepare(accelerator, packed(made), capacities=[CAPACITY], warmup=1)
            optimizer, loader = accelerator.prepare(
                torch.optim.AdamW(made.parameters(), lr=0.01),
                torch.utils.data.DataLoader(
                    random_batches(world * STEPS * ACCUMULATED), collate_fn=lambda rows: rows[0]
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
            assert bool(os.listdir(folder)) and accelerator.is_main_process == (rank == 0)
            with torch.no_grad():
                one = module.eval()(random_batches(world)[rank].to(device))
                losses = accelerator.gather(one[None])
            assert len(losses) == world and losses[0] != losses[1]
    return *found, module.stats.fallbacks["comparison"]


def trainer_of(
    folder: Path, library: str = "transformers", capacities: Any = None, **changes: Any
) -> Any:
    """A trainer, and what it logs. Six steps; four microbatches of four examples in each."""
    data, test = documents(120), documents(16, seed=1)
    changes = {"gradient_accumulation_steps": 4, "eval_strategy": "steps", **changes}
    changes |= {"eval_steps": 3, "save_strategy": "steps", "save_steps": 6}
    if library == "trl":
        import datasets
        import trl

        class PackedSFT(PackedTrainer, trl.SFTTrainer):
            """The trainer of this test."""

        return PackedSFT(
            model(),
            trl.SFTConfig(**options(folder, **changes, max_length=None, bf16=False)),
            train_dataset=datasets.Dataset.from_list(data),
            eval_dataset=datasets.Dataset.from_list(test),
            processing_class=tokenizer(),
        )

    class Packed(PackedTrainer, transformers.Trainer):
        """The trainer of this test."""

    arguments = transformers.TrainingArguments(**options(folder, **changes))
    more = {"capacities": capacities, "token_accuracy": True}
    return Packed(model(), arguments, train_dataset=data, eval_dataset=test, **more)


def facts(trainer: Any) -> dict[str, Any]:
    """What a run has trained and said."""
    return {
        "weights": weights(trainer.model),
        "losses": logged(trainer, "loss"),
        "evaluated": logged(trainer, "eval_loss"),
        "accuracies": logged(trainer, "mean_token_accuracy"),
        "replayed": trainer.stats.replayed,
        "packs": trainer.packing.packs,
    }


def with_trainer(folder: str, library: str, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Facts of a run by graphs and of one that is eager."""
    found = []
    for eager in (False, True):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        where = Path(folder, "eager" if eager else "graphs")
        trainer = trainer_of(where, library, **{"gradient_accumulation_steps": 2, **changes})
        assert trainer.accelerator.num_processes == dist.get_world_size()
        found.append(facts(trained(trainer, eager=eager)))
        dist.barrier()
        kept = transformers.AutoModelForCausalLM.from_pretrained(where / "checkpoint-6")
        assert_same(weights(kept), weights(trainer.model.cpu()))
    return found
