"""Whether RMSNorm and rotary positions are single operations or kernels of `ops/norm.py`, and how
these are tiled: one table for each, by rows.

`operations` are what torch or a compiler makes of them (`ops/elementwise.py`). The tables name
nothing else until `benchmarks/fused_layers.py` shows a gain for a shape; they hold for what it was
measured on, which is compute capability 9.
"""

from typing import NamedTuple

import torch

from packgraph.ops.grouped_gemm.configs import on_hopper

WIDEST = 2**14  # numbers of a row that one program holds
LARGEST_HEADS = 2**14  # numbers of all heads of a token, alike


class Normed(NamedTuple):
    """How rows are normalised.

    kernel: "operations" or "rows" (ops/norm_kernel.py). elements: of the rows that a program has at
    once; a longer row is one by itself. programs: at most, of a backward; each makes one partial
    sum of the weight's gradient.
    """

    kernel: str = "operations"
    elements: int = 4096
    programs: int = 264


class Turned(NamedTuple):
    """How heads of queries and keys are normalised and rotated.

    kernel: "operations" or "heads" (ops/rotary_kernel.py). warps: of a program, which has all heads
    of a token at once. programs: as of `Normed`.
    """

    kernel: str = "operations"
    warps: int = 4
    programs: int = 528


# (from how many rows on, how): descending.
NORMED: tuple[tuple[int, Normed], ...] = ((0, Normed()),)
TURNED: tuple[tuple[int, Turned], ...] = ((0, Turned()),)


def is_measured(device: torch.device) -> bool:
    """Whether the tables hold for this device."""
    return on_hopper(device)


def normed_way(rows: int) -> Normed:
    """The way for so many rows."""
    return next(way for least, way in NORMED if rows >= least)


def turned_way(rows: int) -> Turned:
    """The way for the heads of so many tokens."""
    return next(way for least, way in TURNED if rows >= least)


# Constants for compiled code, as the choice of attention is: tables do not change while a process
# runs.
@torch.compiler.assume_constant_result
def norms_fuse(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> bool:
    """Whether `rows` rows of `width` numbers of `dtype` are normalised by one kernel."""
    return (
        normed_way(rows).kernel == "rows"
        and is_measured(device)
        and dtype in (torch.bfloat16, torch.float16, torch.float32)
        and 0 < width <= WIDEST
    )


@torch.compiler.assume_constant_result
def heads_fuse(
    device: torch.device, dtype: torch.dtype, rows: int, heads: tuple[int, int], head_dim: int
) -> bool:
    """Whether queries and keys of `rows` tokens are normalised and rotated by one kernel. heads: of
    queries and of keys."""
    return (
        turned_way(rows).kernel == "heads"
        and is_measured(device)
        and dtype in (torch.bfloat16, torch.float16, torch.float32)
        and head_dim >= 2
        and head_dim & (head_dim - 1) == 0
        and min(heads) > 0
        and max(heads) * head_dim <= LARGEST_HEADS
    )
