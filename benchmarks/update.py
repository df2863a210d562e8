"""Time of one AdamW update of bfloat16 weights in ways that differ in what they read and write.

    PYTHONPATH=src python benchmarks/update.py --layers 28 >> rows.jsonl

One JSON row for each way: milliseconds of a captured update (median of replays) and of the host for
an eager one, its kernels, bytes of an element as counted and the rate that follows, MiB of
temporaries, what it holds beside weights, gradients and AdamW's 12 bytes, and how far it is from
the naive twin after some steps: elements of masters that differ, and the largest difference. Norm
and clipping are among it, zeroing of gradients is not. Weights are those of Qwen3-0.6B. A way that
does not run has a row that says why. Needs a GPU with 40 GB.
"""

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from trials import FAILED
from update_candidates import Candidate, compiled_step, kernel_step, naive_step

from packgraph.bench.rows import why
from packgraph.parallel.flat_buffers import GradientBucket
from packgraph.train import optimizer
from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.optimizer import Optimizer
from packgraph.train.updates import rule
from packgraph.train.updates.adamw import GROUP, AdamW

CUDA = torch.device("cuda", 0)
CONFIG = OptimizerConfig(weight_decay=0.1, clip_norm=1.0)
RATE = 1e-3
STEPS = 3  # before ways are compared
REPLAYS = 20


class Way(NamedTuple):
    """How to make an update of spans' state: what updates, and masters by span."""

    bytes: int  # of an element, read and written by all kernels, as counted
    make: Callable[["Model"], tuple[Callable[[], object], Callable[[], list[Tensor]]]]


class Model:
    """Weights of Qwen3-0.6B with so many layers, in an `Optimizer` as the trainer makes it."""

    def __init__(self, layers: int, group: int = GROUP) -> None:
        torch.manual_seed(0)
        shapes = [(151936, 1024)]
        for _ in range(layers):
            shapes += [(2048, 1024), (1024, 1024), (1024, 1024), (1024, 2048)]
            shapes += [(3072, 1024), (3072, 1024), (1024, 3072), (1024,), (1024,), (128,), (128,)]
        named = [
            (str(n), nn.Parameter(torch.randn(shape, device=CUDA).mul_(0.02).bfloat16()))
            for n, shape in enumerate(shapes)
        ]
        self.elements = sum(parameter.numel() for _, parameter in named)
        with mock.patch.object(optimizer, "AdamW", functools.partial(AdamW, group=group)):
            self.optimizer = Optimizer(named, CONFIG)
        self.spans: list[GradientBucket] = self.optimizer.flat.spans
        for span in self.spans:
            span.gradients.normal_()

    def masters(self) -> list[Tensor]:
        """Of the optimizer, by parameter."""
        found = self.optimizer.state_tensors()
        return [found[f"{m.name}.master"].view(-1) for span in self.spans for m in span.members]


def ours(model: Model) -> tuple[Callable[[], object], Callable[[], list[Tensor]]]:
    """As it is trained."""
    model.optimizer.set_learning_rate(RATE)
    model.optimizer.watch()  # so the update can be blocked
    loss = torch.ones((), device=CUDA)
    return lambda: model.optimizer.update(loss), model.masters


def cast_first(model: Model) -> tuple[Callable[[], object], Callable[[], list[Tensor]]]:
    """Two kernels make a clipped copy: a conversion, then a product in place."""

    def clipped(gradient: Tensor, scale: Tensor | None) -> Tensor:
        found = gradient.float()
        torch._foreach_mul_([found], scale)
        return found

    update, masters = ours(model)

    def patched() -> object:
        with mock.patch.object(rule, "clipped", clipped):
            return update()

    return patched, masters


def other(step: object) -> Callable[[Model], tuple[Callable[[], object], Callable[[], object]]]:
    """A candidate, in place of the model's optimizer, whose state is let go of."""

    def make(model: Model) -> tuple[Callable[[], object], Callable[[], list[Tensor]]]:
        del model.optimizer
        found = Candidate(model.spans, CONFIG, step)  # type: ignore[arg-type]
        found.learning_rate.fill_(RATE)

        def masters() -> list[Tensor]:
            return [
                state.span.part(member, state.master).view(-1)
                for state in found.states
                for member in state.span.members
            ]

        return found.update, masters

    return make


def ways() -> Iterator[tuple[str, int, Way]]:
    """Name, elements of a group, and way; the naive twin first."""
    yield "copies", 0, Way(52, other(None))
    yield "pieces", GROUP, Way(42, ours)
    for group in (2**22, 2**23, 320 * 2**16, 2**25, 2**31):
        yield f"pieces of {group / 2**20:.0f}Mi", group, Way(42, ours)
    yield "pieces, converted, then clipped", GROUP, Way(50, cast_first)
    for block, warps in ((4096, 8), (1024, 4), (2048, 4), (2048, 8), (8192, 8)):
        step = functools.partial(kernel_step, block=block, warps=warps)
        yield f"kernel, {block} by {warps} warps", 0, Way(30, other(step))
    yield "compiled", 0, Way(30, other(compiled_step()))


def measure(layers: int, group: int, way: Way, twin: list[Tensor]) -> dict[str, object]:
    """A row of one way. twin: masters of the naive twin, made by the first way that comes."""
    model = Model(layers, group or GROUP)
    update, masters = way.make(model)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated() / model.elements - 2 * 2 - 3 * 4
    held -= sum(each.nbytes for each in twin) / model.elements
    for _ in range(STEPS):
        update()
    found = masters()
    if not twin:
        twin += [each.clone() for each in found]
    differ = sum(int((a != b).sum()) for a, b in zip(found, twin, strict=True))
    most = max(float((a - b).abs().max()) for a, b in zip(found, twin, strict=True))
    del found
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, begin = torch.cuda.memory_allocated(), time.perf_counter()
    update()
    host = time.perf_counter() - begin
    torch.cuda.synchronize()
    temporaries = torch.cuda.max_memory_allocated() - before
    times, kernels = replayed(update)
    ms = statistics.median(times)
    return {
        "parameters": model.elements,
        "ms": round(ms, 3),
        "ms_least_most": [round(min(times), 3), round(max(times), 3)],
        "eager_host_ms": round(host * 1e3, 2),
        "kernels": kernels,
        "bytes_an_element": way.bytes,
        "tb_s": round(way.bytes * model.elements / ms / 1e9, 2),
        "held_bytes_an_element": round(held, 2),
        "temporaries_mib": round(temporaries / 2**20, 1),
        "masters_that_differ": differ,
        "largest_difference": most,
    }


def replayed(update: Callable[[], object]) -> tuple[list[float], int]:
    """Milliseconds of replays of a captured update, and its kernels."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [first.elapsed_time(second) for first, second in itertools.pairwise(marks)]
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        graph.replay()
        torch.cuda.synchronize()
    kernels = sum(event.device_type == DeviceType.CUDA for event in trace.events())
    return times, kernels


def checks() -> Iterator[tuple[str, bool]]:
    """What must hold on this device, and whether it does."""
    values = torch.randn(2**25 + 3, device=CUDA).bfloat16()
    for size in (1, 127, 128, 2**20, 2**25, 2**25 + 3):
        (found,) = torch._foreach_norm([values[:size]], 2, dtype=torch.float32)
        (expected,) = torch._foreach_norm([values[:size].float()])
        yield f"the norm of {size} has the bits of that of float32", torch.equal(found, expected)
    scale = torch.rand((), device=CUDA)
    expected = values.float().mul_(scale)
    yield "clipping has the bits of float32", torch.equal(rule.clipped(values, scale), expected)
    for decays in (True, False):
        weights = torch.randn((64, 64) if decays else (64,)).to(CUDA, torch.bfloat16)
        ends = []
        for step in (naive_step, kernel_step):
            torch.manual_seed(1)
            named = [("weight", nn.Parameter(weights.clone()))]
            candidate = Candidate(Optimizer(named, CONFIG).flat.spans, CONFIG, step)
            (state,) = candidate.states
            candidate.learning_rate.fill_(RATE)
            for number in range(5):
                state.span.gradients.normal_()
                candidate.blocked.fill_(number == 3)
                before = state.master.clone()
                candidate.update()
                yield (
                    f"{step.__name__} changes what is not blocked",
                    torch.equal(before, state.master) == (number == 3),
                )
            ends.append([*state[1:]])
        close = [torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(*ends, strict=True)]
        yield f"the kernel is its naive twin, decays = {decays}", all(close)


def main() -> None:
    """Print rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    options = parser.parse_args()
    about = {
        "benchmark": "update",
        "layers": options.layers,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    failed = [what for what, holds in checks() if not holds]
    print(json.dumps(about | {"way": "checks", "failed": failed}), flush=True)
    twin: list[Tensor] = []
    for name, group, way in ways():
        try:
            row = measure(options.layers, group, way, twin)
        except FAILED as error:
            row = {"error": why(error)}
        print(json.dumps(about | {"way": name} | row), flush=True)


if __name__ == "__main__":
    main()
