"""Host time of a call that replays: the check of module state alone, and a whole call with its
backward.

    PYTHONPATH=src python benchmarks/host_check.py        --profile says where the time goes

The module is a decoder of 28 narrow layers in one chunk graph on the recorder. Launches are left
out: graphs do nothing while host time is measured.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable

import torch

import packgraph
from packgraph.graphs.checks.module_state import ModuleState
from packgraph.graphs.recorder.backend import RecorderGraph
from packgraph.models.config import DecoderConfig
from packgraph.models.decoder import DecoderModel
from packgraph.packing.batch import PackedBatch


def show(
    what: str, work: Callable[[], object], calls: int, cold: torch.Tensor | None = None
) -> None:
    """Print median and least time of a call. cold: memory to walk over before each, to empty the
    caches."""
    times = []
    for _ in range(calls):
        if cold is not None:
            cold.add_(1)
        started = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - started))
    print(f"{what}: median {statistics.median(times):.0f} us, least {min(times):.0f} us")


def batch(tokens: int) -> PackedBatch:
    """One document that fills a row."""
    capacity = packgraph.Capacity(tokens=tokens, documents=1)
    return packgraph.pack([list(range(tokens))], [capacity])[0]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument(
        "--cold", action="store_true", help="empty the caches before every call, as training does"
    )
    parser.add_argument("--profile", action="store_true", help="print where Python spends its time")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    cold = torch.zeros(2**24) if asked.cold else None
    config = DecoderConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_layers=asked.layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
    )
    model, row = DecoderModel(config), batch(16)
    graphed = packgraph.graph(model, warmup=1)
    for _ in range(3):
        graphed(row).backward()
    assert graphed.stats.replayed == 2, graphed.stats
    print(f"{len(list(model.modules()))} modules, {len(list(model.parameters()))} parameters")
    state = ModuleState(model)
    show("check of module state", state.changed, asked.calls, cold)
    show("first look at module state", lambda: ModuleState(model), 5, cold)
    RecorderGraph.replay = lambda graph: None  # type: ignore[method-assign]
    work = lambda: graphed(row).backward()  # noqa: E731
    show("call and backward without launches", work, asked.calls, cold)
    assert sum(graphed.stats.fallbacks.values()) == 1, graphed.stats
    with graphed.frozen():
        show("the same inside frozen()", work, asked.calls, cold)
    if asked.profile:
        profile = cProfile.Profile()
        profile.runcall(show, "profiled", work, asked.calls)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
