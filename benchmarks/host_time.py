"""Host time of a microbatch's forward and backward by one chunk graph each, the launches of graphs
told apart.

    PYTHONPATH=src python benchmarks/host_time.py --tokens 1024 4096            on a GPU; --profile says where it goes
    PYTHONPATH=src python benchmarks/host_time.py --live --tokens 1024 2048     Qwen3-0.6B of transformers

The device is idle before every call, so nothing waits for it: what is measured is Python, copies
into the slot and the two launches. With --live the head and the loss are part of it, and the time
until a bucket replays for the first time is told, too.
"""  # noqa: E501

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_models import build_part, dtype_on, shape, zero_gradients
from bench_step import StepArguments, StepComparison

import packgraph
from packgraph.bench.comparison import Deadline
from packgraph.graphs.cuda.backend import CudaGraph
from packgraph.packing.batch import PackedBatch

LIVE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "head_dim": 128,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}


class Watch:
    """Seconds that launches take, while installed."""

    def __init__(self) -> None:
        self.seconds, self._replay = 0.0, CudaGraph.replay

    def install(self) -> None:
        """Time every launch from here on."""

        def replay(graph: CudaGraph) -> None:
            begin = time.perf_counter()
            self._replay(graph)
            self.seconds += time.perf_counter() - begin

        CudaGraph.replay = replay  # type: ignore[method-assign]

    def remove(self) -> None:
        """Launch as before."""
        CudaGraph.replay = self._replay  # type: ignore[method-assign]


def measure(
    run: Callable[[PackedBatch], object], batches: list[PackedBatch], watch: Watch
) -> tuple[float, float]:
    """Medians over the batches in microseconds: everything, launches."""
    whole, launches = [], []
    for batch in batches:
        torch.cuda.synchronize()
        watch.seconds = 0.0
        begin = time.perf_counter()
        run(batch)
        whole.append(1e6 * (time.perf_counter() - begin))
        launches.append(1e6 * watch.seconds)
    return statistics.median(whole), statistics.median(launches)


def of_live_model(tokens: list[int], calls: int, profiled: bool, watch: Watch) -> None:
    """Print, for every bucket, seconds and calls until it replays, and host time from then on."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from packgraph.integrations.transformers import packed

    with torch.device("cuda"):
        model = packed(Qwen3ForCausalLM(Qwen3Config(**LIVE)).bfloat16())
    zero_gradients([model])
    capacities = [packgraph.Capacity(tokens=n, documents=n // 64) for n in tokens]
    graphed = packgraph.graph(model, capacities=capacities, granularity="chunk", strict=True)
    for capacity in capacities:
        lengths = [capacity.tokens // 2, capacity.tokens // 3]
        documents = [torch.randint(LIVE["vocab_size"], (length,)).tolist() for length in lengths]
        (batch,) = (pack.to("cuda") for pack in packgraph.pack(documents, [capacity]))
        begin, made, before = time.perf_counter(), 0, graphed.stats.replayed
        while graphed.stats.replayed == before:
            graphed(batch).backward()
            made += 1
        torch.cuda.synchronize()
        print(f"{capacity}: replays in call {made}, after {time.perf_counter() - begin:.2f} s")
        batches = [batch] * calls
        print("by autograd:", end=" ")
        report(lambda batch: graphed(batch).backward(), batches, profiled, watch)
        print("forward_backward:", end=" ")
        report(lambda batch: graphed.forward_backward(batch), batches, False, watch)
        print("in a frozen step:", end=" ")
        with packgraph.control(graphed).frozen():
            report(lambda batch: graphed.forward_backward(batch), batches, False, watch)


def report(
    run: Callable[[PackedBatch], object], batches: list[PackedBatch], profiled: bool, watch: Watch
) -> None:
    """Print host time, and where Python spends it."""
    measure(run, batches, watch)
    if profiled:
        profile = cProfile.Profile()
        profile.runcall(measure, run, batches, watch)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    watch.install()
    whole, launches = measure(run, batches, watch)
    watch.remove()
    rest, tokens = whole - launches, batches[0].capacity.tokens
    print(f"{tokens} tokens: {whole:.0f} us, launches {launches:.0f} us, the rest {rest:.0f} us")


def main() -> None:
    """Print a line per number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--live", action="store_true", help="a model of transformers")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--profile", action="store_true", help="print where Python spends its time")
    asked = parser.parse_args()
    device, watch = torch.device("cuda"), Watch()
    if asked.live:
        of_live_model(asked.tokens, asked.calls, asked.profile, watch)
        return
    for tokens in asked.tokens:
        options = StepArguments(
            model=asked.model,
            layers=None,
            tokens=(tokens,),
            part="layers",
            attention="varlen",
            rounds=asked.calls,
            calls=1,
            ways=("chunk",),
        )
        model = build_part(
            options.part, shape(asked.model, options.layers), device, dtype_on(device)
        )
        zero_gradients([model])
        bench = StepComparison(options, tokens, model, device, Deadline(None))
        way = bench.make("chunk")
        batches = [batch.to(device) for batch in bench.draws]
        way.prepare(batches)
        with way.frozen():
            report(way.run, batches, asked.profile, watch)
        way.close()


if __name__ == "__main__":
    main()
