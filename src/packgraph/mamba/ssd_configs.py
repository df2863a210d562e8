"""Tiles of the kernels of mamba/ssd.py, and the choice among several kernels for a piece of it: one
table, by rows.

Figures come from `benchmarks/ssd_tiles.py`. Every way gives the same numbers but for rounding. What
the table says holds for 16-bit numbers, states of at most [64, 128] and chunks of at most 128 rows;
larger ones, and float32, might not fit into shared memory with its tiles, and take the ways that
fit everywhere.

In all of them: warps of a program, stages of loads that are under way in its loop, registers of a
thread at most (0: as many as there are), which decides how many programs run on a multiprocessor at
once.
"""

import math
from typing import NamedTuple

import torch


class Tables(NamedTuple):
    """Tables of decays. heads: of one program, a power of two that is at least 16; rows: summed
    over in one product."""

    heads: int = 16
    rows: int = 64
    warps: int = 4


class Scores(NamedTuple):
    """Scores of a chunk's rows, for kernels that read them."""

    warps: int = 4


class Carry(NamedTuple):
    """States through all chunks. columns: of a state [P, S] in one program; rows: added in one
    product."""

    columns: int = 32
    rows: int = 128
    warps: int = 4
    stages: int = 3
    registers: int = 0


class Mix(NamedTuple):
    """y from scores and states.

    kernel: "heads", a program for a tile of rows by one head, reads scores; "groups", a program for
    a tile by `share` heads of a group, makes their scores itself, once. tile: rows.
    """

    kernel: str = "heads"
    tile: int = 64
    share: int = 1
    warps: int = 4
    stages: int = 3
    registers: int = 0


class Pairs(NamedTuple):
    """Gradients of scores and of decays between rows. share: heads of one program, 0 for as many as
    leave enough programs. products: running sums along rows are products with a triangle of ones,
    in tf32 for 16-bit numbers."""

    share: int = 0
    products: bool = False
    warps: int = 4
    stages: int = 3
    registers: int = 0


class Summed(NamedTuple):
    """Gradients of b or c. tile: rows; share: as of `Pairs`."""

    tile: int = 64
    share: int = 0
    warps: int = 8
    stages: int = 3
    registers: int = 0


class Values(NamedTuple):
    """Gradients of x. kernel: "heads" or "groups", with tile and share as of `Mix`."""

    kernel: str = "heads"
    tile: int = 64
    share: int = 1
    warps: int = 4
    stages: int = 3
    registers: int = 0


class Steps(NamedTuple):
    """Gradients of the step and of decays, put together. heads: of one program, a power of two."""

    heads: int = 8
    warps: int = 4


class KernelConfigs(NamedTuple):
    """A way for each piece. back: the carry backwards; of_c, of_b: gradients of c and b."""

    tables: Tables = Tables()
    scores: Scores = Scores()
    carry: Carry = Carry()
    mix: Mix = Mix()
    back: Carry = Carry()
    pairs: Pairs = Pairs()
    of_c: Summed = Summed()
    of_b: Summed = Summed()
    values: Values = Values()
    steps: Steps = Steps()


EVERYWHERE = KernelConfigs()
HOPPER = 9  # major compute capability of what the table was measured on
MOST_HEAD_SIZE, MOST_STATE_SIZE, MOST_CHUNK = 64, 128, 128  # of what the table is for
# (from how many rows on, how): descending. The best at 16,384, 4,096 and 1,024 rows of 64 heads in
# 8 groups on an H200.
WAYS = (
    (
        8192,
        KernelConfigs(
            tables=Tables(heads=32),
            scores=Scores(warps=8),
            mix=Mix("groups", 128, 8, warps=8),
            pairs=Pairs(products=True),
            of_c=Summed(128, 8),
            of_b=Summed(128, 8),
            values=Values("groups", share=8, stages=2),
        ),
    ),
    (
        2048,
        KernelConfigs(
            mix=Mix("groups", 128, 8, warps=8),
            pairs=Pairs(8, products=True),
            of_c=Summed(128, 8),
            of_b=Summed(128, 8),
            values=Values("groups", share=8, stages=2),
            steps=Steps(16, warps=8),
        ),
    ),
    (
        0,
        KernelConfigs(
            tables=Tables(rows=128),
            scores=Scores(warps=8),
            carry=Carry(stages=2),
            mix=Mix("groups", share=4, stages=2),
            back=Carry(columns=64),
            pairs=Pairs(8, products=True),
            of_c=Summed(share=8, stages=2),
            of_b=Summed(share=8, stages=2),
            values=Values("groups", 128, 4, warps=8),
        ),
    ),
)


def ways_for(
    rows: int, head_size: int, state_size: int, chunk: int, dtype: torch.dtype
) -> KernelConfigs:
    """The ways for T rows of heads with P columns and states of S, in chunks of Q rows."""
    if (
        dtype.itemsize != 2
        or head_size > MOST_HEAD_SIZE
        or state_size > MOST_STATE_SIZE
        or chunk > MOST_CHUNK
    ):
        return EVERYWHERE
    return next(ways for least, ways in WAYS if rows >= least)


def launched(way: Carry | Mix | Pairs | Summed | Values) -> dict[str, int | None]:
    """Launch options of warps, stages and registers."""
    return {"num_warps": way.warps, "num_stages": way.stages, "maxnreg": way.registers or None}


def share_of(wanted: int, per_group: int) -> int:
    """Number of heads of a program: at most `wanted`, and a divisor of the heads of a group."""
    return max(1, math.gcd(wanted, per_group))
