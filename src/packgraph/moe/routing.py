"""Choice of experts and their weights for each token, on the device, with static shapes and no host
sync.

    logits [T, E] -> scores --(+ bias per expert, whole groups left out: for the choice alone)-->
    experts [T, k]
                        |                                                                            |
                        +-------------------------- gather (unbiased) -> normalise -> scale -> weights [T, k]

Invariants: a padding row is routed nowhere (expert -1, weight exactly 0) and has no gradient,
whatever its logits hold; a row depends on its own logits only; of equal scores the expert with the
lower number wins, on every device.

The kernels of moe/route_kernel.py make the choice as one operation with a backward of its own:

    forward     logits, padding, bias -> experts, weights, scores
    backward    gradients of weights and of scores (either may be missing), scores, experts ->
                gradient of logits

Between the two only scores and experts are kept. `naive_route` in moe/routing.py says what is
computed.
"""  # noqa: E501

import math
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from packgraph.moe.dispatch.dispatcher import Routing
from packgraph.ops.triton_found import HAS_TRITON


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


class RouterSettings(Protocol):
    """Fields of a layer that `route` needs; they mean what they mean in `ExpertConfig`, which has
    them all."""

    @property
    def per_token(self) -> int: ...

    @property
    def score(self) -> Literal["softmax", "sigmoid"]: ...

    @property
    def normalise(self) -> bool: ...

    @property
    def scaling(self) -> float: ...

    @property
    def groups(self) -> int: ...

    @property
    def groups_kept(self) -> int: ...


class Scored(NamedTuple):
    """A routing and the scores it was made of. scores: float32 [T, E], without bias; padding rows
    are finite."""

    routing: Routing
    scores: Tensor


def route(
    logits: Tensor, padding_mask: Tensor, score_bias: Tensor | None, settings: RouterSettings
) -> Scored:
    """Top-k routing of T tokens to E experts.

    logits: float32 [T, E], may hold anything in padding rows. padding_mask: bool [T], True =
    padding. score_bias: float32 [E], added to scores for the choice alone (arXiv 2408.15664), or
    None. The places of a token are in the order of its biased scores, highest first. Differentiable
    in logits through weights and scores. Group limits and weights are those of DeepSeek-V3 (arXiv
    2412.19437), softmax scores those of Qwen3-MoE. On CUDA one kernel does it all, and one its
    backward. Raises ValueError for logits that are not float32 or a number of experts that the
    settings do not fit.
    """
    _check(logits, settings)
    if HAS_TRITON and logits.is_cuda:
        experts, weights, scores = route_in_one(
            logits,
            padding_mask,
            score_bias,
            settings.per_token,
            settings.score == "softmax",
            settings.normalise,
            settings.scaling,
            settings.groups,
            settings.groups_kept,
        )
        return Scored(Routing(experts, weights), scores)
    return naive_route(logits, padding_mask, score_bias, settings)


def naive_route(
    logits: Tensor, padding_mask: Tensor, score_bias: Tensor | None, settings: RouterSettings
) -> Scored:
    """The specification of `route`, by single operations."""
    padding = padding_mask[:, None]
    clean = torch.where(
        padding, 0.0, logits
    )  # here already: a gradient of 0 times NaN would still be NaN
    scores = clean.softmax(dim=-1) if settings.score == "softmax" else clean.sigmoid()
    with torch.no_grad():
        biased = scores if score_bias is None else scores + score_bias
        if settings.groups_kept < settings.groups:
            biased = _within_best_groups(biased, settings.groups, settings.groups_kept)
        chosen = first_best(biased, settings.per_token)
    weights = scores.gather(1, chosen)
    if settings.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    if settings.scaling != 1.0:
        weights = weights * settings.scaling
    return Scored(
        Routing(torch.where(padding, -1, chosen).int(), torch.where(padding, 0.0, weights)), scores
    )


def drop_beyond(routing: Routing, num_experts: int, most: int) -> Routing:
    """The classic drop-and-pad mode: each expert keeps the `most` pairs (token, place) with the
    highest weights.

    The rest become expert -1 with weight 0 and no gradient. Of equal weights the earlier token
    stays. Weights are not normalised again. With no more than `most` rows per expert, num_experts *
    most rows always suffice.
    """
    flat = routing.experts.reshape(-1)
    expert = torch.where(flat < 0, num_experts, flat).long()
    # one stable sort by (expert, weight downwards): an expert's keys are the 2^32 around expert *
    # 2^32
    key = expert * 2**32 - ordered_bits(routing.weights.detach().reshape(-1))
    found, order = torch.sort(key, stable=True)
    first_key = torch.arange(num_experts + 1, device=key.device) * 2**32 - 2**31
    start = torch.searchsorted(found, first_key)
    rank = torch.arange(flat.numel(), device=key.device) - start[expert[order]]
    kept = (
        torch.empty_like(flat, dtype=torch.bool)
        .scatter(0, order, rank < most)
        .view(routing.experts.shape)
    )
    kept = kept & (routing.experts >= 0)
    return Routing(torch.where(kept, routing.experts, -1), torch.where(kept, routing.weights, 0.0))


def naive_drop_beyond(routing: Routing, num_experts: int, most: int) -> Routing:
    """The specification of `drop_beyond`: a loop over experts on the host."""
    kept = torch.zeros_like(routing.experts, dtype=torch.bool)
    listed = routing.experts.tolist()
    weights = routing.weights.tolist()
    for expert in range(num_experts):
        pairs = [
            (t, j) for t, places in enumerate(listed) for j, e in enumerate(places) if e == expert
        ]
        for t, j in sorted(pairs, key=lambda pair: -weights[pair[0]][pair[1]])[:most]:
            kept[t, j] = True
    return Routing(torch.where(kept, routing.experts, -1), torch.where(kept, routing.weights, 0.0))


def first_best(values: Tensor, count: int) -> Tensor:
    """Places of the `count` largest of the last dimension, largest first, of equal ones the first:
    int64 [..., count].

    torch.topk leaves open which of equal values it takes, and takes others on the CPU than on CUDA;
    so each value gets a key of its own.
    """
    size = values.shape[-1]
    backwards = torch.arange(size - 1, -1, -1, device=values.device)
    keys = torch.add(backwards, ordered_bits(values), alpha=size)
    return torch.topk(keys, count, dim=-1).indices


def ordered_bits(values: Tensor) -> Tensor:
    """int32 that order as the float32 `values` do (-0 below +0, NaN as infinity)."""
    bits = torch.nan_to_num(values, nan=math.inf, posinf=math.inf, neginf=-math.inf).view(
        torch.int32
    )
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _within_best_groups(biased: Tensor, groups: int, kept: int) -> Tensor:
    """[T, E] with minus infinity outside the `kept` groups whose two best sum up highest."""
    grouped = biased.unflatten(-1, (groups, -1))
    best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    stays = torch.zeros_like(best, dtype=torch.bool).scatter(1, first_best(best, kept), True)
    return torch.where(stays[:, :, None], grouped, -math.inf).flatten(1)


def _check(logits: Tensor, settings: RouterSettings) -> None:
    if logits.dtype != torch.float32:
        raise ValueError(
            f"route needs float32 logits, got {logits.dtype}, in which close scores become equal; "
            "multiply by the router's weight in float32"
        )
    experts = logits.shape[-1]
    if (
        experts % settings.groups
        or settings.per_token > experts // settings.groups * settings.groups_kept
    ):
        raise ValueError(
            f"route cannot choose {settings.per_token} of {experts} experts in {settings.groups} "
            "groups, "
            f"of which {settings.groups_kept} are kept"
        )
