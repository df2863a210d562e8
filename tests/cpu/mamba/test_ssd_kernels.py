"""The kernels of convolution and SSD against the operations they replace, in Triton's
interpreter."""

import os

import pytest
import torch
from interpreterkit import INSIDE, inside, needs_triton, outside, run_in_interpreter
from ssmkit import NAN, conv_inputs, distances, ids_of, mend_interpreter, ssd_inputs, with_gradients

from packgraph.mamba.conv import plain_packed_causal_conv
from packgraph.mamba.ssd import chunked_ssd

pytestmark = needs_triton
LIMITS = {torch.float32: 3e-6, torch.float16: 5e-3}  # the interpreter knows no products of bfloat16


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    if INSIDE in os.environ:
        mend_interpreter(monkeypatch)


def ssd_kernels(ids, chunk):
    from packgraph.mamba.ssd import ssd_by_kernels

    return lambda *leaves: ssd_by_kernels(*leaves, ids, chunk)


@inside
@pytest.mark.parametrize(
    ("lengths", "padding", "chunk", "sizes", "dtype"),
    [
        ([1], 0, 16, {"heads": 1, "groups": 1}, torch.float32),
        ([0, 3, 5, 1, 9, 17], 2, 16, {"heads": 4, "groups": 2}, torch.float16),
        ([43], 3, 16, {"heads": 2, "groups": 1, "skip": False}, torch.float32),
        ([100, 77], 23, 128, {"heads": 2, "groups": 2, "size": 20, "state": 70}, torch.float32),
        ([], 17, 16, {"heads": 1, "groups": 1}, torch.float32),
    ],
    ids=str,
)
def test_ssd_equals_the_operations(lengths, padding, chunk, sizes, dtype):
    """Outputs and all gradients; rows that lie apart; NaN in padding, from where nothing may
    come."""
    ids = ids_of(lengths, padding, 2)
    rows, used = len(ids), sum(lengths)
    inputs = ssd_inputs(rows, dtype=dtype, **sizes)
    grad = torch.randn(inputs[0].shape)
    wide = [None if value is None else value.double() for value in inputs]
    wanted = with_gradients(
        lambda *leaves: chunked_ssd(*leaves, ids, chunk), wide, grad.to(dtype).double()
    )
    for value in (inputs[0], inputs[1], inputs[3], inputs[4], grad):
        value[used:] = NAN
    inputs[0] = torch.cat([inputs[0], inputs[0]], 1)[:, : inputs[0].shape[1]]
    found = with_gradients(ssd_kernels(ids, chunk), inputs, grad)
    assert [x.dtype for x in found] == [dtype, *(x.dtype for x in inputs if x is not None)]
    assert max(distances(found, wanted)) < LIMITS[dtype]
    assert not any(found[place][used:].any() for place in (0, 1, 2, 4, 5))


@inside
def test_ssd_shares_heads_out_among_programs(monkeypatch):
    from packgraph.mamba import ssd_backward

    ids, inputs, grad = ids_of([5, 9], 2), ssd_inputs(16, 4, 3, 1, 5), torch.randn(16, 4, 3)
    results = []
    for enough, parts in ((1, 1), (2, 2)):
        monkeypatch.setattr(ssd_backward, "ENOUGH_PROGRAMS", enough)
        assert ssd_backward.parts_of(1, 4) == parts
        results.append(with_gradients(ssd_kernels(ids, 16), inputs, grad))
    assert max(distances(*results)) < LIMITS[torch.float32]
    assert [ssd_backward.parts_of(1, 6), ssd_backward.parts_of(2, 1)] == [2, 1]


def other_ways(monkeypatch, **given):
    """Have forward and backward made in these ways instead of those of the table."""
    from packgraph.mamba import ssd_backward, ssd_forward
    from packgraph.mamba.ssd_forward import KernelConfigs

    for kernels in (ssd_forward, ssd_backward):
        monkeypatch.setattr(kernels, "ways_of", lambda *sizes: KernelConfigs(**given))


def grouped(tile, share):
    """Every piece in a way that is not the usual one."""
    from packgraph.mamba.ssd_forward import ScanLaunch

    return {
        "tables": ScanLaunch(heads=32, rows=128),
        "carry": ScanLaunch(columns=64, rows=16),
        "mix": ScanLaunch(kernel="groups", tile=tile, share=share),
        "back": ScanLaunch(columns=16, rows=128),
        "pairs": ScanLaunch(share=share, products=True),
        "of_c": ScanLaunch(tile=128, share=share, warps=8),
        "of_b": ScanLaunch(tile=128, share=share, warps=8),
        "values": ScanLaunch(kernel="groups", tile=tile, share=share),
    }


@inside
@pytest.mark.parametrize(
    ("tile", "share", "chunk", "sizes", "dtype"),
    [
        (16, 2, 32, {"heads": 4, "groups": 2}, torch.float16),
        (32, 8, 32, {"heads": 3, "groups": 1, "skip": False}, torch.float32),
        (128, 1, 128, {"heads": 2, "groups": 2, "size": 20, "state": 70}, torch.float32),
    ],
    ids=str,
)
def test_every_way_equals_the_operations(tile, share, chunk, sizes, dtype, monkeypatch):
    ids, used = ids_of([0, 3, 5, 1, 39], 16, 2), 48
    inputs = ssd_inputs(len(ids), dtype=dtype, **sizes)
    grad = torch.randn(inputs[0].shape)
    wide = [None if value is None else value.double() for value in inputs]
    wanted = with_gradients(
        lambda *leaves: chunked_ssd(*leaves, ids, chunk), wide, grad.to(dtype).double()
    )
    for value in (inputs[0], inputs[1], inputs[3], inputs[4], grad):
        value[used:] = NAN
    other_ways(monkeypatch, **grouped(tile, share))
    found = with_gradients(ssd_kernels(ids, chunk), inputs, grad)
    assert max(distances(found, wanted)) < LIMITS[dtype]
    assert not any(found[place][used:].any() for place in (0, 1, 2, 4, 5))


@inside
@pytest.mark.parametrize("part", ["mix", "values"])
def test_a_tile_that_reads_unwritten_scores_is_refused(part, monkeypatch):
    from packgraph.mamba.ssd_forward import ScanLaunch

    other_ways(monkeypatch, **{part: ScanLaunch(tile=128)})
    with pytest.raises(ValueError, match=r"tiles of 64 rows.*got tile=128"):
        with_gradients(
            ssd_kernels(ids_of([20]), 128), ssd_inputs(20, 1, 3, 1, 5), torch.randn(20, 1, 3)
        )


@inside
@pytest.mark.parametrize("way", [None, "groups"])
def test_a_changed_document_leaves_the_others_in_kernels(way, monkeypatch):
    if way is not None:
        other_ways(monkeypatch, **grouped(16, 1))
    ids, changed = ids_of([5, 8, 16], 3), slice(5, 13)
    inputs, grad = ssd_inputs(32, 1, 3, 1, 5), torch.randn(32, 1, 3)
    before = with_gradients(ssd_kernels(ids, 16), inputs, grad)
    for place in (0, 1, 3, 4):
        inputs[place][changed] *= 1.7
    grad[changed] += 3
    after = with_gradients(ssd_kernels(ids, 16), inputs, grad)
    kept = torch.ones(32, dtype=torch.bool)
    kept[changed] = False
    for place in (0, 1, 2, 4, 5):
        assert torch.equal(before[place][kept], after[place][kept])
        assert not torch.equal(before[place][~kept], after[place][~kept])


@inside
def test_long_decays_in_kernels():
    ids, inputs = ids_of([22, 9], 1), ssd_inputs(32, 1, 3, 1, 5)
    inputs[1] = inputs[1] * 300
    wide = [value.double() for value in inputs]
    wanted = with_gradients(
        lambda *leaves: chunked_ssd(*leaves, ids, 16), wide, torch.ones(32, 1, 3).double()
    )
    found = with_gradients(ssd_kernels(ids, 16), inputs, torch.ones(32, 1, 3))
    assert (
        max(distances(found, wanted)) < 1e-3
    )  # decays are differences of sums of thousands, in float32


@inside
def test_compiled_ssd_holds_the_kernels():
    ids, inputs, grad = ids_of([5, 9], 2), ssd_inputs(16, 1, 3, 1, 5), torch.randn(16, 1, 3)
    compiled = torch.compile(ssd_kernels(ids, 16), fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(
        with_gradients(compiled, inputs, grad),
        with_gradients(ssd_kernels(ids, 16), inputs, grad),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@inside
@pytest.mark.parametrize(
    ("lengths", "padding", "channels", "taps", "bias", "activation"),
    [
        ([0, 3, 1, 66, 2], 3, 130, 4, True, True),
        ([6], 0, 3, 4, False, True),
        ([2, 5], 2, 5, 3, True, False),
        ([2, 5], 0, 5, 1, False, True),
        ([], 9, 4, 2, True, True),
    ],
    ids=str,
)
def test_convolution_equals_the_operations(lengths, padding, channels, taps, bias, activation):
    from packgraph.mamba.conv import convolve

    ids, used = ids_of(lengths, padding, 1), sum(lengths)
    inputs = conv_inputs(len(ids), channels, taps, bias=bias)
    grad = torch.randn(len(ids), channels)
    wanted = with_gradients(
        lambda *leaves: plain_packed_causal_conv(*leaves, ids, activation), inputs, grad
    )
    inputs[0][used:], grad[used:] = NAN, NAN
    inputs[0] = torch.cat([inputs[0], inputs[0]], 1)[:, :channels]
    found = with_gradients(lambda *leaves: convolve(*leaves, ids, activation), inputs, grad)
    assert [x.shape for x in found] == [x.shape for x in wanted]
    assert max(distances(found, wanted)) < LIMITS[torch.float32]
    assert not found[0][used:].any() and not found[1][used:].any()


@inside
def test_compiled_convolution_holds_the_kernel():
    from packgraph.mamba.conv import convolve

    ids, inputs, grad = ids_of([5, 9], 2), conv_inputs(16), torch.randn(16, 6)
    compiled = torch.compile(convolve, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(
        with_gradients(lambda *leaves: compiled(*leaves, ids, True), inputs, grad),
        with_gradients(lambda *leaves: convolve(*leaves, ids, True), inputs, grad),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@outside
def test_in_the_interpreter():
    run_in_interpreter(__file__)
