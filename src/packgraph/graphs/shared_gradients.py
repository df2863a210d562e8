"""Gradients of parameters that several threads train.

Alone, a module's gradient buffers are the `.grad` of its parameters, and backward graphs add to them in place. Autograd
adds to `.grad` too, for calls that run eagerly, and knows nothing of graphs. With several threads both happen at once.
Autograd's own adding is safe between threads. So in shared modules `.grad` is no buffer: a backward graph adds to
buffers of zeros, and autograd adds copies of them to `.grad`.
"""
from collections.abc import Iterable, Sequence

import torch

from packgraph.graphs.exclusive import Launches
from packgraph.graphs.parameters import local_tensor

Owned = tuple[torch.nn.Parameter, torch.Tensor]


@torch.no_grad()
def let_go(pairs: Iterable[Owned], launches: Launches) -> None:
    """Make every `.grad` that is a buffer a tensor of its own, while other threads may add to it.

    Autograd holds a lock of the parameter while it adds, and the hook that is called then. To be called without the
    launches: on CUDA the hook runs in the engine's thread.
    """
    for parameter, buffer in pairs:
        def exchange(given: torch.Tensor, buffer: torch.Tensor = buffer) -> None:
            with launches, torch.no_grad():
                if given.grad is buffer:
                    given.grad = buffer.clone()

        if parameter.grad is buffer:
            handle = parameter.register_post_accumulate_grad_hook(exchange)
            try:  # minus zero changes no number
                torch.autograd.backward([parameter], [torch.full_like(buffer, -0.0)])
            finally:
                handle.remove()


@torch.no_grad()
def begin(owned: Sequence[Owned]) -> list[Owned]:
    """Before a backward graph adds to the buffers: those whose sums autograd has to add, zeroed."""
    apart = [(parameter, buffer) for parameter, buffer in owned if parameter.grad is not buffer]
    if apart:
        torch._foreach_zero_([local_tensor(buffer) for _, buffer in apart])
    return apart


@torch.no_grad()
def taken(apart: Sequence[Owned]) -> list[torch.Tensor]:
    """After the backward graph, still with the launches: copies of the sums."""
    return [buffer.clone() for _, buffer in apart]


def add(apart: Sequence[Owned], sums: Sequence[torch.Tensor]) -> None:
    """Have autograd add the copies to `.grad`. Without the launches: hooks of the user's may run."""
    if apart:
        torch.autograd.backward([parameter for parameter, _ in apart], list(sums))
