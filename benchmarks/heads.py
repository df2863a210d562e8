"""Layers with norms and rotation by operations of `ops/norm.py`, beside plain ones; their kernels
alone; and the loss by sizes of its chunks.

    PYTHONPATH=src python3 benchmarks/fused_layers.py [--out FILE] [--seconds 140]
                                                      [--parts layers loss kernels]

layers   Four compiled layers in chunk graphs, forward and backward, at shapes of Qwen3: plain; with
         norms (`norms`); with rotated heads (`heads`); with both. First every one is checked
         against plain: relative distances of the output and of all gradients of parameters, whether
         a replay repeats and whether an eager call has its bits (`same_bits`; attention's backward
         may have none, then plain layers say so, too). Then all take turns: the median of
         microbatches in a row (`ms`) and of one by itself (`one_ms`), and bytes of the pool.
loss     Forward with gradients of the linear cross-entropy at so many logits a chunk
         (`CHUNK_ELEMENTS` of ops/loss.py), in turns: time, bytes at the most beyond what went in,
         distances to one chunk.
kernels  Every kernel of `ops/norm.py` by itself with other tiles, as the median over replays of a
         graph that holds it several times, beside what its bytes take at 4.3 TB/s. Operands may lie
         in the second-level cache.

One JSON row for each finding, tables of layers and of the loss on stderr. What does not fit into
--seconds is left out and says so, the shapes named first come first. Without CUDA everything is
tiny and traced only, which shows that the script works and nothing else.
"""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from moe_experts import Row, Session, distance
from torch import Tensor

from packgraph.bench.models import TimedPart, build_part, draw_batches, shape, zero_gradients
from packgraph.bench.timing import peak_bytes, rounds_in_turn, start_anew, time_block, time_calls
from packgraph.bench.variants import Graphed, Setting
from packgraph.models.stack import DecoderStack
from packgraph.ops import norm_configs
from packgraph.ops.loss import linear_cross_entropy
from packgraph.ops.norm_configs import Normed, Turned
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

LAYERS, CALLS, ROUNDS = 4, 6, 15
RELATIVE = 0.03  # bfloat16: every layer rounds anew
BYTES_PER_US = 4.3e6  # measured on an H200, docs/LOG.md
CHUNKS = tuple(2**power for power in range(27, 31))


class Case(NamedTuple):
    """A shape. ways: what is measured at it, plain first. rounds: turns of each."""

    model: str
    tokens: int
    ways: tuple[str, ...]
    rounds: int = ROUNDS


ALL = ("plain", "norms", "heads", "norms+heads")
CASES = (
    Case("qwen3-0.6b", 4096, ALL),
    Case("qwen3-4b", 16384, ("plain", "norms+heads"), 5),
    Case("qwen3-0.6b", 1024, ALL),
    Case("qwen3-4b", 4096, ("plain", "norms+heads"), 9),
)
TINY = (Case("tiny", 64, ALL, 2),)


@contextlib.contextmanager
def chosen(way: str, everywhere: bool = False) -> Iterator[None]:
    """Within the block the tables name what `way` says. everywhere: whatever the device."""
    kept = norm_configs.NORMED, norm_configs.TURNED, norm_configs.is_measured
    parts = way.split("+")
    norm_configs.NORMED = ((0, Normed("rows" if "norms" in parts else "operations")),)
    norm_configs.TURNED = ((0, Turned("heads" if "heads" in parts else "operations")),)
    if everywhere:
        norm_configs.is_measured = lambda device: True
    try:
        yield
    finally:
        norm_configs.NORMED, norm_configs.TURNED, norm_configs.is_measured = kept


class Layers:
    """All ways of one case, over the same parameters and gradients."""

    def __init__(self, session: Session, case: Case) -> None:
        self.session, self.case = session, case
        config = shape(case.model, LAYERS)
        self.model: DecoderStack = build_part("layers", config, session.device, session.dtype)
        zero_gradients([self.model])
        capacity = Capacity(case.tokens, max(4, case.tokens // 64))
        drawn = draw_batches(
            capacity, CALLS + 1, config.vocab_size, mean=case.tokens / 8, sigma=1.0, seed=0
        )
        self.batches: list[PackedBatch] = [batch.to(session.device) for batch in drawn]
        work = TimedPart(self.model, case.tokens, min(batch.num_tokens for batch in drawn))
        compiler = "inductor" if session.cuda else "aot_eager"
        self.setting = Setting(work, self.model, capacity, (capacity,), compiler=compiler)
        self.ways: dict[str, Graphed] = {}
        self.found: dict[str, list[Tensor]] = {}

    def prepare(self, way: str) -> Row:
        """Compile and capture a way, and compare what it computes with plain layers."""
        with chosen(way, not self.session.cuda):
            made = Graphed(
                f"chunk+compile+{way}",
                self.setting.work_of("chunk+compile"),
                (self.setting.capacity,),
                "chunk",
                compile=self.setting.compiler,
            )
            made.prepare(self.batches)
            self.ways[way] = made
            fuses = self._fuses()
            first, second = (self._results(made.run) for _ in range(2))
            eager = self._results(partial(self._eagerly, made))
        plain = self.found.setdefault("plain", first) if way == "plain" else self.found["plain"]
        far = [distance(ours, theirs) for ours, theirs in zip(first, plain, strict=True)]
        return {
            "output_distance": far[0],
            "gradient_distance": max(far[1:]),
            "norm_gradient_distance": max(
                part for part, value in zip(far[1:], plain[1:], strict=True) if value.dim() == 1
            ),
            "fuses": fuses,
            "ok": max(far) <= RELATIVE
            and made.complaint() is None
            and fuses == ("norms" in way, "heads" in way),
            "complaint": made.complaint(),
            "same_bits": {
                "replay": all(map(torch.equal, first, second)),
                "eager": all(map(torch.equal, first, eager)),
            },
            "pool_bytes": made.facts()["pool_bytes"],
        }

    def _fuses(self) -> tuple[bool, bool]:
        """Whether tables and device have fused norms, and fused heads, in these layers."""
        config, rows = self.model.config, self.case.tokens
        where, heads = (
            (self.session.device, self.session.dtype),
            (config.num_heads, config.num_kv_heads),
        )
        return (
            norm_configs.norms_fuse(*where, rows, config.hidden_size),
            norm_configs.heads_fuse(*where, rows, heads, config.head_dim),
        )

    def time(self) -> dict[str, Row]:
        """Medians of all ways that were prepared, in turns."""
        device, batches = self.session.device, self.batches[:CALLS]
        several: dict[str, list[float]] = {name: [] for name in self.ways}
        single: dict[str, list[float]] = {name: [] for name in self.ways}

        def turn(name: str, number: int) -> None:
            way = self.ways[name]

            def calls(mark: Callable[[], None]) -> None:
                for batch in batches:
                    way.run(batch)
                    mark()

            zero_gradients([self.model])
            with way.frozen():
                laps, _ = time_calls(device, calls, lambda: way.run(batches[-1]))
                one, _ = time_block(device, lambda: way.run(batches[number % CALLS]))
            several[name].append(statistics.mean(laps))
            single[name].append(one)

        runs = {name: partial(turn, name) for name in self.ways}
        rounds_in_turn(runs, self.case.rounds, lambda: False)
        rows: dict[str, Row] = {}
        for name in self.ways:
            ms, plain = statistics.median(several[name]), statistics.median(several["plain"])
            rows[name] = {
                "ms": round(ms, 4),
                "one_ms": round(statistics.median(single[name]), 4),
                "us_of_layer": round(1000 * ms / LAYERS, 1),
                "over_plain": round(plain / ms, 4),
                "spread": round(statistics.stdev(several[name]) / ms, 4),
            }
        return rows

    def close(self) -> None:
        """Free graphs and compiled code."""
        for way in self.ways.values():
            way.close()
        self.ways.clear()
        self.found.clear()

    def _results(self, run: Callable[[PackedBatch], Tensor]) -> list[Tensor]:
        """The output and the gradients of all parameters of one microbatch."""
        zero_gradients([self.model])
        out = run(self.batches[0]).clone()
        return [out, *(value.grad.clone() for value in self.model.parameters())]

    @staticmethod
    def _eagerly(way: Graphed, batch: PackedBatch) -> Tensor:
        out = way.graphed.run_eagerly(*way.work.arguments(batch))
        torch.autograd.backward(out, way.work.incoming(batch))
        found: Tensor = out.detach()
        return found


def layers(session: Session) -> None:
    """Rows and a table of all cases."""
    lines = []
    for case in CASES if session.cuda else TINY:
        start_anew(session.device)
        what: Row = {"section": "layers", "model": case.model, "tokens": case.tokens}
        made = Layers(session, case)
        for way in case.ways:
            if way == "plain" or "plain" in made.ways:
                session.attempt(partial(made.prepare, way), **what, way=way)
        for name, row in made.time().items() if made.ways else ():
            session.write(**what, way=name, **row)
            lines.append([case.model, case.tokens, name, *row.values()])
        made.close()
    table(("model", "tokens", "way", "ms", "one ms", "us/layer", "over plain", "spread"), lines)


def losses(session: Session) -> None:
    """Rows and a table of the loss by the size of its chunks."""
    vocabulary, width = (151_936, 1024) if session.cuda else (320, 32)
    device, lines = session.device, []
    for tokens in (4096, 16384) if session.cuda else (512,):
        torch.manual_seed(0)
        hidden = torch.randn(tokens, width, device=device).to(session.dtype).requires_grad_()
        weight = 0.02 * torch.randn(vocabulary, width, device=device)
        leaves = [hidden, weight.to(session.dtype).requires_grad_()]
        labels = torch.randint(0, vocabulary, (tokens,), device=device)
        chunks = CHUNKS if session.cuda else (2**14, 2**16)
        runs = {
            elements: partial(
                by_chunks, leaves, labels, max(elements // vocabulary // 128, 1) * 128
            )
            for elements in chunks
        }
        whole = by_chunks(leaves, labels, tokens)
        times: dict[int, list[float]] = {elements: [] for elements in chunks}

        def turn(elements: int, number: int, runs=runs, times=times) -> None:
            times[elements].append(time_block(device, runs[elements], runs[elements])[0])

        most = {}
        for elements, run in runs.items():
            far = [distance(a, b) for a, b in zip(run(), whole, strict=True)]
            before = torch.cuda.memory_allocated(device) if session.cuda else 0
            most[elements] = far, (peak_bytes(device, run) or 0) - before
        rounds_in_turn(
            {elements: partial(turn, elements) for elements in chunks}, ROUNDS, lambda: False
        )
        for elements in chunks:
            far, memory = most[elements]
            row: Row = {
                "section": "loss",
                "tokens": tokens,
                "elements": elements,
                "rows": min(tokens, max(elements // vocabulary // 128, 1) * 128),
                "ms": round(statistics.median(times[elements]), 3),
                "bytes_at_most": memory,
                "distances": far,
                "ok": max(far) <= RELATIVE,
            }
            session.write(**row)
            lines.append([tokens, elements, row["rows"], row["ms"], round(memory / 2**20)])
    table(("tokens", "logits a chunk", "rows", "ms", "MiB at most"), lines)


def by_chunks(leaves: Sequence[Tensor], labels: Tensor, rows: int) -> list[Tensor]:
    """The loss, a mean, and its gradients."""
    loss = linear_cross_entropy(*leaves, labels, rows) / labels.shape[0]
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def kernels(session: Session) -> None:
    """Rows of every kernel with other tiles."""
    if not session.cuda:
        session.write(section="kernels", reason="kernels are there on CUDA only")
        return
    for model, tokens in (("qwen3-0.6b", 4096), ("qwen3-4b", 16384), ("qwen3-0.6b", 1024)):
        for name, how, moved, work in kernel_work(session, model, tokens):
            what: Row = {"section": "kernels", "model": model, "tokens": tokens}

            def measured(moved: int = moved, work: Callable[[], object] = work) -> Row:
                taken, floor = session.microseconds(work), moved / BYTES_PER_US
                return {"us": round(taken, 2), "floor_us": round(floor, 2)}

            session.attempt(measured, **what, kernel=name, how=how._asdict())


def kernel_work(
    session: Session, model: str, tokens: int
) -> Iterator[tuple[str, Normed | Turned, int, Callable[[], object]]]:
    """Name, tile, bytes that are moved, and the launch."""
    from packgraph.ops.norm_kernel import normalise, normalise_backward
    from packgraph.ops.rotary_kernel import turn, turn_backward

    config = shape(model, LAYERS)

    def rows(*sizes: int) -> list[Tensor]:
        return [torch.randn(sizes, device=session.device).to(session.dtype) for _ in range(4)]

    x, grad, out, total = rows(tokens, config.hidden_size)
    weight, of_weight, *_ = rows(config.hidden_size)
    for elements in (2048, 4096, 8192):
        way = Normed("rows", elements)
        plain = partial(normalise, x, None, weight, 1e-6, out, None, way)
        adding = partial(normalise, x, grad, weight, 1e-6, out, total, way)
        yield "norm", way, 2 * x.nbytes, plain
        yield "sum and norm", way, 4 * x.nbytes, adding
        for programs in (132, 264, 528):
            way = Normed("rows", elements, programs)
            back = (grad, total, x, weight, 1e-6, out, of_weight, way)
            yield "norm backward", way, 4 * x.nbytes, partial(normalise_backward, *back)
    q, q_grad, q_out, _ = rows(tokens, config.num_heads, config.head_dim)
    k, k_grad, k_out, _ = rows(tokens, config.num_kv_heads, config.head_dim)
    first, second, *others = rows(config.head_dim)
    cos, sin, *_ = rows(tokens, config.head_dim)
    moved = q.nbytes + k.nbytes
    common = (q, k, (first, second), 1e-6, (cos, sin), (q_out, k_out))
    for warps in (4, 8):
        way = Turned("heads", warps)
        yield "heads", way, 2 * moved, partial(turn, *common, way)
        for programs in (264, 528, 1056):
            way = Turned("heads", warps, programs)
            back_of = partial(turn_backward, (q_grad, k_grad), *common, tuple(others), way)
            yield "heads backward", way, 3 * moved, back_of


def table(names: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
    """Lines under their names, on stderr."""
    texts = [[str(value) for value in line] for line in (names, *lines)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for line in texts:
        padded = (text.rjust(width) for text, width in zip(line, widths, strict=True))
        print("  ".join(padded), file=sys.stderr)


PARTS: Mapping[str, Callable[[Session], None]] = {
    "layers": layers,
    "loss": losses,
    "kernels": kernels,
}


def main() -> int:
    """Print rows and tables; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=140)
    parser.add_argument("--parts", nargs="+", choices=sorted(PARTS), default=list(PARTS))
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    session = Session(device, options.out, options.seconds)
    for part in options.parts:
        PARTS[part](session)
    return 1 if session.bad else 0


if __name__ == "__main__":
    sys.exit(main())
