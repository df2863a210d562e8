"""The choice of experts as one operation with a backward of its own, made by the kernels of
moe/route_kernel.py.

    forward     logits, padding, bias -> experts, weights, scores
    backward    gradients of weights and of scores (either may be missing), scores, experts ->
                gradient of logits

Between the two only scores and experts are kept. `naive_route` in moe/routing.py says what is
computed.
"""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("packgraph::route", mutates_args=())
def route_in_one(
    logits: Tensor,
    padding: Tensor,
    bias: Tensor | None,
    per_token: int,
    softmax: bool,
    normalise: bool,
    scaling: float,
    groups: int,
    groups_kept: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """experts int32 [T, k], weights float32 [T, k], scores float32 [T, E]. Differentiable in
    logits.

    logits: float32 [T, E]. padding: bool [T]. bias: float32 [E] or None. softmax: or sigmoid. The
    rest: see `RouterSettings`; nothing is checked here. No host sync.
    """
    from packgraph.moe.route_kernel import choose

    outputs = _shapes(
        logits, padding, bias, per_token, softmax, normalise, scaling, groups, groups_kept
    )
    choose(logits, padding, bias, outputs, softmax, normalise, scaling, groups, groups_kept)
    return outputs


@torch.library.custom_op("packgraph::route_backward", mutates_args=())
def _route_backward(
    of_weights: Tensor | None,
    of_scores: Tensor | None,
    scores: Tensor,
    experts: Tensor,
    softmax: bool,
    normalise: bool,
    scaling: float,
) -> Tensor:
    """Gradient of logits: float32 [T, E]."""
    from packgraph.moe.route_kernel import differentiate

    return differentiate(of_weights, of_scores, scores, experts, softmax, normalise, scaling)


@route_in_one.register_fake
def _shapes(
    logits: Tensor,
    padding: Tensor,
    bias: Tensor | None,
    per_token: int,
    softmax: bool,
    normalise: bool,
    scaling: float,
    groups: int,
    groups_kept: int,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = logits.shape[0]
    return (
        logits.new_empty(tokens, per_token, dtype=torch.int32),
        logits.new_empty(tokens, per_token),
        logits.new_empty(logits.shape),
    )


@_route_backward.register_fake
def _backward_shape(
    of_weights: Tensor | None,
    of_scores: Tensor | None,
    scores: Tensor,
    experts: Tensor,
    softmax: bool,
    normalise: bool,
    scaling: float,
) -> Tensor:
    return scores.new_empty(scores.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    experts, _, scores = output
    ctx.set_materialize_grads(False)  # without a loss of the router nothing comes for the scores
    ctx.mark_non_differentiable(experts)
    ctx.save_for_backward(scores, experts)
    ctx.settings = inputs[4:7]


def _differentiate(
    ctx: Any, of_experts: None, of_weights: Tensor | None, of_scores: Tensor | None
) -> tuple[Tensor | None, ...]:
    scores, experts = ctx.saved_tensors
    nothing = of_weights is None and of_scores is None
    found = (
        None if nothing else _route_backward(of_weights, of_scores, scores, experts, *ctx.settings)
    )
    return (found, *[None] * 8)


route_in_one.register_autograd(_differentiate, setup_context=_save)
