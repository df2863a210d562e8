"""Tensor parallelism: a model split over ranks computes what the whole one does, through graphs
exactly as eagerly."""

import warnings
from unittest import mock

import pytest
import torch
from distkit import run_ranks
from parallelkit import (
    Run,
    assert_same_within_rounding,
    steps_of_packs,
    tiny_config,
    train,
    train_both,
)
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from tracekit import differences

from packgraph.graphs.agreement import alone, consensus_of
from packgraph.graphs.errors import PackgraphWarning
from packgraph.graphs.graphed import control, graph
from packgraph.graphs.stages import Stage, run_stages
from packgraph.models.decoder import DecoderModel
from packgraph.models.layers.mlp import RMSNorm
from packgraph.ops import heads
from packgraph.ops.loss import naive_linear_cross_entropy
from packgraph.parallel.layout import Layout
from packgraph.parallel.mesh import Mesh, single_process
from packgraph.parallel.tensor import dropout_seed, parallelize, tensor_problems
from packgraph.parallel.vocabulary import embed, head_cross_entropy

TP2 = Layout(tp=2)
STEPS = 6


@pytest.mark.parametrize(
    ("sequence", "options"),
    [
        (False, {"granularity": "layer"}),
        (True, {"granularity": "layer"}),
        (False, {"granularity": "chunk"}),
        (
            True,
            {
                "granularity": "chunk",
                "tie_embeddings": False,
                "vocab_size": 33,
                "attention_bias": True,
            },
        ),
    ],
)
def test_graphs_equal_eager_on_every_rank(sequence, options):
    options = {"steps": STEPS, "dropout": 0.2, "sequence": sequence, "set_to_none": True, **options}
    for eager, captured in run_ranks(train_both, 2, options, layout=TP2):
        assert captured["replayed"] > 8
        assert not differences(eager, captured)


def run_graphs(mesh, options):
    return train(mesh, graphs=True, steps=STEPS, **options)


@pytest.mark.parametrize(
    "options",
    [
        # Without sequence parallelism activations are copies, so even dropout is that of one
        # process.
        {"sequence": False, "dropout": 0.2},
        {"sequence": True},
        {"sequence": True, "tie_embeddings": False, "vocab_size": 33, "attention_bias": True},
    ],
)
def test_two_ranks_equal_one_process_within_rounding(options):
    alone = train(None, graphs=False, steps=STEPS, **options)
    results = run_ranks(run_graphs, 2, options, layout=TP2)
    assert_same_within_rounding(results, alone)
    for result in results:
        for ours, theirs in zip(result["trace"], alone["trace"], strict=True):
            torch.testing.assert_close(ours["loss"], theirs["loss"], rtol=1e-4, atol=1e-5)


def test_copies_stay_equal_and_replicas_compose():
    alone = train(None, graphs=False, steps=6)
    results = run_ranks(run_six, 4, layout=TP2)
    assert_same_within_rounding(results, alone)
    for result in results[1:]:
        assert all(
            torch.equal(result["trace"][-1][name], value)
            for name, value in results[0]["trace"][-1].items()
            if name.startswith("parameter")
        )


def run_six(mesh):
    eager, graph = train_both(mesh, {"steps": 6, "sequence": True})
    assert not differences(eager, graph)
    return graph


def masks_and_states(mesh, sequence):
    run = Run(mesh, graphs=False, sequence=sequence, dropout=0.5)
    run.step(0, next(steps_of_packs(1)))
    return torch.nn.functional.dropout(torch.ones(64), 0.5), torch.get_rng_state()


@pytest.mark.parametrize("sequence", [False, True])
def test_dropout_is_equal_on_copies_and_different_on_parts(sequence):
    (first, first_state), (second, second_state) = run_ranks(
        masks_and_states, 2, sequence, layout=TP2
    )
    assert torch.equal(first, second) == torch.equal(first_state, second_state) == (not sequence)


def test_seeds_of_dropout():
    def seeds(sequence):
        layout = Layout(dp=2, pp=2, tp=2)
        return [
            dropout_seed(7, Mesh(layout, rank, layout.coordinates(rank), None), sequence=sequence)
            for rank in range(8)
        ]

    assert (
        dropout_seed(7, single_process(), sequence=True) == 7 == seeds(True)[0] == seeds(False)[0]
    )
    assert len(set(seeds(True))) == 8
    assert len(set(seeds(False))) == 4 and seeds(False)[::2] == seeds(False)[1::2]


def test_sizes_that_do_not_divide_are_refused_with_all_reasons():
    assert not tensor_problems(tiny_config(), 2)
    problems = "; ".join(tensor_problems(tiny_config(vocab_size=2, intermediate_size=30), 4))
    assert "num_kv_heads to be a multiple of it; it is 2" in problems
    assert "intermediate_size to be a multiple of it; it is 30" in problems
    assert "without a row" in problems and "num_heads" not in problems.replace("num_kv_heads", "")


def refused(mesh):
    with pytest.raises(ValueError, match="num_kv_heads to be a multiple"):
        parallelize(DecoderModel(tiny_config(num_kv_heads=1)), mesh["tp"])
    weight = distribute_tensor(torch.ones(4, 3), mesh["tp"], [Replicate()])
    with pytest.raises(ValueError, match="along the vocabulary"):
        head_cross_entropy(torch.ones(2, 3), weight, torch.ones(2, dtype=torch.int64))
    model = DecoderModel(tiny_config())
    assert consensus_of(model) is alone
    parallelize(model, mesh["tp"])
    assert consensus_of(model) is not alone  # nobody captures it alone
    split = {
        name
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor) and parameter.placements[0].is_shard()
    }
    assert {name.split(".")[-2] for name in split} == {
        "embed_tokens",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    return sum(
        parameter._local_tensor.numel() if isinstance(parameter, DTensor) else parameter.numel()
        for parameter in model.parameters()
    )


def test_every_matrix_is_split():
    whole = sum(parameter.numel() for parameter in DecoderModel(tiny_config()).parameters())
    vectors = sum(
        parameter.numel()
        for parameter in DecoderModel(tiny_config()).parameters()
        if parameter.dim() == 1
    )
    assert run_ranks(refused, 2, layout=TP2) == [(whole + vectors) // 2] * 2


def loss_and_embedding(mesh, words, chunk, split_rows):
    torch.manual_seed(1)
    tokens, hidden, weight, labels, padding = _case(words)
    head = nn.Parameter(distribute_tensor(weight.detach(), mesh["tp"], [Shard(0)]))
    part = hidden.chunk(2)[mesh.rank] if split_rows else hidden
    part = part.detach().requires_grad_()
    loss = head_cross_entropy(part, head, labels, chunk)
    (2 * loss).backward()
    head_gradient, head.grad = head.grad.full_tensor(), None
    rows = embed(tokens, padding, head, split_rows=split_rows)
    _weighted(rows, mesh.rank * rows.shape[0] if split_rows else 0).backward()
    return loss.detach(), part.grad, head_gradient, rows.detach().clone(), head.grad.full_tensor()


def _case(words):
    hidden, weight = (
        torch.randn(10, 6, requires_grad=True),
        torch.randn(words, 6, requires_grad=True),
    )
    labels = torch.randint(0, words, (10,))
    labels[::4] = -100
    padding = torch.arange(10) >= 8
    return torch.randint(0, words, (10,)), hidden, weight, labels, padding


def illegal_words(mesh, label, token):
    torch.manual_seed(1)
    tokens, hidden, weight, labels, padding = _case(9)
    head = nn.Parameter(distribute_tensor(weight.detach(), mesh["tp"], [Shard(0)]))
    hidden = hidden.detach().requires_grad_()
    labels[5], tokens[3] = label, token
    loss = head_cross_entropy(hidden, head, labels, 4)
    loss.backward()
    return (
        loss.detach(),
        hidden.grad,
        head.grad.full_tensor(),
        embed(tokens, padding, head, split_rows=False).detach(),
    )


@pytest.mark.parametrize(("label", "token"), [(-1, -1), (9, 9), (5000, 5000), (-101, -(2**40))])
def test_words_that_no_rank_has_make_nan_on_all(label, token):
    torch.manual_seed(1)
    tokens, hidden, weight, labels, padding = _case(9)
    head_cross_entropy(hidden, weight, labels, 4).backward()
    tokens[3] = token
    wanted = embed(tokens, padding, weight, split_rows=False)
    assert wanted[3].isnan().all() and not wanted[8:].any()
    for loss, of_hidden, of_head, rows in run_ranks(illegal_words, 2, label, token, layout=TP2):
        assert loss.isnan() and of_hidden[5].isnan().all() and of_head.isnan().all()
        others = [0, 1, 2, 3, 4, 6, 7, 8, 9]
        torch.testing.assert_close(of_hidden[others], hidden.grad[others])
        torch.testing.assert_close(rows, wanted, equal_nan=True)


def _weighted(rows, first):
    return (rows * torch.arange(first + 1, first + rows.shape[0] + 1)[:, None]).sum()


@pytest.mark.parametrize(
    ("words", "chunk", "split_rows"), [(8, None, False), (9, 3, True), (9, 4, False)]
)
def test_split_vocabulary_equals_the_specification(words, chunk, split_rows):
    results = run_ranks(loss_and_embedding, 2, words, chunk, split_rows, layout=TP2)
    torch.manual_seed(1)
    tokens, hidden, weight, labels, padding = _case(words)
    loss = naive_linear_cross_entropy(hidden, weight, labels)
    (2 * loss).backward()
    head_gradient, weight.grad = weight.grad, None
    rows = embed(tokens, padding, weight, split_rows=False)
    _weighted(rows, 0).backward()
    for rank, (ours, part_gradient, our_head, our_rows, our_embedding) in enumerate(results):
        torch.testing.assert_close(ours, loss.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            part_gradient, hidden.grad.chunk(2)[rank] if split_rows else hidden.grad
        )
        torch.testing.assert_close(our_head, head_gradient)
        assert torch.equal(our_rows, rows.chunk(2)[rank] if split_rows else rows)
        torch.testing.assert_close(our_embedding, weight.grad)


class NormsTwice(nn.Module):
    """Two stages with one norm, whose weight is a DTensor."""

    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(8, 1e-6)

    def begin(self, x):
        return {"x": x}

    def stages(self):
        return [Stage("first", 0, self.first), Stage("second", 1, self.second)]

    def end(self, state):
        return state["x"].square().mean()

    def first(self, state):
        return {"x": self.norm(state["x"]).sin()}

    def second(self, state):
        return {"x": self.norm(state["x"]).exp()}

    def forward(self, x):
        return run_stages(self, x)


def accumulate_twice(mesh, granularity):
    """Gradients of the shared weight after every call, and how many calls were replayed."""
    module = NormsTwice()
    style = SequenceParallel(sequence_dim=0, use_local_output=True)
    parallelize_module(module, mesh["tp"], {"norm": style}, src_data_rank=None)
    torch.manual_seed(mesh.rank)
    call = module
    if granularity:
        call = graph(module, backend="recorder", granularity=granularity)
    found = []
    # which calls run eagerly is the result
    with warnings.catch_warnings(action="ignore", category=PackgraphWarning):
        for _ in range(8):
            call(torch.randn(4, 8, requires_grad=True)).backward()
            found.append(module.norm.weight.grad.to_local().clone())
    return found, control(call).stats.replayed if granularity else 0


def test_segments_that_share_a_copied_dtensor_run_eagerly():
    """Their sum with gradients of the calls before had other bits."""
    expected = run_ranks(accumulate_twice, 2, "", layout=TP2)
    for granularity, replays in (("layer", False), ("chunk", True)):
        for ours, theirs in zip(
            run_ranks(accumulate_twice, 2, granularity, layout=TP2), expected, strict=True
        ):
            assert all(map(torch.equal, ours[0], theirs[0])) and (ours[1] > 0) is replays


# ---- heads that are normalised and rotated by one operation


def train_fused(mesh, options):
    """Training eagerly and through graphs, and whether the operation ran."""
    seen, own = [], heads.naive_turn
    replaced = {
        "is_measured": lambda device: True,
        "LEAST_ROWS": 0,
        "naive_turn": lambda *operands: seen.append(1) or own(*operands),
    }
    with mock.patch.multiple(heads, **replaced):
        return *train_both(mesh, options), bool(seen)


@pytest.mark.parametrize(
    ("layout", "options", "expected"),
    [
        (Layout(tp=2), {"sequence": False}, False),
        (Layout(tp=2), {"sequence": True}, False),
        (Layout(cp=2), {}, True),
        (Layout(dp=2), {}, True),
    ],
    ids=str,
)
def test_graphs_have_the_bits_of_eager(layout, options, expected):
    options = {"steps": 6, "granularity": "chunk", **options}
    for eager, captured, ran in run_ranks(train_fused, 2, options, layout=layout):
        assert ran == expected and captured["replayed"] >= 3
        assert not differences(eager, captured)
