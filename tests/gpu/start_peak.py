"""Run by torchrun: device memory while a sharded model of the 8B shape is made, its layers fewer.

    PYTHONPATH=src:tests/helpers torchrun --nproc-per-node 2 tests/gpu/start_peak.py --layers 16

Prints a JSON line for each rank, GB: all parameters; the most while the model is built; what stays
of parameters, gradients and optimizer; the most on the way there. Exits with an error where a rank
held the whole model, or more than what stays and one layer.
"""

import argparse
import dataclasses
import json
import time

import torch

from packgraph.parallel.layout import Layout
from packgraph.parallel.ranks import Launch, processes
from packgraph.train.build import build_chunks, make_optimizer
from packgraph.train.config.presets import preset
from packgraph.train.config.sections import ParallelConfig

SHAPE = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "tie_embeddings": False,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=16)
    layers = parser.parse_args().layers
    launch = Launch.read()
    device = torch.device("cuda", launch.local_rank)
    made = preset("qwen3-tiny")
    config = dataclasses.replace(
        made,
        model=dataclasses.replace(made.model, num_layers=layers, **SHAPE),
        run=dataclasses.replace(made.run, dtype="bfloat16"),
        parallel=ParallelConfig(shard="parameters"),
    )
    with processes(Layout(), device, launch) as mesh:
        started = time.perf_counter()
        model = build_chunks(config, device, mesh)
        built = torch.cuda.max_memory_allocated(device)
        whole = 2 * sum(parameter.numel() for parameter in model.parameters())
        torch.cuda.reset_peak_memory_stats(device)
        optimizer = make_optimizer(model, config, mesh)
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        peak, stays = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        layer = sum(p.numel() for p in model.chunks[0].layers["0"].parameters())
        parameters = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for span in optimizer.flat.spans
            for t in (span.parameters, span.own_parameters)
        }
        found = {
            "rank": mesh.rank,
            "seconds": round(seconds, 1),
            "all parameters": whole,
            "built": built,
            "parameters that stay": sum(parameters.values()),
            "stays": stays,
            "peak": peak,
        }
        print(json.dumps({n: v if v < 1e6 else round(v / 1e9, 2) for n, v in found.items()}))
        assert built < 2 * layer and sum(parameters.values()) < 0.75 * whole
        # Masters are float32 copies of a span at a time.
        assert peak < stays + 4 * 4 * layer


if __name__ == "__main__":
    main()
