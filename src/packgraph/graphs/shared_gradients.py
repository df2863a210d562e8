"""Gradients of parameters that several threads train.

Alone, a module's gradient buffers are the `.grad` of its parameters, and backward graphs add to them in place. Autograd
adds to `.grad` too, for calls that run eagerly, and knows nothing of graphs. With several threads both happen at once.
Autograd's own adding is safe between threads. So in shared modules `.grad` is no buffer: gradients of a replay are
taken by themselves (`SeparateGradients`), and autograd adds them to `.grad`.

    thread 1   F, B adds to the buffer, which is `.grad`            F, B  let go, replay apart, autograd adds to `.grad`
    thread 2                              first call: launches.share()  F, B  let go, replay apart, autograd adds

`.grad` moves at the first backward after that, not at the call before: a thread may change `.grad` while another one
runs a forward. Every backward sees to it for its own buffers, so none replays on memory that is `.grad`, whoever put it
there; and whoever replays on what is `.grad` has begun before `launches.share()`, which waits.
"""
from collections.abc import Iterable

import torch

from packgraph.graphs.exclusive import Launches
from packgraph.graphs.gradients import GradientBuffer
from packgraph.graphs.parameters import OwnHook, has_hooks


class _Exchange(OwnHook):
    """Makes the `.grad` that is a buffer a tensor of its own."""

    def __init__(self, buffer: GradientBuffer, launches: Launches) -> None:
        self._buffer, self._launches = buffer, launches

    def exchange(self, parameter: torch.Tensor) -> None:
        """Do so, if that is due yet."""
        with self._launches, torch.no_grad():
            if self._buffer.is_grad():
                parameter.grad = parameter.grad.clone()  # type: ignore[union-attr]  # it is the buffer


def let_go(buffers: Iterable[GradientBuffer], launches: Launches) -> None:
    """Make every `.grad` that is a buffer a tensor of its own, while other threads may add to it.

    Autograd holds a lock of the parameter while it adds, and while the hook runs that is called then. To be called
    when `launches.shared` is set, and without the launches: on CUDA the hook runs in the engine's thread.
    """
    for buffer in buffers:
        if buffer.is_grad():
            _let_go(buffer, _Exchange(buffer, launches))


@torch.no_grad()
def _let_go(buffer: GradientBuffer, moved: _Exchange) -> None:
    parameter = buffer.parameter
    if has_hooks(parameter) or not parameter.requires_grad:
        moved.exchange(parameter)  # the user's hooks are to see no gradient that is none; autograd adds nothing
        return
    handle = parameter.register_post_accumulate_grad_hook(moved.exchange)
    try:  # minus zero changes no number
        torch.autograd.backward([parameter], [torch.full_like(buffer.tensor, -0.0)])
    finally:
        handle.remove()
