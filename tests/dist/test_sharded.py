"""Sharded layers: the same numbers as replicas that keep everything, through graphs and eagerly."""

import dataclasses
import functools
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from distkit import CPU, run_ranks
from shardedkit import LAYERS, broken, settings, train
from torch import nn
from tracekit import differences

from packgraph.graphs.memory.budget import budget_bytes
from packgraph.graphs.stages import Stage, run_stages
from packgraph.models.config import ExpertConfig
from packgraph.parallel import sharded_layers
from packgraph.parallel.data import FlatParameters
from packgraph.parallel.layout import Layout
from packgraph.parallel.pieces import parts_of
from packgraph.parallel.sharded_layers import ShardedLayer, ShardedLayers, layers_of
from packgraph.train.build import build_chunks, make_optimizer
from packgraph.train.validate import validate
from packgraph.verification.matrix import budget_over, config_for, random_packs, tiny_hybrid_config
from packgraph.verification.ranks import STATE, verify_ranks


def run_kinds(mesh, kinds, options, changes):
    return [
        train(
            mesh,
            settings(shard, graph=graph, **{k: dict(v) for k, v in changes.items()}),
            **options,
        )
        for shard, graph in kinds
    ]


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_eager_equals_replicas_bitwise(shard):
    kinds = [("none", False), (shard, False)]
    for plain, parts in run_ranks(run_kinds, 2, kinds, {"packs": 2, "alike": True}, {}):
        assert not differences(plain, parts)


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_graphs_equal_eager_bitwise(shard, granularity):
    changes = {"graph_options": {"granularity": granularity, "strict": True}}
    kinds = [(shard, False), (shard, True)]
    options = {"packs": 3, "uneven": True}
    for eager, graph in run_ranks(run_kinds, 2, kinds, options, changes):
        assert graph["replayed"] >= 3 and not differences(eager, graph)


CASES = {
    "frozen embedding": ({"freeze": "embed_tokens"}, {}),
    "frozen below": ({"freeze": "layers.0."}, {"model": {"tie_embeddings": False}}),
    "recomputed": ({}, {"run": {"recompute": "full"}}),
    "recomputed cheaply": ({}, {"run": {"recompute": "selective"}}),
    "narrow": ({}, {"run": {"dtype": "bfloat16"}}),
    "one layer": ({}, {"model": {"num_layers": 1}}),
    "scope": ({}, {"graph_options": {"scope": ("mlp",), "granularity": "layer"}}),
    "scope of both": ({}, {"graph_options": {"scope": ("attn", "mlp")}}),
    "state on the host": ({}, {"optimizer": {"offload": True}}),
    "no clipping": ({}, {"optimizer": {"clip_norm": None}}),
}


@pytest.mark.parametrize("case", CASES)
def test_combinations(case):
    """Eager equals replicas with a microbatch each, graphs equal eager."""
    options, changes = CASES[case]
    kinds = [("none", False), ("parameters", False), ("parameters", True)]
    options = {"packs": 2, "alike": True, "steps": 5, **options}
    for plain, eager, graph in run_ranks(run_kinds, 2, kinds, options, changes):
        assert not differences(plain, eager)
        assert graph["replayed"] and not differences(eager, graph)


WITHOUT = {
    "a gather that is waited for": (ShardedLayer, "wait_for", lambda self, gathers: None),
    "a reduction that is waited for": (
        ShardedLayer,
        "add",
        lambda self, found: add_at_once(self, found),
    ),
    "gathers": (ShardedLayer, "gather", lambda self: []),
    "zeroed gradients": (
        ShardedLayer,
        "begin_backward",
        lambda self, *late: begin_on_what_is_there(self, *late),
    ),
    "a reduction of what was added last": (sharded_layers, "add_waiting_gradients", lambda: None),
}


def add_at_once(self, reductions, add=ShardedLayer.add):
    done = SimpleNamespace(wait=lambda: None)
    add(self, [(span, (done, parts)) for span, (_, parts) in reductions])


def begin_on_what_is_there(self, *late, begin=ShardedLayer.begin_backward):
    before = [span.gradients.clone() for span in self.spans]
    begin(self, *late)
    for span, content in zip(self.spans, before, strict=True):
        span.gradients.data.add_(content)


def run_broken(mesh, granularity):
    eager = settings("parameters")
    graph = settings("parameters", graph=True, graph_options={"granularity": granularity})
    return broken(mesh, eager, graph, WITHOUT, packs=2, steps=4)


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
def test_late_exchanges_are_waited_for_and_what_is_left_out_is_found(granularity):
    for found in run_ranks(run_broken, 2, granularity, seconds=200.0):
        assert not found.pop("")
        assert len(found) == len(WITHOUT) and all(found.values()), found


def incomplete_when_sent(mesh):
    """In each step, of spans of whole layers in the order in which they are sent: how many spans
    the last backward had still to complete."""
    steps, launch, reduce = [[]], FlatParameters._launch, FlatParameters.reduce

    def launching(self):
        if self.spans[self.launched].members[0].name.startswith("layers.") and self._expected:
            steps[-1].append(sum(map(bool, self._expected)))
        launch(self)

    def reducing(self):
        reduce(self)
        steps.append([])

    with (
        mock.patch.object(FlatParameters, "_launch", launching),
        mock.patch.object(FlatParameters, "reduce", reducing),
    ):
        found = train(mesh, settings("none", graph=True), packs=2, alike=True, steps=4)
    return steps[:-1], found["replayed"]


def test_whole_layers_are_sent_while_others_are_incomplete():
    """Norms of all layers are one span, which waits for the first layer; so does the embedding."""
    for steps, replayed in run_ranks(incomplete_when_sent, 2):
        assert replayed and [each[: LAYERS - 1] for each in steps] == [[4, 3]] * len(steps), steps


def held_bytes(mesh, shard):
    """Bytes of storages: (parameters of layers, gradients of layers, largest layer)."""
    config = settings(shard, model={"num_layers": 6})
    model = build_chunks(config, CPU, mesh)
    layer = sum(p.numel() for p in model.chunks[0].layers["0"].parameters() if p.ndim >= 2) * 4
    optimizer = make_optimizer(model, config, mesh)
    spans = [span for span in optimizer.flat.spans if span.members[0].name.startswith("layers.")]
    spans = [span for span in spans if span.decays]

    def count(tensors):
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    buffers = count([span.parameters for span in spans])
    parts = count([span.own_parameters for span in spans])
    gradients = count([span.gradients for span in spans])
    sums = count([span.own_gradients for span in spans])
    return buffers, parts, gradients, sums, layer


def test_a_rank_holds_its_part_and_two_buffers():
    for buffers, parts, gradients, sums, layer in run_ranks(held_bytes, 4, "parameters"):
        padded = layer + 4 * 4 * 128 * 2  # bytes; a span ends at a multiple of 128 for each rank
        assert 2 * layer <= buffers <= 2 * padded and 2 * layer <= gradients <= 2 * padded
        assert 6 * layer / 4 <= parts <= 6 * padded / 4
        assert 6 * layer / 4 <= sums <= 6 * padded / 4


class Odd(nn.Module):
    """A layer that makes autograd's order hard: casts of weights, one that is used twice, a product
    of weights alone, one without a gradient, and a second output."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        make = lambda: nn.Parameter(torch.randn(8, 8, generator=draw) / 4)  # noqa: E731
        self.one, self.twice, self.three, self.idle = make(), make(), make(), make()

    def run(self, state):
        hidden = state["hidden"]
        square = self.twice.double() @ self.three.double()
        hidden = hidden + torch.tanh(hidden @ self.one.bfloat16().float()) @ square.float()
        hidden = hidden + torch.sin(hidden @ self.twice)
        return {**state, "hidden": hidden, "extra": state["extra"] + square.square().mean()}


class OddModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Odd() for number in range(4)})

    def stages(self):
        return [Stage("odd", int(number), layer.run) for number, layer in self.layers.items()]

    def begin(self, rows, differentiable):
        return {"hidden": rows.clone().requires_grad_(differentiable), "extra": rows.new_zeros([])}

    def end(self, state):
        return state["hidden"].square().mean() + state["extra"].float()

    def forward(self, rows, differentiable):
        return run_stages(self, rows, differentiable)


def run_odd(mesh, differentiable):
    found = []
    for shard in ("none", "parameters"):
        model = OddModel()
        flat = FlatParameters(
            model.named_parameters(), mesh.group("dp"), layers=layers_of(model), shard=shard
        )
        if shard != "none":
            ShardedLayers(flat).put_into(model)
        flat.zero_gradients()
        rows = torch.randn(5, 8, generator=torch.Generator().manual_seed(mesh.rank))
        # Two calls in one backward: what is open of the first must not be in the way.
        loss = model(rows, differentiable) + (model(rows + 1, differentiable) if shard else 0)
        loss.backward()
        flat.reduce()
        found.append([span.own_gradients.clone() for span in flat.spans])
    return found


@pytest.mark.parametrize("differentiable", [True, False])
def test_gradients_of_a_layer_are_complete_when_they_are_reduced(differentiable):
    for plain, parts in run_ranks(run_odd, 2, differentiable):
        assert len(plain) == len(parts) == 4
        for one, other in zip(plain, parts, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def exchanges(mesh, narrow):
    """What a forward and a backward of sharded layers exchange: (function, elements, dtype) of
    each; and whether all parameters are aligned. narrow: one matrix of each layer is bfloat16."""
    model = OddModel()
    for layer in model.layers.values():
        layer.idle.requires_grad_(False)
        layer.three.data = layer.three.to(torch.bfloat16 if narrow else torch.float32)
    flat = FlatParameters(
        model.named_parameters(),
        mesh.group("dp"),
        span_bytes=1,
        layers=layers_of(model),
        shard="parameters",
    )
    ShardedLayers(flat).put_into(model)
    flat.zero_gradients()
    found = []

    def noting(name, which):
        send = getattr(sharded_layers, name)

        def noted(*tensors, **options):
            found.append((name, tensors[which].numel(), tensors[which].dtype))
            return send(*tensors, **options)

        return mock.patch.object(sharded_layers, name, noted)

    with noting("all_gather_flat", 0), noting("reduce_scatter_flat", 1):
        loss = model(torch.randn(5, 8), True)
        forward, found = found, []
        loss.backward()
    places = [member.parameter for member in flat.members()]
    starts = [place.data_ptr() - place.untyped_storage().data_ptr() for place in places]
    return forward, found, all(start % 256 == 0 for start in starts)


@pytest.mark.parametrize("narrow", [False, True])
def test_a_layer_is_gathered_and_reduced_by_one_collective_for_each_dtype(narrow):
    """However large it is. What is frozen is gathered by one of its own, and reduced by none."""
    # Three matrices of 128 elements with padding, as a multiple of 128 for each rank.
    wide = 256 if narrow else 512
    sizes = [(wide, torch.float32), *([(256, torch.bfloat16)] if narrow else [])]
    frozen = (256, torch.float32)
    for forward, backward, aligned in run_ranks(exchanges, 2, narrow):
        assert aligned
        gathers = Counter(("all_gather_flat", *size) for size in [*sizes, frozen] for _ in range(4))
        reductions = Counter(("reduce_scatter_flat", *size) for size in sizes for _ in range(4))
        assert Counter(forward) == gathers
        assert Counter(backward) == gathers + reductions


def buckets_of_layers(mesh, layout, experts):
    """How many buckets each layer of a model has, where spans of others hold one matrix each."""
    config = settings("parameters")
    parallel = dataclasses.replace(config.parallel, tp=layout.tp, ep=layout.ep)
    kind = ExpertConfig(count=4, per_token=2, intermediate_size=48) if experts else ExpertConfig()
    model = dataclasses.replace(config.model, experts=kind)
    config = dataclasses.replace(config, parallel=parallel, model=model)
    small = functools.partial(FlatParameters, span_bytes=1)
    with mock.patch("packgraph.train.optimizer.FlatParameters", small):
        optimizer = make_optimizer(build_chunks(config, CPU, mesh), config, mesh)
    layers = Counter(span.sharded_layer for span in optimizer.flat.spans)
    del layers[None]
    return sorted(layers.values())


@pytest.mark.parametrize(
    ("layout", "experts", "buckets"),
    [(Layout(dp=2, tp=2), False, 1), (Layout(dp=4), True, 1), (Layout(dp=4, ep=2), True, 2)],
    ids=str,
)
def test_a_layer_has_a_bucket_for_each_group_of_replicas(layout, experts, buckets):
    """Experts that ranks share have other replicas than the rest of their layer."""
    for found in run_ranks(buckets_of_layers, 4, layout, experts, layout=layout):
        assert found == [buckets] * 3


PAIRS = {"shard_ranks": 2}


def verified(mesh, layout, granularity, apart):
    """apart: `hybrid` takes another model instead, `ends` one whose ends are shared, too."""
    config = config_for(layout, granularity, 4)
    if apart == "hybrid":
        config = dataclasses.replace(
            tiny_hybrid_config(granularity, 0.1, 4), parallel=config.parallel
        )
    if apart == "ends":
        model = dataclasses.replace(config.model, tie_embeddings=False)
        config = dataclasses.replace(config, model=model)
    parallel = dataclasses.replace(
        config.parallel, shard="parameters", shard_ranks=layout.shard_ranks
    )
    graph = dataclasses.replace(config.graph, strict=True)
    config = dataclasses.replace(config, graph=graph, parallel=parallel)
    assert not validate(config, "cpu", world=mesh.world)
    packs = functools.partial(random_packs, seed=1)
    budget = budget_over(layout.dp)
    apart = apart is True
    return verify_ranks("sharded", config, packs, CPU, mesh, apart=apart, budget=budget)


@pytest.mark.parametrize(
    ("layout", "granularity", "apart"),
    [
        (Layout(dp=2), "chunk", False),
        (Layout(dp=2), "layer", True),
        (Layout(dp=2), "layer", "hybrid"),
        (Layout(dp=1, cp=2), "layer", False),
        (Layout(dp=2, ep=2), "layer", False),
        (Layout(dp=2, pp=2), "chunk", False),
        (Layout(dp=2, pp=2), "chunk", "ends"),
        (Layout(dp=2, tp=2), "layer", "ends"),
        (Layout(dp=4, **PAIRS), "layer", False),
        (Layout(dp=2, cp=2, **PAIRS), "layer", False),
        (Layout(dp=4, ep=2, **PAIRS), "layer", False),
        pytest.param(Layout(dp=2, tp=2), "layer", False, marks=pytest.mark.slow),
        pytest.param(Layout(dp=4, ep=2), "chunk", False, marks=pytest.mark.slow),
        pytest.param(Layout(dp=4, pp=2, **PAIRS), "chunk", False, marks=pytest.mark.slow),
        pytest.param(Layout(dp=4, tp=2, **PAIRS), "layer", False, marks=pytest.mark.slow),
        pytest.param(
            Layout(dp=4, ep=2, cp=2, shard_ranks=4), "layer", False, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_layouts_are_verified(layout, granularity, apart):
    """Graphs against eager bit by bit, and the run against one process."""
    world = layout.dp * layout.inner
    for report in run_ranks(
        verified, world, layout, granularity, apart, layout=layout, seconds=250.0
    ):
        assert report.good and report.one_process.good, report
        assert list(report.one_process.distances)[-1] == STATE and not report.silent_ranks()


SOME = ("4KiB", "12KiB")  # of each rank's 23 KiB of state


def places(mesh):
    """Of the optimizer's state: on the device, on the host, and on each rank another part."""
    return {"offload": False}, {"offload": True}, {"offload": True, "resident": SOME[mesh.rank]}


def trained_everywhere(mesh, shard):
    return [
        train(mesh, settings(shard, graph=True, optimizer=place), packs=4) for place in places(mesh)
    ]


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_state_on_the_host_changes_no_bit(shard):
    for here, *there in run_ranks(trained_everywhere, 2, shard):
        assert not [differences(here, other) for other in there if differences(here, other)]


def stored_forms(mesh, shard):
    """Rectangles of all state, and bytes that stay on the device."""
    found = []
    for place in places(mesh):
        config = settings(shard, optimizer=place)
        model = build_chunks(config, CPU, mesh)
        optimizer = make_optimizer(model, config, mesh)
        forms = {
            name: [(offsets, tuple(part.shape)) for offsets, part in parts_of(tensor)]
            for name, tensor in optimizer.state_tensors().items()
        }
        state = optimizer.host_state
        found.append((forms, state and (state.resident, state.moved)))
    return found


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_checkpoints_do_not_depend_on_where_the_state_is(shard):
    """Ranks that hold copies of state, as of norms with tp, would store other rectangles of it."""
    for rank, (here, there, some) in enumerate(run_ranks(stored_forms, 2, shard)):
        assert here[0] == there[0] == some[0]
        (none, whole), (stays, moves) = there[1], some[1]
        assert none == 0 < stays <= budget_bytes(SOME[rank], None) and stays + moves == whole
