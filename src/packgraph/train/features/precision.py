"""Float8 in the trainer: what keeps the layers of a run from it, all reasons at once."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from packgraph.models.branches import routed_width
from packgraph.models.config import DecoderConfig
from packgraph.models.layers.decoder import DecoderLayer
from packgraph.ops.float8.linear import float8_layers, float8_problems, is_float8, size_problem
from packgraph.ops.linear import NATIVE
from packgraph.parallel.tensor import parts_of_layer
from packgraph.train.config.sections import TrainConfig
from packgraph.train.features.live import live_shape


def problems_of_precision(config: TrainConfig, device_type: str) -> list[str]:
    """All reasons why the linear layers of a run cannot multiply as `model.precision` says."""
    model = config.model
    if not is_float8(model.precision):
        return []
    found: list[str] = []
    if device_type == "cuda" and torch.cuda.is_available():
        device = torch.device("cuda" if config.run.device == "auto" else config.run.device)
        dtype = getattr(torch, config.run.dtype)
        found += float8_problems(device, dtype, model.experts.enabled)
    if config.hf.path is not None:
        found += live_shape(config.hf.path).in_float8(model.bf16_ends)
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
        found |= dict.fromkeys(float8_layers(layer, partial(parts_of_layer, ranks=ranks))[0])
    experts = model.experts
    if experts.enabled:
        problem = size_problem(routed_width(model), experts.intermediate_size)
        found |= {} if problem is None else {f"experts: {problem}": None}
    return [*found]
