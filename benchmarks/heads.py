"""Layers whose heads are normalised and rotated by one operation (`ops/heads.py`), beside plain
ones.

    PYTHONPATH=src python3 benchmarks/heads.py [--out FILE] [--seconds 140]

Four compiled layers in chunk graphs, forward and backward, at shapes of Qwen3. First layers with
the operation are checked against plain: relative distances of the output and of all gradients of
parameters. Then both take turns: the median of microbatches in a row, and bytes of the pool. One
JSON row for each finding; what does not fit into --seconds is left out and says so. Without CUDA
everything is tiny and traced only, which shows that the script works and nothing else.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from bench_models import TimedPart, build_part, draw_batches, shape, zero_gradients
from bench_ways import Graphed, Setting
from moe_experts import Row, Session, distance
from torch import Tensor

from packgraph.bench.comparison import rounds_in_turn, start_anew, time_calls
from packgraph.ops import heads
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

LAYERS, CALLS, ROUNDS = 4, 6, 15
RELATIVE = 0.03  # bfloat16: every layer rounds anew
FROM_ROWS = {"plain": sys.maxsize, "heads": 0}  # ways, and from how many rows on each takes it
CASES = (("qwen3-0.6b", 4096), ("qwen3-0.6b", 1024), ("qwen3-4b", 4096), ("qwen3-4b", 16384))


class Layers:
    """Both ways at one shape, over the same parameters and gradients."""

    def __init__(self, session: Session, model: str, tokens: int) -> None:
        config, capacity = shape(model, LAYERS), Capacity(tokens, max(4, tokens // 64))
        self.session = session
        self.model = build_part("layers", config, session.device, session.dtype)
        zero_gradients([self.model])
        drawn = draw_batches(
            capacity, CALLS + 1, config.vocab_size, mean=tokens / 8, sigma=1.0, seed=0
        )
        self.batches: list[PackedBatch] = [batch.to(session.device) for batch in drawn]
        work = TimedPart(self.model, tokens, min(batch.num_tokens for batch in drawn))
        compiler = "inductor" if session.cuda else "aot_eager"
        self.setting = Setting(work, self.model, capacity, (capacity,), compiler=compiler)
        self.ways: dict[str, Graphed] = {}
        self.found: dict[str, list[Tensor]] = {}

    def prepare(self, name: str) -> Row:
        """Compile and capture a way, and compare what it computes with plain layers."""
        heads.LEAST_ROWS = FROM_ROWS[name]
        capacities = (self.setting.capacity,)
        work = self.setting.work.by(self.setting.model_of("chunk+compile"))
        compiler = self.setting.compiler
        made = Graphed(f"chunk+compile+{name}", work, capacities, "chunk", compile=compiler)
        made.prepare(self.batches)
        self.ways[name] = made
        zero_gradients([self.model])
        out = made.run(self.batches[0]).clone()
        self.found[name] = [out, *(value.grad.clone() for value in self.model.parameters())]
        pairs = list(zip(self.found[name], self.found["plain"], strict=True))
        far, same = [distance(*pair) for pair in pairs], all(torch.equal(*pair) for pair in pairs)
        return {
            "output_distance": far[0],
            "gradient_distance": max(far[1:]),
            "ok": max(far) <= RELATIVE and made.complaint() is None and same == (name == "plain"),
            "complaint": made.complaint(),
            "pool_bytes": made.facts()["pool_bytes"],
        }

    def time(self) -> dict[str, Row]:
        """Medians of what was prepared, in turns."""
        taken: dict[str, list[float]] = {name: [] for name in self.ways}

        def turn(name: str, number: int) -> None:
            way = self.ways[name]

            def calls(mark: Callable[[], None]) -> None:
                for batch in self.batches[:CALLS]:
                    way.run(batch)
                    mark()

            zero_gradients([self.model])
            with way.frozen():
                laps, _ = time_calls(self.session.device, calls, lambda: way.run(self.batches[-1]))
            taken[name].append(statistics.mean(laps))

        rounds_in_turn({name: partial(turn, name) for name in self.ways}, ROUNDS, lambda: False)
        median = {name: statistics.median(laps) for name, laps in taken.items()}
        return {
            name: {
                "us_of_layer": round(1000 * ms / LAYERS, 1),
                "over_plain": round(median["plain"] / ms, 4),
                "spread": round(statistics.stdev(taken[name]) / ms, 4),
            }
            for name, ms in median.items()
        }

    def close(self) -> None:
        """Free graphs and compiled code."""
        for way in self.ways.values():
            way.close()


def main() -> int:
    """Print rows; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=140)
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    session = Session(device, options.out, options.seconds)
    if not session.cuda:
        heads.is_measured = lambda device: True
    for model, tokens in CASES if session.cuda else (("tiny", 64),):
        start_anew(device)
        what: Row = {"section": "heads", "model": model, "tokens": tokens}
        made = Layers(session, model, tokens)
        for way in FROM_ROWS:
            if way == "plain" or "plain" in made.ways:
                session.attempt(partial(made.prepare, way), **what, way=way)
        for way, row in made.time().items() if made.ways else ():
            session.write(**what, way=way, **row)
        made.close()
    return 1 if session.bad else 0


if __name__ == "__main__":
    sys.exit(main())
