"""Kernels of RMSNorm, and of heads that are normalised and rotated, against float64 in Triton's
interpreter: outputs, all gradients, sums that repeat, rows that are strided."""

import pytest
import torch
from interpreterkit import inside, needs_triton, outside, run_in_interpreter
from normkit import (
    EPS,
    added_reference,
    assert_near,
    draw,
    exact,
    kept_reference,
    tables,
    turned_reference,
)

from packgraph.ops.norm_configs import Normed, Turned

pytestmark = needs_triton
DTYPES = [torch.float32, torch.bfloat16]


def by_kernel(x, branch, weight, grads, way, *, eps=EPS, frozen=False):
    from packgraph.ops.norm_kernel import normalise, normalise_backward

    normed, of_x = torch.empty(2, *x.shape, dtype=x.dtype).unbind()
    total = None if branch is None else torch.empty(x.shape, dtype=x.dtype)
    of_weight = None if frozen else torch.empty_like(weight)
    normalise(x, branch, weight, eps, normed, total, way)
    kept = x if total is None else total
    normalise_backward(*grads, kept, weight, eps, of_x, of_weight, way)
    return [normed, kept, of_x, of_weight]


@inside
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "way"),
    [
        (1, 16, Normed("rows")),
        (9, 48, Normed("rows", elements=128, programs=2)),
        (13, 64, Normed("rows", elements=256, programs=3)),
        (5, 100, Normed("rows", elements=16, programs=1)),
        (6, 8192, Normed("rows", programs=4)),
    ],
    ids=str,
)
def test_norm_and_residual(rows, width, way, dtype):
    x, weight, grad, residual = draw(
        (rows, width), (width,), (rows, width), (rows, width), dtype=dtype
    )
    found = by_kernel(x, None, weight, (grad, residual), way)
    expected = exact(kept_reference, [x, weight], [grad, residual])
    assert_near([found[0], *found[2:]], [expected[0], *expected[2:]])


@inside
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_added_and_normed(dtype):
    x, branch, weight, grad, residual = draw(
        (11, 48), (11, 48), (48,), (11, 48), (11, 48), dtype=dtype
    )
    way = Normed("rows", elements=128, programs=2)
    normed, total, of_x, of_weight = by_kernel(x, branch, weight, (grad, residual), way)
    assert torch.equal(total, x + branch)
    alone = by_kernel(total, None, weight, (grad, residual), way)
    assert torch.equal(normed, alone[0]), "the sum is normalised as it is returned"
    expected = exact(kept_reference, [total, weight], [grad, residual])
    assert_near([normed, of_x, of_weight], [expected[0], *expected[2:]])
    whole = exact(added_reference, [x, branch, weight], [grad, residual])
    assert torch.equal(whole[2], whole[3])


@inside
def test_rows_may_be_strided_and_repeat_bitwise():
    wide = draw((7, 96), (7, 96), (7, 96), (7, 96), dtype=torch.bfloat16)
    x, branch, grad, residual = (value[:, 8:56] for value in wide)
    (weight,) = draw((48,), dtype=torch.float32)
    way = Normed("rows", elements=64, programs=3)
    strided = by_kernel(x, branch, weight, (grad, residual), way)
    dense = [value.contiguous() for value in (x, branch, grad, residual)]
    for ours, theirs in zip(strided, by_kernel(*dense[:2], weight, dense[2:], way), strict=True):
        assert torch.equal(ours, theirs)


@inside
def test_without_eps_rows_that_are_not_there_add_nothing():
    x, weight, grad, residual = draw((3, 8), (8,), (3, 8), (3, 8), dtype=torch.float32)
    way = Normed("rows", elements=64, programs=1)
    *_, of_weight = by_kernel(x, None, weight, (grad, residual), way, eps=0.0)
    unit = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    assert_near([of_weight], [(grad.double() * unit).sum(0)])


@inside
def test_a_frozen_weight_gets_nothing_and_changes_nothing():
    x, weight, grad, residual = draw((9, 48), (48,), (9, 48), (9, 48), dtype=torch.bfloat16)
    way = Normed("rows", elements=128, programs=2)
    trained = by_kernel(x, None, weight, (grad, residual), way)
    frozen = by_kernel(x, None, weight, (grad, residual), way, frozen=True)
    assert frozen[3] is None and torch.equal(trained[2], frozen[2])


def turned_by_kernel(q, k, weights, cos_sin, grads, way, *, frozen=False):
    from packgraph.ops.rotary_kernel import turn, turn_backward

    outputs = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype)
    gradients = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype)
    of_weights = None if frozen else tuple(torch.empty_like(weight) for weight in weights)
    turn(q, k, weights, EPS, cos_sin, outputs, way)
    turn_backward(grads, q, k, weights, EPS, cos_sin, gradients, of_weights, way)
    return [*outputs, *gradients, *(of_weights or ())]


@inside
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "way"),
    [
        (1, (1, 1), 2, Turned("heads")),
        (7, (4, 2), 16, Turned("heads", programs=2)),
        (5, (6, 3), 64, Turned("heads", programs=4)),
        (9, (16, 8), 128, Turned("heads", programs=3)),
    ],
    ids=str,
)
def test_heads_are_normalised_and_rotated(tokens, heads, head_dim, way, dtype):
    shapes = [(tokens, count, head_dim) for count in heads]
    q, k, q_grad, k_grad = draw(*shapes, *shapes, dtype=dtype)
    weights = draw((head_dim,), (head_dim,), dtype=dtype)
    cos_sin = tables(tokens, head_dim, dtype)
    found = turned_by_kernel(q, k, weights, cos_sin, (q_grad, k_grad), way)
    expected = exact(turned_reference(*cos_sin), [q, k, *weights], [q_grad, k_grad])
    assert_near(found, expected)
    again = turned_by_kernel(q, k, weights, cos_sin, (q_grad, k_grad), way, frozen=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, found[:4], strict=True))


@inside
def test_heads_may_be_slices_of_one_row():
    row, grads = draw((6, 8, 16), (6, 8, 16), dtype=torch.bfloat16)
    q, k, q_grad, k_grad = row[:, :4], row[:, 4:6], grads[:, :4], grads[:, 4:6]
    weights, cos_sin = draw((16,), (16,), dtype=torch.bfloat16), tables(6, 16, torch.float32)
    way = Turned("heads", programs=4)
    strided = turned_by_kernel(q, k, weights, cos_sin, (q_grad, k_grad), way)
    dense = [value.contiguous() for value in (q, k, q_grad, k_grad)]
    whole = turned_by_kernel(*dense[:2], weights, cos_sin, tuple(dense[2:]), way)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(strided, whole, strict=True))


@outside
def test_in_the_interpreter():
    run_in_interpreter(__file__)
