"""Attention of a row spread over ranks, by heads (ulysses) or cut in zigzag, against the same
attention in one process: outputs, all gradients, isolation."""

import functools
import random
from unittest import mock

import pytest
import torch
from attentionkit import textbook_backward, textbook_forward
from distkit import run_ranks

from packgraph.ops.attention import flash as attention_flash
from packgraph.ops.attention import varlen as attention_varlen
from packgraph.ops.attention.api import attention, attention_metadata
from packgraph.ops.attention.context import ContextGroup, own_rows
from packgraph.ops.attention.flash import Kernels, Library
from packgraph.ops.attention.zigzag import zigzag_tables
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.layout import Layout

WIDTH, VALUES = 6, 4
HEADS = {"ulysses": 8, "zigzag": 6}  # four ranks cannot share six heads
ROWS = {
    "ulysses": {
        "mixed": (Capacity(48, 8), (13, 1, 20, 7)),
        "one document on all ranks": (Capacity(48, 4), (47,)),
        "ranks with padding only": (Capacity(48, 4), (5,)),
        "full": (Capacity(32, 4), (16, 16)),
        "tiny documents": (Capacity(1536, 1536), (1,) * 900 + (2,) * 300),
    },
    "zigzag": {
        "mixed": (Capacity(72, 8), (13, 1, 20, 7)),
        "one document on all ranks": (Capacity(48, 4), (47,)),
        "full": (Capacity(48, 3), (16, 32)),
        "single tokens": (Capacity(64, 8), (1,) * 6),
        "empty": (Capacity(16, 2), ()),
        "bounded": (Capacity(64, 8, 21), (21, 3, 9)),
        "tiny documents": (Capacity(2048, 1200, 8), (1,) * 150 + (2,) * 50 + (5,) * 20),
    },
}
KINDS = pytest.mark.parametrize("kind", ROWS)


@functools.cache
def batch_of(kind, name):
    capacity, lengths = ROWS[kind][name]
    draw = random.Random(name)
    if not lengths:
        return PackedBatch.empty(capacity)
    return PackedBatch.build(
        [[draw.randrange(9) for _ in range(length)] for length in lengths], capacity
    )


def inputs(kind, name, key_heads, values):
    """q, k, v and the gradient of the output, of the whole row, float64."""
    draw = torch.Generator().manual_seed(key_heads)
    tokens, heads = batch_of(kind, name).capacity.tokens, HEADS[kind]
    shapes = (
        (tokens, heads, WIDTH),
        (tokens, key_heads, WIDTH),
        (tokens, key_heads, values),
        (tokens, heads, values),
    )
    return [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]


def differentiate(tensors, metadata):
    """Output and gradients of q, k, v."""
    *leaves, grad = (tensor.clone() for tensor in tensors)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = attention(*leaves, metadata, scale=0.3)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def in_one_process(kind, name, key_heads, values):
    return differentiate(
        inputs(kind, name, key_heads, values), attention_metadata(batch_of(kind, name), "naive")
    )


def rows_of(batch, context):
    """The numbers of this rank's rows, and which of them are padding."""
    if context.kind == "zigzag":
        rows = zigzag_tables(batch, context).rows
        return rows.source, rows.padding
    source = own_rows(torch.arange(batch.capacity.tokens), context)
    return source, source >= batch.num_tokens


def share_of(tensors, batch, backend, context, held=None):
    """This rank's rows of output and gradients, and which rows and padding they are. held: what
    padding holds (default: numbers as any others)."""
    source, padding = rows_of(batch, context)
    parts = [tensor[source] for tensor in tensors]
    if held is not None:
        parts = [part.masked_fill(padding[:, None, None], held) for part in parts]
    metadata = attention_metadata(batch, backend, finite_padding=held == 0.0, context=context)
    return differentiate(parts, metadata), source, padding


def share(kind, name, key_heads, values, backend, context, held=None):
    tensors = inputs(kind, name, key_heads, values)
    return share_of(tensors, batch_of(kind, name), backend, context, held)


def context_of(mesh, kind):
    return ContextGroup(mesh.size("cp"), mesh.place["cp"], mesh.group("cp").group_name, kind)


def whole(results, part, like):
    """What the ranks have of output or a gradient, in the order of the row; padding must be exactly
    zero."""
    found = torch.zeros_like(like)
    for tensors, source, padding in results:
        assert not tensors[part][padding].any(), "padding is exactly zero"
        found[source[~padding]] = tensors[part][~padding]
    return found


def on_ranks(mesh, kind, cases):
    return [share(kind, *case, context_of(mesh, kind), held) for *case, held in cases]


def cases_of(kind):
    """Name, key heads, width of values, backend, and what padding holds. Key heads: fewer than
    ranks, as many, more, one for each query head; values narrower than keys, as latent attention
    has them."""
    held = None if kind == "ulysses" else 0.0
    cases = [
        (name, heads, WIDTH, "sdpa", held)
        for name in ROWS[kind]
        for heads in ((1, 2, 4) if kind == "ulysses" else (1, 3))
        if heads == 1 or not name.startswith("tiny")
    ]
    cases += [("mixed", HEADS[kind], VALUES, backend, held) for backend in ("sdpa", "naive")]
    if kind == "ulysses":
        return [*cases, ("mixed", 2, VALUES, "naive", held)]
    return [
        *cases,
        ("mixed", 2, VALUES, "sdpa", torch.nan),
        ("bounded", 3, WIDTH, "naive", torch.inf),
    ]


@KINDS
@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_and_gradients_are_those_of_one_process(kind, ranks):
    cases = cases_of(kind)
    results = run_ranks(on_ranks, ranks, kind, cases, layout=Layout(cp=ranks))
    for number, (name, heads, values, backend, _) in enumerate(cases):
        expected = in_one_process(kind, name, heads, values)
        for part, label in enumerate(("out", "dq", "dk", "dv")):
            torch.testing.assert_close(
                whole([result[number] for result in results], part, expected[part]),
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
            share("zigzag", name, 3, values, backend, context_of(mesh, "zigzag"), held)
            for name, values, backend, held in KERNEL_CASES
        ]


def test_a_kernel_gets_boundaries_of_queries_and_of_keys():
    results = run_ranks(with_kernels, 4, layout=Layout(cp=4))
    for number, (name, values, *_) in enumerate(KERNEL_CASES):
        expected = in_one_process("zigzag", name, 3, values)
        for part in range(4):
            torch.testing.assert_close(
                whole([result[number] for result in results], part, expected[part]),
                # the kernel's output is float32
                expected[part],
                rtol=1e-5,
                atol=1e-5,
            )


def one_document_changed(mesh, kind):
    """Output and gradients with the second document's rows changed, NaN in padding; and without."""
    batch, context = batch_of(kind, "mixed"), context_of(mesh, kind)
    tensors = inputs(kind, "mixed", 2, WIDTH)
    changed = [tensor.clone() for tensor in tensors]
    for tensor in changed:
        tensor[14:34] = 7.0 - tensor[14:34]
    return [
        share_of(each, batch, "sdpa", context, held)
        for each, held in ((tensors, 0.0), (changed, torch.nan))
    ]


@KINDS
def test_documents_do_not_see_each_other_nor_padding(kind):
    results = run_ranks(one_document_changed, 2, kind, layout=Layout(cp=2))
    *leaves, out = inputs(kind, "mixed", 2, WIDTH)
    for part, like in enumerate([out, *leaves]):
        before, after = (
            whole([result[side] for result in results], part, like) for side in range(2)
        )
        assert torch.equal(before[:14], after[:14]) and torch.equal(before[34:], after[34:])
        assert not torch.equal(before[14:34], after[14:34])


def compiled(mesh, kind):
    batch, context = batch_of(kind, "mixed"), context_of(mesh, kind)
    function = {"ulysses": attention, "zigzag": zigzag}[kind]
    if kind == "ulysses":
        arguments = (attention_metadata(batch, "sdpa", context=context),)
    else:
        arguments = batch, context
    both = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        leaves = inputs(kind, "mixed", 2, WIDTH)[:3]
        if kind == "ulysses":
            leaves = [own_rows(leaf, context).clone() for leaf in leaves]
        out = call(*(leaf.requires_grad_() for leaf in leaves), *arguments)
        out.square().sum().backward()
        both.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return both


def zigzag(q, k, v, batch, context):
    tables = zigzag_tables(batch, context)
    return attention(
        *(x.index_select(0, tables.rows.source) for x in (q, k, v)),
        attention_metadata(batch, "sdpa", context=context, tables=tables),
    )


@KINDS
@pytest.mark.slow
def test_compiled_code_holds_the_exchange(kind):
    for eager, code in run_ranks(compiled, 2, kind, layout=Layout(cp=2)):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(eager, code, strict=True))
