"""Choice of experts and their weights for each token, on the device, with static shapes and no host
sync.

    logits [T, E] -> scores --(+ bias per expert, whole groups left out: for the choice alone)-->
    experts [T, k]
                        |                                                                            |
                        +-------------------------- gather (unbiased) -> normalise -> scale -> weights [T, k]

Invariants: a padding row is routed nowhere (expert -1, weight exactly 0) and has no gradient,
whatever its logits hold; a row depends on its own logits only; of equal scores the expert with the
lower number wins, on every device. `naive_route` says what is computed; on CUDA it is one kernel,
and one its backward, between which only scores and experts are kept.
"""  # noqa: E501

import math
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from packgraph.moe.dispatch.dispatcher import Routing
from packgraph.ops.kernels import has_kernel, tl, triton

AT_ONCE = 256  # scores of a program, unless a row has more
TAKEN = tl.constexpr(-(2**31))  # below every number that a score has
LEFT_OUT = tl.constexpr(-(2**31) + 0x7FFFFF)  # minus infinity's


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


def _within_best_groups(biased: Tensor, groups: int, kept: int) -> Tensor:
    """[T, E] with minus infinity outside the `kept` groups whose two best sum up highest."""
    grouped = biased.unflatten(-1, (groups, -1))
    best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    stays = torch.zeros_like(best, dtype=torch.bool).scatter(1, first_best(best, kept), True)
    return torch.where(stays[:, :, None], grouped, -math.inf).flatten(1)


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


@triton.jit
def _swap(bits):  # type: ignore[no-untyped-def]
    """Bits of a float32 to an int32 that orders as it does, and back (`ordered_bits` in
    moe/routing.py)."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _ordered(value):  # type: ignore[no-untyped-def]
    return _swap(tl.where(value != value, float("inf"), value).to(tl.int32, bitcast=True))


@triton.jit
def _value(ordered):  # type: ignore[no-untyped-def]
    return _swap(ordered).to(tl.float32, bitcast=True)


@triton.jit
def _first_best(ordered, place, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Place of the largest of every row [ROWS, SIZE], of equal ones the first: [ROWS]."""
    largest = tl.max(ordered, 1)
    return tl.min(tl.where(ordered == largest[:, None], place[None, :], SIZE), 1)


@triton.jit
def _of_best_groups(  # type: ignore[no-untyped-def]
    ordered,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr,
    WIDE_GROUPS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """[ROWS, WIDE_GROUPS * WIDE], minus infinity outside the KEPT groups whose two best sum up
    highest."""
    grouped = tl.reshape(ordered, (ROWS, WIDE_GROUPS, WIDE))
    best = tl.max(grouped, 2)
    total = _value(best)
    if EACH > 1:
        member = tl.arange(0, WIDE)[None, None, :]
        at = tl.min(tl.where(grouped == best[:, :, None], member, WIDE), 2)
        total += _value(tl.max(tl.where(member == at[:, :, None], TAKEN, grouped), 2))
    group = tl.arange(0, WIDE_GROUPS)
    left = tl.where((group < GROUPS)[None, :], _ordered(total), TAKEN)
    stays = tl.zeros([ROWS, WIDE_GROUPS], tl.int32)
    for _ in range(KEPT):
        found = group[None, :] == _first_best(left, group, WIDE_GROUPS)[:, None]
        stays = tl.where(found, 1, stays)
        left = tl.where(found, TAKEN, left)
    out = (stays[:, :, None] == 0) & (grouped != TAKEN)
    return tl.reshape(tl.where(out, LEFT_OUT, grouped), (ROWS, WIDE_GROUPS * WIDE))


@triton.jit
def _scores(value, real, SOFTMAX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores of logits [ROWS, SIZE]; real: which of the SIZE there are."""
    if SOFTMAX:
        value = tl.where(real[None, :], value, -float("inf"))
        shares = tl.exp(value - tl.max(value, 1)[:, None])
        return shares / tl.sum(shares, 1)[:, None]
    else:
        return tl.sigmoid(value)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    logits, padding, bias, experts, weights, scores, tokens, scaling,
    COUNT: tl.constexpr, PLACES: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALISE: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr,
    WIDE_GROUPS: tl.constexpr, WIDE: tl.constexpr, WIDE_PLACES: tl.constexpr,
):  # fmt: skip
    each: tl.constexpr = COUNT // GROUPS
    size: tl.constexpr = WIDE_GROUPS * WIDE
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, size)
    expert = (place // WIDE) * each + place % WIDE
    real = (place // WIDE < GROUPS) & (place % WIDE < each)
    inside = row < tokens
    routed = inside & (tl.load(padding + row, mask=inside, other=1) == 0)
    here = row[:, None] * COUNT + expert[None, :]
    score = _scores(
        tl.load(logits + here, mask=routed[:, None] & real[None, :], other=0.0), real, SOFTMAX
    )
    tl.store(scores + here, score, mask=inside[:, None] & real[None, :])
    biased = score
    if BIASED:
        biased += tl.load(bias + expert, mask=real, other=0.0)[None, :]
    ordered = tl.where(real[None, :], _ordered(biased), TAKEN)
    if KEPT < GROUPS:
        ordered = _of_best_groups(ordered, GROUPS, KEPT, each, ROWS, WIDE_GROUPS, WIDE)
    turn = tl.arange(0, WIDE_PLACES)
    chosen = tl.zeros([ROWS, WIDE_PLACES], tl.int32)
    weight = tl.zeros([ROWS, WIDE_PLACES], tl.float32)
    for j in range(PLACES):
        at = _first_best(ordered, place, size)
        found = place[None, :] == at[:, None]
        ordered = tl.where(found, TAKEN, ordered)
        own = turn[None, :] == j
        chosen = tl.where(own, ((at // WIDE) * each + at % WIDE)[:, None], chosen)
        weight = tl.where(own, tl.sum(tl.where(found, score, 0.0), 1)[:, None], weight)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 1) + 1e-20)[:, None]
    there = row[:, None] * PLACES + turn[None, :]
    wanted = inside[:, None] & (turn < PLACES)[None, :]
    tl.store(experts + there, tl.where(routed[:, None], chosen, -1), mask=wanted)
    tl.store(weights + there, tl.where(routed[:, None], weight * scaling, 0.0), mask=wanted)


def choose(
    logits: Tensor,
    padding: Tensor,
    bias: Tensor | None,
    outputs: tuple[Tensor, Tensor, Tensor],
    softmax: bool,
    normalise: bool,
    scaling: float,
    groups: int,
    kept: int,
) -> None:
    """Fill outputs: experts int32 [T, k], weights float32 [T, k] and scores float32 [T, E], all
    contiguous.

    logits: float32 [T, E]. padding: bool [T]. bias: float32 [E] or None. The rest as
    `RouterSettings`.

        one row      scores, biased -> numbers that order as they do -> k times: the largest, of
                     equal ones the first; out
        in registers |<- group 0 ->|<- group 1 ->| ...    each group filled up to a power of two

    By single operations this sorts 64-bit keys, whose radix sort reads a row a dozen times, and
    writes every step between. Here a program takes some rows, 256 scores at a time or one row, and
    is one warp: finding the largest needs no memory. Padding rows are not read. Nothing is atomic.
    """
    experts, weights, scores = outputs
    (tokens, count), places = logits.shape, experts.shape[1]
    wide_groups, wide = triton.next_power_of_2(groups), triton.next_power_of_2(count // groups)
    rows = max(AT_ONCE // (wide_groups * wide), 1)
    if tokens:
        _choose[(triton.cdiv(tokens, rows),)](
            logits.contiguous(),
            padding.contiguous(),
            scores if bias is None else bias.contiguous(),
            experts,
            weights,
            scores,
            tokens,
            scaling,
            COUNT=count,
            PLACES=places,
            GROUPS=groups,
            KEPT=kept,
            SOFTMAX=softmax,
            NORMALISE=normalise,
            BIASED=bias is not None,
            ROWS=rows,
            WIDE_GROUPS=wide_groups,
            WIDE=wide,
            WIDE_PLACES=triton.next_power_of_2(places),
            num_warps=1,
        )


@triton.jit
def _of_scores(  # type: ignore[no-untyped-def]
    of_weights, scores, experts, row, expert, number, scaling,
    PLACES: tl.constexpr, COUNT: tl.constexpr, NORMALISE: tl.constexpr, WIDE_PLACES: tl.constexpr,
):  # fmt: skip
    """Gradient of scores [ROWS, WIDE] that comes through the weights. number: experts of the rows
    [ROWS, WIDE_PLACES]."""
    turn = tl.arange(0, WIDE_PLACES)
    live = (number >= 0) & (number < COUNT)
    grad = (
        tl.load(of_weights + row[:, None] * PLACES + turn[None, :], mask=live, other=0.0) * scaling
    )
    if NORMALISE:
        score = tl.load(scores + row[:, None] * COUNT + number, mask=live, other=0.0)
        total = (tl.sum(score, 1) + 1e-20)[:, None]
        grad = (grad - tl.sum(grad * score, 1)[:, None] / total) / total
    gradient = tl.zeros([row.shape[0], expert.shape[0]], tl.float32)
    for j in range(PLACES):
        own = turn[None, :] == j
        at = tl.sum(tl.where(own, number, 0), 1)
        gradient = tl.where(
            expert[None, :] == at[:, None], tl.sum(tl.where(own, grad, 0.0), 1)[:, None], gradient
        )
    return gradient


@triton.jit
def _differentiate(  # type: ignore[no-untyped-def]
    of_weights, of_scores, scores, experts, out, tokens, scaling,
    COUNT: tl.constexpr, PLACES: tl.constexpr, SOFTMAX: tl.constexpr, NORMALISE: tl.constexpr,
    BY_WEIGHTS: tl.constexpr, BY_SCORES: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    WIDE_PLACES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert, turn = tl.arange(0, WIDE), tl.arange(0, WIDE_PLACES)
    inside = row < tokens
    number = tl.load(
        experts + row[:, None] * PLACES + turn[None, :],
        mask=inside[:, None] & (turn < PLACES)[None, :],
        other=-1,
    )
    routed = (tl.max(number, 1) >= 0)[:, None]
    here = row[:, None] * COUNT + expert[None, :]
    real = (expert < COUNT)[None, :]
    score = tl.load(scores + here, mask=routed & real, other=0.0)
    gradient = tl.zeros([ROWS, WIDE], tl.float32)
    if BY_WEIGHTS:
        gradient = _of_scores(
            of_weights,
            scores,
            experts,
            row,
            expert,
            number,
            scaling,
            PLACES,
            COUNT,
            NORMALISE,
            WIDE_PLACES,
        )
    if BY_SCORES:
        gradient += tl.load(of_scores + here, mask=routed & real, other=0.0)
    if SOFTMAX:
        gradient = score * (gradient - tl.sum(score * gradient, 1)[:, None])
    else:
        gradient = gradient * (score * (1.0 - score))
    tl.store(out + here, tl.where(routed, gradient, 0.0), mask=inside[:, None] & real)


def differentiate(
    of_weights: Tensor | None,
    of_scores: Tensor | None,
    scores: Tensor,
    experts: Tensor,
    softmax: bool,
    normalise: bool,
    scaling: float,
) -> Tensor:
    """Gradient of logits, float32 [T, E], 0 in padding rows, whatever their gradients hold.

    of_weights: float32 [T, k], of_scores: float32 [T, E]: gradients, None where there is none.
    scores and experts: as `choose` has made them.
    """
    (tokens, count), places = scores.shape, experts.shape[1]
    out, wide = scores.new_empty(scores.shape), triton.next_power_of_2(count)
    rows = max(AT_ONCE // wide, 1)
    if tokens:
        _differentiate[(triton.cdiv(tokens, rows),)](
            scores if of_weights is None else of_weights.contiguous(),
            scores if of_scores is None else of_scores.contiguous(),
            scores,
            experts,
            out,
            tokens,
            scaling,
            COUNT=count,
            PLACES=places,
            SOFTMAX=softmax,
            NORMALISE=normalise,
            BY_WEIGHTS=of_weights is not None,
            BY_SCORES=of_scores is not None,
            ROWS=rows,
            WIDE=wide,
            WIDE_PLACES=triton.next_power_of_2(places),
            num_warps=1,
        )
    return out


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


_route_backward.register_fake(
    lambda of_weights, of_scores, scores, *_: scores.new_empty(scores.shape)
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    experts, _, scores = output
    ctx.set_materialize_grads(False)  # without a loss of the router nothing comes for the scores
    ctx.mark_non_differentiable(experts)
    ctx.save_for_backward(scores, experts)
    ctx.settings = inputs[4:7]


def _route_gradient(
    ctx: Any, of_experts: None, of_weights: Tensor | None, of_scores: Tensor | None
) -> tuple[Tensor | None, ...]:
    scores, experts = ctx.saved_tensors
    nothing = of_weights is None and of_scores is None
    found = (
        None if nothing else _route_backward(of_weights, of_scores, scores, experts, *ctx.settings)
    )
    return (found, *[None] * 8)


route_in_one.register_autograd(_route_gradient, setup_context=_save)


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
    if has_kernel(logits):
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
