"""Floating point operations that a model asks for, from shapes alone: the numerator of its share of
the peak.

Counted are the matrix products of forward and backward for real tokens: padding, recomputation,
norms, rotary and activation functions are none of the model's work. A weight matrix costs 2
operations per element and token in the forward and 4 in the backward (gradients of inputs and
weights); of experts, those that a token is routed to. Causal attention has L (L + 1) / 2 pairs in a
document of L tokens; each costs 2 D for the score and 2 D for the value per query head (D of keys,
D of values), and twice that in the backward, as with any product, although the kernels compute
scores again there. A head of Mamba-2 adds an outer product of P columns and S of state for each
token and multiplies the state by S columns to read it, 4 P S together, and twice that in the
backward: what the recurrence asks for, although kernels work on chunks and do more. Its convolution
is no product of matrices.
"""

from collections.abc import Sequence

from packgraph.models.branches import token_weights
from packgraph.models.config import DecoderConfig

PEAK_TFLOPS = 797.0  # measured on an H200: bfloat16, a product of two matrices of 8192 x 8192


def model_flops(config: DecoderConfig, lengths: Sequence[int], head: bool) -> int:
    """Operations of forward and backward for one microbatch of documents of these lengths.

    head: whether the head is run, too; the embedding is a lookup. Hidden states that come in have a
    gradient.
    """
    weights = token_weights(config) + (config.vocab_size * config.hidden_size if head else 0)
    others = sum(
        config.count(name) * kind.operations(config, lengths)
        for name, kind in config.kinds().items()
    )
    return 6 * weights * sum(lengths) + 3 * others


def peak_share(flops: float, milliseconds: float) -> float:
    """Share of PEAK_TFLOPS that `flops` operations in this time are."""
    return flops / (milliseconds * 1e-3) / (PEAK_TFLOPS * 1e12)
