"""Attention backends against the per-document formula: outputs and all gradients, padding and NaN included."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import hand_batch
from torch import Tensor

from packgraph.ops.attention import AttentionMetadata, attention, attention_metadata, choose_backend
from packgraph.ops.attention_varlen import zero_padding_gradient

# both sides are float32 sums of at most 24 terms of size one in different order
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def run(backend: str, tensors: list[Tensor], lengths: list[int], rows: int, grad: Tensor) -> list[Tensor]:
    batch = hand_batch([[1] * length for length in lengths], rows, len(lengths) + 2)
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = attention(*leaves, attention_metadata(batch, backend), scale=None)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def random_inputs(rows: int, kv_heads: int, group: int, dim: int, value_dim: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, kv_heads * group, dim), (rows, kv_heads, dim), (rows, kv_heads, value_dim),
              (rows, kv_heads * group, value_dim)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), max_size=5), padding=st.integers(0, 5), kv_heads=st.integers(1, 3),
       group=st.integers(1, 3), dim=st.sampled_from([2, 6, 8]), value_dim=st.sampled_from([2, 8]),
       seed=st.integers(0, 99))
def test_sdpa_equals_naive_for_outputs_and_gradients(lengths, padding, kv_heads, group, dim, value_dim, seed):
    rows = sum(lengths) + padding
    if rows == 0:
        return
    q, k, v, grad = random_inputs(rows, kv_heads, group, dim, value_dim, seed)
    poisoned = [x.index_fill(0, torch.arange(sum(lengths), rows), float("nan")) for x in (q, k, v, grad)]
    expected = run("naive", [q, k, v], lengths, rows, grad)
    actual = run("sdpa", poisoned[:3], lengths, rows, poisoned[3])
    for ours, theirs in zip(actual, expected):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
        assert (ours[sum(lengths):] == 0).all()


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


def test_scale_is_applied():
    batch = hand_batch([[1] * 5], 6, 1)
    q, k, v, _ = random_inputs(6, 1, 2, 4, 4, seed=1)
    results = [attention(q, k, v, attention_metadata(batch, name), scale=0.3) for name in ("naive", "sdpa")]
    torch.testing.assert_close(*results, **TOLERANCE)


def test_zero_padding_gradient_is_the_identity_with_clean_gradients():
    padding = torch.tensor([False, True])
    x, y = (torch.randn(2, 1, 3, requires_grad=True) for _ in range(2))
    first, second = zero_padding_gradient(padding, x, y)
    assert torch.equal(first, x) and torch.equal(second, y)
    grad = torch.ones(2, 1, 3)
    grad[1] = float("nan")
    torch.autograd.backward([first, second], [grad, 2 * grad])
    assert torch.equal(x.grad, torch.tensor([1.0, 0.0])[:, None, None].expand(2, 1, 3))
    assert torch.equal(y.grad, 2 * x.grad)


def test_metadata_holds_a_mask_only_where_one_is_read():
    batch = hand_batch([[1, 1], [1]], 4, 3)
    meta = attention_metadata(batch, "sdpa")
    assert meta.mask.tolist() == [[True, False, False, False], [True, True, False, False],
                                  [False, False, True, False], [False, False, False, True]]
    assert attention_metadata(batch, "varlen").mask is None
    assert meta.longest == 4


def test_backend_follows_device_and_dtype():
    assert choose_backend(torch.device("cpu"), torch.bfloat16) == "sdpa"
    assert choose_backend(torch.device("cuda"), torch.bfloat16) == "varlen"
    assert choose_backend(torch.device("cuda"), torch.float32) == "sdpa"


def test_shapes_that_do_not_fit_are_named():
    meta = attention_metadata(hand_batch([[1, 1]], 4, 1), "sdpa")
    q, k, v, _ = random_inputs(4, 2, 2, 8, 8, seed=0)
    with pytest.raises(ValueError, match=r"q \(4, 3, 8\)"):
        attention(q[:, :3], k, v, meta)
    with pytest.raises(ValueError, match="T = 4"):
        attention(q[:2], k[:2], v[:2], meta)


class _UnwrittenTails(torch.autograd.Function):
    """Stands in for the CUDA kernel: one head size, and rows of padding hold NaN in the output and all gradients."""

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, scale):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        ctx.save_for_backward(q, k, v, cu_seqlens)
        ctx.scale = scale
        return _UnwrittenTails.compute(q, k, v, cu_seqlens, scale)

    @staticmethod
    def compute(q, k, v, cu_seqlens, scale):
        meta = AttentionMetadata(cu_seqlens, torch.empty(q.shape[0]), None, q.shape[0], "naive")
        return _UnwrittenTails.spoil(attention(q, k, v, meta, scale=scale), cu_seqlens)

    @staticmethod
    def spoil(x, cu_seqlens):
        return x.index_fill(0, torch.arange(int(cu_seqlens[-1]), x.shape[0]), float("nan"))

    @staticmethod
    def backward(ctx, grad):
        q, k, v, cu_seqlens = ctx.saved_tensors
        assert torch.isfinite(grad).all()
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            _UnwrittenTails.compute(*leaves, cu_seqlens, ctx.scale).backward(grad)
        return (*(_UnwrittenTails.spoil(leaf.grad, cu_seqlens) for leaf in leaves), None, None)


@pytest.mark.parametrize("value_dim", [8, 4])
def test_varlen_cleans_what_its_kernel_leaves_unwritten(monkeypatch, value_dim):
    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        assert cu_q is cu_k and max_q == max_k == 16 and window_size == (-1, 0) and enable_gqa
        return _UnwrittenTails.apply(q, k, v, cu_q, scale)

    monkeypatch.setattr("packgraph.ops.attention_varlen.varlen_attn", kernel)
    monkeypatch.setattr("packgraph.ops.attention_varlen._SAYS_GQA", True)
    monkeypatch.setattr("packgraph.ops.attention_varlen._check_supported", lambda q, v: None)
    q, k, v, grad = random_inputs(16, 2, 3, 8, value_dim, seed=4)
    expected = run("naive", [q, k, v], [5, 0, 6], 16, grad)
    for ours, theirs in zip(run("varlen", [q, k, v], [5, 0, 6], 16, grad), expected):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
        assert (ours[11:] == 0).all()


def test_varlen_says_why_it_cannot_run_here():
    meta = attention_metadata(hand_batch([[1, 1]], 4, 1), "varlen")
    q, k, v, _ = random_inputs(4, 1, 1, 12, 16, seed=0)
    with pytest.raises(ValueError, match=r"on cpu; .*float32.*; head_dim is 12.*wider.*attention_backend='sdpa'"):
        attention(q, k, v, meta)
