"""Muon: momentum, orthogonalised, for the matrices of hidden layers (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982).

    gradient ─▶ momentum (Nesterov) ─▶ five Newton-Schulz steps ─▶ directions of about equal length

Updates are scaled to the size that those of AdamW have (0.2 sqrt(max(rows, columns))), so learning
rate and weight decay are those of AdamW, which updates everything else: embedding and head,
norms, biases, stacks of experts. The host never waits, and a blocked update changes nothing, so an
update can be captured. The invariant: a matrix is updated as a whole, by a rank that has all of it.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.updates.rule import Updated, UpdateRule, clipped, put, write_parameters

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic polynomial, as in torch.optim.Muon
STEPS = 5
LEAST_NORM = 1e-7
BYTES = 4  # of state, of an element
NOT_HIDDEN = ("embed_tokens", "lm_head")  # parts of names whose matrices AdamW updates


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Tells whether Muon updates this parameter: a matrix that is no embedding or head."""
    return parameter.ndim == 2 and not set(name.split(".")) & set(NOT_HIDDEN)


class Muon(UpdateRule):
    """Updates of spans of matrices, all of which this rank has whole."""

    def __init__(self, updated: Sequence[Updated], config: OptimizerConfig) -> None:
        super().__init__(updated, ["momentum"])
        self._momentum, self._weight_decay = config.muon_momentum, config.weight_decay
        # Weight [rows, columns], gradient, of its span's dtype, and momentum: views of buffers.
        self._matrices = [
            [each.span.part(member, flat) for flat in (each.values, each.span.own_gradients, mean)]
            for each, mean in zip(self.updated, self.state["momentum"], strict=True)
            for member in each.span.members
        ]

    @torch.no_grad()
    def step(
        self, learning_rate: Tensor, steps: Tensor, scale: Tensor | None, blocked: Tensor | None
    ) -> None:
        """See `UpdateRule.step`."""
        for weight, narrow, momentum in self._matrices:
            gradient = clipped(narrow, scale)
            mean = momentum.lerp(gradient, 1 - self._momentum)
            direction = orthogonalized(gradient.lerp(mean, self._momentum))
            size = 0.2 * math.sqrt(max(weight.shape))
            updated = weight * (1 - learning_rate * self._weight_decay)
            updated -= direction.float() * (learning_rate * size)
            put(weight, updated, blocked)
            put(momentum, mean, blocked)
        write_parameters(self.updated)


def orthogonalized(matrix: Tensor) -> Tensor:
    """About U V^T of the singular value decomposition U S V^T of `matrix` [rows, columns]: singular
    values between 0.5 and 1.5 or so. bfloat16."""
    a, b, c = COEFFICIENTS
    turned = matrix.shape[0] > matrix.shape[1]
    found = matrix.bfloat16().T if turned else matrix.bfloat16()
    found = found / found.norm().clamp(min=LEAST_NORM)
    for _ in range(STEPS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if turned else found
