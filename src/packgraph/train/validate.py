"""Checks the sections of a run's configuration against each other, all reasons at once."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn

from packgraph.graphs.stages import scope_errors
from packgraph.models.branches import routed_width
from packgraph.models.config import DecoderConfig
from packgraph.models.decoder import named_stages
from packgraph.models.layers.decoder import DecoderLayer
from packgraph.ops.float8.linear import float8_layers, float8_problems, is_float8, size_problem
from packgraph.ops.names import NATIVE
from packgraph.parallel.tensor import parts_of_layer
from packgraph.train.config.contradictions import contradictions, optimizer_problems
from packgraph.train.config.reading import true_of
from packgraph.train.config.sections import TrainConfig
from packgraph.train.features.live import live_problems, live_shape
from packgraph.train.features.lora import lora_problems
from packgraph.train.features.moe import exchange_problems
from packgraph.train.features.offload import offload_problems
from packgraph.train.features.recompute import problems_of_recompute
from packgraph.train.parallelisms import PARALLELISMS


def validate(
    config: TrainConfig, device_type: str, vocabulary: int | None = None, world: int = 1
) -> list[str]:
    """All reasons why the sections of `config` do not fit together on a device of `device_type`
    (`cpu` or `cuda`).

    vocabulary: number of token ids of the tokenizer, when it is known already. world: processes of
    the run.
    """
    graph, run, model = config.graph, config.run, config.model
    size, attention = model.vocab_size, model.attention_backend
    regions = "chunk" if graph.granularity == "step" else graph.granularity
    stages = named_stages(model) if config.hf.path is None else live_shape(config.hf.path).stages
    found = contradictions(config) + true_of(
        {
            "graph.backend = cuda needs a CUDA device; use auto, or recorder on the "
            "CPU": graph.enabled and graph.backend == "cuda" and device_type != "cuda",
            "graph.backend = recorder runs on the CPU only; use auto, or run.device = "
            "cpu": graph.enabled and graph.backend == "recorder" and device_type == "cuda",
            f"graph.memory_budget = {graph.memory_budget} needs a CUDA device; write it in GiB "
            "or MiB": "%" in (graph.memory_budget or "") and device_type != "cuda",
            **{
                f"graph.scope: {problem}": graph.enabled
                for problem in scope_errors(stages, graph.scope, regions)
            },
            f"model.attention_backend = {attention} needs a CUDA device and run.dtype = bfloat16; "
            "use auto, or sdpa": attention in ("flash", "varlen")
            and (device_type, run.dtype) != ("cuda", "bfloat16"),
            f"model.vocab_size = {size} is smaller than the tokenizer's {vocabulary} ids; raise "
            "it": vocabulary is not None and size < vocabulary,
        }
    )
    found += problems_of_recompute(config) + problems_of_precision(config, device_type)
    found += live_problems(config) + lora_problems(config)
    found += [] if config.hf.path is not None else offload_problems(config)
    found += [
        f"run.tracker names {name}, which is not installed: pip install {name}, or leave it out"
        for name in config.run.tracker  # tensorboard is there by default: nobody asked for it
        if name != "tensorboard" and find_spec(name) is None
    ]
    found += optimizer_problems(config, world)
    for parallelism in PARALLELISMS:
        found += parallelism.problems(config, world)
    return found + exchange_problems(config, device_type)


def problems_of_precision(config: TrainConfig, device_type: str) -> list[str]:
    """All reasons why the linear layers of a run cannot multiply as `model.precision` says."""
    model = config.model
    if not is_float8(model.precision):
        return []
    device = torch.device("cpu")
    if device_type == "cuda" and torch.cuda.is_available():
        device = torch.device("cuda" if config.run.device == "auto" else config.run.device)
    dtype = getattr(torch, config.run.dtype)
    found = float8_problems(device, dtype, model.experts.enabled, model.precision)
    if config.hf.path is not None:
        found += live_shape(config.hf.path).in_float8(model.precision, model.bf16_ends)
    else:
        found += _problems_of_sizes(model, config.parallel.tp)
    return [f"model.precision = {model.precision}: {problem}" for problem in found]


def _problems_of_sizes(model: DecoderConfig, ranks: int) -> list[str]:
    """Matrices of the layers in float8 whose sizes it does not take, once for all like layers.
    ranks: which each matrix is split over."""
    native, found = replace(model, precision=NATIVE), dict[str, None]()
    inside = [n for n in range(model.num_layers) if is_float8(model.of_layer(n).precision)]
    for number in {model.branches(n): n for n in inside}.values():
        with torch.device("meta"):
            layer: nn.Module = DecoderLayer(native, number)
        parts = partial(parts_of_layer, ranks=ranks)
        found |= dict.fromkeys(float8_layers(layer, model.precision, parts)[0])
    experts = model.experts
    if experts.enabled:
        problem = size_problem(routed_width(model), experts.intermediate_size, model.precision)
        found |= {} if problem is None else {f"experts: {problem}": None}
    return [*found]
