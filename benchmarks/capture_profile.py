"""Where the host time of a capture goes, for a bank of shapes and graphs of all layers.

    PYTHONPATH=src python benchmarks/capture_profile.py --layers 28 --banks 4 --compile

The same bank is captured in one process as it is, twice, and then under cProfile. Code is compiled
in the first capture.
"""

import argparse
import cProfile
import pstats
import time

import torch
from bench_memory import Bank

from packgraph.bench.models import build_part, draw_batches, dtype_on, shape, zero_gradients
from packgraph.bench.variants import Graphed
from packgraph.graphs.backend import synchronize
from packgraph.graphs.graphed import control
from packgraph.packing.capacity import Capacity


def seconds(way: Graphed, device: torch.device) -> float:
    """How long the bank takes to capture, from and to an idle device."""
    control(way.graphed).forget_all()
    arguments = [way.work.arguments(batch) for batch in way.used.values()]
    synchronize(device)
    began = time.perf_counter()
    way.graphed.build(arguments)
    synchronize(device)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--banks", type=int, default=4)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--lines", type=int, default=45)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = shape(given.model, given.layers)
    model = build_part("model", config, device, dtype_on(device))
    zero_gradients([model])
    shapes = [
        Capacity(given.tokens * n // given.banks, given.documents)
        for n in range(1, given.banks + 1)
    ]
    drawn = [
        draw_batches(one, 1, config.vocab_size, mean=given.tokens / 16, sigma=1.0, seed=0)[0]
        for one in reversed(shapes)
    ]
    work = Bank(shapes, drawn).work(model)
    way = Graphed("profiled", work, shapes, "chunk", "inductor" if given.compile else False)
    way.warm_up([batch.to(device) for batch in drawn])
    first, again = seconds(way, device), seconds(way, device)
    profile = cProfile.Profile()
    profile.enable()
    seconds(way, device)
    profile.disable()
    each = 1000 / given.layers / given.banks
    print(
        f"{given.model}, {given.layers} layers, {given.banks} shapes up to {given.tokens} tokens: "
        f"first {first:.2f} s, again {again:.2f} s ({again * each:.1f} ms a layer and shape)"
    )
    statistics = pstats.Stats(profile)
    statistics.sort_stats("tottime").print_stats(given.lines)
    statistics.sort_stats("cumtime").print_stats(given.lines)


if __name__ == "__main__":
    main()
