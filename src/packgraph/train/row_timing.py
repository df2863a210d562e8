"""What rows cost on this machine: a few rows of every size are timed, and the planner's costs are
fitted to them.

    estimates plan the first steps ─▶ warm-up, capture, one step ─▶ rows timed ─▶ fit ─▶ measured
    costs plan the rest

Rows are those that the run replays, at the sizes and places that its plans have: one document that
fills the row, whose cost is attention, and short ones, whose cost is all else. All ranks run the
same rows in groups of one size at a time, and the slowest rank counts, so all of them find the same
numbers and go on with the same plans.

The invariant: of the timed rows nothing is left but gradients, which the next step begins by
zeroing. Weights are not touched; buffers, random states and counts are put back.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from packgraph.graphs.timer import synchronize
from packgraph.ops.attention.kind import document_multiple
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.context.request import (
    COEFFICIENTS,
    ContextCost,
    ContextRequest,
    RowTiming,
    fit,
)
from packgraph.parallel.mesh import Mesh
from packgraph.train.executor import Executor
from packgraph.train.random_state import random_states, set_random_states

ROWS = 2  # in a run, as in a step: the host's way to the first one does not count as much
RUNS = 2  # that count, after one that does not
SHORT = 32  # tokens of short documents, at least
WEIGHT = 1e-4  # of the estimates in the fit: rows are few, and estimates may be off by factors

TimeRow = Callable[[PackedBatch], float]
Slowest = Callable[[float], float]


def is_wanted(wish: bool | str, device: torch.device, deterministic: bool) -> bool:
    """Whether to time rows. wish: as of `parallel.time_rows`; auto = on CUDA, where times mean
    something, and not in a run that is to give the same bits again, since other times may make
    other plans."""
    return device.type == "cuda" and not deterministic if wish == "auto" else bool(wish)


def sample_rows(request: ContextRequest, vocabulary: int) -> list[tuple[int, PackedBatch]]:
    """Rows to be timed, with their numbers of ranks, largest first: of every size one with a single
    document, and one with short documents for the fewest and for the most places. Tokens are drawn,
    so that experts are about equally busy; the same on all ranks."""
    draw, rows = np.random.default_rng(0), list[tuple[int, PackedBatch]]()
    for size in reversed(request.sizes):
        tokens = size * request.tokens
        multiple = document_multiple("zigzag" if size in request.cost.zigzag else "ulysses", size)
        contents = [(request.places[0], [tokens])]
        for places in dict.fromkeys((request.places[0], request.places[-1])):
            short = min(tokens, -(-max(SHORT, tokens // places) // multiple) * multiple)
            contents.append((places, [short] * min(places, tokens // short)))
        rows += [
            (
                size,
                PackedBatch.build(
                    [draw.integers(vocabulary, size=length) for length in lengths],
                    Capacity(tokens, places),
                ),
            )
            for places, lengths in contents
        ]
    return rows


@dataclass(frozen=True)
class MeasuredCost:
    """cost: what plans go by from now on, None where nothing sensible was found. note: for
    people."""

    cost: ContextCost | None
    note: str


def measured_cost(request: ContextRequest, vocabulary: int, time_row: TimeRow) -> MeasuredCost:
    """The costs of `request` fitted to rows. time_row: microseconds of forward and backward of a
    row, on the slowest rank, while all ranks run the same row in groups of its size; called in the
    same order everywhere."""
    timings = [
        RowTiming(
            size,
            request.tokens,
            row.capacity.documents,
            sum(length * length for length in row.lengths),
            time_row(row),
        )
        for size, row in sample_rows(request, vocabulary)
    ]
    try:
        cost = fit(timings, _scaled(request.cost, timings), weight=WEIGHT)
    except ValueError as error:
        return MeasuredCost(
            None, f"rows were timed, but no costs explain them ({error}); plans go on by estimates"
        )
    errors = [
        abs(cost.row_us(row.size, row.tokens, row.places, row.pairs) / row.us - 1)
        for row in timings
    ]
    spans = []
    for size in request.sizes:
        of_size = sorted(timing.us / 1000 for timing in timings if timing.size == size)
        spans.append(
            f"{size} rank{'s' if size > 1 else ''} {of_size[0]:.3g} to {of_size[-1]:.3g} ms"
        )
    return MeasuredCost(
        cost,
        f"rows were timed: {', '.join(spans)}; plans go by these from here on (fitted within "
        f"{max(errors):.0%})",
    )


def _scaled(cost: ContextCost, timings: Sequence[RowTiming]) -> ContextCost:
    """`cost` times the one factor that explains `timings` best: how much slower this machine is as
    a whole, which a fit near the estimates would not find."""
    shares = [cost.row_us(row.size, row.tokens, row.places, row.pairs) / row.us for row in timings]
    factor = sum(shares) / sum(share * share for share in shares)
    return replace(cost, **{name: factor * getattr(cost, name) for name in COEFFICIENTS})


def time_row(executor: Executor, device: torch.device, slowest: Slowest) -> TimeRow:
    """Times rows by what runs the steps of a run. Gradients are added to `.grad`. slowest: see
    `slowest_rank`."""

    def timed(row: PackedBatch) -> float:
        times = []
        for number in range(RUNS + 1):
            synchronize(device)
            slowest(0.0)  # a common start
            began = time.perf_counter()
            executor.run_step([row] * ROWS, row.num_tokens)
            synchronize(device)
            if number:
                times.append(1e6 * (time.perf_counter() - began) / ROWS)
        return slowest(statistics.median(times))

    return timed


def slowest_rank(mesh: Mesh) -> Slowest:
    """The largest number of all ranks; waits for all of them."""
    group = mesh.everyone()

    def slowest(number: float) -> float:
        if group is None:
            return number
        every = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(every, dist.ReduceOp.MAX, group=group)
        return every.item()

    return slowest


@contextlib.contextmanager
def put_back(
    modules: Sequence[nn.Module], executor: Executor, device: torch.device
) -> Iterator[None]:
    """What is run within leaves gradients alone behind: buffers, random states and the executor's
    counts are put back.

    Nothing may be in flight.
    """
    buffers = {buffer: buffer.clone() for module in modules for buffer in module.buffers()}
    random = random_states(device)
    try:
        with executor.aside():
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers.items():
                buffer.copy_(before)
        set_random_states(random, device)
