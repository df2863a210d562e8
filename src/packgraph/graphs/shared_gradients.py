"""Gradients of parameters that several threads train.

Alone, a module's gradient buffers are the `.grad` of its parameters, and backward graphs add to
them in place. Autograd adds to `.grad` too, for calls that run eagerly, and knows nothing of
graphs. With several threads both happen at once. Autograd's own adding is safe between threads. So
in shared modules `.grad` is no buffer: gradients of a replay are taken by themselves
(`SeparateGradients`), and autograd adds them to `.grad`.

    thread 1   F, B adds to the buffer, which is `.grad`            F, B  let go, replay apart, autograd adds to `.grad`
    thread 2                              first call: launches.share()  F, B  let go, replay apart, autograd adds

`.grad` moves at the first backward after that, not at the call before: a thread may change `.grad`
while another one runs a forward. Every backward sees to it for its own buffers, so none replays on
memory that is `.grad`, whoever put it there; and whoever replays on what is `.grad` has begun
before `launches.share()`, which waits.
"""  # noqa: E501

from collections.abc import Iterable

import torch

from packgraph.graphs.exclusive import Launches
from packgraph.graphs.gradients import GradientBuffer, cloned, with_local
from packgraph.graphs.parameters import has_hooks, local_tensor


@torch.no_grad()
def let_go(buffers: Iterable[GradientBuffer], launches: Launches) -> None:
    """Make every `.grad` that is a buffer a tensor of its own, while other threads may add to it.

    To be called when `launches.shared` is set, and without the launches: autograd may hold the lock
    of a parameter in a thread that waits for them.
    """
    due = [buffer for buffer in buffers if buffer.is_grad()]
    devices = {buffer.tensor.device for buffer in due if buffer.tensor.device.type == "cuda"}
    for device in devices:  # autograd adds on a stream of its own choice
        torch.cuda.synchronize(device)
    for buffer in due:
        if buffer.parameter.requires_grad and not has_hooks(buffer.parameter):
            _add_nothing(buffer)
            continue
        with launches:  # autograd adds nothing, or a hook would see a gradient that is none
            if buffer.is_grad():
                buffer.parameter.grad = cloned(buffer.tensor)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _add_nothing(buffer: GradientBuffer) -> None:
    """Have autograd replace `.grad` by the sum of it and -0.0, which changes no number.

    The node of a parameter adds out of place where gradients may be differentiated again, and holds
    its lock, as in every backward of every thread, until the sum has become `.grad`. (Hooks run
    without that lock.)
    """
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(buffer.parameter).node
        nothing = torch.zeros_like(local_tensor(buffer.tensor)).neg_()
        node(with_local(buffer.tensor, nothing))  # type: ignore[operator]
