"""Attention and mixers with a state, over packed documents, in the place of transformers' own.

    run_layer -- LayerCall --> layer -- LayerCall --> attention or mixer of ours: an entry in `ran`
        `------------ refuse_other_ways: has every one of them run? ------------'

A layer hands keyword arguments that it does not know on to the implementation of attention, so the
packed batch travels with the call, and nothing is stored anywhere. Implementations are registered
under own names. Calls without a packed batch, such as those of `generate`, go to what the config
had before; for `eager` that is a function of the model's own file. Masks are never made for packed
batches: their layers get None. A mixer of transformers has no interface to register with, so
`forward` of each such module is set to one that takes calls with a packed batch, and hands all
others to its class. States and convolutions never cross from one document to the next; where
documents begin is read on the device. Ranks that share a row exchange it for heads before a
convolution (mamba/heads.py).

What runs in a layer is decided by its configs, classes and attributes, which anybody may change at
any time. So nothing is concluded from them: an implementation that was not ours leaves no entry.
Replays run no Python; graphs watch all of it, and a change leads back here.
"""

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packgraph.integrations.transformers.experts import experts_of, give_dispatchers, run_experts
from packgraph.mamba.conv import live_document_ids, packed_causal_conv
from packgraph.mamba.gated_delta import gated_delta
from packgraph.mamba.heads import own_channels, own_heads, whole_heads, whole_scan_rows
from packgraph.mamba.shape import ScanShape
from packgraph.mamba.ssd import ssd
from packgraph.ops.attention.api import attention, attention_metadata, choose_backend
from packgraph.ops.attention.context import ContextGroup, own_heads_back
from packgraph.ops.attention.metadata import ScoreOptions
from packgraph.ops.attention.zigzag import ZigzagTables
from packgraph.packing.batch import PackedBatch

# Arguments of attention that are used, or say what every packed call does.
KNOWN = (
    *("sliding_window", "is_causal", "position_ids", "position_embeddings", "use_cache"),
    *("output_attentions", "output_router_logits", "cache_position"),
)
BATCH = "packed_batch"  # keyword argument of layers


class LayerCall(NamedTuple):
    """The arguments that a layer hands down to its attention and mixers.

    window: of attention in this layer, None for none. ran: class of each module that ran ours.
    context, tables: where the batch is spread over ranks.
    """

    batch: PackedBatch
    window: int | None
    ran: list[str]
    context: ContextGroup | None = None
    tables: ZigzagTables | None = None

    def refuse_other_attention(
        self, module: nn.Module, length: int, mask: Tensor | None, given: dict[str, Any]
    ) -> None:
        """Raises ValueError where attention is asked for something else than causal attention
        within documents and the layer's window. given: further arguments of its implementation."""
        ranks = 1 if self.context is None else self.context.size
        unknown = [name for name, value in given.items() if value is not None and name not in KNOWN]
        wrong = {
            f"{', '.join(unknown)}, which packgraph's does not know": bool(unknown),
            "a mask of its own": mask is not None,
            f"{length} keys": length * ranks != self.batch.tokens.shape[0],
            f"a window of {given.get('sliding_window')}, not {self.window}": (
                given.get("sliding_window", self.window) != self.window
            ),
            "no causal order": not given.get("is_causal", getattr(module, "is_causal", True)),
        }
        if any(wrong.values()):
            told = ", ".join(what for what, there in wrong.items() if there)
            raise ValueError(
                f"{type(module).__name__} asks for attention with {told}, which packed documents "
                f"cannot have; use the model's own attention"
            )


def refuse_other_ways(layer: Any, call: LayerCall) -> None:
    """Raises ValueError unless every module that reads other tokens has run ours."""
    if len(call.ran) < layer.token_mixers:
        ran = ", ".join(call.ran) or "none"
        raise ValueError(
            f"documents would see each other in {type(layer).__name__}: of {layer.token_mixers} "
            f"modules that read other tokens {ran} ran packgraph's implementation; call "
            "packed(model) again after set_attn_implementation, and after replacing a module or "
            "its config"
        )


def scan_shape(mixer: Any) -> ScanShape:
    """Shape of what a mixer with a state scans."""
    if hasattr(mixer, "ssm_state_size"):
        return ScanShape(mixer.num_heads, mixer.head_dim, mixer.n_groups, mixer.ssm_state_size)
    heads, size = getattr(mixer, "num_heads", 0), getattr(mixer, "head_dim", 0)
    values, keys = (getattr(mixer, f"num_{part}_heads", heads) for part in "vk")
    value_dim, key_dim = (getattr(mixer, f"head_{part}_dim", size) for part in "vk")
    return ScanShape(values, value_dim, keys, key_dim, heads_last=True)


def _convolved(
    mixer: Any, columns: Tensor, steps: Tensor, ids: Tensor, context: ContextGroup | None
) -> tuple[list[Tensor], Tensor]:
    """All rows of this rank's heads after the convolution: the parts of columns [T, n, D], in their
    order, and steps [T, heads]. columns, steps: this rank's rows, of all heads."""
    shape, weight, bias = scan_shape(mixer), mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias
    columns, steps, own = whole_scan_rows(columns, steps, shape, context)
    weight = own_channels(weight, shape, context)
    bias = None if bias is None else own_channels(bias, shape, context)
    mixed = packed_causal_conv(columns.to(weight.dtype), weight, bias, ids)
    cut = zip(mixed.split(own.columns, dim=-1), own.parts, strict=True)
    return [part.unflatten(-1, sizes) for part, sizes in cut], steps


def run_mamba(mixer: Any, x: Tensor, batch: PackedBatch, context: ContextGroup | None) -> Tensor:
    """A Mamba-2 mixer: [T, H] -> [T, H], this rank's rows. Families differ in factors on the input
    and in whether a norm precedes the last projection."""
    ids = live_document_ids(batch)
    projected = mixer.in_proj(x * getattr(mixer, "ssm_in_multiplier", 1.0))
    if hasattr(mixer, "mup_vector"):
        projected = projected * mixer.mup_vector.flatten()
    widths = mixer.intermediate_size, mixer.conv_dim, mixer.num_heads
    gate, columns, steps = projected.split(widths, dim=-1)
    (heads, b, c), steps = _convolved(mixer, columns, steps, ids, context)
    bias, a_log, d = (
        own_heads(value, context).float() for value in (mixer.dt_bias, mixer.A_log, mixer.D)
    )
    least, most = mixer.time_step_limit
    dt = F.softplus(steps.float() + bias).clamp(min=least, max=most)
    y = ssd(heads, dt, -a_log.exp(), b, c, d, ids, mixer.chunk_size)
    y = own_heads_back(y, context).flatten(1)
    if isinstance(mixer.norm, nn.Identity):
        y = y * F.silu(gate)
    else:
        y = mixer.norm(y[None], gate[None])[0]
    return mixer.out_proj(y.to(x.dtype))


class _Delta(NamedTuple):
    """Projections of the input of a mixer of the gated delta rule, all [T, ...].

    columns: of queries, keys and values, before their convolution. gate: of the output. beta: [T,
    heads]. decay: [T, heads], or one of each channel of keys.
    """

    columns: Tensor
    gate: Tensor
    beta: Tensor
    decay: Tensor


def _of_two_products(mixer: Any, x: Tensor) -> _Delta:
    q, k, v, gate, beta, steps = mixer.fix_query_key_value_ordering(
        mixer.in_proj_qkvz(x[None]), mixer.in_proj_ba(x[None])
    )
    columns = torch.cat([part[0].flatten(1) for part in (q, k, v)], dim=-1)
    return _Delta(columns, gate[0], beta[0].sigmoid(), _decay(mixer, steps[0]))


def _of_four_products(mixer: Any, x: Tensor) -> _Delta:
    decay = _decay(mixer, mixer.in_proj_a(x))
    return _Delta(mixer.in_proj_qkv(x), mixer.in_proj_z(x), mixer.in_proj_b(x).sigmoid(), decay)


def _of_six_products(mixer: Any, x: Tensor) -> _Delta:
    columns = torch.cat([mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)], dim=-1)
    beta = mixer.b_proj(x).sigmoid() * (2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0)
    if hasattr(mixer, "forget_gate"):  # of every channel
        return _Delta(
            columns, mixer.g_b_proj(mixer.g_a_proj(x)), beta, mixer.forget_gate(x[None])[0]
        )
    return _Delta(columns, mixer.g_proj(x), beta, _decay(mixer, mixer.a_proj(x)))


def _decay(mixer: Any, steps: Tensor) -> Tensor:
    return -mixer.A_log.float().exp() * F.softplus(steps.float() + mixer.dt_bias.float())


def run_gated_delta(
    project: Callable[[Any, Tensor], _Delta],
    mixer: Any,
    x: Tensor,
    batch: PackedBatch,
    context: ContextGroup | None,
) -> Tensor:
    """A mixer of the gated delta rule: [T, H] -> [T, H], this rank's rows. Families differ in how
    they project."""
    ids, made = live_document_ids(batch), project(mixer, x)
    (q, k, v), beta = _convolved(mixer, made.columns, made.beta, ids, context)
    q, k = (_normalised(part.float()) for part in (q, k))
    decay = whole_heads(made.decay, context)
    y = own_heads_back(gated_delta(q * q.shape[-1] ** -0.5, k, v, decay, beta, ids), context)
    norm, out = (
        (mixer.norm, mixer.out_proj) if hasattr(mixer, "norm") else (mixer.o_norm, mixer.o_proj)
    )
    y = norm(y.flatten(0, 1), made.gate.reshape(-1, y.shape[-1]))
    return out(y.view(x.shape[0], -1))


def _normalised(x: Tensor) -> Tensor:
    """x [..., D], of length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


# (mixer, rows [T, H], batch, context) -> [T, H]
Runner = Callable[[Any, Tensor, PackedBatch, ContextGroup | None], Tensor]
MIXERS: tuple[tuple[frozenset[str], Runner], ...] = (
    (frozenset({"in_proj", "conv1d", "A_log", "D", "dt_bias", "ssm_state_size"}), run_mamba),
    (
        frozenset({"in_proj_qkvz", "in_proj_ba", "conv1d", "A_log", "dt_bias"}),
        functools.partial(run_gated_delta, _of_two_products),
    ),
    (
        frozenset({"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "A_log"}),
        functools.partial(run_gated_delta, _of_four_products),
    ),
    (
        frozenset({"q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj", "conv1d", "A_log"}),
        functools.partial(run_gated_delta, _of_six_products),
    ),
    (
        frozenset({"q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "conv1d", "forget_gate"}),
        functools.partial(run_gated_delta, _of_six_products),
    ),
)


# Packages whose `forward` does what that of transformers does: of devices, dtypes, kernels.
AROUND = ("transformers.", "accelerate.", "liger_kernel.", "packgraph.", "torch.")


OLD_TRACER = torch.__version__ < "2.12"  # which takes `__module__` of a method for another


def runner_of(module: nn.Module) -> Runner | None:
    """Returns the function that runs a mixer with a state over packed documents, else None."""
    for names, run in MIXERS:
        if all(hasattr(module, name) for name in names):
            return run
    return None


def is_theirs(module: nn.Module) -> bool:
    """Tells whether `forward` of a module is that of transformers, or around it; a packed call,
    which takes its place, leaves out any other."""
    if OLD_TRACER and torch.compiler.is_compiling():  # guards whether there is one of its own
        return "forward" not in vars(module) or bool(vars(module)["forward"])
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
    return run(self, hidden_states[0], packed_batch.batch, packed_batch.context)[None]


PREFIX = "packgraph"


def attend(
    otherwise: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_batch: LayerCall | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """An implementation of attention for transformers. query, key, value: [1, heads, T, D]. Returns
    [1, T, heads, D] and no probabilities.

    otherwise: name of the implementation for calls without a packed batch, `sdpa` or `eager`.
    """
    if packed_batch is None:
        known = {
            "scaling": scaling,
            "dropout": dropout,
            "softcap": softcap,
            "s_aux": s_aux,
        }
        given = {name: value for name, value in known.items() if value is not None}
        if otherwise == "eager":  # a function of the model's own file
            own: Any = sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
        else:
            own = importlib.import_module("transformers").AttentionInterface()[otherwise]
        found: tuple[Tensor, Tensor | None] = own(
            module, query, key, value, attention_mask, **given, **others
        )
        return found
    packed_batch.refuse_other_attention(module, key.shape[-2], attention_mask, others)
    options = ScoreOptions(others.get("sliding_window"), softcap or 0.0, dropout, s_aux)
    q, k, v = (tensor.squeeze(0).transpose(0, 1).contiguous() for tensor in (query, key, value))
    choice = choose_backend(q.device, q.dtype, q.shape[-1], v.shape[-1], options.needs)
    meta = attention_metadata(
        packed_batch.batch,
        choice.name,
        finite_padding=True,
        context=packed_batch.context,
        tables=packed_batch.tables,
    )
    packed_batch.ran.append(type(module).__name__)
    return attention(q, k, v, meta, scale=scaling, options=options)[None], None


def use_ours(model: Any) -> None:
    """Make every layer of `model`, a PreTrainedModel, call our attention, experts and mixers with a
    state, also those whose config is not the model's."""
    for module in model.modules():
        if runner_of(module) is not None:
            module.forward = types.MethodType(forward, module)
    transformers = importlib.import_module("transformers")
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    for config in {id(found): found for found in configs}.values():
        now = getattr(config, "_attn_implementation", PREFIX) or "eager"
        if not now.startswith(PREFIX):
            otherwise = "sdpa" if now != "eager" and model._supports_sdpa else "eager"
            config._attn_implementation = f"{PREFIX}_{otherwise}"
    for otherwise in ("sdpa", "eager"):  # a model that was unpickled has the names alone
        name, masks = f"{PREFIX}_{otherwise}", transformers.AttentionMaskInterface
        transformers.AttentionInterface.register(name, functools.partial(attend, otherwise))
        masks.register(name, masks()[otherwise])
    moe = importlib.import_module("transformers.integrations.moe")
    moe.ExpertsInterface.register(PREFIX, run_experts)
    give_dispatchers(model)
    for module in experts_of(model):
        module.config._experts_implementation = PREFIX


def refuse_other_experts(layers: Iterable[nn.Module]) -> None:
    """Raises ValueError where experts of `layers` would not run ours."""
    for module in (found for layer in layers for found in experts_of(layer)):
        if module.config._experts_implementation != PREFIX:
            raise ValueError(
                f"{type(module).__name__} would run as {module.config._experts_implementation!r}, "
                "not as packgraph's grouped products; call packed(model) again after "
                "set_experts_implementation, and after replacing a module or its config"
            )
        if not hasattr(module, "dispatching"):
            raise ValueError(
                f"{type(module).__name__} came after packed(model), which prepares experts; call "
                "it again"
            )
