"""Layers in float8 that are split over ranks: the numbers of matrices that are cut in one process,
bit by bit, and graphs that equal eager."""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from distkit import CPU, run_ranks
from float8kit import CutProducts, cut_layers
from parallelkit import steps_of_packs, tiny_config, train_both, whole
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from tracekit import differences

from packgraph.models.config import ExpertConfig
from packgraph.models.decoder import DecoderModel
from packgraph.ops.float8.linear import (
    FLOAT8,
    FLOAT8_GRADIENTS,
    Float8Linear,
    RankSplit,
    multiply_by,
)
from packgraph.ops.linear import linear_layer, merged
from packgraph.ops.names import NATIVE
from packgraph.parallel.layout import Layout
from packgraph.parallel.tensor import parallelize
from packgraph.train.validate import validate
from packgraph.verification.matrix import budget_over, config_for, random_packs
from packgraph.verification.ranks import GRADIENTS, compare_with_one_process, verify_ranks

TP2 = Layout(dp=1, tp=2)
PRECISIONS = (FLOAT8, FLOAT8_GRADIENTS)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}
ROWS = 6  # of the layers that are compared one by one
NEAR = 1e-3  # of what differs by sums in another order, and by a few codes that they change


@pytest.mark.parametrize(
    ("sequence", "options"),
    [
        (True, {"granularity": "chunk", "precision": FLOAT8}),
        (False, {"granularity": "layer", "precision": FLOAT8, "attention_bias": True}),
        (True, {"granularity": "layer", "precision": FLOAT8_GRADIENTS, "attention_bias": True}),
        (
            False,
            {
                "granularity": "chunk",
                "precision": FLOAT8_GRADIENTS,
                "bf16_ends": 1,
                "num_layers": 3,
            },
        ),
    ],
)
def test_graphs_equal_eager_on_every_rank(sequence, options):
    options = {"steps": 6, "dropout": 0.2, "sequence": sequence, "bf16_ends": 0, **SIZES, **options}
    for eager, captured in run_ranks(train_both, 2, options, layout=TP2, seconds=200.0):
        assert captured["replayed"] > 6
        assert not differences(eager, captured)


def case(by_outputs):
    """x, weights and biases of layers that read it, and gradients of what they make."""
    draw = torch.Generator().manual_seed(1)
    inputs, outputs = (32, (32, 64)) if by_outputs else (64, (32,))
    x = torch.randn(ROWS, inputs, generator=draw)
    x[:, inputs // 2 :] *= 2.0**-16  # a part of a row with a scale that differs from the whole's
    weights = [torch.randn(size, inputs, generator=draw) for size in outputs]
    biases = [torch.randn(size, generator=draw) for size in outputs]
    grads = [torch.randn(ROWS, size, generator=draw) for size in outputs]
    for grad in grads:
        grad[:, grad.shape[1] // 2 :] *= 2.0**-16
        grad[4:] = 0.0  # rows of padding
    return x, weights, biases, grads


def split_products(mesh, precision, by_outputs, splits_rows):
    """What this rank's layers make, and its gradients: of x, of weights, of biases."""
    x, weights, biases, grads = case(by_outputs)
    split = RankSplit(mesh["tp"], by_outputs, splits_rows)
    layers = []
    for weight, bias in zip(weights, biases, strict=True):
        layer = linear_layer(precision, weight.shape[1], weight.shape[0], True)
        assert isinstance(layer, Float8Linear)
        layer.split = split
        for name, value, placement in (
            ("weight", weight, Shard(0 if by_outputs else 1)),
            ("bias", bias, Shard(0) if by_outputs else Replicate()),
        ):
            spread = distribute_tensor(value, mesh["tp"], [placement])
            layer.register_parameter(name, nn.Parameter(spread))
        layers.append(layer)
    own = x if by_outputs else x.chunk(2, 1)[mesh.rank]
    leaf = own.clone().requires_grad_()
    made = merged(leaf, *layers)
    dim = 1 if by_outputs else 0
    cut = by_outputs or splits_rows
    torch.autograd.backward(made, [g.chunk(2, dim)[mesh.rank] if cut else g for g in grads])
    return (
        [part.detach().clone() for part in made],
        leaf.grad,
        [layer.weight.grad.to_local() for layer in layers],
        [layer.bias.grad.full_tensor() for layer in layers],
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("by_outputs", "splits_rows"), [(True, False), (False, False), (False, True)]
)
def test_products_and_all_gradients_are_those_of_cut_matrices(precision, by_outputs, splits_rows):
    x, weights, biases, grads = case(by_outputs)
    cut = CutProducts(2, by_outputs, precision == FLOAT8_GRADIENTS)
    made = [cut.forward(x, w) + b for w, b in zip(weights, biases, strict=True)]
    of_x, of_weights = cut.rows_gradient(grads, weights), cut.weight_gradients(x, grads)
    results = run_ranks(split_products, 2, precision, by_outputs, splits_rows, layout=TP2)
    for rank, (ours, our_x, our_weights, our_biases) in enumerate(results):
        dim = 1 if by_outputs else 0
        expected = [m.chunk(2, dim)[rank] for m in made] if by_outputs or splits_rows else made
        assert all(map(torch.equal, ours, expected))
        assert torch.equal(our_x, of_x if by_outputs else of_x.chunk(2, 1)[rank])
        parts = [w.chunk(2, 0 if by_outputs else 1)[rank] for w in of_weights]
        assert all(map(torch.equal, our_weights, parts))
        for found, grad in zip(our_biases, grads, strict=True):
            torch.testing.assert_close(found, grad.sum(0))
    wrong = CutProducts(2, by_outputs, False, whole_scales=True)
    told_apart = (
        not torch.equal(wrong.rows_gradient(grads, weights), of_x)
        if by_outputs
        else not torch.equal(wrong.forward(x, weights[0]) + biases[0], made[0])
    )
    assert told_apart, "scales of whole rows would have the same numbers"


def decoder(precision, *, is_wide=True):
    """is_wide: rows differ by 2^16 from one rank's part to the other's, where they are cut. Scales
    of parts then have other codes than scales of whole rows: both are powers of two, and codes have
    exponents, so only numbers far below the largest tell them apart."""
    model = DecoderModel(
        tiny_config(**SIZES | {"num_layers": 3}, precision=precision, bf16_ends=0), seed=3
    )
    with torch.no_grad():
        for name, module in model.named_modules() if is_wide else ():
            last = name.rpartition(".")[2]
            if last in ("v_proj", "up_proj"):
                module.weight[module.out_features // 2 :] *= 2.0**-16
            elif last in ("o_proj", "down_proj"):
                module.weight[:, module.in_features // 2 :] *= 2.0**16
    return model.train()


def loss_and_gradients(model):
    loss = model(next(steps_of_packs(1))[0])
    loss.backward()
    found = {name: whole(value.grad) for name, value in model.named_parameters()}
    return {"loss": loss.detach().clone(), **found}


def of_ranks(mesh, precision, sequence):
    """Of a wide decoder and of an ordinary one."""
    models = decoder(precision), decoder(precision, is_wide=False)
    for model in models:
        parallelize(model, mesh["tp"], sequence=sequence)
    return [*map(loss_and_gradients, models)]


def distances(one, other):
    """Relative distance of each, by name."""
    assert one.keys() == other.keys()
    return {name: float((one[name] - other[name]).norm() / other[name].norm()) for name in other}


@pytest.mark.parametrize(("precision", "sequence"), [(FLOAT8, True), (FLOAT8_GRADIENTS, False)])
def test_a_model_computes_what_it_does_with_cut_matrices(precision, sequence):
    twin, wrong = decoder(precision), decoder(precision)
    cut_layers(twin, 2)
    cut_layers(wrong, 2, whole_scales=True)
    expected, broken = map(loss_and_gradients, (twin, wrong))
    alone, exact = (loss_and_gradients(decoder(p, is_wide=False)) for p in (precision, NATIVE))
    for found, ordinary in run_ranks(of_ranks, 2, precision, sequence, layout=TP2):
        assert max(distances(found, expected).values()) < NEAR
        assert max(distances(found, broken).values()) > 20 * NEAR, "scales are of whole rows"
        assert max(distances(ordinary, alone).values()) < NEAR
        far, as_far = (
            torch.tensor([*distances(numbers, exact).values()]) for numbers in (ordinary, alone)
        )
        assert far.mean() > 20 * NEAR, "nothing is in float8"
        torch.testing.assert_close(far, as_far, rtol=NEAR, atol=NEAR)


def refusals(mesh):
    """What is refused, in words."""
    found = []
    sizes = SIZES | {"num_layers": 3}
    small = DecoderModel(tiny_config(**sizes | {"head_dim": 8}, precision=FLOAT8))
    with pytest.raises(ValueError, match="on each of 2 ranks") as refused:
        parallelize(small, mesh["tp"])
    found += str(refused.value).split("; ")
    assert not any(isinstance(value, DTensor) for value in small.parameters()), "none is split"
    plain, model = (
        DecoderModel(tiny_config(**sizes, precision=precision)) for precision in (NATIVE, FLOAT8)
    )
    for made in (plain, model):
        parallelize(made, mesh["tp"])
    for (name, one), (_, other) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        assert getattr(one, "placements", None) == getattr(other, "placements", None), name
    found += multiply_by(model.layers["1"], NATIVE) + multiply_by(plain.layers["1"], FLOAT8)[:1]
    inner = model.layers["1"].self_attn
    for layer, x in (
        (inner.o_proj, DTensor.from_local(torch.ones(2, 64), mesh["tp"], [Shard(1)])),
        (inner.q_proj, DTensor.from_local(torch.ones(2, 32), mesh["tp"], [Shard(0)])),
    ):
        with pytest.raises(ValueError, match="cannot read a DTensor with placements"):
            layer(x)
    with pytest.raises(ValueError, match="are split in different ways"):
        merged(torch.ones(2, 32), inner.q_proj, inner.o_proj)
    inner.q_proj.split = None
    with pytest.raises(ValueError, match="its matrix is a DTensor"):
        inner.q_proj(torch.ones(2, 32))
    return found


def test_what_cannot_be_split_is_refused_with_all_names():
    """Layers in float8 are split as others are, so checkpoints do not know of it."""
    for found in run_ranks(refusals, 2, layout=TP2):
        assert found == [
            "layers.1.self_attn.k_proj: on each of 2 ranks 32 x 8 is not made of multiples of 16",
            "layers.1.self_attn.v_proj: on each of 2 ranks 32 x 8 is not made of multiples of 16",
            "layers in float8 that are split over ranks stay so",
            "self_attn.q_proj: its matrix is a DTensor, which float8 takes from "
            "packgraph.parallel.tensor.parallelize alone",
        ]


CASES = {
    "sequence": {"precision": FLOAT8_GRADIENTS, "granularity": "layer"},
    "sharded": {"layout": Layout(dp=2, tp=2), "parallel": {"shard": "parameters"}},
    "pipeline": {"layout": Layout(dp=1, pp=2, tp=2), "granularity": "layer"},
    "context": {
        "layout": Layout(dp=1, cp=2, tp=2),
        "model": {"num_heads": 8, "num_kv_heads": 4},
    },
    "experts": {
        "dtype": "float32",  # in bfloat16 near scores choose other experts
        "model": {
            "experts": ExpertConfig(
                count=4, per_token=2, intermediate_size=32, shared=1, first_dense=1
            )
        },
    },
    "step": {"precision": FLOAT8_GRADIENTS, "graph": {"granularity": "step", "optimizer": True}},
    "offloading": {"offload": {"modules": ("qkv_linear", "mlp_act"), "min_bytes": 1}},
}


def config_of(name):
    given = CASES[name]
    layout = given.get("layout", TP2)
    made = config_for(layout, given.get("granularity", "chunk"), 4)
    shape = {**SIZES, "bf16_ends": 0}
    shape |= {"precision": given.get("precision", FLOAT8), **given.get("model", {})}
    return layout, replace(
        made,
        model=replace(made.model, **shape),
        graph=replace(made.graph, strict=True, **given.get("graph", {})),
        offload=replace(made.offload, **given.get("offload", {})),
        parallel=replace(made.parallel, **given.get("parallel", {})),
        run=replace(made.run, dtype=given.get("dtype", "bfloat16")),
    )


def verified(mesh, config):
    assert not validate(config, "cpu", world=mesh.world)
    budget = budget_over(config.parallel.dp or 1)
    packs = partial(random_packs, seed=1)
    return verify_ranks("float8", config, packs, CPU, mesh, budget=budget)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "sequence")) for name in CASES]
)
def test_whole_runs_are_verified(name):
    """Graphs against eager bit by bit, and the run against one process."""
    layout, config = config_of(name)
    world = (layout.dp or 1) * layout.inner
    for report in run_ranks(verified, world, config, layout=layout, seconds=300.0):
        assert report.good and not report.found() and not report.silent_ranks(), report


def without_sums(mesh, config):
    """The comparison with one process of a run whose gradients of x are no sums over ranks."""
    with mock.patch.object(RankSplit, "operand", own_share):
        packs = random_packs(seed=1)
        return compare_with_one_process(config, packs, CPU, mesh, budget_over(1))


def own_share(split, x):
    return x.to_local() if isinstance(x, DTensor) else x


@pytest.mark.slow
def test_a_sum_over_ranks_that_is_left_out_is_far_from_one_process():
    """The negative control of the limits of float8."""
    _, config = config_of("sequence")
    config = replace(config, run=replace(config.run, steps=2))
    for report in run_ranks(without_sums, 2, config, layout=TP2, seconds=120.0):
        gradients = report.distances[GRADIENTS]
        assert not report.good and gradients.size > gradients.limit == 0.3
