"""Log-probabilities of labels under a linear head, and the entropies of its rows, chunk by chunk:
the [T, V] logits never exist at once.

    hidden [T, H]  |chunk 0|chunk 1| ... |   each chunk: logits [C, V] -> log-probabilities [C],
                                             entropies [C]; then the logits are dropped

Every row has a gradient of its own, so the backward makes the logits of a chunk again. Rows with
the label -100 give exactly zero and get no gradient. A label outside the vocabulary makes the row
NaN. Nothing is atomic, so results repeat bitwise.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from packgraph.ops.linear import autocast
from packgraph.ops.loss import IGNORED, gradient_of_products, is_word, rows_per_chunk
from packgraph.packing.batch import PackedBatch

Output = Literal["loss", "hidden", "log_probabilities", "log_probabilities_and_entropies"]
_FLOATS = 8  # entropies hold about four float32 tensors of a chunk's form, the others one bfloat16
OUTPUTS: tuple[Output, ...] = (
    "loss",
    "hidden",
    "log_probabilities",
    "log_probabilities_and_entropies",
)


def logprobs(
    model: nn.Module, batch: PackedBatch, *, entropy: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of every label of a batch, without the whole logits.

    Args:
        model: A decoder of this package, what `packgraph.integrations.transformers.packed` makes
            of a live model, a module of your own whose forward takes `output=`, or
            `packgraph.graph` of any of them: it then replays graphs as any other call does.
        batch: The packed documents.
        entropy: Whether the entropies of the predictions are returned, too.

    Returns:
        Float32 [T], 0 where a token has no label (the last of a document, padding, prompts). With
        `entropy` a pair of such tensors, the second in nats. Both have gradients if these are on.

    Raises:
        TypeError: If the forward of `model` takes no `output`.

    Examples:
        >>> from packgraph.models.decoder import DecoderConfig, DecoderModel
        >>> config = DecoderConfig(
        ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2,
        ...     num_kv_heads=1, head_dim=4,
        ... )
        >>> batch, = packgraph.pack([[5, 6, 7], [8, 9]], [packgraph.Capacity(8, 2)])
        >>> packgraph.logprobs(DecoderModel(config), batch).shape
        torch.Size([8])
    """
    forward = model.forward
    if not _takes_output(getattr(forward, "__func__", forward)):
        raise TypeError(
            f"packgraph.logprobs calls model(batch, output=...), which {type(model).__name__} does "
            "not take: pass a DecoderModel, packed(model), or packgraph.graph of one"
        )
    if not entropy:
        return model(batch, output="log_probabilities")
    one, other = model(batch, output="log_probabilities_and_entropies").unbind()
    return one, other


@functools.lru_cache
def _takes_output(forward: Callable[..., Any]) -> bool:
    return "output" in inspect.signature(forward).parameters


def check_output(output: str) -> None:
    """Raises ValueError if no head knows `output`."""
    if output not in OUTPUTS:
        raise ValueError(f"output must be one of {', '.join(OUTPUTS)}, not {output!r}")


def linear_log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int | None = None,
    *,
    scale: float = 1.0,
    softcap: float = 0.0,
    entropy: bool = False,
) -> Tensor:
    """Log-probability of each label under a linear head: float32 [T], 0 where the label is -100.

    Args:
        hidden: [T, H], floating point.
        weight: [V, H], of the same dtype.
        labels: int64 [T], each in [0, V), or -100; any other makes its row NaN.
        chunk: Rows of logits held at once. None derives it from V.
        scale: Factor on the logits.
        softcap: Bound on the scaled logits x, which become softcap * tanh(x / softcap). 0 is none.
        entropy: Whether the result is float32 [2, T], the second row being the entropies of all
            predictions in nats, 0 where the label is -100.
    """
    rows = log_probability_rows(weight.shape[0], entropy) if chunk is None else chunk
    hidden, weight = autocast(hidden, weight)
    return _LogProbabilities.apply(hidden, weight, labels, rows, scale, softcap, entropy)


def log_probability_rows(words: int, entropy: bool) -> int:
    """Rows of a chunk of logits of so many words."""
    return rows_per_chunk(words * (_FLOATS if entropy else 1))


def naive_log_probabilities(
    logits: Tensor, labels: Tensor, scale: float = 1.0, softcap: float = 0.0, entropy: bool = False
) -> Tensor:
    """The specification of `linear_log_probabilities`, of the whole products [T, V] of a head."""
    logits = logits.float() * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    counted = labels != IGNORED
    logits = logits.masked_fill(~counted[:, None], 0.0)
    legal = is_word(labels, logits.shape[1])
    logs = logits.log_softmax(-1)
    found = logs.gather(1, labels.masked_fill(~legal, 0)[:, None])[:, 0]
    if entropy:
        certain = logs == -torch.inf  # of no other word: 0 * -inf is no number
        terms = logs.exp() * logs.masked_fill(certain, 0.0)
        found = torch.stack((found, -terms.sum(-1)))
    return torch.where(legal, found, torch.nan).masked_fill(~counted, 0.0)


class _LogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: int,
        scale: float,
        softcap: float,
        entropy: bool,
    ) -> Tensor:
        shape = (2, *labels.shape) if entropy else labels.shape
        found = torch.empty(shape, dtype=torch.float32, device=labels.device)
        for start in range(0, labels.shape[0], rows):
            part = slice(start, start + rows)
            words, (products, _) = labels[part], _products(hidden[part], weight, labels[part])
            if entropy:
                found[:, part] = naive_log_probabilities(products, words, scale, softcap, True)
            else:
                gradient_of_products(products, words, found[part], scale, softcap, wanted=False)
        ctx.save_for_backward(hidden, weight, labels)
        ctx.rows, ctx.how, ctx.entropy = rows, (scale, softcap), entropy
        return found if entropy else -found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors

        def gradient(products: Tensor, part: slice) -> Tensor:
            # A row that does not count has no gradient, whatever comes in.
            words, ignored = labels[part], labels[part] == IGNORED
            if ctx.entropy:
                given = grad[:, part].masked_fill(ignored, 0.0)
                return _gradient_with_entropies(products, words, given, *ctx.how)
            losses = torch.empty(words.shape, dtype=torch.float32, device=words.device)
            made = gradient_of_products(products, words, losses, *ctx.how, wanted=True)
            assert made is not None
            return made * (-grad[part, None]).masked_fill(ignored[:, None], 0.0)

        return *gradients_by_chunk(ctx, hidden, weight, labels, gradient), *[None] * 5


def _gradient_with_entropies(
    products: Tensor, labels: Tensor, given: Tensor, scale: float, softcap: float
) -> Tensor:
    """The gradient of `products` [C, V], float32. given: [2, C], of the log-probabilities l and of
    the entropies h; with p the probabilities it is l' (1[label] - p) - h' p (log p + h)."""
    logits = products.float() * scale
    slope = None
    if softcap:
        share = torch.tanh(logits / softcap)
        logits, slope = share * softcap, 1 - share.square()
    logs = logits.log_softmax(-1)
    chances = logs.exp()
    logs = logs.masked_fill(logs == -torch.inf, 0.0)
    illegal = ~is_word(labels, products.shape[1]) & (labels != IGNORED)
    target = labels.masked_fill(~is_word(labels, products.shape[1]), 0)[:, None]
    entropies = -(chances * logs).sum(-1, keepdim=True)
    found = chances * (logs + entropies) * -given[1][:, None]
    less = torch.expm1(logs.gather(1, target))  # p - 1 without cancellation
    found -= chances.scatter_(1, target, less) * given[0][:, None]
    if slope is not None:
        found *= slope
    return (found * scale).masked_fill_(illegal[:, None], torch.nan)


def _products(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Products [C, V] of a chunk, and its hidden states with zeros where no label counts."""
    live = hidden.masked_fill((labels == IGNORED)[:, None], 0.0)
    return live @ weight.t(), live


def gradients_by_chunk(
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    found: Callable[[Tensor, slice], Tensor],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden states and head, where they are asked for.

    Args:
        ctx: Of the operation, with `rows` of a chunk; its first inputs are `hidden` and `weight`.
        hidden: [T, H].
        weight: [V, H].
        labels: [T].
        found: Gives the gradients of a chunk's products [C, V].
    """
    grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
    grad_weight: Tensor | None = None
    for start in range(0, labels.shape[0], ctx.rows):
        part = slice(start, start + ctx.rows)
        products, live = _products(hidden[part], weight, labels[part])
        grad_products = found(products, part).to(hidden.dtype)
        if grad_hidden is not None:
            grad_hidden[part] = grad_products @ weight
        if ctx.needs_input_grad[1]:
            product = grad_products.t() @ live
            # sums over chunks are float32, as those of the loss
            grad_weight = product if grad_weight is None else grad_weight.float().add_(product)
    if grad_weight is not None:
        grad_weight = grad_weight.to(weight.dtype)
    return grad_hidden, grad_weight
