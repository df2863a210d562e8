"""Attention of a row spread over ranks against the same attention in one process: outputs, all
gradients, isolation."""

import functools
import random

import pytest
import torch
from distkit import run_ranks

from packgraph.ops.attention.api import attention, attention_metadata
from packgraph.ops.attention.context import ContextGroup, own_rows, swap_parts, whole_rows
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.mesh import Layout

pytestmark = pytest.mark.dist

HEADS, WIDTH, VALUES = 8, 6, 4
ROWS = {
    "mixed": (Capacity(48, 8), (13, 1, 20, 7)),
    "one document on all ranks": (Capacity(48, 4), (47,)),
    "ranks with padding only": (Capacity(48, 4), (5,)),
    "full": (Capacity(32, 4), (16, 16)),
    "tiny documents": (Capacity(1536, 1536), (1,) * 900 + (2,) * 300),
}


@functools.cache
def batch_of(name):
    capacity, lengths = ROWS[name]
    draw = random.Random(name)
    return PackedBatch.build(
        [[draw.randrange(9) for _ in range(length)] for length in lengths], capacity
    )


def inputs(batch, key_heads, values):
    """q, k, v and the gradient of the output, of the whole row, float64."""
    draw = torch.Generator().manual_seed(key_heads)
    tokens = batch.capacity.tokens
    shapes = (
        (tokens, HEADS, WIDTH),
        (tokens, key_heads, WIDTH),
        (tokens, key_heads, values),
        (tokens, HEADS, values),
    )
    return [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]


def differentiate(batch, tensors, backend, context=None):
    """Output and gradients of q, k, v, of this rank's rows."""
    *leaves, grad = (own_rows(tensor, context).clone() for tensor in tensors)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = attention(*leaves, attention_metadata(batch, backend, context=context), scale=0.3)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def context_of(mesh):
    return ContextGroup(mesh.size("cp"), mesh.place["cp"], mesh.group("cp").group_name)


def on_ranks(mesh, cases):
    return [
        differentiate(
            batch_of(name), inputs(batch_of(name), heads, values), backend, context_of(mesh)
        )
        for name, heads, values, backend in cases
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_and_gradients_are_those_of_one_process(ranks):
    """Key heads: fewer than ranks, as many, more, one per query head; values narrower than keys, as
    latent attention has them."""
    cases = [
        (name, heads, WIDTH, "sdpa")
        for name in ROWS
        for heads in (1, 2, 4)
        if heads == 1 or name[:4] != "tiny"
    ]
    cases += [
        ("mixed", HEADS, VALUES, "sdpa"),
        ("mixed", HEADS, VALUES, "naive"),
        ("mixed", 2, VALUES, "naive"),
    ]
    results = run_ranks(on_ranks, ranks, cases, layout=Layout(cp=ranks))
    for number, (name, heads, values, backend) in enumerate(cases):
        batch = batch_of(name)
        expected = differentiate(batch, inputs(batch, heads, values), "naive")
        for part, label in enumerate(("out", "dq", "dk", "dv")):
            found = torch.cat([result[number][part] for result in results])
            torch.testing.assert_close(
                found,
                expected[part],
                rtol=1e-12,
                atol=1e-12,
                msg=lambda text, place=(name, heads, backend, label): f"{place}: {text}",
            )
            assert not found[sum(ROWS[name][1]) :].any(), "padding is exactly zero"


def one_document_changed(mesh):
    """Output and gradients with the second document's rows changed, NaN in padding; and without."""
    batch, context = batch_of("mixed"), context_of(mesh)
    tensors = inputs(batch, 2, WIDTH)
    changed = [tensor.clone() for tensor in tensors]
    for tensor in changed:
        tensor[14:34] = 7.0 - tensor[14:34]
        tensor[41:] = torch.nan
    return [differentiate(batch, each, "sdpa", context) for each in (tensors, changed)]


def test_documents_do_not_see_each_other_nor_padding():
    results = run_ranks(one_document_changed, 2, layout=Layout(cp=2))
    for part in range(4):
        before, after = (torch.cat([result[side][part] for result in results]) for side in range(2))
        assert torch.equal(before[:14], after[:14]) and torch.equal(before[34:], after[34:])
        assert not torch.equal(before[14:34], after[14:34])


def swap_twice(mesh):
    context = context_of(mesh)
    x = torch.arange(3 * 4, dtype=torch.float32).reshape(3, 4) + 100 * mesh.rank
    once = swap_parts(x, context.name)
    with pytest.raises(ValueError, match="4 query heads cannot be shared by the 3 ranks"):
        whole_rows(torch.zeros(2, 4, 2), torch.zeros(2, 2, 2), torch.zeros(2, 2, 2), context)
    with pytest.raises(ValueError, match="must be of one dtype"):
        whole_rows(
            torch.zeros(2, 3, 2), torch.zeros(2, 3, 2), torch.zeros(2, 3, 2).double(), context
        )
    return once, torch.equal(swap_parts(once, context.name), x)


def test_parts_are_swapped():
    results = run_ranks(swap_twice, 3, layout=Layout(cp=3))
    assert all(back for _, back in results)
    for place, (found, _) in enumerate(results):
        expected = torch.arange(4.0) + 4 * place + 100 * torch.arange(3)[:, None]
        assert torch.equal(found, expected)


def compiled(mesh):
    batch, context = batch_of("mixed"), context_of(mesh)
    *leaves, grad = (own_rows(tensor, context) for tensor in inputs(batch, 1, WIDTH))
    metadata = attention_metadata(batch, "sdpa", context=context)
    both = []
    for function in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        fresh = [leaf.clone().requires_grad_() for leaf in leaves]
        out = function(*fresh, metadata)
        out.backward(grad)
        both.append([out.detach(), *(leaf.grad for leaf in fresh)])
    return both


@pytest.mark.slow
def test_compiled_code_holds_the_exchange():
    for eager, code in run_ranks(compiled, 2, layout=Layout(cp=2)):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(eager, code, strict=True))
