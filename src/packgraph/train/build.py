"""Builds this rank's chunks of the model, their optimizer and executor.

Stages are dealt out in turn: chunk c of rank r is stage c * ranks + r. The invariant: weights
depend on their names and `run.seed` (or `run.init_from`) alone, neither on the device nor on the
layout. A run that begins from weights takes their shape; an option that contradicts it is refused
by name. Layers of multi-token prediction alone may be more or fewer: they stay fresh, or are left
out, and that is told.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from packgraph.integrations.transformers.model import PackedModel, PackedPart
from packgraph.integrations.transformers.tensor import prove as prove_split_live
from packgraph.models.decoder import DecoderModel, ModelChunks, stage_layers
from packgraph.models.hf import (
    CONFIG,
    WeightsError,
    fill_pretrained,
    pretrained_config,
)
from packgraph.models.hf_config import shape_values
from packgraph.moe.dispatch.dispatcher import own_experts
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.ranks import PATIENCE, replica_consensus, stage_consensus
from packgraph.parallel.sharded_layers import ShardedLayers, layers_of
from packgraph.train.autotune import Autotune
from packgraph.train.config.reading import ConfigLayer
from packgraph.train.config.request import RunRequest
from packgraph.train.config.sections import TrainConfig
from packgraph.train.features.context import rank_tokens, stage_tokens, with_context_buckets
from packgraph.train.features.live import build_live, live_layer
from packgraph.train.features.lora import add_adapters, refuse_untrained_stages
from packgraph.train.features.moe import ExpertBalance, Overflow, has_shared_experts, make_stash
from packgraph.train.features.offload import make_offloading
from packgraph.train.features.preference import PreferenceModel
from packgraph.train.features.recompute import AUTO, recompute_at_first, set_recompute
from packgraph.train.feed import MicrobatchAssignment
from packgraph.train.memory import resident_on
from packgraph.train.optimizer import Optimizer
from packgraph.train.parallelisms import PARALLELISMS
from packgraph.train.strategies import (
    Executor,
    MicrobatchExecutor,
    PipelineExecutor,
    StepExecutor,
)


def build_model(
    config: TrainConfig, device: torch.device, *, deferred: bool = False
) -> DecoderModel | PackedModel:
    """The whole model of a run, in training mode, with its adapters. deferred: as in
    `parallel/deferred.py`."""
    model: DecoderModel | PackedModel
    if config.hf.path is not None:
        model = build_live(config, device, _reads_weights(config), deferred)
    else:
        (model,) = _build(config, device, [0], 1, deferred=deferred)
    if config.lora.enabled:
        add_adapters(model, config)
    return model.train()


def build_chunks(config: TrainConfig, device: torch.device, mesh: Mesh) -> ModelChunks:
    """This rank's chunks of the model of a run, in training mode, spread over the ranks of
    `mesh`."""
    parts = config.parallel.known_shard == "parameters" and mesh.group("copies") is not None
    if config.lora.enabled and mesh.size("pp") * mesh.size("tp") == 1:
        return _spread([build_model(config, device)], config, mesh)
    ranks, chunks = mesh.size("pp"), config.parallel.chunks
    stages = [chunk * ranks + mesh.place["pp"] for chunk in range(chunks)]
    if config.hf.path is not None:
        return _live_chunks(config, device, mesh, stages, deferred=parts)
    shared = config.model.experts.enabled and mesh.size("ep") > 1
    mine = own_experts(config.model.experts.count, mesh.group("ep")) if shared else None
    models = _build(config, device, stages, ranks * chunks, mine, deferred=parts)
    return _spread(models, config, mesh)


def _spread(models: Sequence[nn.Module], config: TrainConfig, mesh: Mesh) -> ModelChunks:
    for parallelism in PARALLELISMS:
        parallelism.apply(models, mesh, config)
    set_recompute(models, recompute_at_first(config))
    return ModelChunks(models, adapters_only=config.lora.enabled)


def _live_chunks(
    config: TrainConfig, device: torch.device, mesh: Mesh, stages: Sequence[int], deferred: bool
) -> ModelChunks:
    """The chunks of a model of transformers. Each is made of the whole: without memory where its
    weights can be read one by one, and with adapters on the host. Raises ConfigError."""
    parts, adapters = mesh.size("pp") * config.parallel.chunks, config.lora.enabled
    is_cut = parts * mesh.size("tp") * mesh.size("ep") > 1
    cut, models = stage_layers(config.model, parts, stage_tokens(config)), list[nn.Module]()
    here = torch.device("cpu") if adapters else device
    for stage in stages:
        later = (deferred or is_cut) and not adapters
        model = build_live(config, here, _reads_weights(config), later)
        if adapters:
            add_adapters(model, config)
            refuse_untrained_stages(model, cut)
        if mesh.size("tp") > 1 and not models:
            prove_split_live(model, mesh["tp"], sequence=config.parallel.sequence)
        models.append((PackedPart(model, cut[stage]) if parts > 1 else model).train())
        if adapters:
            models[-1].to(device)
    return _spread(models, config, mesh)


def make_optimizer(
    model: ModelChunks, config: TrainConfig, mesh: Mesh, *, sums_apart: bool = False
) -> Optimizer:
    """The optimizer of these chunks; its update moves the routers' biases, too. Make it before the
    executor. sums_apart: as in `FlatParameters`."""
    optimizer = Optimizer(
        model.named_parameters(),
        replace(config.optimizer, gradients=config.gradient_dtype(mesh.world)),
        mesh,
        {name: number for chunk in model.chunks for name, number in layers_of(chunk).items()},
        config.parallel.known_shard,
        resident=resident_on(model, config, mesh),
        sums_apart=sums_apart,
    )
    if config.parallel.shards and mesh.group("copies") is not None:
        for chunk in model.chunks:
            ShardedLayers(optimizer.flat, set(layers_of(chunk).values())).put_into(chunk)
    stash = None
    if config.model.experts.enabled:
        optimizer.balance = ExpertBalance(model.chunks, mesh.group("copies"))
        stash = make_stash(model, config, mesh, optimizer.learning_rate.device)
    # On all ranks or on none, whatever layers a rank has: they agree about every update together.
    budgets = config.parallel.dispatcher_name in ("padded", "symmetric")
    if has_shared_experts(config) and (budgets or config.parallel.expert_stash):
        optimizer.overflow = Overflow(
            model.chunks, mesh.everyone(), optimizer.learning_rate.device, stash
        )
    return optimizer


def make_executor(
    model: ModelChunks, config: TrainConfig, device: torch.device, mesh: Mesh
) -> Executor:
    """Makes the executor of `model`'s steps: a loop, one graph of a whole step and its update, or
    this rank's part of a pipeline (of one rank for graphs of whole steps without the update)."""
    config = with_context_buckets(config)
    graph, staged = config.graph, mesh.size("pp") > 1
    executor: Executor
    whole = model.chunks[0]
    if config.loss.is_of_pairs:
        assert isinstance(whole, DecoderModel | PackedModel)
        whole = PreferenceModel(whole, config.loss)
    if graph.enabled and graph.optimizer and not staged:
        executor = StepExecutor(whole, graph, device)
    elif not staged and graph.granularity != "step":
        executor = MicrobatchExecutor(whole, graph, device)
    else:
        executor = PipelineExecutor(model.chunks, config, device, mesh)
    executor.everyone = mesh.everyone()
    executor.chooses_recompute = config.run.recompute == AUTO
    # A pipeline evaluates eagerly.
    executor.rows_differ = config.parallel.dynamic_cp and not executor.whole_steps
    # A partner of a failed capture has begun its own at the same time; only compiling may take it
    # much longer.
    patience = max(PATIENCE, config.run.timeout) if graph.compile else config.run.timeout
    executor.agree_by(
        stage_consensus(mesh, patience, sharded=config.parallel.shards),
        replica_consensus(mesh, patience, updates=graph.optimizer),
    )
    executor.prepare = make_offloading(model, config, executor.copy_streams, device, mesh)
    if graph.enabled and graph.is_autotuned(device.type):
        sharing = MicrobatchAssignment.of(
            mesh, rank_tokens(config), in_step=config.replicas_in_step
        )
        executor.autotune = Autotune(
            executor, mesh, device, whole_steps=executor.whole_steps, sharing=sharing
        )
    return executor


def _build(
    config: TrainConfig,
    device: torch.device,
    stages: Sequence[int],
    of: int,
    experts: range | None = None,
    deferred: bool = False,
) -> list[DecoderModel]:
    """Made where they will be, in the dtype of the run, with these experts; values come from the
    host matrix by matrix, so that they do not depend on the device and the host needs no room for a
    model. deferred: matrices get memory and values with the optimizer, which knows the parts."""
    models = [
        DecoderModel(
            config.model,
            seed=config.run.seed,
            device=device,
            dtype=getattr(torch, config.run.dtype),
            stage=stage,
            stages=of,
            tokens=stage_tokens(config),
            experts=experts,
            deferred=deferred,
        )
        for stage in stages
    ]
    if config.run.init_from is not None and _reads_weights(config):
        load_weights(models, config.run.init_from)
    return [model.train() for model in models]


def _reads_weights(config: TrainConfig) -> bool:
    """Tells whether a run starts from weights, also as the reference of its loss; else a checkpoint
    has them all."""
    return not config.run.resume or config.lora.enabled or config.loss.has_reference


def with_shape(asked: RunRequest, device_type: str = "cpu") -> tuple[TrainConfig, list[str]]:
    """The configuration of a run with the shape of the model whose files it begins from, and notes
    on defaults that gave way. Raises ConfigError and WeightsError."""
    config, notes = asked.read(device_type=device_type)
    layers, init_from = list[ConfigLayer](), config.run.init_from
    if init_from is not None and not (
        config.run.resume and not Path(init_from).expanduser().exists()
    ):
        layers.insert(0, shape_layer(init_from))
        config, notes = asked.read(*layers, device_type=device_type)
    if config.hf.path is not None:
        layers.insert(0, live_layer(config.hf.path))
        config, notes = asked.read(*layers, device_type=device_type)
    return config, notes


def shape_layer(path: str) -> ConfigLayer:
    """The shape of the model in the folder `path` as values of a configuration, and its tokenizer
    if there is one. Raises WeightsError."""
    file = Path(path).expanduser() / CONFIG
    with _one_error():
        found, _ = pretrained_config(file.parent)
    values = {f"model.{field}": value for field, value in shape_values(found).items()}
    if os.path.lexists(file.with_name("tokenizer.json")):  # a broken link, too
        values["data.tokenizer"] = path
    return ConfigLayer(str(file), values)


def load_weights(models: Sequence[DecoderModel], path: str) -> None:
    """Copy the weights in the folder `path` into `models`: a whole decoder, or pipeline stages with
    their parts of it.

    Raises WeightsError naming every value in which the shapes differ, and what `fill_pretrained`
    refuses.
    """
    folder = Path(path).expanduser()
    with _one_error():
        found, _ = pretrained_config(folder)
        here = shape_values(models[0].config)
        if differing := [
            f"model.{name} is {value!r} there, {here[name]!r} here"
            for name, value in shape_values(found).items()
            if value != here[name] and name != "mtp_layers"
        ]:
            raise WeightsError(
                f"{path}: these weights are of another shape than the run: {'; '.join(differing)}"
            )
        fill_pretrained(models, folder)


@contextmanager
def _one_error() -> Iterator[None]:
    """Files that are missing are told as WeightsError too."""
    try:
        yield
    except FileNotFoundError as error:
        raise WeightsError(str(error)) from error
