"""Run by torchrun: eager against graphs under tensor and data parallelism over NCCL.

    PYTHONPATH=src:tests/helpers torchrun --nproc-per-node 2 tests/gpu/parallel_ranks.py --tp 2

Every rank compares loss, norm, all gradients and all parameters of its own after every step, bit by
bit; prints one JSON line; exits with an error when anything differs, is not finite, or does not
end.
"""

import argparse
import json
import time

import torch
from parallelkit import Run, steps_of_packs
from shard_ways import without_peers

from packgraph.ops.names import NATIVE, PRECISIONS
from packgraph.ops.symmetric_memory import symmetric_bytes
from packgraph.packing.capacity import Capacity
from packgraph.parallel.layout import Layout
from packgraph.parallel.ranks import Launch, processes
from packgraph.train.launch import use_deterministic_kernels

CAPACITIES = (Capacity(1024, 16), Capacity(2048, 32))
SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_layers": 8,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "dropout": 0.1,
}


def train(mesh, device, steps, tokens, **options):
    """Facts of every step (on the host), and milliseconds of each."""
    run = Run(mesh, device=device, dtype=torch.bfloat16, capacities=CAPACITIES, **SHAPE, **options)
    trace, times = [], []
    for number, packs in enumerate(steps_of_packs(steps, SHAPE["vocab_size"], CAPACITIES)):
        torch.cuda.synchronize()
        started = time.perf_counter()
        facts = run.step(number, packs)
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - started))
        tokens.append(sum(pack.num_tokens for pack in packs))
        assert facts["loss"].isfinite() and facts["norm"].isfinite(), (
            f"step {number}: {facts['loss']}, {facts['norm']}"
        )
        keep = {name: value for name, value in facts.items() if not name.startswith("parameter")}
        keep |= {
            f"local {place}": part
            for place, part in enumerate(run.optimizer.flat.kept(run.model.parameters()))
        }
        trace.append(
            {name: value.detach().cpu() for name, value in keep.items()} if number < 8 else {}
        )
    replayed, shared = run.executor.totals()["replayed"], symmetric_bytes()
    run.executor.close()
    return trace, times, replayed, shared


def different(expected, trace):
    """What of a trace has other bits."""
    return [
        f"step {step}: {name}"
        for step, (a, b) in enumerate(zip(expected, trace, strict=True))
        for name in a
        if not torch.equal(a[name], b[name])
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sequence", action="store_true")
    parser.add_argument("--granularity", default="chunk")
    parser.add_argument("--shard", default="none")
    parser.add_argument("--precision", choices=PRECISIONS, default=NATIVE)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    launch = Launch.read()
    device = torch.device("cuda", launch.local_rank)
    use_deterministic_kernels(device)
    with processes(Layout(tp=options.tp), device, launch) as mesh:
        chosen = {
            "sequence": options.sequence and options.tp > 1,
            "granularity": options.granularity,
            "shard": options.shard,
            "precision": options.precision,
        }
        tokens = []
        expected, eager_times, *_ = train(
            mesh, device, options.steps, tokens, graphs=False, **chosen
        )
        trace, graph_times, replayed, found_bytes = train(
            mesh, device, options.steps, tokens, graphs=True, **chosen
        )
        wrong = different(expected, trace)
        if options.shard != "none":  # and the bits of collectives, which add two numbers alike
            with without_peers():
                trace, *_ = train(mesh, device, options.steps, tokens, graphs=False, **chosen)
            wrong += [f"collectives, {found}" for found in different(expected, trace)]
        print(
            json.dumps(
                {
                    "rank": mesh.rank,
                    "layout": str(mesh.layout),
                    **chosen,
                    "differs": wrong[:5],
                    "differences": len(wrong),
                    "replayed": replayed,
                    "symmetric_bytes": found_bytes,
                    "losses": [round(float(facts["loss"]), 4) for facts in expected if facts][:4],
                    "eager_ms": [round(t) for t in eager_times][3:9],
                    "graph_ms": [round(t) for t in graph_times][3:9],
                }
            ),
            flush=True,
        )
        assert replayed and not wrong, "graphs differ from eager, or copies from collectives"
        assert bool(found_bytes) == (options.shard != "none"), "peers do not read each other"


if __name__ == "__main__":
    main()
