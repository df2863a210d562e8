"""Operations that compute shapes and no numbers, as DTensor's do when a shape is new to it, are no
part of a graph."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from packgraph.graphs.graphed import graph


@torch.compiler.allow_in_graph
def mean_of_columns(x, weight):
    with FakeTensorMode():
        columns = (
            torch.empty_strided((x.shape[0], 3), (1, 0)).sum(0).shape[0]
        )  # elements that share memory
    return (x * weight).sum() / columns


class AsksForAShape(nn.Module):
    """Learns the shape of a sum on fake tensors, made by a factory: no operand says that they are
    fake."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return mean_of_columns(x, self.weight)


def test_factories_of_fake_tensors_are_not_replayed():
    module = AsksForAShape()
    graphed = graph(module, backend="recorder", warmup=1, strict=True)
    for number in range(4):
        x = torch.full((2, 3), float(number))
        loss = graphed(x)
        loss.backward()
        assert torch.equal(loss.detach(), x.sum() / 3)
    assert graphed.stats.replayed > 0
    assert torch.equal(module.weight.grad, torch.full((3,), 2.0 * (0 + 1 + 2 + 3) / 3))
    graphed.close()
