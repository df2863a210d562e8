"""Balance of experts without an auxiliary loss: once per step every router's bias moves against the
load of the step.

The forwards of a step count on the device which experts tokens went to (`Gate.load`); here the
counts are summed over the replicas, in one exchange for all layers, and the biases move. It is part
of the optimizer's update, so that it is captured with it, repeated with it, and left out with it.
Source: arXiv 2408.15664.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from packgraph.models.layers.moe import moe_blocks
from packgraph.moe.balance import update_bias


class ExpertBalance:
    """The routers of some chunks of a model. group: replicas with the same routers, None = this
    process alone."""

    def __init__(self, chunks: Sequence[nn.Module], group: dist.ProcessGroup | None) -> None:
        self._gates = [block.gate for block in moe_blocks(chunks)]
        self._rates = [block.settings.bias_rate for block in moe_blocks(chunks)]
        self._group = group

    @torch.no_grad()
    def update(self, skip: Tensor | None = None) -> None:
        """Move all biases by the counts of the step, which begin anew. skip: bool [], whether to
        leave the biases."""
        if not self._gates:
            return
        loads = torch.stack([gate.load for gate in self._gates])
        if self._group is not None:
            dist.all_reduce(loads, group=self._group)
        for gate, load, rate in zip(self._gates, loads, self._rates, strict=True):
            bias = gate.e_score_correction_bias
            if bias is not None:
                update_bias(bias, load, rate if skip is None else torch.where(skip, 0.0, rate))
            gate.load.zero_()
