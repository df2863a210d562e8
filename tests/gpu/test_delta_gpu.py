"""The gated delta rule on CUDA: kernels against single operations in float64, replays, isolation,
time."""

import pytest
import torch
from ssmkit import NAN, delta_inputs, distances, ids_of, with_gradients

from packgraph.graphs.graphed import graph
from packgraph.mamba.gated_delta import chunked_gated_delta, delta_problems, gated_delta

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = torch.bfloat16
# bfloat16: q, k, v, what rows write and states are rounded
LIMITS = {BF16: 0.02, torch.float16: 0.005, torch.float32: 1e-4}
# (key heads, heads, columns of keys, of values): few, since kernels are compiled for each
SHAPES = [(2, 2, 64, 64), (1, 2, 32, 16), (2, 4, 128, 128), (1, 1, 48, 80)]
PACKS = [[500], [3, 130, 1, 255, 64], [], [512], [128, 128, 256], [100, 28, 300]]


@pytest.fixture(autouse=True)
def quiet_again():
    yield
    torch.cuda.set_sync_debug_mode("default")


def case(rows, shape=(2, 4, 64, 64), dtype=torch.float32):
    with torch.device("cuda"):
        inputs = delta_inputs(rows, *shape, dtype)
        inputs[3] = 0.2 * inputs[3]
        return inputs, torch.randn(rows, shape[1], shape[3]).to(dtype)


def by_kernels(inputs, grad, ids, chunk=64):
    return with_gradients(lambda *leaves: gated_delta(*leaves, ids, chunk), inputs, grad)


def in_float64(inputs, grad, ids):
    return with_gradients(
        lambda *leaves: chunked_gated_delta(*leaves, ids),
        [x.double() for x in inputs],
        grad.double(),
    )


def assert_near(found, wanted, dtype):
    assert all(torch.isfinite(x).all() for x in found)
    assert max(distances(found, wanted)) < LIMITS[dtype], distances(found, wanted)


def test_kernels_are_chosen():
    found = [
        bool(delta_problems(torch.device("cuda"), BF16, (128, 128), 64, dims)) for dims in (2, 3)
    ]
    assert found == [False, True]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_equal_single_operations(shape):
    """Fifty packs of each shape."""
    generator = torch.Generator().manual_seed(0)

    def draw(most):
        return int(torch.randint(1, most + 1, (), generator=generator))

    for _ in range(50):
        most = draw(3) ** 5  # documents of a row, of some, of several chunks
        lengths = [draw(most) for _ in range(draw(8))]
        lengths += [-sum(lengths) % 64] * draw(2)  # borders of documents at borders of chunks
        ids = ids_of(lengths, draw(90) - 1).cuda()
        inputs, grad = case(len(ids), shape)
        assert_near(by_kernels(inputs, grad, ids), in_float64(inputs, grad, ids), torch.float32)


@pytest.mark.parametrize(
    ("shape", "chunk", "dtype"),
    [
        ((2, 4, 128, 128), 64, BF16),
        ((2, 2, 16, 16), 64, BF16),
        ((1, 2, 16, 64), 64, BF16),
        ((1, 1, 128, 256), 64, BF16),
        ((1, 2, 256, 256), 64, BF16),
        ((1, 2, 96, 192), 32, BF16),
        ((2, 2, 64, 64), 16, torch.float16),
        ((1, 1, 256, 256), 64, torch.float32),
        ((1, 1, 64, 32), 16, torch.float32),
        ((2, 4, 8, 6), 64, BF16),  # by single operations: kernels read outside
        ((1, 1, 20, 40), 64, BF16),
    ],
    ids=str,
)
def test_kernels_equal_single_operations_for_every_size(shape, chunk, dtype):
    ids = ids_of([0, 3, 130, 0, 1, 300, 64], 20, 1).cuda()
    inputs, grad = case(len(ids), shape, dtype)
    assert_near(by_kernels(inputs, grad, ids, chunk), in_float64(inputs, grad, ids), dtype)


def test_what_stands_in_padding_reaches_nothing_and_documents_are_apart():
    ids, changed = ids_of([100, 3, 227], 54).cuda(), slice(100, 103)
    inputs, grad = case(384, dtype=BF16)
    clean = by_kernels(inputs, grad, ids)
    merged = by_kernels(inputs, grad, ids.clamp(max=0))
    assert min(distances(merged, clean)) > 0.01
    for x in (*inputs, grad):
        x[330:] = NAN
    for old, new in zip(clean, by_kernels(inputs, grad, ids), strict=True):
        assert torch.equal(old, new) and not new[330:].any()
    for x in inputs:
        x[changed] *= 0.7
    grad[changed] += 3
    kept = torch.ones(384, dtype=torch.bool, device="cuda")
    kept[changed] = False
    for old, new in zip(clean, by_kernels(inputs, grad, ids), strict=True):
        assert torch.equal(old[kept], new[kept]) and not torch.equal(old[~kept], new[~kept])


def test_results_repeat_and_nothing_waits_for_the_host():
    ids = ids_of([700, 1, 300], 23).cuda()
    inputs, grad = case(1024, (4, 8, 128, 128), BF16)
    results = []
    for mode in ("default", "error", "error"):  # kernels are compiled by the first call
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        results.append(by_kernels(inputs, grad, ids))
    torch.cuda.set_sync_debug_mode("default")
    assert all(all(map(torch.equal, other, results[0])) for other in results[1:])


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_replays_follow_new_documents_bitwise(dtype):
    ids = ids_of(PACKS[0], 12).cuda()
    inputs, grad = case(512, (2, 4, 128, 128), dtype)
    leaves = [x.requires_grad_() for x in inputs]
    stream, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())

    def step():
        out = gated_delta(*leaves, ids)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(captured, stream=stream):
        found = step()
    for lengths in PACKS[1:4]:
        ids.copy_(ids_of(lengths, 512 - sum(lengths)))
        captured.replay()
        replayed = [x.detach().clone() for x in found]
        assert all(torch.isfinite(x).all() for x in replayed)
        assert all(map(torch.equal, replayed, step()))


class Rule(torch.nn.Module):
    """The rule on slices of one product, as a layer has it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(0.1 * torch.randn(256, 512, dtype=BF16, device="cuda"))
        self.log_a = torch.nn.Parameter(torch.linspace(-2, 0, 4, device="cuda"))

    def forward(self, x, ids):
        q, k, v = (x @ self.weight).split([128, 128, 256], 1)
        q, k = (
            torch.nn.functional.normalize(part.unflatten(1, (2, 64)).float(), dim=-1)
            for part in (q, k)
        )
        v = v.unflatten(1, (4, 64))
        return gated_delta(q, k, v, -self.log_a.exp() * x[:, :4].float().sigmoid(), x[:, 4:8], ids)


@pytest.mark.parametrize("compile", [False, True])
def test_graphed_layers_equal_eager_ones_bitwise(compile):
    graphed = graph(Rule(), warmup=1, strict=True, compile=compile)
    plain = graph(Rule(), warmup=10**6, compile=compile) if compile else Rule()
    for number, lengths in enumerate(PACKS * 2):
        results = []
        for module in (graphed, plain):
            torch.manual_seed(number)
            x = torch.rand(512, 256, device="cuda").to(BF16).requires_grad_()
            module.zero_grad(set_to_none=False)
            out = module(x, ids_of(lengths, 512 - sum(lengths)).cuda())
            out.backward(torch.randn_like(out))
            results.append([out.detach().clone(), x.grad, *(p.grad for p in module.parameters())])
            results[-1] = [value.clone() for value in results[-1]]
        assert all(torch.isfinite(value).all() for value in results[0]), number
        assert all(map(torch.equal, *results)), number
    assert graphed.stats.replayed >= 10
