"""Forward and backward of one microbatch in one go, by the shortest way there is.

A loop that does nothing between a microbatch's forward and its backward needs no autograd graph:
the graphs of the chunk are launched one after another. Where that cannot be (an eager stage, a
fallback, someone who wants to look at the autograd graph) the call is made and differentiated as
usual; the numbers are the same bit by bit.
"""

from collections.abc import Callable
from typing import Any

import torch

from packgraph.graphs.graphed import GraphedModule, control
from packgraph.graphs.replay_handle import ReplayHandle


def forward_backward(
    graphed: GraphedModule, *args: Any, before: Callable[[torch.Tensor], None] | None = None
) -> torch.Tensor:
    """Call `graphed` on `args` and differentiate its only output, a 0-d loss. Gradients are added
    to `.grad`.

    before: called with the loss before its backward; it sees an autograd graph. Returns the loss,
    detached; it may be memory of the slot, so it holds its value only until the next call.
    """
    own = control(graphed)
    handle = own.acquire(args, {}) if before is None else None
    if isinstance(handle, ReplayHandle) and handle.is_direct and handle.makes_one_number:
        loss = handle.forward(args, {})
        handle.backward()
        return loss
    if isinstance(handle, ReplayHandle):
        loss = handle.run(args, {})
    else:
        loss = graphed(*args) if handle is None else own.fall_back(handle, args, {})
    if before is not None:
        before(loss)
    loss.backward()
    return loss.detach()
