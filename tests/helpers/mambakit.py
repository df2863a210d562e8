"""Small hybrids, and the specification of their Mamba-2 layer."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from packgraph.mamba.conv import naive_packed_causal_conv
from packgraph.mamba.gated_norm import naive_gated_rms_norm
from packgraph.mamba.ssd import naive_ssd
from packgraph.models.config import DecoderConfig, ExpertConfig, MambaConfig
from packgraph.models.decoder import DecoderModel
from packgraph.models.layers.mamba import MambaMixer

CHUNK = 8
MAMBA = MambaConfig(num_heads=4, head_dim=6, state=5, groups=2, chunk=CHUNK)
EXPERTS = ExpertConfig(count=4, per_token=2, intermediate_size=16, shared=1)


def hybrid(pattern: str = "M-M*-E", **changes: Any) -> DecoderConfig:
    """A decoder of six layers, with experts where the pattern has some."""
    sizes: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 6,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.2,
        "pattern": pattern,
        "mamba": MAMBA,
    }
    if "E" in pattern:
        sizes["experts"] = EXPERTS
    return DecoderConfig(**(sizes | changes))


def random_hybrid(config: DecoderConfig, seed: int = 1) -> DecoderModel:
    """A model whose norms, biases, decays and steps are random too, so that no factor of one hides
    an error."""
    model = DecoderModel(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def naive_mixer(mixer: MambaMixer, x: Tensor, ids: Tensor) -> Tensor:
    """The layer in one process by the definitions of its operations. x: [T, H]; ids: int32 [T], -1
    in padding."""
    shape = mixer.shape
    inner, shared = shape.heads * shape.head_dim, shape.groups * shape.state
    gate, columns, steps = mixer.in_proj(x).split((inner, inner + 2 * shared, shape.heads), dim=-1)
    mixed = naive_packed_causal_conv(columns, mixer.conv1d.weight[:, 0], mixer.conv1d.bias, ids)
    heads, b, c = mixed.split((inner, shared, shared), dim=-1)
    dt = F.softplus(steps.to(mixer.dt_bias.dtype) + mixer.dt_bias)
    if mixer.smallest_step:
        dt = dt.clamp(min=mixer.smallest_step)
    y = naive_ssd(
        heads.unflatten(-1, (shape.heads, -1)),
        dt,
        -mixer.A_log.exp(),
        b.unflatten(-1, (shape.groups, -1)),
        c.unflatten(-1, (shape.groups, -1)),
        mixer.D,
        ids,
    )
    return mixer.out_proj(
        naive_gated_rms_norm(y.flatten(1), gate, mixer.norm.weight, mixer.norm.eps, shape.groups)
    )


def with_bias(config: DecoderConfig) -> DecoderConfig:
    """The same with biases of projections, no bias of the convolution, and time steps that are
    clamped."""
    return dataclasses.replace(
        config,
        mamba=dataclasses.replace(config.mamba, bias=True, conv_bias=False, smallest_step=0.5),
    )
