"""Memory of a recorded capture is right whenever its last reference goes: other threads drop theirs when they like."""
from unittest import mock

import torch
from torch import nn

from packgraph.graphs.graphed import graph
from packgraph.graphs.recorder.pool import RecorderPool
from packgraph.graphs.state_kinds import assume_constant


class HandsOut(nn.Module):
    """Somebody outside holds on to what a stage made, as a transfer does until its thread lets go."""

    def __init__(self, holder):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.holder = [holder]

    def forward(self, x):
        product = x * self.weight
        self.holder[0](product.detach())
        return (product * product).sum()


def test_a_reference_may_go_while_blocks_are_placed():
    held = assume_constant([])
    module = HandsOut(held.append)
    graphed = graph(module, backend="recorder", warmup=1, strict=True)
    original = RecorderPool.place

    def place(self, blocks):
        found = original(self, blocks)
        held.clear()
        return found

    with mock.patch.object(RecorderPool, "place", place):
        for number in range(4):
            x = torch.full((3,), float(number))
            loss = graphed(x)
            loss.backward()
            assert loss.item() == 3.0 * number**2
    assert graphed.stats.replayed > 0
    assert torch.equal(module.weight.grad, torch.full((3,), 2.0 * (0 + 1 + 4 + 9)))
    graphed.close()
