"""Grouped products by descriptors and by pointers against one product after the other; the choice
of a way."""

import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreterkit import bounds_from_memory, inside, needs_triton, outside, run_in_interpreter

from packgraph.ops import grouped_gemm as grouped_ways
from packgraph.ops.grouped_gemm import (
    ADDED_ANYWHERE,
    MULTIPLIED_ANYWHERE,
    Added,
    Multiplied,
    added_way,
    describable,
    multiplied_anywhere,
    multiplied_way,
)

NAN, ROWS = float("nan"), 150
ENDS = [(0, 45, 45, 130), (32, 64, 96, 96), (0, 0, 0, 0), (1, 2, 3, 4), (0, 0, 0, 150)]


@inside
@bounds_from_memory
def test_rows_of_others_do_not_reach_a_sum():
    """Neither by a product with zero: a row of the next expert is NaN on one side and infinite on
    the other."""
    from packgraph.ops.grouped_gemm import add_by_descriptors

    left, right = torch.randn(40, 16), torch.randn(40, 16)
    left[10:20], right[10:20] = NAN, float("inf")
    total = torch.zeros(3, 16, 16)
    way = Added("descriptors", 32, 16, 16, reduce=False)
    add_by_descriptors(total, left, right, torch.tensor([10, 20, 40], dtype=torch.int32), way, 2)
    torch.testing.assert_close(total[0], left[:10].mT @ right[:10], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(total[2], left[20:].mT @ right[20:], rtol=1e-5, atol=1e-4)
    assert not total[1].isfinite().any()


SIZES = {"EXPERTS": 4}
POINTERS = dict.fromkeys(("out", "a", "matrices", "total", "left", "right"), "*fp32") | {
    "offsets": "*i32"
}


@outside
@needs_triton
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("_multiply", way) for _, way in MULTIPLIED_ANYWHERE),
        ("_add", ADDED_ANYWHERE),
    ],
    ids=str,
)
def test_float32_is_multiplied_as_such_on_gpus_of_every_age(name, way):
    """TF32 would drop what is below one part in 2,048; the interpreter knows no TF32, so compiled
    code is read."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(grouped_ways, name)
    constants = {
        key.upper(): value
        for key, value in way._asdict().items()
        if key.upper() in kernel.arg_names
    } | {key: value for key, value in SIZES.items() if key in kernel.arg_names}
    signature = {
        key: "constexpr" if key in constants else POINTERS.get(key, "i32")
        for key in kernel.arg_names
    }
    for capability in (75, 80, 90, 120):
        made = triton.compile(
            ASTSource(kernel, signature, constants),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": way.warps, "num_stages": way.stages},
        )
        assert "tt.dot" in made.asm["ttir"] and "tf32" not in made.asm["ttir"]
        assert made.metadata.shared <= 64 * 1024, "what the oldest of them has"


@outside
@needs_triton
def test_in_the_interpreter():
    run_in_interpreter(__file__)


@settings(max_examples=50)
@given(rows=st.integers(1, 5000), experts=st.integers(1, 9))
def test_tables_know_every_number_of_rows(rows, experts):
    left, right = (
        torch.empty(rows, 8, dtype=torch.bfloat16),
        torch.empty(rows, 16, dtype=torch.bfloat16),
    )
    way = added_way(torch.empty(experts, 8, 16, dtype=torch.bfloat16), left, right)
    assert way == ADDED_ANYWHERE
    matrices = torch.empty(experts, 8, 16, dtype=torch.bfloat16)
    assert multiplied_way(left, matrices).kernel == "torch"
    assert multiplied_anywhere(left, matrices).rows <= max(16, rows // experts)


@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_for_everywhere_fit_into_the_shared_memory_of_small_devices(number):
    """96 KiB a multiprocessor: what compute capability 8.6 has for one program, less what it keeps
    for itself."""
    for way in [way for _, way in MULTIPLIED_ANYWHERE]:
        assert way.inner * (way.rows + way.columns) * number.itemsize * way.stages < 96 * 1024
    assert (
        ADDED_ANYWHERE.rows * (ADDED_ANYWHERE.left + ADDED_ANYWHERE.right) * number.itemsize
        < 96 * 1024 // 2
    )


@pytest.mark.parametrize(
    ("number", "hopper", "kernel"),
    [
        (torch.bfloat16, True, "hopper"),
        (torch.float32, True, "anywhere"),
        (torch.bfloat16, False, "anywhere"),
    ],
)
def test_wide_numbers_and_other_devices_take_what_fits_everywhere(
    number, hopper, kernel, monkeypatch
):
    monkeypatch.setattr(grouped_ways, "on_hopper", lambda device: hopper)
    monkeypatch.setattr(grouped_ways, "HAS_TRITON", False)
    left, total = torch.zeros(4, 8, dtype=number), torch.zeros(2, 8, 8, dtype=number)
    assert (added_way(total, left, left) == ADDED_ANYWHERE) is (kernel == "anywhere")
    assert added_way(total.float(), left, left) == added_way(total, left, left)


def test_what_descriptors_cannot_take_goes_by_pointers(monkeypatch):
    monkeypatch.setattr(grouped_ways, "ADDED", ((0, Added("descriptors", 64, 128, 256)),))
    monkeypatch.setattr(grouped_ways, "MULTIPLIED", ((0, Multiplied("descriptors")),))
    left, right, total = torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(2, 8, 8)
    assert not describable(left)
    assert (
        added_way(total, left, right).kernel == "pointers"
        and multiplied_way(left, total).kernel == "torch"
    )


@pytest.mark.parametrize("major", [8, 9, 10, 12])
def test_descriptors_are_for_the_device_they_were_tried_on(major, monkeypatch):
    monkeypatch.setattr(grouped_ways, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    like = types.SimpleNamespace(
        device=torch.device("cuda"),
        data_ptr=lambda: 0,
        numel=lambda: 64,
        element_size=lambda: 2,
        stride=lambda *dim: 1 if dim else (8, 1),
    )
    assert describable(like) is (major == 9)
