"""Kernels of heads that are normalised and rotated, against float64 in Triton's interpreter:
outputs, all gradients, sums that repeat, rows that are strided."""

import pytest
import torch
from headskit import EPS, assert_near, draw, exact, tables, turned_reference
from interpreterkit import inside, needs_triton, outside, run_in_interpreter

pytestmark = needs_triton
DTYPES = [torch.float32, torch.bfloat16]
CUT = 2.0  # the interpreter cuts numbers off where hardware rounds them: twice as far at most


def by_kernel(q, k, weights, cos_sin, grads, programs, *, frozen=False):
    from packgraph.ops.heads import turn, turn_backward

    outputs = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype)
    gradients = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype)
    of_weights = None if frozen else tuple(torch.empty_like(weight) for weight in weights)
    turn(q, k, weights, EPS, cos_sin, outputs)
    turn_backward(grads, q, k, weights, EPS, cos_sin, gradients, of_weights, programs)
    return [*outputs, *gradients, *(of_weights or ())]


@inside
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "programs"),
    [
        (1, (1, 1), 2, 528),
        (7, (4, 2), 16, 2),
        (5, (6, 3), 64, 4),
        (9, (16, 8), 128, 3),
    ],
    ids=str,
)
def test_heads_are_normalised_and_rotated(tokens, heads, head_dim, programs, dtype):
    shapes = [(tokens, count, head_dim) for count in heads]
    q, k, q_grad, k_grad = draw(*shapes, *shapes, dtype=dtype)
    weights = draw((head_dim,), (head_dim,), dtype=dtype)
    cos_sin = tables(tokens, head_dim, dtype)
    found = by_kernel(q, k, weights, cos_sin, (q_grad, k_grad), programs)
    expected = exact(turned_reference(*cos_sin), [q, k, *weights], [q_grad, k_grad])
    assert_near(found, expected, CUT)
    again = by_kernel(q, k, weights, cos_sin, (q_grad, k_grad), programs, frozen=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, found[:4], strict=True))


@inside
def test_heads_may_be_slices_of_one_row():
    row, grads = draw((6, 8, 16), (6, 8, 16), dtype=torch.bfloat16)
    q, k, q_grad, k_grad = row[:, :4], row[:, 4:6], grads[:, :4], grads[:, 4:6]
    weights, cos_sin = draw((16,), (16,), dtype=torch.bfloat16), tables(6, 16, torch.float32)
    strided = by_kernel(q, k, weights, cos_sin, (q_grad, k_grad), 4)
    dense = [value.contiguous() for value in (q, k, q_grad, k_grad)]
    whole = by_kernel(*dense[:2], weights, cos_sin, tuple(dense[2:]), 4)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(strided, whole, strict=True))


@outside
def test_in_the_interpreter():
    run_in_interpreter(__file__)
