"""RMSNorm, SwiGLU and rotary embedding against their naive twins: outputs and all gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from packgraph.ops.elementwise import (
    apply_rotary,
    inverse_frequencies,
    naive_apply_rotary,
    naive_rms_norm,
    naive_swiglu,
    rms_norm,
    rotary_tables,
    swiglu,
)

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def compare(ours, naive, *inputs, **tolerance):
    """Outputs and gradients of two functions of the same tensors, under the same random
    gradient."""
    results = []
    for function in (ours, naive):
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(5)
        grads = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outputs]
        torch.autograd.backward(outputs, grads)
        results.append([*(out.detach() for out in outputs), *(leaf.grad for leaf in leaves)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, **tolerance)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 7),
    heads=st.integers(1, 3),
    width=st.integers(1, 33),
    seed=st.integers(0, 99),
)
def test_rms_norm_equals_naive(rows, heads, width, seed):
    torch.manual_seed(seed)
    compare(
        lambda x, w: rms_norm(x, w, 1e-6),
        lambda x, w: naive_rms_norm(x, w, 1e-6),
        torch.randn(rows, heads, width),
        torch.randn(width),
        rtol=1e-4,
        atol=1e-4,
    )


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 9), width=st.integers(1, 9), seed=st.integers(0, 99))
def test_swiglu_equals_naive(rows, width, seed):
    torch.manual_seed(seed)
    compare(swiglu, naive_swiglu, torch.randn(rows, width), torch.randn(rows, width), **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_keeps_its_operands_alone_and_has_the_bits_of_autograd(dtype):
    torch.manual_seed(0)
    gate, up = torch.randn(2, 33, 17).to(dtype)
    compare(swiglu, lambda a, b: F.silu(a) * b, gate, up, rtol=0, atol=0)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu(gate.requires_grad_(), up.requires_grad_())
    assert [t.data_ptr() for t in kept] == [gate.data_ptr(), up.data_ptr()]


def test_swiglu_has_gradients_of_one_operand_and_of_gradients():
    torch.manual_seed(0)
    gate, up = torch.randn(2, 3, 5, dtype=torch.float64)
    (of_gate,) = torch.autograd.grad(swiglu(gate.requires_grad_(), up).sum(), gate)
    (of_up,) = torch.autograd.grad(swiglu(gate.detach(), up.requires_grad_()).sum(), up)
    assert of_gate.isfinite().all() and of_up.isfinite().all()
    torch.autograd.gradgradcheck(swiglu, (gate, up))


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 9),
    half=st.integers(1, 8),
    heads=st.integers(1, 3),
    theta=st.sampled_from([1e4, 1e6]),
    interleaved=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rotary_equals_complex_rotation(rows, half, heads, theta, interleaved, seed):
    torch.manual_seed(seed)
    positions = torch.randint(0, 50, (rows,))

    def ours(q, k):
        cos, sin = rotary_tables(positions, inverse_frequencies(2 * half, theta), torch.float32)
        return apply_rotary(q, k, cos, sin, interleaved=interleaved)

    # angles up to 50 are rounded to float32: an error of 50 * 2 ** -24 each
    compare(
        ours,
        lambda q, k: naive_apply_rotary(q, k, positions, theta, interleaved=interleaved),
        torch.randn(rows, heads * 2, 2 * half),
        torch.randn(rows, heads, 2 * half),
        rtol=1e-4,
        atol=5e-5,
    )
