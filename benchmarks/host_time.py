"""Host time of a microbatch's forward and backward by one chunk graph each, the launches of graphs
told apart.

    PYTHONPATH=src python benchmarks/host_time.py --tokens 1024 4096            on a GPU; --profile says where it goes

The device is idle before every call, so nothing waits for it: what is measured is Python, copies
into the slot and the two launches.
"""  # noqa: E501

import argparse
import cProfile
import pstats
import statistics
import time

import torch
from bench_models import build_part, dtype_on, shape, zero_gradients
from bench_step import StepArguments, StepComparison
from bench_ways import Way

from packgraph.bench.comparison import Deadline
from packgraph.graphs.cuda.backend import CudaGraph
from packgraph.packing.batch import PackedBatch


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


def measure(way: Way, batches: list[PackedBatch], watch: Watch) -> tuple[float, float]:
    """Medians over the batches in microseconds: everything, launches."""
    whole, launches = [], []
    for batch in batches:
        torch.cuda.synchronize()
        watch.seconds = 0.0
        begin = time.perf_counter()
        way.run(batch)
        whole.append(1e6 * (time.perf_counter() - begin))
        launches.append(1e6 * watch.seconds)
    return statistics.median(whole), statistics.median(launches)


def main() -> None:
    """Print a line per number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--profile", action="store_true", help="print where Python spends its time")
    asked = parser.parse_args()
    device, watch = torch.device("cuda"), Watch()
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
            measure(way, batches, watch)
            if asked.profile:
                profile = cProfile.Profile()
                profile.runcall(measure, way, batches, watch)
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            watch.install()
            whole, launches = measure(way, batches, watch)
        print(
            f"{tokens} tokens: {whole:.0f} us, launches {launches:.0f} us, the rest "
            f"{whole - launches:.0f} us"
        )
        way.close()


if __name__ == "__main__":
    main()
