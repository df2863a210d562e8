"""Balance of experts: how many tokens each gets, the bias that moves the choice against the load,
and auxiliary losses of the router.

    each forward of training:    load += expert_counts(experts)              int64, in place, in the graph
    once per step:               load summed over ranks (by the caller), then update_bias: load is 0
                                 again

Sums of integers: the same bits in every order, so atomics do no harm here.

Losses are 0-d float32 tensors on the device; padding has no part in any of them.

A balance loss is E * sum over experts of f * P: the fraction of tokens an expert gets times its
mean share of scores. Only P has a gradient, and it is linear in the tokens' shares:

    loss = sum over tokens t, experts e of share[t, e] * price[document of t, e]      price: from integer counts alone

So nothing is summed per document but integers. The sum over tokens has a fixed order, the gradient
of a token is its price: no atomics on floats, same bits in every run, and one document's scores
never touch another's gradient.

Where a row is spread over ranks (`context`), tokens are those of this rank, whose share of the loss
comes out; counts are summed over the ranks.
"""  # noqa: E501

from typing import Any

import torch
from torch import Tensor

from packgraph.ops.attention.context import ContextGroup, total

TINY = 1e-20


def expert_counts(experts: Tensor, num_experts: int) -> Tensor:
    """Tokens of each expert: int64 [E]. experts: int [T, k], -1 = padding, which is not counted. No
    host sync."""
    return count_keys(experts, experts >= 0, num_experts).long()


@torch.no_grad()
def update_bias(bias: Tensor, counts: Tensor, rate: float | Tensor) -> None:
    """One step of auxiliary-loss-free balancing (arXiv 2408.15664), in place: bias += rate *
    sign(mean - counts).

    bias: float32 [E]. counts: int64 [E], of the whole step over all ranks; zeroed here for the next
    step. A step without tokens leaves the bias as it is. No host sync.
    """
    # in integers: a mean rounded to float32 would move experts that are exactly balanced
    direction = torch.sign(counts.sum() - counts * counts.numel())
    bias.add_(direction.to(bias.dtype) * rate)
    counts.zero_()


def count_keys(keys: Tensor, live: Tensor, size: int) -> Tensor:
    """Counts 0 ... size - 1 in `keys` where `live`: int32 [size]. keys: int, live: bool, any shape.

    int32, which Inductor adds atomically inside its kernels (int64 it does not). What is not live
    adds nothing, but somewhere: spread over all places, since additions to one place wait for each
    other.
    """
    flat, counted = keys.reshape(-1), live.reshape(-1)
    elsewhere = torch.arange(flat.numel(), device=flat.device) % size
    place = torch.where(counted, flat.long(), elsewhere)
    return torch.zeros(size, dtype=torch.int32, device=flat.device).scatter_add(
        0, place, counted.int()
    )


def load_loss(
    scores: Tensor, experts: Tensor, valid: Tensor, context: ContextGroup | None = None
) -> Tensor:
    """Balance loss over all tokens of a microbatch (Switch Transformer, arXiv 2101.03961), 1 if
    balanced: 0-d float32.

    scores: float32 [T, E], not negative (softmax or sigmoid); a token's shares are its scores
    divided by their sum. experts: int [T, k], the choice, -1 = none. valid: bool [T], False =
    padding. 0 with zero gradients if all is padding. Differentiable in scores.
    """
    return _balance_loss(scores, experts, torch.where(valid, 0, 1), 1, context)


def document_loss(
    scores: Tensor,
    experts: Tensor,
    document_ids: Tensor,
    valid: Tensor,
    documents: int,
    context: ContextGroup | None = None,
) -> Tensor:
    """Balance loss of each document by itself, averaged over documents that have tokens: 0-d
    float32.

    The sequence-wise loss of DeepSeek-V3 (arXiv 2412.19437), with each document of the pack as a
    sequence. document_ids: int [T], in [0, N) where valid. documents: N, a static bound. The rest
    as in `load_loss`.
    """
    return _balance_loss(
        scores, experts, torch.where(valid, document_ids, documents).long(), documents, context
    )


def batch_loss(
    scores: Tensor, counts: Tensor, valid: Tensor, context: ContextGroup | None = None
) -> Tensor:
    """Balance loss of a microbatch against the load of a whole step: 0-d float32.

    The global-batch loss of arXiv 2501.11873, with the fractions of the step before instead of the
    microbatches so far: they are known before the first forward, and the same for every microbatch,
    in any order and on any ranks. counts: int64 [E], routed tokens of that step over all ranks; all
    zero = none yet, and the loss and its gradient are 0. The rest as in `load_loss`.
    """
    with torch.no_grad():
        fractions = counts.float() / counts.sum().clamp(min=1)
        tokens = total(valid.sum(), context).clamp(min=1)
        prices = torch.stack((fractions * (len(counts) / tokens), torch.zeros_like(fractions)))
    return _PricedShares.apply(scores, prices, torch.where(valid, 0, 1))


def z_loss(logits: Tensor, valid: Tensor, context: ContextGroup | None = None) -> Tensor:
    """Mean over valid tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906): 0-d float32.

    logits: float32 [T, E], may hold anything in padding rows. valid: bool [T]. 0 if all is padding.
    """
    clean = torch.where(valid[:, None], logits, 0.0)
    squares = clean.logsumexp(dim=-1).square()
    return torch.where(valid, squares, 0.0).sum() / total(valid.sum(), context).clamp(min=1)


def attach(hidden: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
    """`hidden` unchanged, in whose backward `loss` gets the gradient `scale`, whatever gradient
    hidden gets.

    So the loss needs no way through the rest of the model. loss, scale: 0-d tensors; scale has no
    gradient, and is read in the backward. The result must be used once or more on the way to what
    is differentiated.
    """
    return _Attach.apply(hidden, loss, scale)


def naive_load_loss(scores: Tensor, experts: Tensor, valid: Tensor) -> Tensor:
    """The specification of `load_loss`: the valid rows picked out on the host."""
    scores, experts = scores[valid], experts[valid]
    if len(scores) == 0:
        return scores.sum()
    shares = scores / scores.sum(dim=-1, keepdim=True)
    fractions = torch.stack(
        [(experts == expert).sum() / experts.numel() for expert in range(scores.shape[1])]
    )
    return scores.shape[1] * (fractions * shares.mean(dim=0)).sum()


def naive_batch_loss(scores: Tensor, counts: Tensor, valid: Tensor) -> Tensor:
    """The specification of `batch_loss`: the valid rows picked out on the host."""
    scores, routed = scores[valid], int(counts.sum())
    if len(scores) == 0 or routed == 0:
        return 0 * scores.sum()
    shares = scores / scores.sum(dim=-1, keepdim=True)
    return scores.shape[1] * (counts / routed * shares.mean(dim=0)).sum()


def naive_document_loss(
    scores: Tensor, experts: Tensor, document_ids: Tensor, valid: Tensor, documents: int
) -> Tensor:
    """The specification of `document_loss`: a loop over documents on the host."""
    masks = [valid & (document_ids == document) for document in range(documents)]
    losses = [naive_load_loss(scores, experts, mask) for mask in masks if mask.any()]
    return torch.stack(losses).mean() if losses else scores[valid].sum()


def naive_z_loss(logits: Tensor, valid: Tensor) -> Tensor:
    """The specification of `z_loss`."""
    logits = logits[valid]
    return torch.log(logits.exp().sum(dim=-1)).square().mean() if len(logits) else logits.sum()


def _balance_loss(
    scores: Tensor, experts: Tensor, segments: Tensor, count: int, context: ContextGroup | None
) -> Tensor:
    """segments: int64 [T], the segment of each token, `count` = none."""
    return _PricedShares.apply(
        scores, _prices(experts, segments, count, scores.shape[1], context), segments
    )


@torch.no_grad()
def _prices(
    experts: Tensor, segments: Tensor, count: int, num_experts: int, context: ContextGroup | None
) -> Tensor:
    """Loss per unit of a token's share: float32 [count + 1, E], 0 in the last row (padding).

    E * f / (tokens of the segment * segments with tokens), since P is a mean over the segment's
    tokens.
    """
    inside = segments < count
    tokens = count_keys(segments, inside, count + 1)[:, None]
    keys = segments[:, None] * num_experts + experts
    chosen = count_keys(keys, inside[:, None] & (experts >= 0), (count + 1) * num_experts).view(
        -1, num_experts
    )
    if context is not None:
        chosen, tokens = total(torch.cat((chosen, tokens), dim=1), context).split(
            (num_experts, 1), dim=1
        )
    tokens = tokens.float()
    present = (tokens > 0).sum()
    fractions = chosen / (tokens * experts.shape[1]).clamp(min=1)
    return fractions * (num_experts / (tokens * present).clamp(min=1))


class _PricedShares(torch.autograd.Function):
    """Sum over t, e of scores[t, e] / sum(scores[t]) * prices[segments[t], e]; keeps no [T, E]
    tensor but scores."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, prices: Tensor, segments: Tensor) -> Tensor:
        sums = scores.sum(dim=-1) + TINY
        priced = (scores * prices[segments]).sum(dim=-1) / sums
        ctx.save_for_backward(scores, prices, segments)
        return torch.where(segments < prices.shape[0] - 1, priced, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        scores, prices, segments = ctx.saved_tensors
        sums = scores.sum(dim=-1, keepdim=True) + TINY
        price = prices[segments]
        priced = (scores * price).sum(dim=-1, keepdim=True) / sums
        inside = (segments < prices.shape[0] - 1)[:, None]
        return torch.where(inside, grad * ((price - priced) / sums), 0.0), None, None


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.dtype = loss.dtype
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad, scale.to(ctx.dtype), None
