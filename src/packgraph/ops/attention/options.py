"""Options of causal attention within documents that families of models add: windows, soft caps,
sinks, dropout.

    scores = softcap * tanh(q k^T * scale / softcap)      0 <= row - column < window
    probabilities = exp(scores) / (exp(sink) + sum exp(scores))

A sink is one number for each query head, a key that takes probability and gives no value.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ScoreOptions(NamedTuple):
    """Options of one call.

    window: how many of the last tokens of its document a token sees, itself included; None = all.
    softcap: bound on scores, approached as a tanh; 0 = none. dropout: probability that a
    probability is dropped. sinks: [Hq], or None.
    """

    window: int | None = None
    softcap: float = 0.0
    dropout: float = 0.0
    sinks: Tensor | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the options that are in use: what a backend must know."""
        used = {
            "window": self.window is not None,
            "softcap": bool(self.softcap),
            "dropout": bool(self.dropout),
            "sinks": self.sinks is not None,
        }
        return tuple(name for name, is_used in used.items() if is_used)


PLAIN = ScoreOptions()


def lacking(needs: tuple[str, ...], known: frozenset[str]) -> list[str]:
    """Returns why a backend that knows the options `known` cannot serve `needs`; empty = it can."""
    missing = [name for name in needs if name not in known]
    return [f"it has no {', '.join(missing)}"] if missing else []


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with one more key for each head, from attention without it.

    out: [T, Hq, D]; lse: float32 [Hq, T]; sinks: [Hq]. Returns both as if the key had been there.
    Rows whose lse is undefined give undefined rows.
    """
    with_key = torch.logaddexp(lse, sinks.float()[:, None])
    share = torch.exp(lse - with_key).t()[:, :, None]
    return (out.float() * share).to(out.dtype), with_key


def gradient_of_sinks(
    grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, padding: Tensor
) -> Tensor:
    """Gradient of sinks [Hq], in their dtype, from `with_sinks`' results and the gradient of out.

    The sink's value is zero, so its score gets -p * sum(grad * out), p being its probability.
    """
    probability = torch.exp(sinks.float()[:, None] - lse)
    delta = (grad.float() * out.float()).sum(-1).t()
    return (-probability * delta).masked_fill(padding[None], 0.0).sum(1).to(sinks.dtype)
