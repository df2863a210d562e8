"""Activation recomputation: stages under `torch.utils.checkpoint`, eagerly and inside graphs.

    kept, none     forward  ──▶ everything that autograd saves           backward
    selective      forward  ──▶ input, products, attention ──▶ the rest again ──▶ backward
    full           forward  ──▶ input ──────────────────────▶ forward again ──▶ backward

Consecutive stages of one layer that ask for the same are recomputed together, from one input. A
backward graph holds the second forward, so that a replay launches it as everything else.

Selective recomputation keeps what costs many operations for each byte of its result, and computes
the rest again (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", arXiv:2205.05198, section 5). FLOPs per byte of the result, in bfloat16:

    product [T, K] x [K, N]         2 K / 2 bytes = K            4,096 with K = 4,096    kept
    attention over L tokens         4 L / 2 bytes = 2 L          half of it if causal    kept
    state space, state of S         4 S / 2 bytes = 2 S          256 with S = 128        kept
    RMSNorm                         about 5 / 2 bytes            2.5                     again
    SwiGLU                          about 6 / 2 bytes            3                       again
    rotary positions, additions     about 3 / 2 bytes            1.5                     again

An H200 makes 206 FLOPs (989 TFLOP/s) in the time that one byte takes (4.8 TB/s): what is below that
costs the reading and writing of its operands. `KEPT` names the operations above it.

The invariants. Random numbers are drawn once: what drew them is kept, never computed again, so that
no state of a generator goes back and forth inside a graph. Gradients have the bits that they have
without recomputation, as long as kernels give the same bits twice. Compiled stages are recomputed
as the compiled code that they are, if it draws nothing; within it torch.compile already computes
cheap operations again, so that `selective` changes nothing there.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from inspect import isgenerator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from packgraph.torch_internals import schema_of

State = dict[str, Any]
FULL, SELECTIVE = "full", "selective"
LAYER_INPUT = "layer_input"  # the block, for offloading, of what recomputation begins with

KEPT = frozenset(
    f"aten::{name}"
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_grouped_mm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    )
) | frozenset(
    f"packgraph::{name}"
    for name in (
        "linear_product",
        "float8_product",
        "router_logits",
        "activate_and_multiply",
        "varlen_attention",
        "flash_attention",
        "ssd",
    )
)


def checkpointed(
    run: Callable[[State], State],
    state: State,
    kind: str,
    *,
    mark: Callable[..., AbstractContextManager[None]] | None = None,
    compiled: bool = False,
) -> State:
    """The state that `run` makes of `state`, whose backward computes it again.

    Args:
        run: Stages of one layer, one after the other.
        state: What they get; only what of it needs a gradient is held for the backward by autograd,
            so that it may be offloaded.
        kind: `full` or `selective`.
        mark: Opens the block of the input, as `packgraph.offload_block`.
        compiled: Whether `run` is compiled code, which is kept or recomputed as a whole.

    Raises:
        RuntimeError: If `run` draws random numbers into a tensor in place, which cannot be kept.
    """
    if not torch.is_grad_enabled() or (compiled and kind == SELECTIVE):
        return run(state)
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    leaves, others, build = _taken_apart(state)
    context = copy_context()  # a backward calls `run` in a thread of autograd's own

    def again(*tensors: torch.Tensor) -> State:
        return context.copy().run(run, build(tensors))

    options: dict[str, Any] = {"preserve_rng_state": False}
    if not compiled:
        policy = _full_policy if kind == FULL else _selective_policy
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)
    block = nullcontext() if mark is None else mark(LAYER_INPUT, leave=others)
    with block, _hooks_end_with_errors():
        found: State = checkpoint(again, *leaves, use_reentrant=False, **options)
    return found


@contextmanager
def _hooks_end_with_errors() -> Iterator[None]:
    """Takes back the hooks for saved tensors at once where the block raises. `checkpoint` before
    torch 2.12 leaves that to the end of its generator, which the frames of the error's traceback
    hold: until then everything that autograd saves would go to the checkpoint that failed."""
    try:
        yield
    except BaseException as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
                for held in filter(isgenerator, list(frame.f_locals.values())):
                    held.close()
        raise


def _taken_apart(
    state: State,
) -> tuple[list[torch.Tensor], list[torch.Tensor], Callable[[Any], State]]:
    """The tensors of a state that need a gradient, its other tensors, and how the state is put
    together again. Entries without such tensors stay the objects that they are."""
    fixed, places, leaves = dict[str, Any](), dict[str, Any](), list[torch.Tensor]()
    for key, value in state.items():
        flat, spec = tree_flatten(value)
        mine = [
            number
            for number, leaf in enumerate(flat)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if not mine:
            fixed[key] = value
            continue
        places[key] = (spec, [None if n in mine else leaf for n, leaf in enumerate(flat)], mine)
        leaves += [flat[number] for number in mine]
    order = list(state)

    def build(tensors: tuple[torch.Tensor, ...]) -> State:
        rest, made = iter(tensors), dict[str, Any]()
        for key, (spec, known, mine) in places.items():
            flat = list(known)
            for number in mine:
                flat[number] = next(rest)
            made[key] = tree_unflatten(flat, spec)
        return {key: fixed[key] if key in fixed else made[key] for key in order}

    others = [leaf for leaf in tree_leaves(fixed) if isinstance(leaf, torch.Tensor)]
    return leaves, others, build


def _full_policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    """Returns whether to keep the result of an operation where everything is computed again."""
    return _is_drawn(operation, args, kwargs)


def _selective_policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    """Returns whether to keep the result of an operation where cheap ones are computed again."""
    return operation.name().partition(".")[0] in KEPT or _is_drawn(operation, args, kwargs)


def _is_drawn(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tells whether an operation draws random numbers. Raises RuntimeError if it does in place."""
    if not draws(operation, args, kwargs):
        return False
    if schema_of(operation).is_mutable:
        raise RuntimeError(
            f"recomputation: {operation.name()} draws random numbers into a tensor in place, which "
            "the backward would draw anew: use torch.native_dropout or another operation that "
            "returns a new tensor, or leave this stage out of recomputation"
        )
    return True


def draws(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether an operation of torch draws random numbers with these arguments."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    for number, argument in enumerate(schema_of(operation).arguments):
        if argument.name == "dropout_p":  # of attention, which draws nothing without
            given = args[number] if number < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given != 0.0)
    return True
