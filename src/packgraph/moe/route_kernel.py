"""The choice of experts as one kernel, and its backward as another; what they compute is
`naive_route`'s.

    one row      scores, biased -> numbers that order as they do -> k times: the largest, of equal
                 ones the first; out
    in registers |<- group 0 ->|<- group 1 ->| ...      each group filled up to a power of two

By single operations this sorts 64-bit keys, whose radix sort reads a row a dozen times, and writes
every step between. Here a program takes some rows, 256 scores at a time or one row, and is one
warp: finding the largest needs no memory. Padding rows are not read. Nothing is atomic, and a row's
results depend on its own logits only.
"""

import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 256  # scores of a program, unless a row has more
TAKEN = tl.constexpr(-(2**31))  # below every number that a score has
LEFT_OUT = tl.constexpr(-(2**31) + 0x7FFFFF)  # minus infinity's


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
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE_GROUPS: tl.constexpr,
    WIDE: tl.constexpr,
):
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
    logits,
    padding,
    bias,
    experts,
    weights,
    scores,
    tokens,
    scaling,
    COUNT: tl.constexpr,
    PLACES: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALISE: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE_GROUPS: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_PLACES: tl.constexpr,
):
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
    of_weights,
    scores,
    experts,
    row,
    expert,
    number,
    scaling,
    PLACES: tl.constexpr,
    COUNT: tl.constexpr,
    NORMALISE: tl.constexpr,
    WIDE_PLACES: tl.constexpr,
):
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
    of_weights,
    of_scores,
    scores,
    experts,
    out,
    tokens,
    scaling,
    COUNT: tl.constexpr,
    PLACES: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALISE: tl.constexpr,
    BY_WEIGHTS: tl.constexpr,
    BY_SCORES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_PLACES: tl.constexpr,
):
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
