"""Other ways of one AdamW update of bfloat16 weights than that of `train/optimizer.py`, over the
same flat buffers: what `update.py` times.

    copies     float32 copies of all gradients are made, clipped and updated: the naive twin
    kernel     one Triton kernel a span: 14 bytes of an element are read, 14 written
    compiled   the kernel that torch.compile makes of the same lines
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from packgraph.parallel.flat_buffers import GradientBucket
from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.optimizer import TINY
from packgraph.train.updates.adamw import fused_adamw
from packgraph.train.updates.host_state import parts_of

BLOCK = 4096
WARPS = 8


class State(NamedTuple):
    """A span, and float32 [own] of master, running mean, and running mean of squares."""

    span: GradientBucket
    master: Tensor
    mean: Tensor
    square: Tensor

    @staticmethod
    def of(span: GradientBucket) -> "State":
        master = span.own_parameters.detach().float()
        return State(span, master, torch.zeros_like(master), torch.zeros_like(master))


class Scalars(NamedTuple):
    """Numbers of one update, float32 [1] each: what gradients are multiplied by, weight decay
    times the rate, the rate over its correction, the root of the squares' correction, and whether
    nothing is to change."""

    scale: Tensor
    decay: Tensor
    rate: Tensor
    root: Tensor
    blocked: Tensor


class Candidate:
    """An optimizer of one process. step: of a `State` by scalars and configuration; None = by
    float32 copies of all gradients."""

    def __init__(
        self,
        spans: list[GradientBucket],
        config: OptimizerConfig,
        step: Callable[[State, Scalars, OptimizerConfig], None] | None,
    ) -> None:
        self.states = [State.of(span) for span in spans]
        self._config, self._step = config, step
        device = spans[0].parameters.device
        self.learning_rate, self.steps, self.blocked = (
            torch.zeros((), dtype=torch.float32, device=device) for _ in range(3)
        )
        self._copies = [torch.zeros_like(s.master) for s in self.states] if step is None else []

    @torch.no_grad()
    def update(self) -> Tensor:
        """Clip and update once, if not blocked; the norm. Can be captured."""
        if self._step is None:
            return self._update_copies()
        pieces = [s.span.own_gradients[part] for s in self.states for part in parts_of(s.span)]
        norm = _total(torch._foreach_norm(pieces, 2, dtype=torch.float32))
        ordinal, (beta1, beta2) = (self.steps + 1).double(), self._config.betas
        rate = self.learning_rate.double()
        found = (
            self._scale(norm),
            rate * self._config.weight_decay,
            rate / (1 - beta1**ordinal),
            (1 - beta2**ordinal).sqrt(),
            self.blocked,
        )
        for state in self.states:
            self._step(state, Scalars(*(value.float().view(1) for value in found)), self._config)
        self.steps += self.blocked == 0
        return norm

    def _update_copies(self) -> Tensor:
        states, copies = self.states, self._copies
        torch._foreach_copy_(copies, [s.span.own_gradients for s in states])
        pieces = [c[part] for c, s in zip(copies, states, strict=True) for part in parts_of(s.span)]
        norm = _total(torch._foreach_norm(pieces))
        torch._foreach_mul_(copies, self._scale(norm))
        for decays in (True, False):
            chosen = [n for n, s in enumerate(states) if s.span.decays == decays]
            flats = [states[n].master for n in chosen], [copies[n] for n in chosen]
            means = [states[n].mean for n in chosen], [states[n].square for n in chosen]
            about = self._config, self.learning_rate, self.steps + 1, self.blocked
            if chosen:
                fused_adamw(*flats, *means, *about, decays=decays)
        self.steps += self.blocked == 0
        torch._foreach_copy_([s.span.own_parameters for s in states], [s.master for s in states])
        return norm

    def _scale(self, norm: Tensor) -> Tensor:
        assert self._config.clip_norm is not None
        return (self._config.clip_norm / (norm + TINY)).clamp(max=1.0)


def _total(norms: list[Tensor]) -> Tensor:
    return torch.stack(list(norms)).square().sum().sqrt()


def naive_step(state: State, scalars: Scalars, config: OptimizerConfig) -> None:
    """What the kernel does, in plain torch."""
    span, (beta1, beta2) = state.span, config.betas
    decay = scalars.decay if span.decays else torch.zeros_like(scalars.decay)
    _adamw(
        span.own_parameters, span.own_gradients, *state[1:], *scalars._replace(decay=decay),
        beta1, beta2, config.eps,
    )  # fmt: skip


def compiled_step() -> Callable[[State, Scalars, OptimizerConfig], None]:
    """`naive_step` as torch.compile makes it."""
    compiled = torch.compile(_adamw, fullgraph=True, dynamic=False)

    def step(state: State, scalars: Scalars, config: OptimizerConfig) -> None:
        span, (beta1, beta2) = state.span, config.betas
        decay = scalars.decay if span.decays else torch.zeros_like(scalars.decay)
        flats = span.own_parameters, span.own_gradients, *state[1:]
        compiled(*flats, *scalars._replace(decay=decay), beta1, beta2, config.eps)

    return step


def _adamw(
    parameters: Tensor,
    gradients: Tensor,
    masters: Tensor,
    means: Tensor,
    squares: Tensor,
    scale: Tensor,
    decay: Tensor,
    rate: Tensor,
    root: Tensor,
    blocked: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    gradient = gradients * scale
    mean = beta1 * means + (1 - beta1) * gradient
    square = beta2 * squares + (1 - beta2) * gradient * gradient
    updated = masters - decay * masters
    updated = updated - rate * mean / (square.sqrt() / root + eps)
    good = blocked == 0
    means.copy_(torch.where(good, mean, means))
    squares.copy_(torch.where(good, square, squares))
    masters.copy_(torch.where(good, updated, masters))
    parameters.copy_(masters)


@triton.jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    parameters, gradients, masters, means, squares, scale, decay, rate, root, blocked, size,
    beta1, rest1, beta2, rest2, eps, DECAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(blocked) == 0.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
        master = tl.load(masters + at, mask=inside, other=0.0)
        mean = beta1 * tl.load(means + at, mask=inside, other=0.0) + rest1 * gradient
        square = beta2 * tl.load(squares + at, mask=inside, other=0.0)
        square = square + rest2 * gradient * gradient
        if DECAYS:
            master = master - tl.load(decay) * master
        master = master - tl.load(rate) * mean / (tl.sqrt(square) / tl.load(root) + eps)
        tl.store(means + at, mean, mask=inside)
        tl.store(squares + at, square, mask=inside)
        tl.store(masters + at, master, mask=inside)
        tl.store(parameters + at, master.to(parameters.dtype.element_ty), mask=inside)


def kernel_step(
    state: State,
    scalars: Scalars,
    config: OptimizerConfig,
    *,
    block: int = BLOCK,
    warps: int = WARPS,
) -> None:
    """One launch for the span."""
    span, (beta1, beta2) = state.span, config.betas
    size = state.master.numel()
    _adamw_kernel[(triton.cdiv(size, block),)](
        span.own_parameters, span.own_gradients, *state[1:], *scalars, size,
        beta1, 1 - beta1, beta2, 1 - beta2, config.eps,
        DECAYS=span.decays, BLOCK=block, num_warps=warps,
    )  # fmt: skip
