"""Operations on CUDA: kernels against their naive twins, clean padding, capture and replay with new
values."""

import pytest
import torch
from model_batches import hand_batch
from torch import Tensor

from packgraph.ops.attention.api import attention, attention_metadata, choose_backend
from packgraph.ops.attention.flash import flash_problems
from packgraph.ops.elementwise import naive_rms_norm, rms_norm
from packgraph.ops.loss import (
    IGNORED,
    gradient_of_logits,
    linear_cross_entropy,
    naive_gradient_of_logits,
    naive_linear_cross_entropy,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# bfloat16 rounds by up to 2 ** -9; probabilities, values and outputs are each rounded, gradients a
# few times more
RELATIVE = 0.03
LENGTHS = [37, 0, 128, 1, 60]


def on_cuda(lengths: list[int], rows: int, documents: int = 8):
    batch = hand_batch([[1] * length for length in lengths], rows, documents)
    tensors = {
        name: value.cuda() for name, value in vars(batch).items() if isinstance(value, Tensor)
    }
    return type(batch)(capacity=batch.capacity, **tensors)


def attend(backend: str, tensors: list[Tensor], grad: Tensor, batch) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = attention(*leaves, attention_metadata(batch, backend))
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    assert torch.isfinite(ours).all()
    assert (ours.float() - theirs.float()).norm() <= RELATIVE * theirs.float().norm() + 1e-6


def skip_unless_it_runs(backend: str, dim: int = 64, value_dim: int = 64) -> None:
    problems = (
        flash_problems(torch.device("cuda", 0), torch.bfloat16, dim, value_dim)
        if backend == "flash"
        else []
    )
    if problems:
        pytest.skip("; ".join(problems))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"),
    [(4, 4, 64, 64), (8, 2, 128, 128), (4, 4, 192, 128), (2, 1, 16, 16)],
)
@pytest.mark.parametrize("backend", ["flash", "varlen", "sdpa"])
def test_attention_equals_naive(backend, heads, kv_heads, dim, value_dim):
    skip_unless_it_runs(backend, dim, value_dim)
    torch.manual_seed(0)
    batch, rows, used = on_cuda(LENGTHS, 256), 256, sum(LENGTHS)
    shapes = [
        (rows, heads, dim),
        (rows, kv_heads, dim),
        (rows, kv_heads, value_dim),
        (rows, heads, value_dim),
    ]
    low = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    expected = attend("naive", [x.float() for x in low[:3]], low[3].float(), batch)
    for x in low:
        x[used:] = float("nan")
    for ours, theirs in zip(attend(backend, low[:3], low[3], batch), expected):
        assert_near(ours, theirs)
        assert (ours[used:] == 0).all()


@pytest.mark.parametrize("backend", ["flash", "varlen"])
def test_compiled_attention_equals_eager(backend):
    skip_unless_it_runs(backend)
    torch.manual_seed(0)
    batch = on_cuda(LENGTHS, 256)
    q, k, v, grad = (torch.randn(256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    compiled = torch.compile(attention, fullgraph=True, dynamic=False)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = compiled(*leaves, attention_metadata(batch, backend))
    out.backward(grad)
    expected = attend(backend, [q, k, v], grad, batch)
    assert torch.equal(out, expected[0])
    for leaf, theirs in zip(leaves, expected[1:]):
        assert_near(leaf.grad, theirs)


def test_fastest_backend_is_chosen():
    skip_unless_it_runs("flash", 128, 128)
    assert choose_backend(torch.device("cuda", 0), torch.bfloat16, 128, 128) == ("flash", "")


@pytest.mark.parametrize("backend", ["flash", "varlen"])
def test_attention_replays_with_new_boundaries(backend):
    skip_unless_it_runs(backend)
    torch.manual_seed(0)
    static = on_cuda(LENGTHS, 256)
    q, k, v, grad = (torch.randn(256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(backend, [q, k, v], grad, static)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        captured = attend(backend, [q, k, v], grad, static)
    for lengths in ([256], [100, 100], [], [1, 2, 3, 4], LENGTHS):
        new = on_cuda(lengths, 256)
        for name in ("cu_seqlens", "padding_mask", "document_ids"):
            getattr(static, name).copy_(getattr(new, name))
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        eager = attend(backend, [q, k, v], grad, new)
        assert torch.equal(captured[0], eager[0])
        for ours, theirs in zip(captured[1:], eager[1:]):
            assert_near(ours, theirs)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim"), [(8, 2, 128, 128), (4, 4, 192, 128)]
)
def test_deterministic_flash_does_not_depend_on_the_capacity(heads, kv_heads, dim, value_dim):
    """At 64 or 256 documents and the longest possible one, bit for bit what a tight capacity
    gives."""
    skip_unless_it_runs("flash", dim, value_dim)
    torch.manual_seed(0)
    lengths, rows = [300, 1, 511, 128], 1024
    shapes = [
        (rows, heads, dim),
        (rows, kv_heads, dim),
        (rows, kv_heads, value_dim),
        (rows, heads, value_dim),
    ]
    q, k, v, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    results = []
    torch.use_deterministic_algorithms(True)
    for documents in (4, 64, 256):
        batch = on_cuda(lengths, rows, documents)
        results += [attend("flash", [q, k, v], grad, batch) for _ in range(2)]
    for other in results[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(other, results[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_equals_naive_and_repeats_bitwise(dtype):
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(shape, device="cuda").mul(0.3).to(dtype) for shape in ((512, 64), (5000, 64))
    )
    labels = torch.randint(0, 5000, (512,), device="cuda")
    labels[400:] = -100

    def run(function, hidden: Tensor, weight: Tensor, **options) -> list[Tensor]:
        hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = function(hidden, weight, labels, **options)
        (loss / 400).backward()
        return [loss.detach(), hidden.grad, weight.grad]

    expected = run(naive_linear_cross_entropy, hidden.float(), weight.float())
    hidden[400:] = float("nan")
    first, second = (run(linear_cross_entropy, hidden, weight, chunk=128) for _ in range(2))
    for ours, theirs in zip(first, expected):
        assert_near(ours, theirs)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_loss_repeats_bitwise_under_deterministic_algorithms(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    hidden = torch.randn(64, 16, device="cuda", requires_grad=True)
    weight = torch.randn(100, 16, device="cuda", requires_grad=True)
    labels = torch.randint(0, 100, (64,), device="cuda")
    plain = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), [hidden, weight])
    torch.use_deterministic_algorithms(True)
    strict = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), [hidden, weight])
    assert all(torch.equal(a, b) for a, b in zip(plain, strict))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_naive(dtype):
    x = torch.randn(64, 8, 128, device="cuda", dtype=dtype)
    weight = torch.randn(128, device="cuda", dtype=dtype)
    grad = torch.randn_like(x)
    results = []
    for function, cast in ((rms_norm, dtype), (naive_rms_norm, torch.float32)):
        leaves = [t.to(cast).clone().requires_grad_() for t in (x, weight)]
        function(*leaves, 1e-6).backward(grad.to(cast))
        results.append([function(*leaves, 1e-6).detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results):
        assert_near(ours, theirs)


@pytest.mark.parametrize("size", [1000, 151_936])
def test_losses_and_gradients_of_logits_equal_the_operations(size: int) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(300, size, device="cuda")).bfloat16()
    labels = torch.randint(0, size, (300,), device="cuda").masked_fill_(
        torch.rand(300, device="cuda") < 0.2, IGNORED
    )
    expected_losses, losses = torch.empty(2, 300, device="cuda")
    expected = naive_gradient_of_logits(logits.clone(), labels, expected_losses, wanted=True)
    found = gradient_of_logits(logits, labels, losses, wanted=True)
    assert found is not None and expected is not None
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-7)
    assert not found[labels == IGNORED].any()
