"""Which way the kernels of SSD take."""

import pytest
import torch

from packgraph.mamba.ssd_forward import EVERYWHERE, WAYS, share_of, ways_for


def test_the_table_serves_every_number_of_rows():
    least = [rows for rows, _ in WAYS]
    assert least == sorted(least, reverse=True) and least[-1] == 0
    for rows, ways in WAYS:
        assert ways_for(rows, 64, 128, 128, torch.bfloat16) is ways


@pytest.mark.parametrize(
    ("size", "state", "chunk", "dtype"),
    [
        (65, 128, 128, torch.bfloat16),
        (64, 129, 128, torch.bfloat16),
        (64, 128, 256, torch.bfloat16),
        (64, 128, 128, torch.float32),
    ],
)
def test_what_would_not_fit_takes_the_way_that_fits_everywhere(size, state, chunk, dtype):
    assert ways_for(4096, size, state, chunk, dtype) is EVERYWHERE


@pytest.mark.parametrize(
    ("wanted", "per_group", "found"), [(8, 8, 8), (8, 12, 4), (4, 6, 2), (1, 5, 1), (8, 1, 1)]
)
def test_shares_divide_a_group(wanted, per_group, found):
    assert share_of(wanted, per_group) == found
