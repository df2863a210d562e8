"""Recomputation of stages of a model in the backward: `packgraph.recompute`.

    none         nothing
    selective    attn, mamba, mlp, moe_*: all but products, attention and scans    (graphs/checkpointed.py)
    full         attn, mamba, mlp, moe_*: each layer from its input
    attn,mlp     these stages, in full

What stands against a stage: experts that keep their rows in a stash, which holds what a
recomputation would need; experts of several ranks, whose dispatch would exchange tokens once more
in the backward; routers in compiled code, which would count their load twice. Embedding and head
are never recomputed: the loss keeps one chunk of logits at a time anyway.
"""  # noqa: E501

import difflib
from collections.abc import Callable, Collection, Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from packgraph.graphs.checkpointed import FULL, SELECTIVE
from packgraph.graphs.graphed import GraphedModule, control
from packgraph.graphs.stages import in_scope
from packgraph.models.branches import BRANCHES
from packgraph.models.layers.decoder import DecoderLayer
from packgraph.models.layers.moe import MoEBlock
from packgraph.models.rows import SharedRows
from packgraph.moe.dispatch.dispatcher import Dispatching, LocalDispatcher

NONE = "none"
KINDS = (NONE, SELECTIVE, FULL)
What = str | Collection[str]


def recompute(module: nn.Module, what: What) -> nn.Module:
    """Lets the backward compute activations again instead of keeping them for it.

    Outputs and gradients keep their bits. Graphs of the module are captured again at their next
    call. Own modules made of stages say it themselves: `packgraph.Stage(recompute=...)`.

    Args:
        module: A decoder of `packgraph.models` or a part of one, a transformers model, what
            `packed` made of one, or what `packgraph.graph` made of any of these.
        what: `none`; `selective`: norms, activations and whatever else is cheap for each byte of
            its result; `full`: each layer from its input; or names of stages, such as
            `["attn", "mlp"]`, that are recomputed in full. For transformers models, whose gradient
            checkpointing this turns on or off, `none` or `full`.

    Returns:
        The module, the same object.

    Raises:
        ValueError: If it cannot be recomputed, with all reasons.

    Examples:
        >>> from packgraph.models.decoder import DecoderConfig, DecoderModel
        >>> model = DecoderModel(DecoderConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_layers=2,
        ...     num_heads=2, num_kv_heads=1, head_dim=4,
        ... ))
        >>> model = packgraph.recompute(model, "full")
        >>> [stage.recompute for stage in model.stages()]
        ['', 'full', 'full', 'full', 'full', '']
    """
    inner = control(module).module if isinstance(module, GraphedModule) else module
    layers = [part for part in inner.modules() if isinstance(part, DecoderLayer)]
    if not layers:
        _checkpoint_live(inner, what)
        return module
    found = [
        {stage.name: kind_of(stage.name, what) for stage in layer.stages()} for layer in layers
    ]
    problems = recompute_problems(what, [name for kinds in found for name in kinds])
    for layer, kinds in zip(layers, found, strict=True):
        block = getattr(layer, "mlp", None)
        moe = any(kind and in_scope(name, ["moe"]) for name, kind in kinds.items())
        if moe and isinstance(block, MoEBlock):
            alone = isinstance(block.dispatcher, LocalDispatcher)
            problems += [STASHED] * (block.stash is not None) + [SHARED] * (not alone)
    if any(kind for kinds in found for kind in kinds.values()) and _exchanges(inner):
        problems.append(EXCHANGES)
    if problems:
        raise ValueError("; ".join(dict.fromkeys(problems)))
    for layer, kinds in zip(layers, found, strict=True):
        layer.recompute = {name: kind for name, kind in kinds.items() if kind}
    return module


def kind_of(stage: str, what: What) -> str:
    """Kind of recomputation of a decoder's stage: `full`, `selective`, or empty."""
    if isinstance(what, str) and what in KINDS:
        return what if what != NONE and in_scope(stage, BRANCHES.values()) else ""
    return FULL if in_scope(stage, _asked(what)) else ""


def recompute_problems(what: What, stages: Sequence[str]) -> list[str]:
    """Every reason why a model with these stages cannot be recomputed so; empty when it can."""
    if isinstance(what, str) and what in KINDS:
        return []
    asked = _asked(what)
    known = [name for name in dict.fromkeys(stages) if in_scope(name, BRANCHES.values())]
    problems = [] if asked else [f"names no stage: use {', '.join(KINDS)}, or names of stages"]
    for name in asked:
        if any(in_scope(stage, [name]) for stage in known):
            continue
        near = difflib.get_close_matches(name, [*KINDS, *known], n=1)
        problems.append(
            f"{name!r} cannot be recomputed: stages that can are {', '.join(known)}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    return problems


def _asked(what: What) -> list[str]:
    names = what.split(",") if isinstance(what, str) else list(what)
    return [name.strip() for name in names if name.strip()]


def _exchanges(module: nn.Module) -> bool:
    """Returns whether ranks exchange data within layers: split matrices, or spread rows."""
    return any(isinstance(value, DTensor) for value in module.parameters()) or any(
        isinstance(part, SharedRows) and part.contexts for part in module.modules()
    )


OTHERS = "name the other stages, such as attn or attn,mlp"
STASHED = (
    f"moe stages cannot be recomputed where experts keep their rows in a stash: {OTHERS}, or train "
    "without a stash"
)
SHARED = (
    "moe stages cannot be recomputed where ranks share experts: the backward would exchange tokens "
    f"once more; {OTHERS}"
)


EXCHANGES = (
    "stages that exchange data between ranks cannot be recomputed yet: the backward would exchange "
    "once more"
)


def _checkpoint_live(module: nn.Module, what: What) -> None:
    """Gradient checkpointing of the transformers model in `module`, on or off."""
    found = next(
        (
            (part, name)
            for part in module.modules()
            for name in ("activation_checkpointing", "gradient_checkpointing")  # new and old name
            if hasattr(part, f"{name}_enable")
        ),
        None,
    )
    if found is None:
        raise ValueError(
            f"{type(module).__name__} holds no decoder of packgraph.models and no transformers "
            "model: give its own stages packgraph.Stage(recompute=...), or call "
            "torch.utils.checkpoint(use_reentrant=False) in its forward"
        )
    model, name = found
    if what == NONE:
        getattr(model, f"{name}_disable")()
    elif what == FULL:
        shares_experts = any(
            type(part) is Dispatching and not isinstance(part.dispatcher, LocalDispatcher)
            for part in module.modules()
        )
        if shares_experts or _exchanges(module):
            raise ValueError(EXCHANGES)
        asked = bool(getattr(model, "_require_grads_hooks", ()))
        getattr(model, f"{name}_enable")({"use_reentrant": False})
        forget: Callable[[], None] | None = getattr(model, "disable_input_require_grads", None)
        if not asked and forget is not None:
            # With adapters transformers lets frozen embeddings have gradients, which only reentrant
            # checkpoints need, and which nothing takes.
            forget()
    else:
        raise ValueError(
            f"a transformers model recomputes whole layers or nothing: {FULL!r} or {NONE!r}, not "
            f"{what!r}"
        )
