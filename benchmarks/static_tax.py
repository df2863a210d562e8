"""One run on a GPU for what could only be written without one: flash-attn-4, its static tax,
compiled regions.

    PYTHONPATH=src:tests/helpers python3 benchmarks/static_tax.py --out FOLDER [--seconds 220]

Prints one JSON line per finding, most important first, and appends them to FOLDER/static_tax.jsonl;
a section that the time does not suffice for gets a row that says so. Without flash-attn-4 a row
says why, and the rest runs. Without CUDA everything runs small on the CPU, which shows that the
script works and nothing else.

`tax` rows: microseconds of forward, and of forward and backward, at a capacity of N documents and
the longest possible one, over the same at a tight capacity. What the experiments among them ask:
  N=258    the kernels look batches up in a table from 257 documents on, where empty blocks walk
           over all before
  wide     keys and values repeated to all heads: backward then needs no float32 sums of T + 128 N rows
  bare     without the masks that keep padding out: what those cost
"""  # noqa: E501

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_models import SHAPES, draw_batches, zero_gradients
from result_rows import commit_of_source
from torch import Tensor

from packgraph.bench.rows import facts
from packgraph.graphs.graphed import graph
from packgraph.models.decoder import DecoderModel
from packgraph.ops.attention import flash as attention_flash
from packgraph.ops.attention.api import AttentionMetadata, attention, attention_metadata
from packgraph.ops.attention.flash import flash_problems
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

Row = dict[str, Any]
FAILURES = (RuntimeError, ValueError, TypeError, AssertionError, ImportError, OSError)
REPEATS, ROUNDS = 8, 12
RELATIVE = 0.03  # bfloat16: probabilities, values and outputs are each rounded


class Session:
    """Writes rows, and knows how much time is left."""

    def __init__(self, device: torch.device, out: Path | None, seconds: float) -> None:
        self.device, self.out, self.end = device, out, time.monotonic() + seconds
        self.cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.shared = facts(device, commit_of_source())
        self.bad = 0  # checks that found something wrong

    def write(self, section: str, **row: Any) -> None:
        """Print a row; the file has the device and the versions in it, too."""
        line: Row = {"section": section, **row}
        self.bad += row.get("ok") is False
        print(json.dumps(line), flush=True)
        if self.out is not None:
            with (self.out / "static_tax.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line | self.shared) + "\n")

    def attempt(self, section: str, work: Callable[[], Row], **what: Any) -> None:
        """Write what `work` finds, or why it found nothing."""
        if time.monotonic() > self.end:
            self.write(section, **what, reason="not measured: the time was over before")
            return
        begin = time.perf_counter()
        try:
            found = work()
        except FAILURES as error:
            found = {"reason": f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"}
        self.write(section, **what, **found, seconds=round(time.perf_counter() - begin, 1))

    def problems(self, backend: str, dim: int = 128, value_dim: int = 128) -> list[str]:
        """Why a backend cannot run here."""
        return flash_problems(self.device, self.dtype, dim, value_dim) if backend == "flash" else []


def documents(
    lengths: Sequence[int], tokens: int, capacity: int, device: torch.device
) -> PackedBatch:
    """A batch of documents of these lengths, on the device."""
    return PackedBatch.build([[1] * length for length in lengths], Capacity(tokens, capacity)).to(
        device
    )


def inputs(
    session: Session, tokens: int, heads: tuple[int, int], dims: tuple[int, int]
) -> list[Tensor]:
    """Random q, k, v and gradient."""
    torch.manual_seed(0)
    shapes = [
        (tokens, heads[0], dims[0]),
        (tokens, heads[1], dims[0]),
        (tokens, heads[1], dims[1]),
        (tokens, heads[0], dims[1]),
    ]
    return [torch.randn(shape, device=session.device).to(session.dtype) for shape in shapes]


def attend(tensors: Sequence[Tensor], meta: AttentionMetadata) -> list[Tensor]:
    """Output and gradients of q, k and v."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    out = attention(*leaves, meta)
    out.backward(tensors[3])
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative distance of two tensors; infinite when ours is not finite."""
    if not torch.isfinite(ours).all():
        return float("inf")
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-6))


def check_against_naive(
    session: Session, backend: str, heads: tuple[int, int], dims: tuple[int, int]
) -> Row:
    """Outputs and gradients against the formula in float32, padding full of NaN; and that padding
    comes out as zero."""
    lengths, tokens = [37, 0, 128, 1, 60, 200], 512
    used = sum(lengths)
    batch = documents([length for length in lengths if length], tokens, 16, session.device)
    tensors = inputs(session, tokens, heads, dims)
    expected = attend([x.float() for x in tensors], attention_metadata(batch, "naive"))
    for x in tensors:
        x[used:] = float("nan")
    found = attend(tensors, attention_metadata(batch, backend))
    distances = [round(distance(a, b), 5) for a, b in zip(found, expected, strict=True)]
    clean = all(bool((x[used:] == 0).all()) for x in found)
    return {
        "distances": distances,
        "padding_is_zero": clean,
        "ok": clean and max(distances) <= RELATIVE,
    }


def check_bits(
    session: Session, backend: str, heads: tuple[int, int], dims: tuple[int, int]
) -> Row:
    """With deterministic kernels: the same bits at every capacity, and in a replay with other
    lengths than captured."""
    lengths, tokens = [300, 1, 411, 128], 1024
    tensors = inputs(session, tokens, heads, dims)
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        tight = attend(
            tensors, attention_metadata(documents(lengths, tokens, 4, session.device), backend)
        )
        same = {}
        for capacity in (64, 256, 258):
            batch = documents(lengths, tokens, capacity, session.device)
            other = attend(tensors, attention_metadata(batch, backend))
            same[str(capacity)] = [torch.equal(a, b) for a, b in zip(other, tight, strict=True)]
        replayed = _replays(session, backend, tensors, tokens) if session.cuda else None
    finally:
        torch.use_deterministic_algorithms(False)
    # torch's varlen kernel splits its sums by the number of documents: other bits at another
    # capacity are no mistake
    everything = [all(values) for values in same.values()] if backend == "flash" else []
    found = all(everything) and replayed is not False
    return {"same_bits_as_tight": same, "replays_equal_eager": replayed, "ok": found}


def _replays(session: Session, backend: str, tensors: list[Tensor], tokens: int) -> bool:
    static = documents([500, 400], tokens, 64, session.device)
    stream, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(tensors, attention_metadata(static, backend))
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(captured, stream=stream):
        found = attend(tensors, attention_metadata(static, backend))
    for lengths in ([1024], [1, 2, 3, 4, 5], [333, 333, 333], [511, 129]):
        new = documents(lengths, tokens, 64, session.device)
        static.data.copy_(new.data)
        for tensor in found:
            tensor.fill_(float("nan"))
        captured.replay()
        if not all(
            torch.equal(a, b)
            for a, b in zip(found, attend(tensors, attention_metadata(new, backend)))
        ):
            return False
    return True


def microseconds(session: Session, work: Callable[[], object]) -> float:
    """Median time of `work` in a replayed graph of REPEATS calls (by the wall clock on a CPU)."""
    for _ in range(3 if session.cuda else 1):
        work()
    if not session.cuda:
        begin = time.perf_counter()
        work()
        return 1e6 * (time.perf_counter() - begin)
    stream, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(captured, stream=stream):
        for _ in range(REPEATS):
            work()
    times = []
    for _ in range(ROUNDS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        captured.replay()
        stop.record()
        stop.synchronize()
        times.append(1000 * start.elapsed_time(stop) / REPEATS)
    return statistics.median(times)


def tax_ways(
    session: Session, backend: str, tensors: list[Tensor], lengths: list[int]
) -> Iterator[tuple[str, Callable[[bool], object]]]:
    """(name, work(backward)) for each way of paying the tax; the first is the tight one."""
    tokens, (q, k, v, grad) = tensors[0].shape[0], tensors
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def usual(meta: AttentionMetadata, backward: bool, repeat: bool = False) -> object:
        attention_flash.repeats_heads = lambda tokens, documents, group: repeat
        out = attention(*leaves, meta)
        return torch.autograd.grad(out, leaves, grad) if backward else out

    def bare(meta: AttentionMetadata, backward: bool) -> object:
        scale = q.shape[-1] ** -0.5
        found = attention_flash._forward(
            *(x.detach() for x in leaves),
            meta.cu_seqlens,
            meta.padding_mask,
            meta.longest,
            scale,
            False,
            True,
        )
        if not backward:
            return found
        return attention_flash._backward(
            grad, *(x.detach() for x in leaves), *found, meta.cu_seqlens, meta.longest, scale, False
        )

    for capacity in (len(lengths), 64, 256, 258) if backend == "flash" else (len(lengths), 64, 256):
        meta, name = (
            attention_metadata(documents(lengths, tokens, capacity, session.device), backend),
            f"N={capacity}",
        )
        if capacity == len(lengths):
            meta, name = meta._replace(longest=max(lengths)), "tight"
        yield name, lambda backward, meta=meta: usual(meta, backward)
        if backend == "flash" and q.shape[1] > k.shape[1]:
            yield f"{name} wide", lambda backward, meta=meta: usual(meta, backward, repeat=True)
        if backend == "flash" and capacity == 256:
            yield f"{name} bare", lambda backward, meta=meta: bare(meta, backward)


def measure_tax(session: Session, backend: str, tokens: int, heads: tuple[int, int]) -> None:
    """One row per way."""
    lengths = [tokens * share // 64 for share in (24, 14, 11, 9, 6)] if tokens > 64 else [tokens]
    tensors = inputs(session, tokens, heads, (128, 128) if session.cuda else (16, 16))
    first: Row = {}
    for name, work in tax_ways(session, backend, tensors, lengths):

        def measured(work: Callable[[bool], object] = work) -> Row:
            with torch.no_grad():
                forward = microseconds(session, lambda: work(False))
            both = microseconds(session, lambda: work(True))
            row: Row = {"forward_us": round(forward, 1), "backward_us": round(both - forward, 1)}
            first.update(row if not first else {})
            return row | {
                "forward_tax": round(row["forward_us"] / first["forward_us"], 3),
                "backward_tax": round(row["backward_us"] / first["backward_us"], 3),
            }

        session.attempt(
            "tax", measured, backend=backend, tokens=tokens, heads=list(heads), way=name
        )


def measure_compile(session: Session, tokens: int, compiled: bool | Mapping[str, Any]) -> Row:
    """Milliseconds of forward and backward of one microbatch in chunk graphs, and what getting
    ready took."""
    shape = "qwen3-0.6b" if session.cuda else "tiny"
    config = SHAPES[shape]
    model = DecoderModel(config, device=session.device, dtype=session.dtype)
    zero_gradients([model])
    capacity = Capacity(tokens, 64)
    batches = [
        batch.to(session.device)
        for batch in draw_batches(
            capacity, 6, config.vocab_size, mean=1024.0 if session.cuda else 12.0, sigma=1.5, seed=0
        )
    ]
    graphed = graph(
        model,
        capacities=[capacity],
        warmup=1,
        slots=1,
        strict=True,
        compile=compiled if session.cuda or not compiled else "aot_eager",
    )
    losses = []
    for batch in batches:
        loss = graphed(batch)
        loss.backward()
        losses.append(loss.detach())

    def one() -> None:
        graphed(batches[0]).backward()

    if session.cuda:
        torch.cuda.synchronize()
    times = []
    for _ in range(20 if session.cuda else 2):
        begin = time.perf_counter()
        one()
        if session.cuda:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    stats = graphed.stats
    row = {
        "ms": round(statistics.median(times), 3),
        "attention": str(model.attention_choice()),
        "loss": round(float(torch.stack(losses).mean()), 5),
        "compiled": stats.compiled,
        "recompiles": dict(stats.recompiles),
        "compile_seconds": round(stats.compile_seconds, 1),
        "capture_seconds": round(stats.capture_seconds, 2),
        "pool_bytes": stats.pool_bytes,
        "replayed": stats.replayed,
        "kernels": kernels(one) if session.cuda else [],
    }
    graphed.close()
    return row


def kernels(work: Callable[[], object], most: int = 24) -> list[list[Any]]:
    """The kernels of one call that take the most time: [name, microseconds, launches]."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return [
        [event.key[:90], round(event.self_device_time_total, 1), event.count]
        for event in found[:most]
    ]


def run(session: Session) -> None:
    """All sections, most important first."""
    large, dims = ((16, 8), (128, 128)) if session.cuda else ((4, 2), (16, 16))
    backends = ["flash", "varlen"] if session.cuda else ["sdpa"]
    for backend in list(backends):
        problems = session.problems(backend)
        if problems:
            session.write("backend", backend=backend, reason="; ".join(problems))
            backends.remove(backend)
    for backend in backends:
        what = {"backend": backend, "heads": list(large), "dims": list(dims)}
        session.attempt(
            "naive",
            lambda backend=backend: check_against_naive(session, backend, large, dims),
            **what,
        )
        session.attempt(
            "bits", lambda backend=backend: check_bits(session, backend, large, dims), **what
        )
    for backend in backends:
        measure_tax(session, backend, 4096 if session.cuda else 64, large)
    tuned = {"max_autotune": True, "coordinate_descent_tuning": True}
    plan: list[tuple[int, bool | Mapping[str, Any]]] = [
        (1024, False),
        (1024, True),
        (1024, {"combo_kernels": True}),
        (8192, True),
    ]
    for tokens, compiled in plan if session.cuda else [(32, False), (32, True)]:
        session.attempt(
            "compile",
            lambda t=tokens, c=compiled: measure_compile(session, t, c),
            tokens=tokens,
            compile=compiled,
        )
    if "flash" in backends:
        measure_tax(session, "flash", 1024, large)
    if session.cuda:
        session.attempt(
            "compile",
            lambda: measure_compile(session, 1024, tuned),
            tokens=1024,
            compile=tuned,
        )
    if "flash" in backends:
        for heads, dims in (((16, 16), (128, 128)), ((4, 4), (192, 128))):
            what = {"backend": "flash", "heads": list(heads), "dims": list(dims)}
            session.attempt(
                "naive", lambda h=heads, d=dims: check_against_naive(session, "flash", h, d), **what
            )
        measure_tax(session, "flash", 4096, (16, 16))
        measure_tax(session, "flash", 16384, large)


def main(words: Sequence[str]) -> int:
    """Returns the exit code: 1 when a check found something wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for static_tax.jsonl")
    parser.add_argument(
        "--seconds", type=float, default=220.0, help="begin nothing new after this time"
    )
    asked = parser.parse_args(words)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    session = Session(device, asked.out, asked.seconds)
    session.write("facts", **session.shared)
    run(session)
    return 1 if session.bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
