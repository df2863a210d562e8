"""Gated RMSNorm against its naive twin: outputs and all gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ssmkit import with_gradients

from packgraph.mamba.gated_norm import gated_rms_norm, naive_gated_rms_norm


@settings(max_examples=20)
@given(rows=st.integers(1, 5), groups=st.integers(1, 4), width=st.integers(1, 9))
def test_equals_naive(rows, groups, width):
    size = groups * width
    inputs = [torch.randn(rows, size), torch.randn(rows, size), torch.randn(size)]
    grad = torch.randn(rows, size)
    results = [
        with_gradients(lambda *leaves, f=function: f(*leaves, 1e-5, groups), inputs, grad)
        for function in (gated_rms_norm, naive_gated_rms_norm)
    ]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_unequal_groups_are_refused():
    with pytest.raises(ValueError, match="3 groups of 8"):
        gated_rms_norm(torch.zeros(1, 8), torch.zeros(1, 8), torch.ones(8), 1e-5, 3)
