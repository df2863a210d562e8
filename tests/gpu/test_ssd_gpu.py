"""Convolution and SSD on CUDA: kernels against plain operations in float64, replays, isolation,
large offsets, time."""

import statistics

import pytest
import torch
from ssmkit import NAN, conv_inputs, distances, ids_of, ssd_inputs, with_gradients

from packgraph.graphs.graphed import graph
from packgraph.mamba.conv import conv_problems, packed_causal_conv, plain_packed_causal_conv
from packgraph.mamba.ssd import chunked_ssd, ssd, ssd_problems
from packgraph.mamba.ssd_forward import KernelConfigs, ScanLaunch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = torch.bfloat16
LIMITS = {
    BF16: 0.015,
    torch.float16: 0.003,
    torch.float32: 1e-4,
}  # bfloat16: factors of products are rounded
Q = 128
PACKS = [
    ([500], 12),
    ([3, 130, 0, 1, 255, 64], 59),
    ([], 512),
    ([512], 0),
    ([128, 128, 256], 0),
    ([100, 28, 300], 84),
]


@pytest.fixture(autouse=True)
def quiet_again():
    yield
    torch.cuda.set_sync_debug_mode("default")


def ssd_case(rows, dtype=BF16, heads=8, size=64, groups=2, state=128, skip=True):
    """Inputs with steps of the size that training sees, so that states live for some hundred
    rows."""
    with torch.device("cuda"):
        inputs = ssd_inputs(rows, heads, size, groups, state, dtype, skip)
        inputs[1] = 0.1 * inputs[1]
        return inputs, torch.randn(rows, heads, size).to(dtype)


def conv_case(rows, channels, taps=4, dtype=BF16, bias=True):
    with torch.device("cuda"):
        return conv_inputs(rows, channels, taps, dtype, bias), torch.randn(rows, channels).to(dtype)


def by_ssd(inputs, grad, ids, chunk=Q):
    return with_gradients(lambda *leaves: ssd(*leaves, ids, chunk), inputs, grad)


def by_conv(inputs, grad, ids, activation=True):
    return with_gradients(
        lambda *leaves: packed_causal_conv(*leaves, ids, activation), inputs, grad
    )


def in_float64(function, inputs, grad):
    return with_gradients(
        function, [None if value is None else value.double() for value in inputs], grad.double()
    )


def assert_near(found, wanted, dtype):
    assert all(torch.isfinite(value).all() for value in found)
    assert max(distances(found, wanted)) < LIMITS[dtype], distances(found, wanted)


def test_kernels_are_chosen():
    assert not ssd_problems(torch.device("cuda", 0), BF16, 64, 128, Q)
    assert not conv_problems(torch.device("cuda", 0), BF16, 4)


@pytest.mark.parametrize("length", [1, Q - 1, Q, Q + 1, 3 * Q + 5])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_ssd_equals_plain_for_every_length(length, dtype):
    ids = ids_of([length]).cuda()
    inputs, grad = ssd_case(length, dtype)
    wanted = in_float64(lambda *leaves: chunked_ssd(*leaves, ids, 64), inputs, grad)
    assert_near(by_ssd(inputs, grad, ids), wanted, dtype)


@pytest.mark.parametrize(
    ("chunk", "sizes", "dtype"),
    [
        (64, {}, BF16),
        (256, {}, BF16),
        (128, {"heads": 10, "groups": 1}, BF16),
        (32, {"size": 20, "state": 40}, BF16),
        (128, {"heads": 4, "groups": 4, "skip": False}, torch.float16),
        (128, {"size": 128, "state": 64}, BF16),
        (256, {"heads": 2, "groups": 1, "size": 128, "state": 256}, BF16),
        (64, {"size": 1, "state": 1}, BF16),
        (128, {}, torch.float32),
        (256, {"size": 16, "state": 16}, torch.float32),
    ],
    ids=str,
)
def test_ssd_equals_plain_for_every_shape(chunk, sizes, dtype):
    ids = ids_of([0, 3, 130, 0, 1, 300], 20, 1).cuda()
    inputs, grad = ssd_case(len(ids), dtype, **sizes)
    assert not ssd_problems(ids.device, dtype, inputs[0].shape[2], inputs[3].shape[2], chunk)
    wanted = in_float64(lambda *leaves: chunked_ssd(*leaves, ids, 64), inputs, grad)
    assert_near(by_ssd(inputs, grad, ids, chunk), wanted, dtype)


@pytest.mark.parametrize(
    "mix",
    [
        ScanLaunch(kernel="groups", tile=128, share=4, warps=8, stages=2),
        ScanLaunch(kernel="groups", share=2),
    ],
    ids=str,
)
def test_every_way_equals_plain_and_repeats(mix, monkeypatch):
    """Whatever the table says; running sums of bfloat16 by products are tested nowhere else."""
    from packgraph.mamba import ssd_backward, ssd_forward

    ways = KernelConfigs(
        mix=mix,
        carry=ScanLaunch(columns=64, rows=128),
        pairs=ScanLaunch(share=0, products=True),
        of_c=ScanLaunch(tile=128, share=0, warps=8),
        of_b=ScanLaunch(tile=128, share=0, warps=8),
        values=mix,
    )
    for kernels in (ssd_backward, ssd_forward):
        monkeypatch.setattr(kernels, "ways_of", lambda *sizes: ways)
    ids = ids_of([0, 3, 130, 0, 1, 300], 20, 1).cuda()
    inputs, grad = ssd_case(len(ids))
    found = by_ssd(inputs, grad, ids)
    assert_near(
        found, in_float64(lambda *leaves: chunked_ssd(*leaves, ids, 64), inputs, grad), BF16
    )
    assert all(
        torch.equal(old, new) for old, new in zip(found, by_ssd(inputs, grad, ids), strict=True)
    )


@pytest.mark.parametrize(
    ("taps", "bias", "activation"), [(4, True, True), (4, False, True), (2, True, False)]
)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_convolution_equals_plain(taps, bias, activation, dtype):
    ids = ids_of([0, 3, 1, 140, 2, 700], 30, 1).cuda()
    inputs, grad = conv_case(len(ids), 1030, taps, dtype, bias)
    wanted = in_float64(
        lambda *leaves: plain_packed_causal_conv(*leaves, ids, activation), inputs, grad
    )
    assert_near(by_conv(inputs, grad, ids, activation), wanted, dtype)


def test_what_stands_in_padding_reaches_nothing():
    ids, used = ids_of([100, 200], 84).cuda(), 300
    inputs, grad = ssd_case(384)
    conv, conv_grad = conv_case(384, 256)
    clean = by_ssd(inputs, grad, ids) + by_conv(conv, conv_grad, ids)
    for value in (inputs[0], inputs[1], inputs[3], inputs[4], grad, conv[0], conv_grad):
        value[used:] = NAN
    poisoned = by_ssd(inputs, grad, ids) + by_conv(conv, conv_grad, ids)
    for old, new in zip(clean, poisoned, strict=True):
        assert torch.equal(old, new)
    assert not any(value[used:].any() for value in poisoned if value.shape[0] == 384)


@pytest.mark.parametrize("changed", [slice(0, 100), slice(100, 103), slice(103, 400)], ids=str)
@pytest.mark.parametrize("heads", [8, 64])
def test_a_changed_document_leaves_the_others_bitwise(changed, heads):
    ids = ids_of([100, 3, 297, 70], 42).cuda()
    inputs, grad = ssd_case(512, heads=heads, groups=2)
    conv, conv_grad = conv_case(512, 256)
    before = by_ssd(inputs, grad, ids) + by_conv(conv, conv_grad, ids)
    for value in (inputs[0], inputs[1], inputs[3], inputs[4], conv[0]):
        value[changed] *= 1.7
    for value in (grad, conv_grad):
        value[changed] += 3
    after = by_ssd(inputs, grad, ids) + by_conv(conv, conv_grad, ids)
    kept = torch.ones(512, dtype=torch.bool, device="cuda")
    kept[changed] = False
    for old, new in zip(before, after, strict=True):
        if old.shape[0] == 512:  # not the gradients of a, d, weight and bias
            assert torch.equal(old[kept], new[kept]) and not torch.equal(old[~kept], new[~kept])


def test_results_repeat_and_nothing_waits_for_the_host():
    ids = ids_of([700, 1, 300], 23).cuda()
    inputs, grad = ssd_case(1024, heads=32, groups=1)
    conv, conv_grad = conv_case(1024, 512)
    results = []
    for mode in ("default", "error", "error"):  # kernels are compiled by the first call
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        results.append(by_ssd(inputs, grad, ids) + by_conv(conv, conv_grad, ids))
    torch.cuda.set_sync_debug_mode("default")
    for other in results[1:]:
        assert all(
            torch.equal(ours, theirs) for ours, theirs in zip(other, results[0], strict=True)
        )


class Mix(torch.nn.Module):
    """Convolution, then SSD of what came out, cut up as in a layer of Mamba-2: slices with
    strides."""

    def __init__(self, heads=8, size=64, groups=2, state=128):
        super().__init__()
        torch.manual_seed(0)
        self.sizes = (heads, size, groups, state)
        channels = heads * size + 2 * groups * state
        self.weight = torch.nn.Parameter(0.3 * torch.randn(channels, 4, dtype=BF16, device="cuda"))
        self.bias = torch.nn.Parameter(torch.zeros(channels, dtype=BF16, device="cuda"))
        self.log_a = torch.nn.Parameter(torch.linspace(0, 2, heads, device="cuda"))
        self.skip = torch.nn.Parameter(torch.ones(heads, device="cuda"))

    def forward(self, x, dt, ids):
        heads, size, groups, state = self.sizes
        mixed = packed_causal_conv(x, self.weight, self.bias, ids)
        value, b, c = mixed.split([heads * size, groups * state, groups * state], 1)
        return ssd(
            value.unflatten(1, (heads, size)),
            torch.nn.functional.softplus(dt),
            -self.log_a.exp(),
            b.unflatten(1, (groups, state)),
            c.unflatten(1, (groups, state)),
            self.skip,
            ids,
            Q,
        )


def steps_of(module, packs):
    """Output and all gradients for every pack, with inputs that depend on nothing but its
    number."""
    for number, (lengths, padding) in enumerate(packs):
        torch.manual_seed(number)
        leaves = [
            torch.randn(512, width, device="cuda").to(dtype).requires_grad_()
            for width, dtype in ((1024, BF16), (8, torch.float32))
        ]
        module.zero_grad(set_to_none=False)
        out = module(*leaves, ids_of(lengths, padding).cuda())
        out.backward(torch.randn_like(out))
        yield [
            out.detach().clone(),
            *(leaf.grad.clone() for leaf in leaves),
            *(parameter.grad.clone() for parameter in module.parameters()),
        ]


@pytest.mark.parametrize("compile", [False, True])
def test_replays_follow_new_documents_bitwise(compile):
    """Compiled code is the same in eager calls and in graphs, so both statements are bitwise."""
    graphed = graph(Mix(), warmup=1, strict=True, compile=compile)
    plain = graph(Mix(), warmup=10**6, compile=compile) if compile else Mix()
    for number, (ours, theirs) in enumerate(
        zip(steps_of(graphed, PACKS * 2), steps_of(plain, PACKS * 2), strict=True)
    ):
        assert all(torch.isfinite(value).all() for value in ours), number
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), number
    assert graphed.stats.replayed >= 10


def test_compiled_is_near_eager():
    compiled = torch.compile(Mix(), fullgraph=True, dynamic=False)
    for ours, theirs in zip(steps_of(compiled, PACKS[:2]), steps_of(Mix(), PACKS[:2]), strict=True):
        assert max(distances(ours, theirs)) < LIMITS[BF16]


def test_offsets_beyond_32_bits():
    """Rows that lie so far apart that the last ones are beyond 2 ** 31 elements."""
    rows, stride = 2300, 1_000_000
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free memory")
    ids = ids_of([1000, 1290], 10).cuda()
    inputs, _ = ssd_case(rows, heads=2, groups=1, state=16)
    conv, conv_grad = conv_case(rows, 128)
    wanted = [ssd(*inputs, ids, Q), packed_causal_conv(*conv, ids)]
    apart = torch.empty(rows, stride, dtype=BF16, device="cuda")
    apart[:, :128] = inputs[0].flatten(1)
    found = ssd(apart[:, :128].unflatten(1, (2, 64)), *inputs[1:], ids, Q)
    assert torch.equal(found, wanted[0])
    apart[:, :128] = conv[0]
    leaf = apart[:, :128].requires_grad_()
    out = packed_causal_conv(leaf, *conv[1:], ids)
    assert torch.equal(out, wanted[1])
    assert torch.equal(
        torch.autograd.grad(out, leaf, conv_grad)[0], by_conv(conv, conv_grad, ids)[1]
    )


def test_states_of_more_elements_than_32_bits_count():
    rows = 2**16
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free memory")
    ids = ids_of([rows - 1000, 900], 100).cuda()
    inputs, grad = ssd_case(rows, heads=128, groups=1, state=64)
    found = by_ssd(inputs, grad, ids, 16)
    assert all(torch.isfinite(value).all() for value in found)
    tail = slice(rows - 1000, rows)
    part = [value[tail] if value.shape[0] == rows else value for value in inputs]
    wanted = in_float64(lambda *leaves: chunked_ssd(*leaves, ids[tail], 64), part, grad[tail])
    assert_near(
        [found[place][tail] for place in (0, 1, 2, 4, 5)],
        [wanted[place] for place in (0, 1, 2, 4, 5)],
        BF16,
    )


def milliseconds(work):
    """Median time of `work` within a graph, so that launching costs nothing."""
    stream, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(captured, stream=stream):
        work()
    times = []
    for _ in range(15):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        captured.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def test_no_slower_than_mamba_ssm():
    """The same numbers as its Triton kernels, in no more time."""
    combined = pytest.importorskip("mamba_ssm.ops.triton.ssd_combined")
    rows = 4096
    ids = ids_of([1500, 96, 2500]).cuda()
    inputs, grad = ssd_case(rows, heads=64, groups=8)

    def theirs(x, dt, a, b, c, d):
        return combined.mamba_chunk_scan_combined(
            x[None], dt[None], a, b[None], c[None], Q, D=d, seq_idx=ids[None]
        )[0]

    leaves = [value.clone().requires_grad_() for value in inputs]
    assert_near(by_ssd(inputs, grad, ids), with_gradients(theirs, inputs, grad), BF16)
    times = [
        milliseconds(lambda f=function: torch.autograd.grad(f(*leaves), leaves, grad))
        for function in (lambda *values: ssd(*values, ids, Q), theirs)
    ]
    assert times[0] <= times[1], f"{times[0]:.3f} ms, mamba_ssm {times[1]:.3f} ms"
