"""What an eager run of captured code, before the capture, has shown of it."""

from typing import NamedTuple

import torch
from torch.distributed.tensor import Placement

from packgraph.graphs.calls import OperationLog
from packgraph.graphs.constants import Constants


class DryRun(NamedTuple):
    """What captured code uses and calls.

    Attributes:
        read: Tensors that were there before; whoever keeps the graphs must keep them, since a graph
            knows only their addresses. Empty where the backend needs no warm-up (it sees and keeps
            all itself), as is `written`.
        written: Those that forwards write to, and buffers among them.
        constants: Tensors that forwards make of numbers.
        calls: The operations of forwards.
        placements: Of gradients that are DTensors, by the number of their parameter among the
            module's.
        has_host_steps: Whether host functions run within.
        unpacks: Whether forwards have hooks around that make saved tensors anew in backwards, as
            checkpoints do.
    """

    read: list[torch.Tensor]
    written: list[torch.Tensor]
    constants: Constants
    calls: OperationLog
    placements: dict[int, tuple[Placement, ...]]
    has_host_steps: bool = False
    unpacks: bool = False
