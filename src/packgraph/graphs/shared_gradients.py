"""Gradients of parameters that several threads train.

Alone, a module's gradient buffers are the `.grad` of its parameters, and backward graphs add to them in place. Autograd
adds to `.grad` too, for calls that run eagerly, and knows nothing of graphs. With several threads both happen at once.
Autograd's own adding is safe between threads. So in shared modules `.grad` is no buffer: gradients of a replay are
taken by themselves (`SeparateGradients`), and autograd adds them to `.grad`.
"""
from collections.abc import Iterable

import torch

from packgraph.graphs.exclusive import Launches
from packgraph.graphs.gradients import GradientBuffer, GradientBuffers


def share(buffers: GradientBuffers, launches: Launches) -> None:
    """From now on several threads train with the module that these belong to."""
    launches.shared = buffers.shared = True
    let_go(buffers.all(), launches)


@torch.no_grad()
def let_go(buffers: Iterable[GradientBuffer], launches: Launches) -> None:
    """Make every `.grad` that is a buffer a tensor of its own, while other threads may add to it.

    Autograd holds a lock of the parameter while it adds, and the hook that is called then. To be called without the
    launches: on CUDA the hook runs in the engine's thread.
    """
    for buffer in buffers:
        def exchange(given: torch.Tensor, buffer: GradientBuffer = buffer) -> None:
            with launches, torch.no_grad():
                if given.grad is buffer.shown:
                    given.grad = buffer.tensor.clone()

        parameter = buffer.parameter
        if parameter.grad is buffer.shown:
            handle = parameter.register_post_accumulate_grad_hook(exchange)
            try:  # minus zero changes no number
                torch.autograd.backward([parameter], [torch.full_like(buffer.tensor, -0.0)])
            finally:
                handle.remove()
