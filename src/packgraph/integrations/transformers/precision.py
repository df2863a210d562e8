"""Precision of the linear layers of a transformers model: in their dtype, or in float8.

layers     0 .. ends    | ends ..      .. -ends |  -ends ..
bf16       nn.Linear    |      nn.Linear        |  nn.Linear
fp8        nn.Linear    |      Float8Linear     |  nn.Linear        over the same parameters

`fp8_weight_gradients` is as `fp8`, with Float8GradientsLinear, and `mxfp8` with Mxfp8Linear.
"""

from collections.abc import Sequence
from typing import Any

import torch

from packgraph.ops.float8.linear import LAYERS, float8_layers, float8_problems, multiply_by
from packgraph.ops.linear import NATIVE


def set_precision(layers: Sequence[Any], precision: str, ends: int) -> list[str]:
    """Let linear layers inside of `layers` multiply by `precision`, but for so many layers at both
    ends. Returns every reason why they cannot; then nothing is changed."""
    if precision not in LAYERS:
        return [f"precision {precision!r} is unknown; known are {', '.join(LAYERS)}"]
    if precision == NATIVE:
        for layer in layers:
            multiply_by(layer, NATIVE)
            layer.precision = NATIVE
        return []
    if problems := precision_problems(layers, precision, ends):
        return [f"precision = {precision}: {problem}" for problem in problems]
    for number, layer in enumerate(layers):
        layer.precision = precision if ends <= number < len(layers) - ends else NATIVE
        multiply_by(layer, layer.precision)
    return []


def precision_problems(layers: Sequence[Any], precision: str, ends: int) -> list[str]:
    """Every reason why layers between both ends cannot multiply by `precision`, one in float8."""
    if ends < 0:
        return [f"bf16_ends is {ends}, must not be negative"]
    if 2 * ends >= len(layers):
        return [f"bf16_ends {ends} leaves none of {len(layers)} layers"]
    found: list[str] = []
    for number, layer in enumerate(layers[ends : len(layers) - ends], ends):
        problems, linear = float8_layers(layer, precision)
        if any(hasattr(part, "is_concatenated") for part in layer.modules()):
            problems.append("experts of transformers, and their routers, are not there yet")
        if not linear:
            problems.append("it has no nn.Linear")
        found += [f"layer {number}: {problem}" for problem in problems]
    first = next((value for layer in layers for value in layer.parameters()), None)
    if first is not None and first.device.type == "cuda":
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cuda") else first.dtype
        found += float8_problems(first.device, dtype, precision=precision)
    return found
