"""Cross-entropy of a linear head, chunk by chunk: the [T, V] logits never exist at once.

    hidden [T, H]  |chunk 0|chunk 1| ... |   each chunk: logits [C, V] -> losses [C], grad_hidden
    [C, H],
                                             grad_weight [V, H] += ...; then the logits are dropped

Gradients are computed in the forward pass, while the logits are there, and scaled by the incoming
gradient in the backward pass: no second product with the head, which is a quarter of the work of a
small model. Rows with the label -100 contribute exactly zero, whatever their hidden state holds. A
label outside the vocabulary makes the loss and the gradients NaN: on a device nothing else can be
said without waiting for it. Nothing is atomic, so results repeat bitwise.

By single operations a row of logits is read and written about ten times, in float32 half of them;
with a vocabulary of 152k that costs as much as the three products with the head. On CUDA one kernel
reads it twice and writes the gradient over it. Every row is a program: a first pass finds maximum
and sum of exponentials (online, Milakov and Gimelshein 2018, arXiv:1805.02867), a second one writes
softmax - one_hot in the logits' own dtype. A row of 152k words is larger than shared memory, and
those under way are larger than the cache: so the second pass goes backwards and begins with what
was read last, and what it has written is the first to leave.

The gradient of the head's matrix is there before the factor is known. Compiled code multiplies and
adds to the weight's `.grad` at once (`add_scaled_gradient`, which graphs/compiled/products.py puts
in place of `scaled_gradient`): three numbers of an element are moved where two operations move
five.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from packgraph.ops.kernels import HAS_TRITON, has_kernel, tl, triton
from packgraph.ops.linear import autocast

IGNORED = -100
CHUNK_BYTES = 2**31  # logits of one chunk at most, where a kernel writes over them
COPIED_ELEMENTS = 2**28  # where single operations make copies of them, some in float32
BLOCK = 8192  # logits of a row that a program reads at once
# Of gradients that the kernel adds: float32 ones go by two operations.
ADDED_DTYPES = (torch.bfloat16, torch.float16)
ADDED_BLOCK, ADDED_WARPS = 4096, 8  # elements and warps of a program that adds


def token_count(labels: Tensor) -> Tensor:
    """Number of labels that count in the loss: 0-d int64 on the device of `labels`."""
    return (labels != IGNORED).sum()


def step_count(tokens: Tensor | None, labels: Tensor) -> Tensor:
    """Count that a loss is divided by, at least 1: that of the step, None = of `labels` alone."""
    return (token_count(labels) if tokens is None else tokens).clamp(min=1)


def check_count(tokens: object) -> None:
    """Raises TypeError unless labels of a step are counted by a tensor, or not at all: a graph
    would hold a number for good."""
    if not isinstance(tokens, Tensor | None):
        raise TypeError(
            f"tokens_in_step must be a 0-d tensor on the batch's device, not {tokens!r}: write "
            f"torch.tensor({tokens!r}, device=batch.tokens.device)"
        )


def is_word(labels: Tensor, vocab_size: int) -> Tensor:
    """bool, shaped as `labels`: whether each is a word of the vocabulary."""
    return (labels >= 0) & (labels < vocab_size)


def writes_over(logits: Tensor) -> bool:
    """Returns whether a kernel writes gradients over such logits: on CUDA with Triton."""
    return HAS_TRITON and logits.is_cuda


def rows_per_chunk(vocab_size: int, itemsize: int | None = None) -> int:
    """Rows of logits that are held at once: a multiple of 128, at least 128.

    Args:
        vocab_size: Logits of a row.
        itemsize: Bytes of a logit over which its gradient is written (`writes_over`); None where
            copies are made.
    """
    elements = COPIED_ELEMENTS if itemsize is None else CHUNK_BYTES // itemsize
    return max(elements // vocab_size // 128, 1) * 128


def naive_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: float = 1.0, softcap: float = 0.0
) -> Tensor:
    """The specification: all logits at once, torch's cross-entropy over the rows that count."""
    counted = labels != IGNORED
    logits, words = (hidden[counted] @ weight.t()).float() * scale, labels[counted]
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    legal = is_word(words, weight.shape[0])
    losses = F.cross_entropy(logits, words.masked_fill(~legal, 0), reduction="none")
    return (losses * torch.where(legal, 1.0, torch.nan)).sum()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int | None = None,
    *,
    scale: float = 1.0,
    softcap: float = 0.0,
    hits: bool = False,
) -> Tensor:
    """Cross-entropy of a linear head in chunks of rows, without the whole logits.

    Sum over rows of -log softmax(hidden @ weight.T)[label]. Gradients are computed in the forward.

    Args:
        hidden: [T, H], floating point.
        weight: [V, H], of the same dtype.
        labels: int64 [T], each in [0, V), or -100: its loss and gradients are exactly 0. Any other
            label makes the loss and all gradients NaN.
        chunk: Rows of logits held at once. None derives it from V.
        scale: Factor on the logits.
        softcap: Bound on the scaled logits x, which become softcap * tanh(x / softcap). 0 is none.
        hits: Whether labels with the largest logit of their row are counted, too.

    Returns:
        The sum, a 0-d float32 tensor; with `hits` float32 [2], the second number, which has no
        gradient, being their count.

    Raises:
        ValueError: If `chunk` is below 1.

    Examples:
        >>> hidden, weight = torch.zeros(3, 8), torch.zeros(10, 8)
        >>> packgraph.linear_cross_entropy(hidden, weight, torch.tensor([1, 2, -100])).exp().round()
        tensor(100.)
    """
    itemsize = weight.element_size() if writes_over(weight) and not softcap else None
    rows = rows_per_chunk(weight.shape[0], itemsize) if chunk is None else chunk
    if rows < 1:
        raise ValueError(
            f"linear_cross_entropy needs a chunk of at least one row, got chunk={chunk}"
        )
    given = weight.dtype
    hidden, weight = autocast(hidden, weight)
    # inside the function autograd is off, so whether gradients are wanted must be asked here
    want_hidden = torch.is_grad_enabled() and hidden.requires_grad
    want_weight = torch.is_grad_enabled() and weight.requires_grad
    own = weight.dtype == given  # a copy would be kept for nothing
    return _LinearCrossEntropy.apply(
        hidden, weight, labels, rows, want_hidden, want_weight, own, scale, softcap, hits
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: int,
        want_hidden: bool,
        want_weight: bool,
        own: bool,
        scale: float,
        softcap: float,
        hits: bool,
    ) -> Tensor:
        losses = torch.empty(labels.shape, dtype=torch.float32, device=labels.device)
        right = torch.zeros(int(hits), dtype=torch.float32, device=labels.device)  # or none

        def gradient(products: Tensor, part: slice) -> Tensor | None:
            if hits:  # scale and cap keep the order of logits
                right.add_((products.argmax(-1) == labels[part]).sum())
            wanted = want_hidden or want_weight
            told = labels[part], losses[part]
            return gradient_of_products(products, *told, scale, softcap, wanted=wanted)

        grad_hidden, grad_weight = head_gradients(
            hidden, weight, labels, rows, want_hidden, want_weight, gradient
        )
        # The weight tells compiled code whose gradient is added to (`scaled_gradient`).
        identified = own and grad_weight is not None
        ctx.save_for_backward(grad_hidden, grad_weight, weight if identified else None)
        ctx.hits = hits
        return torch.cat((losses.sum()[None], right)) if hits else losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, weight = ctx.saved_tensors
        grad = grad[0] if ctx.hits else grad
        of_weight = (
            scaled(grad_weight, grad)
            if weight is None
            else scaled_gradient(grad_weight, grad, weight)
        )
        return scaled(grad_hidden, grad), of_weight, *[None] * 8


def head_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: int,
    want_hidden: bool,
    want_weight: bool,
    gradient: Callable[[Tensor, slice], Tensor | None],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden [T, H] and of weight [V, H] where they are wanted, by chunks of `rows`.

    gradient: of the products [C, V] of the rows of a slice, which it may write over, in their dtype
    or None; called for each chunk, in order.
    """
    grad_hidden = torch.empty_like(hidden) if want_hidden else None
    grad_weight: Tensor | None = None
    for start in range(0, labels.shape[0], rows):
        part = slice(start, start + rows)
        chunk_hidden = hidden[part].masked_fill((labels[part] == IGNORED)[:, None], 0.0)
        grad_logits = gradient(chunk_hidden @ weight.t(), part)
        if grad_logits is None:
            continue
        if grad_hidden is not None:
            grad_hidden[part] = grad_logits @ weight
        if want_weight:
            product = grad_logits.t() @ chunk_hidden
            # sums over chunks are float32: rounding every partial sum to bfloat16 would lose
            # gradients
            grad_weight = product if grad_weight is None else grad_weight.float().add_(product)
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def gradient_of_products(
    products: Tensor,
    labels: Tensor,
    losses: Tensor,
    scale: float,
    softcap: float,
    *,
    wanted: bool,
) -> Tensor | None:
    """`gradient_of_logits` for logits that are scaled and capped `products` [C, V], which may be
    written over: the gradient of the products."""
    if scale != 1.0:
        products = products.mul_(scale)
    slope = None
    if softcap:
        share = torch.tanh(products.float() / softcap)
        slope = (1 - share.square()) if wanted else None
        products = (share * softcap).to(products.dtype)
    found = gradient_of_logits(products, labels, losses, wanted=wanted)
    if found is None:
        return None
    if slope is not None:
        found = (found * slope).to(found.dtype)
    return found if scale == 1.0 else found.mul_(scale)


def naive_gradient_of_logits(
    logits: Tensor, labels: Tensor, losses: Tensor, *, wanted: bool
) -> Tensor | None:
    """The specification of `gradient_of_logits`, by single operations."""
    ignored = (labels == IGNORED)[:, None]
    illegal = ~is_word(labels, logits.shape[1])[:, None]
    log_probabilities = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    target = labels[:, None].masked_fill(illegal, 0)
    target_log_probability = log_probabilities.gather(1, target)
    losses.copy_(-_defined(target_log_probability, illegal, ignored)[:, 0])
    if not wanted:
        return None
    probabilities = log_probabilities.exp_()
    probabilities.scatter_(
        1, target, torch.expm1(target_log_probability)
    )  # p - 1 without cancellation
    return _defined(probabilities, illegal, ignored).to(logits.dtype)


def _defined(values: Tensor, illegal: Tensor, ignored: Tensor) -> Tensor:
    """`values` [C, ...], NaN where the label is no word and 0 where it is ignored: in place, as
    rows of logits are the largest tensors of a step."""
    return values.masked_fill_(illegal, torch.nan).masked_fill_(ignored, 0.0)


@triton.jit
def _row(  # type: ignore[no-untyped-def]
    logits, labels, losses, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, IGNORED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    counted = label != IGNORED
    legal = (label >= 0) & (label < SIZE)
    target = tl.where(legal, label, 0)
    start = logits + row * stride
    at_target = tl.load(start + target).to(tl.float32)
    largest = -float("inf")
    total = 0.0
    for first in range(0, SIZE, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(
            start + column, mask=column < SIZE, other=-float("inf"), eviction_policy="evict_last"
        ).to(tl.float32)
        larger = tl.maximum(largest, tl.max(value, 0))
        shift = tl.where(
            larger == -float("inf"), 0.0, larger
        )  # so far nothing but -inf, and inf - inf is no number
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(value - shift), 0)
        largest = larger
    log_sum = largest + tl.log(total)
    illegal = tl.where(
        legal, 0.0, float("nan")
    )  # added: there is no number for a word that does not exist
    tl.store(losses + row, tl.where(counted, log_sum - at_target + illegal, 0.0))
    less = at_target - log_sum
    # p - 1 without cancellation: by the series of expm1 where p is close to 1
    series = less * (1.0 + less * (0.5 + less * (1.0 / 6.0 + less * (1.0 / 24.0))))
    gradient_at_target = tl.where(less > -0.1, series, tl.exp(less) - 1.0)
    for before in range(0, SIZE, BLOCK):
        column = (SIZE - 1) // BLOCK * BLOCK - before + tl.arange(0, BLOCK)
        value = tl.load(start + column, mask=column < SIZE, other=-float("inf")).to(tl.float32)
        gradient = tl.where(column == target, gradient_at_target, tl.exp(value - log_sum))
        gradient = tl.where(counted, gradient + illegal, 0.0)
        tl.store(start + column, gradient, mask=column < SIZE, eviction_policy="evict_first")


@torch.library.custom_op("packgraph::logits_to_gradients", mutates_args=("logits", "losses"))
def logits_to_gradients(logits: Tensor, labels: Tensor, losses: Tensor) -> None:
    """Write the loss of every row to `losses` and the gradient of its logits over `logits`.

    logits: [C, V], a float dtype, rows contiguous. labels: int64 [C], -100 = the row does not
    count: loss and gradient are exactly 0, whatever it holds. A label outside [0, V) gives a loss
    and gradients of NaN; nothing is read outside the row. losses: float32 [C]. One operation for
    torch.compile.
    """
    rows, size = logits.shape
    _row[(rows,)](
        logits,
        labels,
        losses,
        logits.stride(0),
        SIZE=size,
        BLOCK=min(BLOCK, triton.next_power_of_2(size)),
        IGNORED=-100,
        num_warps=8 if size > 4096 else 4,
    )


def gradient_of_logits(
    logits: Tensor, labels: Tensor, losses: Tensor, *, wanted: bool
) -> Tensor | None:
    """Write the loss of every row to `losses`; returns the gradient of `logits`, in their dtype, if
    `wanted`.

    logits: [C, V]; labels: int64 [C]; losses: float32 [C]. May write over `logits`. On CUDA one
    kernel does it all, see `ops/loss.py`.
    """
    if writes_over(logits):
        logits_to_gradients(logits, labels, losses)
        return logits if wanted else None
    return naive_gradient_of_logits(logits, labels, losses, wanted=wanted)


def scaled(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    """`gradient` (any float dtype) times `factor` (float32 []), rounded once, to the gradient's
    dtype."""
    return None if gradient is None else _scaled(gradient, factor)


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    # One dimension, not none: then the product is formed in float32. A 0-d factor would be rounded
    # to bfloat16 first, which puts the same error into every gradient.
    return torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient))


@triton.jit
def _add_product(total, part, factor, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    found = tl.load(part + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    found = found.to(total.dtype.element_ty).to(tl.float32)
    found += tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, found.to(total.dtype.element_ty), mask=inside)


def add_scaled(total: Tensor, part: Tensor, factor: Tensor) -> None:
    """total += part * factor, the product rounded to total's dtype before it is added. Both
    contiguous, of at most 32 bits. factor: float32, one number."""
    size = total.numel()
    if size:
        grid = (triton.cdiv(size, ADDED_BLOCK),)
        # Unfused, so that a product for a float32 total is rounded, too, as by two operations.
        options = {"num_warps": ADDED_WARPS, "enable_fp_fusion": False}
        _add_product[grid](total, part, factor, size, BLOCK=ADDED_BLOCK, **options)


@torch.library.custom_op("packgraph::scaled_gradient", mutates_args=())
def scaled_gradient(gradient: Tensor, factor: Tensor, weight: Tensor) -> Tensor:
    """`scaled(gradient, factor)`, which is the gradient of `weight`."""
    return _scaled(gradient, factor)


@torch.library.custom_op("packgraph::add_scaled_gradient", mutates_args=("total",))
def add_scaled_gradient(total: Tensor, gradient: Tensor, factor: Tensor, weight: Tensor) -> None:
    """total += `scaled_gradient(gradient, factor, weight)`: the same bits where total has their
    dtype. Where it is float32, the product is not rounded to a narrower one."""
    whole = total.is_contiguous() and gradient.is_contiguous()
    if has_kernel(total) and whole and gradient.dtype in ADDED_DTYPES:
        add_scaled(total, gradient, factor)
    else:
        total.add_(_scaled(gradient.to(total.dtype), factor))


scaled_gradient.register_fake(lambda gradient, *_: torch.empty_like(gradient))
