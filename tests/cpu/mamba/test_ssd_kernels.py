"""The kernels of convolution and SSD against the operations they replace, in Triton's
interpreter."""

import os

import pytest
import torch
from interpreterkit import INSIDE, inside, needs_triton, outside, run_in_interpreter
from ssmkit import ids_of, mend_interpreter, ssd_inputs, with_gradients

pytestmark = needs_triton


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    if INSIDE in os.environ:
        mend_interpreter(monkeypatch)


def ssd_kernels(ids, chunk):
    from packgraph.mamba.ssd import ssd_by_kernels

    return lambda *leaves: ssd_by_kernels(*leaves, ids, chunk)


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
def test_compiled_ssd_holds_the_kernels():
    ids, inputs, grad = ids_of([5, 9], 2), ssd_inputs(16, 1, 3, 1, 5), torch.randn(16, 1, 3)
    compiled = torch.compile(ssd_kernels(ids, 16), fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(
        with_gradients(compiled, inputs, grad),
        with_gradients(ssd_kernels(ids, 16), inputs, grad),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@outside
def test_in_the_interpreter():
    run_in_interpreter(__file__)
