"""Figures of a device: the share of its peak that a model reaches, and of the time that it works.

`model_flops` is the floating point operations that a model asks for, from shapes alone: the
numerator of its share of the peak.

Counted are the matrix products of forward and backward for real tokens: padding, recomputation,
norms, rotary and activation functions are none of the model's work. A weight matrix costs 2
operations per element and token in the forward and 4 in the backward (gradients of inputs and
weights); of experts, those that a token is routed to. Causal attention has L (L + 1) / 2 pairs in a
document of L tokens; each costs 2 D for the score and 2 D for the value per query head (D of keys,
D of values), and twice that in the backward, as with any product, although the kernels compute
scores again there. A head of Mamba-2 adds an outer product of P columns and S of state for each
token and multiplies the state by S columns to read it, 4 P S together, and twice that in the
backward: what the recurrence asks for, although kernels work on chunks and do more. Its convolution
is no product of matrices.

`busy_time` is how much of the time a device has something to do: the union of its kernels' times
over the time that passes.

Kernel times come from torch.profiler (CUPTI), which slows the host and puts gaps between the
kernels of a graph, but hardly touches the kernels. So only they are taken from a profiled run; the
time that passes is that of the same calls without a profiler, measured just before. Copies and
fills count as work. A profiled kernel lasts from its launch to its end, so the microsecond between
two kernels of a graph counts as work, and the sum may be a few percent above the time that passed:
the share is then 1. Profile after everything that is timed: the profiler's library stays loaded.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from bench_step import COLUMNS, StepComparison, run_all
from bench_ways import Way
from torch.autograd import DeviceType

from packgraph.bench.comparison import Deadline, time_calls
from packgraph.bench.rows import FAILURES, Column, Row, value, why
from packgraph.models.branches import forward_operations
from packgraph.models.config import DecoderConfig
from packgraph.packing.batch import count_pairs

PEAK_TFLOPS = 797.0  # measured on an H200: bfloat16, a product of two matrices of 8192 x 8192
BUSY_CALLS, WALL_RUNS = 2, 3
Result = TypeVar("Result")


def model_flops(config: DecoderConfig, lengths: Sequence[int], head: bool) -> int:
    """Operations of forward and backward for one microbatch of documents of these lengths.

    head: whether the head is run, too; the embedding is a lookup. Hidden states that come in have a
    gradient.
    """
    return 3 * forward_operations(config, sum(lengths), count_pairs(lengths), head)


def peak_share(flops: float, milliseconds: float) -> float:
    """Share of PEAK_TFLOPS that `flops` operations in this time are."""
    return flops / (milliseconds * 1e-3) / (PEAK_TFLOPS * 1e12)


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (begin, end)."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def device_intervals(events: Iterable[Any]) -> list[tuple[float, float]]:
    """(begin, end) in microseconds of the kernels, copies and fills among a profiler's events, on
    any stream."""
    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def time_block(
    device: torch.device, run: Callable[[], object], lead: Callable[[], object] | None = None
) -> tuple[float, float]:
    """(milliseconds on the device, milliseconds of the host) of `run`; lead: see `time_calls`."""

    def once(mark: Callable[[], None]) -> None:
        run()
        mark()

    laps, host = time_calls(device, once, lead)
    return laps[0], host


def busy_time(
    device: torch.device, run: Callable[[], object], lead: Callable[[], object]
) -> tuple[float, float] | None:
    """Measures how busy the device is while `run` runs, right after `lead`.

    Returns:
        Milliseconds of its kernels, each moment counted once, and their share of the time of these
        calls without a profiler, at most 1; None on a CPU.

    Raises:
        RuntimeError: The profiler sees nothing of the device.
    """
    if device.type != "cuda":
        return None
    wall = statistics.median(time_block(device, run, lead)[0] for _ in range(WALL_RUNS))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    intervals = device_intervals(profiler.events() or ())
    if not intervals:
        raise RuntimeError("torch.profiler recorded no kernel: CUPTI does not work here")
    kernel_ms = union_length(intervals) / 1000
    return kernel_ms, min(1.0, kernel_ms / wall)


Result = TypeVar("Result")


def attempt_alone(
    work: Callable[[], Result], deadline: Deadline
) -> tuple[Result | None, str | None]:
    """(what `work` returns, None), or (None, why there is nothing): for what is not measured side
    by side."""
    if deadline.passed():
        return None, deadline.reason
    try:
        return work(), None
    except FAILURES as error:
        return None, why(error)


class StepFigures(StepComparison):
    """All ways at one number of tokens, with the share of the peak and of the time in which the
    device is at work."""

    def after(self, way: Way) -> Row:
        """Share of the time in which the device is at work, kernels of a call; or why they are not
        known."""
        batches = self.batches[way.name][self.block(0)][:BUSY_CALLS]
        busy, reason = attempt_alone(
            lambda: busy_time(self.device, lambda: run_all(way, batches), lambda: self.lead(way)),
            self.deadline,
        )
        row: Row = {"gpu_busy": None, "gpu_busy_reason": reason, "kernel_ms": None}
        if busy is not None:
            row |= {"gpu_busy": round(busy[1], 4), "kernel_ms": round(busy[0] / len(batches), 4)}
        return row

    def row(self, name: str) -> Row:
        """The row of one way at this number of tokens."""
        row, head = super().row(name), self.model.last
        samples = self.results.samples[name] if row["reason"] is None else []
        shares = [
            peak_share(model_flops(self.model.config, batch.lengths, head), sample.times[self.main])
            for batch, sample in zip(self.draws, samples, strict=False)
        ]
        known = shares and self.device.type == "cuda"
        mfu = round(statistics.median(shares), 5) if known else None
        return row | {"mfu": mfu, "mfu_peak_tflops": PEAK_TFLOPS}


PLACE = [name for name, _ in COLUMNS].index("prepare s")
STEP_COLUMNS: list[Column] = [
    *COLUMNS[:PLACE],
    ("busy", value("gpu_busy", ".1%")),
    ("mfu", value("mfu", ".3f")),
    *COLUMNS[PLACE:],
]
