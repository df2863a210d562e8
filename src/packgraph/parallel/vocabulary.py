"""Embedding, cross-entropy and log-probabilities with the vocabulary split over ranks: nobody ever
holds a whole row of logits.

    hidden [T, H] on all    each rank: logits [C, V/tp] of its words -> maximum, sum of
                            exponentials, target's logit
                            two small all-reduces [C, 1] and [C, 2] -> the same loss on all ranks

As in `ops/loss.py` gradients are computed in the forward pass, chunk by chunk, and rows without
a label contribute exactly zero, while tokens and labels that are no word of the vocabulary make NaN
on all ranks. Each rank's gradient of `hidden` is its words' share; the shares are summed on the way
out.

Rows of log-probabilities have gradients of their own. So their backward makes the logits of a chunk
again, as in `ops/log_probabilities.py`; what all ranks' words are together is kept for it, [3, T].
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from packgraph.ops.embedding import PADDING_INDEX, embedding
from packgraph.ops.linear import autocast
from packgraph.ops.log_probabilities import (
    gradients_by_chunk,
    linear_log_probabilities,
    log_probability_rows,
)
from packgraph.ops.loss import (
    IGNORED,
    head_gradients,
    is_word,
    linear_cross_entropy,
    rows_per_chunk,
    scaled,
)


def embed(tokens: Tensor, padding: Tensor, weight: Tensor, *, split_rows: bool) -> Tensor:
    """Rows of `weight` [V, H] for tokens int64 [T], zero where padding bool [T], else NaN for a
    token outside [0, V): [T, H].

    weight: a plain tensor, or a DTensor with its rows split over ranks; then with split_rows each
    rank gets its part [T / ranks, H] of the rows of the result, else all ranks get all. Raises
    ValueError for another split.
    """
    if not isinstance(weight, DTensor):
        legal = is_word(tokens, weight.shape[0])
        used = legal & ~padding
        # On CUDA an index outside the matrix would end the process.
        found = embedding(tokens.masked_fill(~used, PADDING_INDEX), weight)
        return torch.where(used[:, None], found, _filling(legal, padding, found.dtype))
    local, first_word = _own_words(weight), _first_word(weight)
    theirs = (tokens < first_word) | (tokens >= first_word + local.shape[0])
    found = F.embedding((tokens - first_word).masked_fill(theirs, 0), local)
    share = torch.where(
        (theirs | padding)[:, None],
        _filling(is_word(tokens, weight.shape[0]), padding, found.dtype),
        found,
    )
    mesh = weight.device_mesh
    summed = DTensor.from_local(share, mesh, [Partial()], run_check=False)
    return summed.redistribute(mesh, [Shard(0) if split_rows else Replicate()]).to_local()


def _filling(legal: Tensor, padding: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of rows that no word fills: [T, 1], NaN for an illegal token, 0 otherwise."""
    return torch.where(legal | padding, 0.0, torch.nan).to(dtype)[:, None]


def head_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """`linear_cross_entropy` for a head that may be a DTensor with its rows (the vocabulary) split
    over ranks.

    hidden: [T, H] on every rank, or this rank's rows [T / ranks, H]; labels: int64 [T]. softcap:
    bound on the logits, 0 is none. Returns 0-d float32, equal on all ranks. Raises ValueError for a
    head that is split in another way.
    """
    if not isinstance(weight, DTensor):
        return linear_cross_entropy(hidden, weight, labels, chunk, softcap=softcap)
    whole, own = _operands(hidden, weight, labels)
    wanted = (
        torch.is_grad_enabled() and whole.requires_grad,
        torch.is_grad_enabled() and own.requires_grad,
    )
    return _SplitCrossEntropy.apply(
        whole,
        own,
        labels,
        chunk or rows_per_chunk(own.shape[0]),
        _first_word(weight),
        weight.shape[0],
        weight.device_mesh.get_group(),
        softcap,
        *wanted,
    )


def head_log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    entropy: bool = False,
    chunk: int | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """`linear_log_probabilities` for a head that may be a DTensor with its rows (the vocabulary)
    split over ranks.

    hidden: [T, H] on every rank, or this rank's rows [T / ranks, H]; labels: int64 [T]. softcap:
    bound on the logits, 0 is none. Returns float32 [T], or [2, T] with entropies, equal on all
    ranks, and so must its gradient be. Raises ValueError for a head that is split in another way.
    """
    if not isinstance(weight, DTensor):
        return linear_log_probabilities(
            hidden, weight, labels, chunk, softcap=softcap, entropy=entropy
        )
    whole, own = _operands(hidden, weight, labels)
    return _SplitLogProbabilities.apply(
        whole,
        own,
        labels,
        chunk or log_probability_rows(own.shape[0], entropy),
        _first_word(weight),
        weight.shape[0],
        weight.device_mesh.get_group(),
        entropy,
        softcap,
    )


def _capped(logits: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """Logits within a soft cap, and their slope; as they are, and None, where there is none."""
    if not softcap:
        return logits, None
    share = torch.tanh(logits / softcap)
    return share * softcap, 1 - share.square()


def _operands(hidden: Tensor, weight: DTensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """All rows of `hidden`, whose gradients are summed over ranks, and this rank's words; in
    autocast's dtype."""
    own = _own_words(weight)
    whole = _everywhere(hidden, weight, labels).to_local(grad_placements=[Partial()])
    whole, own = autocast(whole, own)
    return whole, own


def all_rows(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """All rows of `hidden`, of which this rank may have its part only, as for
    `head_log_probabilities`: [T, H]. Its gradient must be equal on all ranks."""
    if not isinstance(weight, DTensor):
        return hidden
    return _everywhere(hidden, weight, labels).to_local()


def _everywhere(hidden: Tensor, weight: DTensor, labels: Tensor) -> DTensor:
    mesh = weight.device_mesh
    rows = Replicate() if hidden.shape[0] == labels.shape[0] else Shard(0)
    whole = DTensor.from_local(hidden, mesh, [rows], run_check=False)
    return whole.redistribute(mesh, [Replicate()])


def _own_words(weight: DTensor) -> Tensor:
    """This rank's rows of the matrix, differentiably."""
    if weight.placements != (Shard(0),):
        raise ValueError(
            f"embedding and head must be split along the vocabulary, as packgraph.parallel.tensor."
            f"parallelize does, (Shard(0),), not {weight.placements}"
        )
    return weight.to_local()


def _first_word(weight: DTensor) -> int:
    """Number of the first word that this rank holds: DTensor splits as torch.chunk does."""
    mesh = weight.device_mesh
    return mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: int,
        first_word: int,
        words: int,
        group: dist.ProcessGroup,
        softcap: float,
        want_hidden: bool,
        want_weight: bool,
    ) -> Tensor:
        losses = torch.empty(labels.shape, dtype=torch.float32, device=labels.device)

        def gradient(products: Tensor, part: slice) -> Tensor:
            counted = (labels[part] != IGNORED)[:, None]
            logits, slope = _capped(products.float(), softcap)
            word = labels[part, None] - first_word
            illegal = torch.where(is_word(labels[part, None], words), 0.0, torch.nan)
            losses[part], found = _chunk(logits, word, counted, illegal, group)
            return (found if slope is None else found.mul_(slope)).to(hidden.dtype)

        ctx.save_for_backward(
            *head_gradients(hidden, weight, labels, rows, want_hidden, want_weight, gradient)
        )
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return scaled(grad_hidden, grad), scaled(grad_weight, grad), *[None] * 8


def _chunk(
    logits: Tensor, word: Tensor, counted: Tensor, illegal: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Losses [C] and the gradient of this rank's logits [C, V/tp], written over them.

    word: [C, 1], the target as an index into this rank's words where it is one of them. illegal:
    [C, 1], NaN where the label is no rank's word, else 0.
    """
    (ours, index), _, exponentials, sums = _sums_of_words(logits, word, counted, group)
    total = sums[:, :1] + illegal
    target_log_probability = sums[:, 1:] - total.log()
    probabilities = exponentials.div_(total)
    # p - 1 without cancellation, where the target is one of ours
    at_target = torch.where(
        ours, torch.expm1(target_log_probability), probabilities.gather(1, index)
    )
    gradient = probabilities.scatter_(1, index, at_target).masked_fill_(~counted, 0.0)
    return -target_log_probability.masked_fill(~counted, 0.0)[:, 0], gradient


def _sums_of_words(
    logits: Tensor,
    word: Tensor,
    counted: Tensor,
    group: dist.ProcessGroup,
    entropy: bool = False,
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor, Tensor]:
    """Targets, as `_own_targets`; of all ranks' words the highest logit [C, 1]; the exponentials of
    logits below it [C, V/tp], written over them; sums of all ranks [C, 2 or 3].

    The sums are of exponentials, of the target's logit (one rank has it), and with `entropy` of
    exponentials times logits.
    """
    highest = logits.amax(-1, keepdim=True)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group)
    logits.sub_(highest)
    ours, index = _own_targets(word, counted, logits.shape[1])
    target_logit = logits.gather(1, index).masked_fill(~ours, 0.0)
    exponentials = logits.exp() if entropy else logits.exp_()
    parts = [exponentials.sum(-1, keepdim=True), target_logit]
    if entropy:
        certain = logits == -torch.inf  # of no such word: 0 * -inf is no number
        weighted = exponentials.mul_(logits.masked_fill_(certain, 0.0))
        parts.append(weighted.sum(-1, keepdim=True))
    sums = torch.cat(parts, dim=1)
    dist.all_reduce(sums, dist.ReduceOp.SUM, group)
    return (ours, index), highest, exponentials, sums


def _own_targets(word: Tensor, counted: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Mask of rows whose target is one of this rank's `words`, and its index, else 0: [C, 1]."""
    ours = counted & (word >= 0) & (word < words)
    return ours, word.masked_fill(~ours, 0)


class _SplitLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: int,
        first_word: int,
        words: int,
        group: dist.ProcessGroup,
        entropy: bool,
        softcap: float,
    ) -> Tensor:
        found = torch.empty((2, *labels.shape), dtype=torch.float32, device=labels.device)
        # Of all words: the highest logit, the logarithm of the sum of exponentials over it, and
        # the entropy.
        facts = torch.empty((3, *labels.shape), dtype=torch.float32, device=labels.device)
        for start in range(0, labels.shape[0], rows):
            part = slice(start, start + rows)
            counted = (labels[part] != IGNORED)[:, None]
            logits = (hidden[part].masked_fill(~counted, 0.0) @ weight.t()).float()
            logits, _ = _capped(logits, softcap)
            word = labels[part, None] - first_word
            found[0, part], known = _log_probabilities(logits, word, counted, group, entropy)
            facts[:, part], found[1, part] = known, known[2]
        legal = is_word(labels, words)
        found = torch.where(legal, found, torch.nan).masked_fill(labels == IGNORED, 0.0)
        ctx.save_for_backward(hidden, weight, labels, facts)
        ctx.rows, ctx.first_word, ctx.words, ctx.entropy = rows, first_word, words, entropy
        ctx.softcap = softcap
        return found if entropy else found[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, facts = ctx.saved_tensors

        def found(products: Tensor, part: slice) -> Tensor:
            counted = (labels[part] != IGNORED)[:, None]
            illegal = counted & ~is_word(labels[part, None], ctx.words)
            # A row that does not count has no gradient, whatever comes in.
            given = grad[..., part, None].masked_fill(~counted, 0.0)
            logits, slope = _capped(products.float(), ctx.softcap)
            gradient = _log_probability_gradient(
                logits,
                _own_targets(labels[part, None] - ctx.first_word, counted, weight.shape[0]),
                facts[:, part, None],
                tuple(given) if ctx.entropy else (given, None),
            )
            gradient = gradient if slope is None else gradient.mul_(slope)
            return gradient.masked_fill_(illegal, torch.nan)

        return *gradients_by_chunk(ctx, hidden, weight, labels, found), *[None] * 7


def _log_probabilities(
    logits: Tensor, word: Tensor, counted: Tensor, group: dist.ProcessGroup, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets [C], and what the backward needs to know of all words
    [3, C]. May write over `logits`."""
    _, highest, _, sums = _sums_of_words(logits, word, counted, group, entropy)
    log_sum = sums[:, 0].log()
    entropies = log_sum - sums[:, 2] / sums[:, 0] if entropy else torch.zeros_like(log_sum)
    return sums[:, 1] - log_sum, torch.stack((highest[:, 0], log_sum, entropies))


def _log_probability_gradient(
    logits: Tensor,
    targets: tuple[Tensor, Tensor],
    facts: Tensor,
    given: tuple[Tensor, Tensor | None],
) -> Tensor:
    """The gradient of this rank's logits [C, V/tp], written over them.

    targets: as `_own_targets`. facts: [3, C, 1]. given: [C, 1] each, of the log-probabilities l and
    of the entropies h; with p the probabilities it is l' (1[label] - p) - h' p (log p + h).
    """
    (ours, index), (highest, log_sum, entropies) = targets, facts
    logs = logits.sub_(highest).sub_(log_sum)
    # p - 1 without cancellation, where the target is one of ours
    at_target = logs.gather(1, index)
    at_target = torch.where(ours, torch.expm1(at_target), at_target.exp())
    if given[1] is None:
        return logs.exp_().scatter_(1, index, at_target).mul_(-given[0])
    chances = logs.exp()
    found = logs.masked_fill_(logs == -torch.inf, 0.0).add_(entropies).mul_(chances).mul_(-given[1])
    return found.sub_(chances.scatter_(1, index, at_target).mul_(given[0]))
