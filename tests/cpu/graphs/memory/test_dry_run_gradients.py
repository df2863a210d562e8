"""A dry run holds no gradients of parameters: those of all layers together may be more than there
is, where layers are sharded."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import packgraph
from packgraph.graphs.checks.host_sync import CaptureChecker
from packgraph.graphs.dry_run import _CheckedRun
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

WIDTH, LAYERS = 24, 6


class Layers(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        if tied:
            self.layers[-1] = self.layers[0]

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        hidden = self.embed(batch.tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.square().mean()


def tensors(tree):
    """Those that have the shape of a weight."""
    return [
        leaf
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor) and leaf.shape == (WIDTH, WIDTH)
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_layers_do_not_wait_for_each_other(tied, monkeypatch):
    alive, most, inside = list[weakref.ref[torch.UntypedStorage]](), 0, False
    dispatch, backward = CaptureChecker.__torch_dispatch__, _CheckedRun._backward

    def noted(self, func, types, args=(), kwargs=None):
        nonlocal most
        results = dispatch(self, func, types, args, kwargs)
        inputs = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        for result in tensors(results) if inside else []:
            storage = result.untyped_storage()
            if storage._cdata not in inputs:  # no view of a weight
                alive.append(weakref.ref(storage))
        most = max(most, sum(storage() is not None for storage in alive))
        return results

    def watched(self, ends, inputs):
        nonlocal inside
        inside = True
        backward(self, ends, inputs)
        inside = False

    monkeypatch.setattr(CaptureChecker, "__torch_dispatch__", noted)
    monkeypatch.setattr(_CheckedRun, "_backward", watched)
    torch.manual_seed(0)
    model, plain = Layers(tied), Layers(tied)
    plain.load_state_dict(model.state_dict())
    graphed = packgraph.graph(model, capacities=[Capacity(8, 2)], granularity="chunk", warmup=1)
    for step in range(4):
        batch = packgraph.pack([[1 + step, 2, 3, 4], [5, 6]], [Capacity(8, 2)])[0]
        for module in (graphed, plain):
            module(batch).backward()
    assert graphed.stats.replayed == 3
    assert 0 < most <= 3  # one that is made, one that it is added to, one on its way
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
