"""Bytes that are predicted for a rank are those that it holds."""

import dataclasses

import pytest
from distkit import CPU, run_ranks
from shardedkit import settings

from packgraph.graphs.parameters import local_tensor
from packgraph.models.config import ExpertConfig
from packgraph.parallel.flat_buffers import plan_gradient_buckets
from packgraph.parallel.layout import Layout
from packgraph.parallel.mesh import single_process
from packgraph.parallel.pieces import Pieces
from packgraph.train.build import build_chunks, make_optimizer
from packgraph.train.memory import need_of

ALSO = {"tp": {"tp": 2}, "pp": {"pp": 2}, "ep": {"ep": 2}, "cp": {"cp": 2}}
PAIRS = {"shard_ranks": 2}
LAYOUTS = ALSO | {"pairs": PAIRS, "pairs of experts": PAIRS | {"ep": 2}}
ENDS = {"untied": {"untied": True}, "untied pp": {"untied": True, "pp": 2}}


def held(mesh, shard, dtype, **parallel):
    """Bytes of what a run holds for good on this rank, measured and planned."""
    sizes = {"num_layers": 12, "hidden_size": 64, "intermediate_size": 192}
    if parallel.pop("untied", False):
        sizes |= {"tie_embeddings": False, "vocab_size": 2000}
    made = settings(shard, model=sizes)
    config = dataclasses.replace(
        made,
        run=dataclasses.replace(made.run, dtype=dtype),
        parallel=dataclasses.replace(made.parallel, **parallel),
    )
    if "ep" in parallel:
        experts = ExpertConfig(count=8, per_token=2, intermediate_size=48)
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, experts=experts)
        )
    model = build_chunks(config, CPU, mesh)
    optimizer = make_optimizer(model, config, mesh)
    spans, state = optimizer.flat.spans, optimizer.state_tensors().values()
    pieces = [tensor for tensor in state if isinstance(tensor, Pieces)]
    tensors = [parameter for _, parameter in model.named_parameters()]
    tensors += [t for span in spans for t in (span.parameters, span.own_parameters)]
    tensors += [t for span in spans for t in (span.gradients, span.own_gradients)]
    tensors += [span.kept_gradients for span in spans]
    tensors += [tensor for tensor in state if not isinstance(tensor, Pieces)]
    tensors += [part for tensor in pieces for _, part in tensor.pieces]
    tensors += [each.values for each in optimizer._updated]
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(sizes.values()), need_of(config, "cpu", mesh.world, mesh.rank).state


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard", ["none", "gradients", "parameters"])
def test_bytes_are_predicted_within_five_percent(shard, dtype):
    for measured, planned in run_ranks(held, 2, shard, dtype):
        assert planned == pytest.approx(measured, rel=0.05)


def beside(mesh, shard, way):
    return held(mesh, shard, "bfloat16", **(LAYOUTS | ENDS)[way])


@pytest.mark.parametrize("way", ALSO)
@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_bytes_beside_other_parallelisms_are_predicted(shard, way):
    layout = Layout(dp=4 if way == "ep" else 2, **LAYOUTS[way])
    for measured, planned in run_ranks(beside, 4, shard, way, layout=layout):
        assert planned == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("ep", [1, 2])
def test_bytes_of_layers_that_pairs_share_are_predicted(ep):
    """With ep = 2 the ranks of a pair hold different experts, whole."""
    way = "pairs" + " of experts" * (ep > 1)
    layout = Layout(dp=4, **LAYOUTS[way])
    for measured, planned in run_ranks(beside, 4, "parameters", way, layout=layout):
        assert planned == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("way", ENDS)
@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_bytes_of_embedding_and_head_are_predicted(shard, way):
    layout = Layout(dp=2 if "pp" in way else 4, pp=2 if "pp" in way else 1)
    for measured, planned in run_ranks(beside, 4, shard, way, layout=layout):
        assert planned == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("experts", [0, 8])
def test_padding_for_many_replicas_is_predicted(experts):
    """A layer is a multiple of 128 elements for each of 1,000 replicas, which is more than it
    has."""
    config = settings("none", model={"num_layers": 12, "hidden_size": 64, "intermediate_size": 192})
    if experts:
        kind = ExpertConfig(count=experts, per_token=2, intermediate_size=48)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, experts=kind))
    (chunk,) = build_chunks(config, CPU, single_process()).chunks
    padding = 0
    for layer in chunk.layers.values():
        sizes = [value.numel() for value in layer.parameters() if value.ndim >= 2]
        (bucket,) = plan_gradient_buckets(sizes, ["matrix"] * len(sizes), 1000, None)
        padding += bucket.size - sum(sizes)
    alone, many = (need_of(config, "cpu", world).weights for world in (1, 1000))
    assert padding > 0 and many - alone == 4 * padding
