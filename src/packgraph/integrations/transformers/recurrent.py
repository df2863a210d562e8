"""Mixers with a state, over packed documents: what runs in the place of transformers' own forward.

    layer --packed_batch--> mixer.forward --> run_mamba --> packgraph.mamba

States and convolutions never cross from one document to the next; where documents begin is read on
the device. A mixer of transformers has no interface to register with, so `forward` of each such
module is set to one that takes calls with a packed batch, and hands all others to its class.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packgraph.integrations.transformers.layer_call import LayerCall
from packgraph.mamba.conv import live_document_ids, packed_causal_conv
from packgraph.mamba.gated_delta import gated_delta
from packgraph.mamba.ssd import ssd
from packgraph.packing.batch import PackedBatch


def run_mamba(mixer: Any, x: Tensor, batch: PackedBatch) -> Tensor:
    """A Mamba-2 mixer: [T, H] -> [T, H]. Families differ in factors on the input and in whether a
    norm precedes the last projection."""
    ids = live_document_ids(batch)
    projected = mixer.in_proj(x * getattr(mixer, "ssm_in_multiplier", 1.0))
    if hasattr(mixer, "mup_vector"):
        projected = projected * mixer.mup_vector.flatten()
    inner, state = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
    gate, columns, steps = projected.split((inner, mixer.conv_dim, mixer.num_heads), dim=-1)
    weight = mixer.conv1d.weight.squeeze(1)
    mixed = packed_causal_conv(columns.to(weight.dtype), weight, mixer.conv1d.bias, ids)
    heads, b, c = mixed.split((inner, state, state), dim=-1)
    b, c = (part.unflatten(-1, (mixer.n_groups, mixer.ssm_state_size)) for part in (b, c))
    least, most = mixer.time_step_limit
    dt = F.softplus(steps.float() + mixer.dt_bias.float()).clamp(min=least, max=most)
    decay = -mixer.A_log.float().exp()
    heads = heads.unflatten(-1, (mixer.num_heads, mixer.head_dim))
    y = ssd(heads, dt, decay, b, c, mixer.D.float(), ids, mixer.chunk_size)
    y = y.flatten(1)
    if isinstance(mixer.norm, nn.Identity):
        y = y * F.silu(gate)
    else:
        y = mixer.norm(y[None], gate[None])[0]
    return mixer.out_proj(y.to(x.dtype))


def run_gated_delta(mixer: Any, x: Tensor, batch: PackedBatch) -> Tensor:
    """A mixer of the gated delta rule: [T, H] -> [T, H]."""
    ids = live_document_ids(batch)
    q, k, v, z, b, a = mixer.fix_query_key_value_ordering(
        mixer.in_proj_qkvz(x[None]), mixer.in_proj_ba(x[None])
    )
    columns = torch.cat([part[0].flatten(1) for part in (q, k, v)], dim=-1)
    weight = mixer.conv1d.weight.squeeze(1)
    mixed = packed_causal_conv(columns.to(weight.dtype), weight, mixer.conv1d.bias, ids)
    q, k, v = mixed.split((mixer.key_dim, mixer.key_dim, mixer.value_dim), dim=-1)
    q, k = (_normalised(part.unflatten(-1, (-1, mixer.head_k_dim)).float()) for part in (q, k))
    v = v.unflatten(-1, (-1, mixer.head_v_dim))
    decay = -mixer.A_log.float().exp() * F.softplus(a[0].float() + mixer.dt_bias.float())
    y = gated_delta(q * mixer.head_k_dim**-0.5, k, v, decay, b[0].sigmoid(), ids)
    y = mixer.norm(y.flatten(0, 1), z[0].flatten(0, 1))
    return mixer.out_proj(y.view(x.shape[0], -1))


def _normalised(x: Tensor) -> Tensor:
    """x [..., D], of length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


MIXERS: tuple[tuple[frozenset[str], Callable[[Any, Tensor, PackedBatch], Tensor]], ...] = (
    (frozenset({"in_proj", "conv1d", "A_log", "D", "dt_bias", "ssm_state_size"}), run_mamba),
    (frozenset({"in_proj_qkvz", "in_proj_ba", "conv1d", "A_log", "dt_bias"}), run_gated_delta),
)


# Packages whose `forward` does what that of transformers does: of devices, dtypes, kernels.
AROUND = ("transformers.", "accelerate.", "liger_kernel.", "packgraph.", "torch.")


OLD_TRACER = torch.__version__ < "2.12"  # which takes `__module__` of a method for another


def runner_of(module: nn.Module) -> Callable[[Any, Tensor, PackedBatch], Tensor] | None:
    """Returns the function that runs a mixer with a state over packed documents, else None."""
    for names, run in MIXERS:
        if all(hasattr(module, name) for name in names):
            return run
    return None


def is_theirs(module: nn.Module) -> bool:
    """Tells whether `forward` of a module is that of transformers, or around it; a packed call,
    which takes its place, leaves out any other."""
    if OLD_TRACER and torch.compiler.is_compiling():
        return True
    found = str(module.forward.__module__), str(type(module).forward.__module__)
    return all(name.startswith(AROUND) for name in found)


def mixer_problems(module: Any) -> list[str]:
    """Every reason why a mixer with a state would not be what it is in transformers."""
    if runner_of(module) is None:
        named = hasattr(module, "A_log")
        return [f"{type(module).__name__} has a state that crosses documents"] if named else []
    if not is_theirs(module):
        return [f"{type(module).__name__} has a forward of its own, which would not run"]
    if type(module.conv1d) is not nn.Conv1d:
        return [f"{type(module.conv1d).__name__} around a convolution would not be called"]
    if module.activation not in ("silu", "swish"):
        return [f"its convolutions end with {module.activation}, not with silu"]
    return []


def forward(
    self: Any,
    hidden_states: Tensor,
    *args: Any,
    packed_batch: LayerCall | None = None,
    **kwargs: Any,
) -> Tensor:
    """`forward` of a mixer: [1, T, H] -> [1, T, H] where a packed batch is given, else as its class
    does it."""
    if packed_batch is None:
        found: Tensor = type(self).forward(self, hidden_states, *args, **kwargs)
        return found
    run = runner_of(self)
    assert run is not None
    packed_batch.ran.append(type(self).__name__)
    return run(self, hidden_states[0], packed_batch.batch)[None]


def use_our_mixers(model: nn.Module) -> None:
    """Give every mixer with a state in `model` the forward above."""
    for module in model.modules():
        if runner_of(module) is not None:
            module.forward = types.MethodType(forward, module)
