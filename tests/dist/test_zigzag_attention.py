"""Attention of a row cut in zigzag against the same attention in one process: outputs, all
gradients, isolation."""

import functools
import random
from unittest import mock

import pytest
import torch
from attentionkit import textbook_backward, textbook_forward
from distkit import run_ranks

from packgraph.ops.attention import flash as attention_flash
from packgraph.ops.attention import varlen as attention_varlen
from packgraph.ops.attention.api import attention, attention_metadata, gather_parts, prefixes
from packgraph.ops.attention.context import ContextGroup
from packgraph.ops.attention.flash import Kernels, Library
from packgraph.ops.attention.zigzag import zigzag_tables
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.mesh import Layout

pytestmark = pytest.mark.dist

HEADS, WIDTH, VALUES = 6, 6, 4  # four ranks cannot share six heads
ROWS = {
    "mixed": (Capacity(72, 8), (13, 1, 20, 7)),
    "one document on all ranks": (Capacity(48, 4), (47,)),
    "full": (Capacity(48, 3), (16, 32)),
    "single tokens": (Capacity(64, 8), (1,) * 6),
    "empty": (Capacity(16, 2), ()),
    "bounded": (Capacity(64, 8, 21), (21, 3, 9)),
    "thousands of tiny documents": (Capacity(2048, 1200, 8), (1,) * 150 + (2,) * 50 + (5,) * 20),
}


@functools.cache
def batch_of(name):
    capacity, lengths = ROWS[name]
    draw = random.Random(name)
    if not lengths:
        return PackedBatch.empty(capacity)
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


def differentiate(batch, tensors, backend):
    """Output and gradients of q, k, v in one process."""
    *leaves, grad = tensors
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    out = attention(*leaves, attention_metadata(batch, backend), scale=0.3)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def share(batch, tensors, backend, context, held=0.0):
    """This rank's rows of output and gradients, and which rows and padding they are. held: what
    padding holds."""
    rows = zigzag_tables(batch, context).rows
    metadata = attention_metadata(batch, backend, finite_padding=held == 0.0, context=context)
    *leaves, grad = (
        tensor[rows.source].masked_fill(rows.padding[:, None, None], held) for tensor in tensors
    )
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = attention(*leaves, metadata, scale=0.3)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)], rows.source, rows.padding


def context_of(mesh):
    return ContextGroup(mesh.size("cp"), mesh.place["cp"], mesh.group("cp").group_name, "zigzag")


def whole(results, part, like):
    """What the ranks have of output or a gradient, in the order of the row; padding must be exactly
    zero."""
    found = torch.zeros_like(like)
    for tensors, source, padding in results:
        assert not tensors[part][padding].any(), "padding is exactly zero"
        found[source[~padding]] = tensors[part][~padding]
    return found


def on_ranks(mesh, cases):
    return [
        share(
            batch_of(name), inputs(batch_of(name), heads, values), backend, context_of(mesh), held
        )
        for name, heads, values, backend, held in cases
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_and_gradients_are_those_of_one_process(ranks):
    """Grouped heads, one for each query head, and values narrower than keys, as latent attention
    has them."""
    cases = [
        (name, heads, WIDTH, "sdpa", 0.0)
        for name in ROWS
        for heads in (1, 3)
        if heads == 1 or len(name) < 20
    ]
    cases += [("mixed", HEADS, VALUES, backend, 0.0) for backend in ("sdpa", "naive")]
    cases += [("mixed", 2, VALUES, "sdpa", torch.nan), ("bounded", 3, WIDTH, "naive", torch.inf)]
    results = run_ranks(on_ranks, ranks, cases, layout=Layout(cp=ranks))
    for number, (name, heads, values, backend, _) in enumerate(cases):
        batch = batch_of(name)
        expected = differentiate(batch, inputs(batch, heads, values), "naive")
        for part, label in enumerate(("out", "dq", "dk", "dv")):
            found = whole([result[number] for result in results], part, expected[part])
            torch.testing.assert_close(
                found,
                expected[part],
                rtol=1e-12,
                atol=1e-12,
                msg=lambda text, place=(name, heads, backend, label): f"{place}: {text}",
            )


KERNEL_CASES = [
    (name, VALUES, backend, held)
    for backend in ("varlen", "flash")
    for name, held in (("mixed", 0.0), ("bounded", torch.nan), ("empty", 0.0))
]


def with_kernels(mesh):
    """The kernels' places taken by the textbook formula, which leaves all rows that it should not
    write NaN."""

    def forward(q, k, v, cu_seqlens, cu_keys, longest, most_keys, scale, left=-1):
        within(cu_seqlens, longest, q), within(cu_keys, most_keys, k)
        return textbook_forward(q, k, v, cu_seqlens, scale, cu_keys)

    def backward(grad, q, k, v, out, lse, cu_seqlens, cu_keys, longest, most_keys, scale, left):
        return textbook_backward(grad, q, k, v, out, lse, cu_seqlens, scale, cu_keys)

    def within(boundaries, longest, x):
        assert boundaries.dtype == torch.int32 and int(boundaries.diff().max()) <= longest
        assert int(boundaries[-1]) <= x.shape[0]

    def flash(
        q,
        k,
        v,
        *,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        out,
        lse,
        **options,
    ):
        assert all(x.isfinite().all() for x in (q, k, v)), (
            "a tile reads what stands behind a document"
        )
        found, sums = forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale
        )
        out[: int(cu_seqlens_q[-1])] = found[: int(cu_seqlens_q[-1])]
        lse.copy_(sums)

    def flash_backward(
        q, k, v, out, grad, lse, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, dq, dk, dv, **options
    ):
        assert all(x.isfinite().all() for x in (q, k, v, out, grad))
        for target, found in zip(
            (dq, dk, dv),
            textbook_backward(grad, q, k, v, out, lse, cu_seqlens_q, softmax_scale, cu_seqlens_k),
            strict=True,
        ):
            target.copy_(found)

    with (
        mock.patch.multiple(
            attention_varlen,
            _launch_forward=forward,
            _launch_backward=backward,
            _check_supported=lambda *facts: None,
        ),
        mock.patch.multiple(
            attention_flash,
            library=lambda: Library(Kernels(flash, flash_backward), None),
            _check_supported=lambda *facts: None,
        ),
    ):
        return [
            share(
                batch_of(name), inputs(batch_of(name), 3, values), backend, context_of(mesh), held
            )
            for name, values, backend, held in KERNEL_CASES
        ]


def test_a_kernel_gets_boundaries_of_queries_and_of_keys():
    results = run_ranks(with_kernels, 4, layout=Layout(cp=4))
    for number, (name, values, *_) in enumerate(KERNEL_CASES):
        expected = differentiate(batch_of(name), inputs(batch_of(name), 3, values), "naive")
        for part in range(4):
            torch.testing.assert_close(
                whole([result[number] for result in results], part, expected[part]),
                # the kernel's output is float32
                expected[part],
                rtol=1e-5,
                atol=1e-5,
            )


def one_document_changed(mesh):
    batch, context = batch_of("mixed"), context_of(mesh)
    tensors = inputs(batch, 2, WIDTH)
    changed = [tensor.clone() for tensor in tensors]
    for tensor in changed:
        tensor[14:34] = 7.0 - tensor[14:34]
    return [
        share(batch, tensors, "sdpa", context),
        share(batch, changed, "sdpa", context, torch.nan),
    ]


def test_documents_do_not_see_each_other_nor_padding():
    results = run_ranks(one_document_changed, 2, layout=Layout(cp=2))
    tensors = [*inputs(batch_of("mixed"), 2, WIDTH)]
    for part, like in enumerate([tensors[3], *tensors[:3]]):
        before, after = (
            whole([result[side] for result in results], part, like) for side in range(2)
        )
        assert torch.equal(before[:14], after[:14]) and torch.equal(before[34:], after[34:])
        assert not torch.equal(before[14:34], after[14:34])


def gathered(mesh):
    context = context_of(mesh)
    x = (torch.arange(3.0) + 10 * mesh.rank).bfloat16().requires_grad_()
    every = gather_parts(x, context.name, context.size)
    every.backward((torch.ones(3, 3) * (mesh.rank + 1)).bfloat16())
    with pytest.raises(ValueError, match="must be of one dtype"):
        prefixes(torch.zeros(2, 1, 2), torch.zeros(2, 1, 2).double(), None, context)
    return every.detach(), x.grad


def test_parts_are_gathered_and_their_gradients_summed():
    for every, gradient in run_ranks(gathered, 3, layout=Layout(cp=3)):
        assert torch.equal(
            every, torch.stack([torch.arange(3.0) + 10 * rank for rank in range(3)]).bfloat16()
        )
        assert gradient.tolist() == [6.0] * 3


def compiled(mesh):
    batch, context = batch_of("mixed"), context_of(mesh)
    both = []
    for function in (zigzag, torch.compile(zigzag, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in inputs(batch, 2, WIDTH)[:3]]
        out = function(*leaves, batch, context)
        out.square().sum().backward()
        both.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return both


def zigzag(q, k, v, batch, context):
    tables = zigzag_tables(batch, context)
    return attention(
        *(x.index_select(0, tables.rows.source) for x in (q, k, v)),
        attention_metadata(batch, "sdpa", context=context, tables=tables),
    )


@pytest.mark.slow
def test_compiled_code_holds_the_exchange():
    for eager, code in run_ranks(compiled, 2, layout=Layout(cp=2)):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(eager, code, strict=True))
