"""Attention backends against the per-document formula: outputs and all gradients, padding and NaN
included."""

import pytest
import torch
from attentionkit import random_inputs, textbook_backward, textbook_forward
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import hand_batch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from packgraph.ops.attention import varlen as attention_varlen
from packgraph.ops.attention.api import attention, attention_metadata, choose_backend, gather_parts
from packgraph.ops.attention.context import swap_parts

# both sides are float32 sums of at most 24 terms of size one in different order
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def run(
    backend: str,
    tensors: list[Tensor],
    lengths: list[int],
    rows: int,
    grad: Tensor,
    attend=attention,
) -> list[Tensor]:
    batch = hand_batch([[1] * length for length in lengths], rows, len(lengths) + 2)
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = attend(*leaves, attention_metadata(batch, backend), scale=None)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=5),
    padding=st.integers(0, 5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dim=st.sampled_from([2, 6, 8]),
    value_dim=st.sampled_from([2, 8]),
    seed=st.integers(0, 99),
)
def test_sdpa_equals_naive_for_outputs_and_gradients(
    lengths, padding, kv_heads, group, dim, value_dim, seed
):
    rows = sum(lengths) + padding
    if rows == 0:
        return
    q, k, v, grad = random_inputs(rows, kv_heads, group, dim, value_dim, seed)
    poisoned = [
        x.index_fill(0, torch.arange(sum(lengths), rows), float("nan")) for x in (q, k, v, grad)
    ]
    expected = run("naive", [q, k, v], lengths, rows, grad)
    actual = run("sdpa", poisoned[:3], lengths, rows, poisoned[3])
    for ours, theirs in zip(actual, expected):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
        assert (ours[sum(lengths) :] == 0).all()


def test_only_padding_gives_zeros_everywhere():
    q, k, v, grad = (torch.full((4, 2, 8), float("nan")) for _ in range(4))
    for tensor in run("sdpa", [q, k, v], [], 4, grad):
        assert (tensor == 0).all()


def test_another_document_changes_no_bit_of_this_one():
    lengths, rows = [7, 12, 9], 32
    q, k, v, grad = random_inputs(rows, 2, 2, 8, 8, seed=0)
    before = run("sdpa", [q, k, v], lengths, rows, grad)
    changed = [x.clone() for x in (q, k, v, grad)]
    for x in changed:
        x[7:19] = torch.randn_like(x[7:19])
    after = run("sdpa", changed[:3], lengths, rows, changed[3])
    for old, new in zip(before, after):
        assert torch.equal(old[:7], new[:7]) and torch.equal(old[19:], new[19:])
        assert not torch.equal(old[7:19], new[7:19])


def test_backend_follows_device_dtype_and_head_sizes(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(
        "packgraph.ops.attention.api.flash_problems",
        lambda *facts: ["flash-attn-4 is not installed"],
    )
    assert choose_backend(torch.device("cpu"), torch.bfloat16, 64, 64).name == "sdpa"
    assert choose_backend(cuda, torch.bfloat16, 128, 128) == (
        "varlen",
        "no flash: flash-attn-4 is not installed",
    )
    assert choose_backend(cuda, torch.bfloat16, 192, 128).name == "varlen"
    assert choose_backend(cuda, torch.float32, 128, 128).name == "sdpa"
    assert "head_dim is 20" in choose_backend(cuda, torch.bfloat16, 20, 20).reason
    monkeypatch.setattr("packgraph.ops.attention.api.flash_problems", lambda *facts: [])
    assert str(choose_backend(cuda, torch.bfloat16, 192, 128)) == "flash"


def test_shapes_that_do_not_fit_are_named():
    meta = attention_metadata(hand_batch([[1, 1]], 4, 1), "sdpa")
    q, k, v, _ = random_inputs(4, 2, 2, 8, 8, seed=0)
    with pytest.raises(ValueError, match=r"q \(4, 3, 8\)"):
        attention(q[:, :3], k, v, meta)
    with pytest.raises(ValueError, match="T = 4"):
        attention(q[:2], k[:2], v[:2], meta)


@pytest.fixture
def varlen(monkeypatch) -> None:
    """The CUDA kernel's place taken by the textbook: one head size, rows of padding unwritten in
    all that it makes."""

    def forward(q, k, v, cu_seqlens, cu_keys, longest, most_keys, scale, left):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and longest == most_keys == q.shape[0]
        return textbook_forward(q, k, v, cu_seqlens, scale, cu_keys, left)

    def backward(grad, q, k, v, out, lse, cu_seqlens, cu_keys, longest, most_keys, scale, left):
        assert torch.isfinite(grad).all() and longest == most_keys == q.shape[0]
        return textbook_backward(grad, q, k, v, out, lse, cu_seqlens, scale, cu_keys, left)

    monkeypatch.setattr(attention_varlen, "_launch_forward", forward)
    monkeypatch.setattr(attention_varlen, "_launch_backward", backward)
    monkeypatch.setattr(attention_varlen, "_check_supported", lambda *facts: None)


@pytest.mark.parametrize("value_dim", [8, 4])
@pytest.mark.parametrize("compiled", [False, True])
def test_varlen_cleans_what_its_kernel_leaves_unwritten(varlen, value_dim, compiled):
    torch._dynamo.reset()
    attend = (
        torch.compile(attention, fullgraph=True, backend="aot_eager") if compiled else attention
    )
    q, k, v, grad = random_inputs(16, 2, 3, 8, value_dim, seed=4)
    grad[11:] = float("nan")
    expected = run("naive", [q, k, v], [5, 0, 6], 16, grad.nan_to_num())
    for ours, theirs in zip(run("varlen", [q, k, v], [5, 0, 6], 16, grad, attend), expected):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
        assert (ours[11:] == 0).all()


def test_varlen_kernels_are_called_as_this_torch_declares_them():
    """The kernel itself needs CUDA; that its schema takes the arguments does not."""
    q = torch.empty(8, 2, 8, device="meta", dtype=torch.bfloat16)
    k = torch.empty(20, 2, 8, device="meta", dtype=torch.bfloat16)
    boundaries = torch.empty(3, device="meta", dtype=torch.int32)
    out, lse = attention_varlen._launch_forward(q, k, k, boundaries, boundaries, 8, 20, 0.5)
    assert (out.shape, lse.dtype) == (q.shape, torch.float32)
    gradients = attention_varlen._launch_backward(
        out, q, k, k, out, lse, boundaries, boundaries, 8, 20, 0.5
    )
    assert [x.shape for x in gradients] == [q.shape, k.shape, k.shape]


def test_exchanges_of_a_context_keep_nothing_for_their_backward():
    kept = []
    with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        x = torch.empty(2, 8, 4, requires_grad=True)
        assert swap_parts(x, "group").requires_grad and gather_parts(x, "group", 2).requires_grad
    assert not kept
