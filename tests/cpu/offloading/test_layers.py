"""Which modules are one layer, and the number that it has."""

import pytest
import torch
from torch import nn

import packgraph
from packgraph.graphs.recorder.copy_streams import EmulatedCopyStreams
from packgraph.offloading.api import attach, layer_names, layer_numbers
from packgraph.offloading.marks import offload_block
from packgraph.offloading.runtime import OffloadRuntime


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.offload = nn.Linear(8, 8), offload_block

    def forward(self, x):
        with self.offload("core_attn"):
            return self.lin(x).tanh()


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(count)))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["layers.4.attn", "layers.4.mlp", "layers.5.mlp"], {"layers.4": 4, "layers.5": 5}),
        (["1.layers.0.mlp", "1.layers.1.mlp"], {"1.layers.0": 0, "1.layers.1": 1}),
        (["encoder.layers.0", "decoder.layers.0"], {"encoder.layers.0": 0, "decoder.layers.0": 1}),
        (
            ["layers.3.branches.0.mlp", "layers.4.branches.0.mlp", "layers.4.branches.1.mlp"],
            {"layers.3": 0, "layers.4.branches.0": 1, "layers.4.branches.1": 2},
        ),
        (
            [
                "stages.0.blocks.0.mlp",
                "stages.0.blocks.1.mlp",
                "stages.1.blocks.0.mlp",
                "stages.1.blocks.1.mlp",
            ],
            {
                "stages.0.blocks.0": 0,
                "stages.0.blocks.1": 1,
                "stages.1.blocks.0": 2,
                "stages.1.blocks.1": 3,
            },
        ),
        (["layers.7.mlp"], {"layers.7": 7}),
        (["mlp", "attn"], {"": 0}),
        (["0", "1"], {"0": 0, "1": 1}),
    ],
    ids=["usual", "wrapped", "encoder-decoder", "branches", "stages", "one", "none", "sequence"],
)
def test_layers_by_the_names_of_modules(names, expected):
    assert layer_numbers(layer_names(names)) == expected


@pytest.mark.parametrize(
    ("module", "groups"),
    [
        (layers(3), 3),
        (nn.Sequential(nn.Linear(8, 8), layers(3)), 3),
        (nn.ModuleDict({"a": layers(2), "b": layers(2)}), 4),
        (nn.Sequential(layers(3), layers(3)), 6),
    ],
    ids=["sequence", "wrapped", "two", "stages"],
)
def test_a_forward_is_one_pass_with_a_group_for_every_layer(module, groups):
    runtime = OffloadRuntime(("core_attn",), EmulatedCopyStreams(), min_bytes=1)
    assert attach(runtime, module) == list(range(groups))
    x = torch.randn(4, 8)
    for part in module.values() if isinstance(module, nn.ModuleDict) else (module,):
        x = part(x)
    x.sum().backward()
    assert [group.layer for group in runtime.trace.groups] == list(range(groups))


def test_layers_that_are_graphed_themselves_get_the_engine_too():
    model = nn.ModuleList([packgraph.graph(Layer(), warmup=1) for _ in range(2)])
    runtime = OffloadRuntime(("core_attn",), EmulatedCopyStreams(), min_bytes=1)
    assert attach(runtime, model) == [0, 1]
    assert attach(runtime, packgraph.graph(Layer())) == [0]
