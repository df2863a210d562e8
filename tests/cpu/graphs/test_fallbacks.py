"""When a call runs eagerly, what makes a key, and which facts about the module are checked."""

import gc

import pytest
import torch
from graphkit import make_toy, toy_inputs, toy_loss
from statekit import quietly
from torch import nn

import packgraph
from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.graphed import graph

PACK = packgraph.Capacity(tokens=8, documents=3)


class Packed(nn.Module):
    """Sums embedded tokens: the smallest module that takes a packed batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 4)

    def forward(self, x, batch):
        hidden = self.embedding(batch.tokens) * x
        return torch.where(batch.padding_mask[:, None], 0.0, hidden).sum()


def packed(lengths, capacity=PACK):
    return packgraph.pack([list(range(n)) for n in lengths], [capacity])[0]


def test_fallbacks_are_counted_under_their_reason():
    graphed = graph(Packed(), capacities=[PACK], warmup=1)
    x = torch.ones(8, 4)
    graphed(x, packed([3, 2])).backward()
    for _ in range(3):
        graphed(x, packed([3, 2, 1])).backward()
    with packgraph.eager("comparing"):
        graphed(x, packed([3])).backward()
    graphed(torch.ones(16, 4), packed([3], packgraph.Capacity(tokens=16, documents=3)))
    graphed(x, packed([1] * 5, packgraph.Capacity(tokens=8, documents=5)))
    assert dict(graphed.stats.fallbacks) == {
        "warm-up": 1,
        "comparing": 1,
        "capacity not declared": 1,
        "more documents than any capacity": 1,
    }
    assert graphed.stats.replayed == 3 and graphed.stats.captured == 1
    assert graphed.stats.capture_seconds > 0 and graphed.stats.pool_bytes > 0


def test_unknown_shapes_fall_back_when_capacities_are_declared():
    graphed = graph(nn.Linear(4, 4), capacities=[PACK], warmup=0)
    graphed(torch.randn(5, 4))
    graphed(torch.randn(8, 4))
    assert dict(graphed.stats.fallbacks) == {"unknown shape": 1} and graphed.stats.replayed == 1


def test_lengths_are_host_data_and_may_not_be_read_inside_a_region():
    class ReadsLengths(Packed):
        def forward(self, x, batch):
            return super().forward(x, batch) * len(batch.lengths)

    with pytest.raises(CaptureError, match="lengths"):
        graph(ReadsLengths(), warmup=0, strict=True)(torch.ones(8, 4), packed([3, 2]))


def test_new_lengths_need_no_new_capture():
    eager, graphed = Packed(), graph(Packed(), warmup=0)
    x = torch.ones(8, 4)
    for lengths in ([8], [3, 2], [1, 1, 1], [4, 4], [2]):
        assert torch.equal(graphed(x, packed(lengths)), eager(x, packed(lengths)))
    assert graphed.stats.captured == 1 and graphed.stats.replayed == 5


def test_a_number_that_changes_every_call_does_not_capture_forever(monkeypatch):
    class Scaled(nn.Module):
        def forward(self, x, factor):
            return x * factor

    graphed = graph(Scaled(), warmup=0)
    x = torch.ones(3, requires_grad=True)
    monkeypatch.setattr("packgraph.graphs.graphed.MAX_KEYS", 8)
    for step in range(20):
        assert graphed(x, step)[0] == step
    assert graphed.stats.captured == 8
    assert graphed.stats.fallbacks["too many different call signatures"] == 12


def test_a_replaced_parameter_storage_is_captured_again_and_named():
    eager, graphed = make_toy(dropout=0.0), graph(make_toy(dropout=0.0), warmup=0)
    pair = toy_inputs(8)
    toy_loss(graphed(*pair)).backward()
    for model in (eager, graphed):
        model.attention[1].weight.data = model.attention[1].weight.data.clone() * 2
    with pytest.warns(PackgraphWarning, match=r"attention\.1\.weight"):
        out = graphed(*pair)
    assert torch.equal(out["loss"], eager(*pair)["loss"])
    assert graphed.stats.recaptures["module changed"] == 1


def test_a_replaced_parameter_storage_raises_in_strict_mode_with_the_users_line():
    graphed = graph(nn.Linear(4, 4), warmup=0, strict=True)
    graphed(torch.randn(2, 4))
    graphed.weight.data = graphed.weight.data.clone()
    with pytest.raises(CaptureError, match="storage of 'weight' was replaced") as caught:
        graphed(torch.randn(2, 4))
    assert __file__ in caught.value.where


def test_freezing_a_parameter_later_is_noticed():
    graphed = graph(make_toy(dropout=0.0), warmup=0)
    toy_loss(graphed(*toy_inputs(8))).backward()
    graphed.zero_grad()
    graphed.attention[0].weight.requires_grad_(False)
    quietly(lambda: toy_loss(graphed(*toy_inputs(8))).backward())
    assert graphed.attention[0].weight.grad is None
    assert graphed.attention[1].weight.grad is not None


def test_module_hooks_are_refused_with_the_way_out():
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_forward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="forward hooks"):
        graph(module, strict=True)
    with pytest.warns(PackgraphWarning, match="forward hooks"):
        graphed = graph(module, warmup=0)
    graphed(torch.randn(2, 2))
    assert dict(graphed.stats.fallbacks) == {"module hooks": 1}


def test_distributed_data_parallel_is_refused(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(CaptureError, match="DistributedDataParallel"):
            graph(wrapped, strict=True)
        graphed = graph(nn.Linear(2, 2), warmup=0)
        outer = nn.parallel.DistributedDataParallel(graphed)
        with pytest.warns(PackgraphWarning, match="DistributedDataParallel"):
            outer(torch.randn(2, 2)).sum().backward()
        assert graphed.weight.grad is not None
    finally:
        # A reducer that frees the group last holds the interpreter while it waits for a thread of
        # gloo, which may wait for the interpreter.
        wrapped = outer = None
        gc.collect()
        torch.distributed.destroy_process_group()


def test_fully_sharded_modules_are_refused(tmp_path):
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        with pytest.raises(CaptureError, match="FSDPModule"):
            graph(fully_shard(nn.Linear(2, 2)), strict=True)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"backend": "cuda"}, "needs a module on a CUDA device"),
        ({"backend": "metal"}, "unknown backend"),
        ({"warmup": -1}, "warmup"),
        ({"slots": 0}, "slots"),
        ({"granularity": "step"}, "use 'chunk'"),
        (
            {"granularity": "block", "scope": ["atn", "moe", "moe_router"]},
            r"(?s)unknown granularity.*did you mean 'attn'.*"
            r"'moe' already means.*names 'moe_router'",
        ),
        ({"scope": "attn"}, "collection of stage names"),
        ({"scope": []}, "scope is empty"),
        ({"scope": ["moe_preprocess"]}, "needs 'moe_router'"),
    ],
)
def test_illegal_options_say_all_that_is_wrong(options, match):
    with pytest.raises(ValueError, match=match):
        graph(make_toy(), **options)


def test_eager_needs_a_reason():
    with pytest.raises(ValueError, match="reason"), packgraph.eager(""):
        pass


def test_an_exchanged_submodule_and_a_replaced_table_are_noticed():
    class Looks(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * self.table

    module = Looks(nn.Linear(2, 2), nn.Identity())
    module.table = torch.ones(2)
    graphed = graph(module, warmup=0)
    graphed(torch.randn(3, 2))
    module[1] = nn.ReLU()
    with pytest.warns(PackgraphWarning, match=r"module._modules\['1'\]"):
        assert (graphed(torch.randn(3, 2)) >= 0).all()
    module.table = torch.zeros(2)
    with pytest.warns(PackgraphWarning, match=r"module\S*table\S* is another one"):
        assert (graphed(torch.randn(3, 2)) == 0).all()
    assert graphed.stats.replayed == 3 and graphed.stats.recaptures["module changed"] == 2


def test_capacities_may_be_one_or_several_and_nothing_else():
    graphed = graph(Packed(), capacities=PACK, warmup=0)
    graphed(torch.ones(8, 4), packed([3, 2])).backward()
    assert graphed.capacities == (PACK,) and graphed.stats.replayed == 1
    with pytest.raises(TypeError, match="Capacity"):
        graph(Packed(), capacities=[512])


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_a_module_that_holds_a_nested_tensor_runs_eagerly(layout):
    module = nn.Linear(4, 4)
    module.register_buffer(
        "ragged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    )
    with pytest.warns(PackgraphWarning, match="'ragged' is a nested tensor"):
        graphed = graph(module, warmup=0)
    x = torch.randn(3, 4)
    assert all(torch.equal(graphed(x), module(x)) for _ in range(3))
    assert dict(graphed.stats.fallbacks) == {"a nested tensor": 3}
