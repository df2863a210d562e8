"""A small decoder whose layers are sharded over replicas, and what runs of it must agree on."""

import dataclasses
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from tracekit import differences
from trainkit import CPU, RandomPacks, tiny

from packgraph.parallel.mesh import Mesh, make_mesh
from packgraph.parallel.pieces import Pieces
from packgraph.train.build import build_chunks, make_executor, make_optimizer
from packgraph.train.config.sections import LoraConfig, ParallelConfig, TrainConfig
from packgraph.train.feed import MicrobatchAssignment, count_loss_tokens

LAYERS = 3  # an odd number: both buffers are used by layers that follow each other across a step


def settings(shard: str, *, graph: bool = False, **changes: Any) -> TrainConfig:
    """changes: of the sections, by name."""
    made = tiny(graph=graph, **changes.pop("run", {}))
    model = {"num_layers": LAYERS, "num_heads": 4, "num_kv_heads": 2, "dropout": 0.1}
    sections: dict[str, Any] = {
        "model": dataclasses.replace(made.model, **(model | changes.pop("model", {}))),
        "parallel": ParallelConfig(shard=shard, **changes.pop("parallel", {})),  # type: ignore[arg-type]
        "optimizer": dataclasses.replace(
            made.optimizer, **({"clip_norm": 0.5} | changes.pop("optimizer", {}))
        ),
        "graph": dataclasses.replace(made.graph, **changes.pop("graph_options", {})),
        "lora": LoraConfig(**changes.pop("lora", {})),
    }
    assert not changes, changes
    return dataclasses.replace(made, **sections)


def whole(tensor: Tensor) -> Tensor:
    """The values of all ranks together. Collective."""
    if not isinstance(tensor, Pieces):
        return tensor.detach().clone()
    found = torch.full(tensor.shape, float("nan"), dtype=tensor.dtype)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [(offsets, piece.clone()) for offsets, piece in tensor.pieces])
    for offsets, piece in (entry for part in every for entry in part):
        found[tuple(slice(o, o + s) for o, s in zip(offsets, piece.shape, strict=True))] = piece
    return found


def steps_of(packs: int, steps: int, uneven: bool) -> list[list[Any]]:
    """Packs of every step; uneven: their number changes, and is no multiple of the replicas."""
    source = RandomPacks()
    return [
        [next(source) for _ in range(packs + (step % 3 if uneven else 0))] for step in range(steps)
    ]


def train(
    mesh: Mesh,
    config: TrainConfig,
    *,
    packs: int,
    steps: int = 6,
    uneven: bool = False,
    freeze: str = "",
    alike: bool = False,
    late: bool = False,
) -> dict[str, Any]:
    """Train; facts of every step, and counts.

    mesh: of all replicas, where `config.parallel` says no other. freeze: parameters whose names
    begin so need no gradient. alike: share packs out as runs do whose replicas share layers,
    whatever this one is. late: replays exchange as late as they may.
    """
    if config.parallel.shard_ranks:
        mesh = make_mesh(config.parallel.layout(), CPU)
    torch.manual_seed(3 + mesh.rank)
    model = build_chunks(config, CPU, mesh)
    for name, parameter in model.named_parameters():
        if freeze and name.startswith(freeze):
            parameter.requires_grad_(False)
    optimizer = make_optimizer(model, config, mesh)
    executor = make_executor(model, config, CPU, mesh)
    sharing = MicrobatchAssignment.of(mesh, in_step=alike or config.parallel.shards)
    if alike:
        sharing = dataclasses.replace(sharing, together=sharing.replicas)
    if late:
        executor.copy_streams(0).queues.late.add("transfers")  # type: ignore[union-attr]
    trace = []
    for number, batches in enumerate(steps_of(packs, steps, uneven)):
        executor.before_step(number)
        tokens = count_loss_tokens(batches)
        loss, norm = executor.train_step(sharing.share(batches), tokens, optimizer, 0.02)
        tensors = model.stored(optimizer.flat.gathered()) | optimizer.state_tensors()
        facts = {"loss": loss.clone(), "norm": norm.clone()}
        trace.append(facts | {name: whole(value) for name, value in sorted(tensors.items())})
    totals = executor.totals()
    executor.close()
    return {"trace": trace, **totals}


def broken(
    mesh: Mesh,
    eager: TrainConfig,
    graph: TrainConfig,
    without: Mapping[str, tuple[Any, str, Any]],
    **options: Any,
) -> dict[str, list[str]]:
    """How graphs that exchange as late as they may differ from eager: right ones, by the name "",
    and each with a step replaced that keeps their numbers right.

    without: By what is missing, the owner of a function, its name, and what stands for it.
    options: Of `train`.
    """
    expected = train(mesh, eager, **options)
    found = {"": differences(expected, train(mesh, graph, late=True, **options))}
    for what, (owner, name, instead) in without.items():
        with mock.patch.object(owner, name, instead):
            found[what] = differences(expected, train(mesh, graph, late=True, **options))
    return found
