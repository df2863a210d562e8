"""How plans of offloading get better when they are made again by what graphs took.

    PYTHONPATH=src python benchmarks/offload_trials.py --model qwen3-8b [--tokens 8192] [--compile]
    [--trials 3]

Trial 0 follows the plan that an eager microbatch gives, every further one the plan that the clocks
in the graphs of the one before give; `kept` moves nothing. All graphs carry clocks. Each line tells
milliseconds per microbatch (median), of them compute and waits of forward and backward by the
clocks, gigabytes a second of copies, and what was planned.
"""

import argparse
import json
import os

import torch
from bench_offload import OffloadArguments, OffloadCase, OffloadRun

from packgraph.bench.comparison import room_for_code
from packgraph.bench.models import build_part, dtype_on, shape, zero_gradients
from packgraph.bench.rows import facts
from packgraph.bench.timing import time_block
from packgraph.graphs.memory.allocator import free_memory
from packgraph.offloading.plan import KEPT, OffloadPlan, OffloadTrace
from packgraph.offloading.search import plan_for_time
from packgraph.offloading.simulate import simulate_offload
from packgraph.offloading.timing import copy_speed


def nothing(trace: OffloadTrace) -> OffloadPlan:
    """Everything stays."""
    count = len(trace.groups)
    return OffloadPlan((False,) * count, (KEPT,) * count, 1)


def waits_ms(runtime) -> tuple[float, float]:
    """How long main has waited in the forward and in the backward, by clocks, in the last
    replay."""
    times = max(runtime._captured, key=lambda times: times.nbytes)
    begin = next(iter(times.needed.values())).waits
    spent = [times.copy_streams.elapsed_us(*wait) / 1000 for wait in times.waits.all]
    return round(sum(spent[times.started.waits : begin]), 3), round(sum(spent[begin:]), 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--lost", type=float, default=0.01)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="what rows say, where there is no git checkout")
    asked = parser.parse_args()
    device = torch.device(asked.device, 0) if asked.device == "cuda" else torch.device(asked.device)
    options = OffloadArguments(
        model=asked.model,
        layers=asked.layers,
        part="layers",
        tokens=(asked.tokens,),
        lost=asked.lost,
        min_bytes=2**20 if device.type == "cuda" else 1,
        compile=asked.compile,
    )
    with room_for_code():
        run_trials(options, asked, device)


def run_trials(options: OffloadArguments, asked: argparse.Namespace, device: torch.device) -> None:
    model = build_part(options.part, shape(options.model, options.layers), device, dtype_on(device))
    zero_gradients([model])
    speed = copy_speed(device, 2**28)
    case = OffloadCase(options, model, device, asked.tokens, speed)
    eager = case.trace()
    plan, by = plan_for_time(eager, speed, asked.lost), speed
    for name in ("kept", *(f"trial {number}" for number in range(asked.trials))):
        free_memory(device)
        follows = eager, (nothing(eager) if name == "kept" else plan)
        with OffloadRun(case, None, follows, calls=2) as run:
            run.runtime.times_graphs = True
            run.prepare()
            laps = sorted(
                time_block(device, run.calls, run.calls)[0] / len(run.batches)
                for _ in range(asked.rounds)
            )
            trace, found = run.runtime.replayed(speed)
            row = {
                "benchmark": "offload_trials",
                **facts(device, asked.commit),
                "figures": {},
                "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
                "model": options.model,
                "tokens": asked.tokens,
                "compile": options.compile,
                "trial": name,
                "ms": round(laps[len(laps) // 2], 3),
                "eager_ms": round(eager.compute_us / 1000, 3),
                "forward_ms": round(trace.forward_us / 1000, 3),
                "backward_ms": round(trace.backward_us / 1000, 3),
                "waits_ms": waits_ms(run.runtime),
                "pool_bytes": run.way.facts()["pool_bytes"],
                "out_gb_s": round(found.to_host_bytes_per_us / 1000, 2),
                "back_gb_s": round(found.to_device_bytes_per_us / 1000, 2),
                "plain_gb_s": round(speed.to_host_bytes_per_us / 1000, 2),
            }
            if name != "kept":
                timeline = simulate_offload(eager, by, plan)
                row |= {
                    "moved_bytes": plan.moved_bytes,
                    "planned_saved_bytes": plan.saved_bytes,
                    "planned_lost": round(plan.lost, 5),
                    "planned_waits_ms": round(timeline.exposed_us / 1000, 3),
                    "room": eager.forward_room,
                    "groups": len(plan.moves),
                    "in_flight": plan.in_flight,
                }
                eager, by, plan = trace, found, plan_for_time(trace, found, asked.lost)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
