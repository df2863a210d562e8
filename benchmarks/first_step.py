"""Milliseconds per microbatch (forward and backward) of a Qwen3-0.6B-shaped model: eager against captured graphs.

    python benchmarks/first_step.py [--tokens 1024 2048 4096] [--out benchmarks/results/first_step.jsonl]

Both run the same packed documents of lognormal length in the same process, alternating, after the same warm-up;
each row holds the median over the rounds, the host's share, capture time and pool memory. Needs a CUDA device.
"""
import argparse
import json
import random
import statistics
import subprocess
import time

import torch

import packgraph
from packgraph.models.dense import DenseConfig, DenseModel

ROUNDS, WARM_UP = 15, 5


def documents(tokens, generator):
    """Lengths lognormal(mean 256, sigma 1), capped at the row; token ids uniform."""
    total, made = 0, []
    while total < tokens:
        length = max(2, min(tokens - total, round(generator.lognormvariate(5.045, 1.0)), tokens))
        if tokens - total < 2:
            break
        made.append([generator.randrange(151_936) for _ in range(length)])
        total += length
    return made


def measure(run, batches):
    """(median milliseconds on the device, median milliseconds of host time) per call."""
    device_ms, host_ms = [], []
    for index in range(WARM_UP + ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        start.record()
        run(batches[index % len(batches)])
        end.record()
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        if index >= WARM_UP:
            device_ms.append(start.elapsed_time(end))
            host_ms.append(1000 * host)
    return statistics.median(device_ms), statistics.median(host_ms)


def rows_for(tokens, model):
    """One row per way of running, on the same batches."""
    capacity = packgraph.Capacity(tokens=tokens, documents=64)
    generator = random.Random(tokens)
    batches = []
    for _ in range(8):
        packed = packgraph.pack(documents(tokens, generator), [capacity])
        batches.append(max(packed, key=lambda pack: pack.num_tokens).to("cuda"))
    ways = {"eager": model}
    for granularity in ("layer", "chunk"):
        ways[f"graph {granularity}"] = packgraph.graph(model, capacities=[capacity], granularity=granularity)
    for name, way in ways.items():
        device_ms, host_ms = measure(lambda batch, way=way: way(batch).backward(), batches)
        row = {"tokens": tokens, "way": name, "device_ms": round(device_ms, 2), "host_ms": round(host_ms, 2)}
        if name != "eager":
            row |= {"capture_seconds": round(way.stats.capture_seconds, 3), "pool_bytes": way.stats.pool_bytes,
                    "replayed": way.stats.replayed, "fallbacks": dict(way.stats.fallbacks)}
            way.close()
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--out", help="append the rows to this file, one JSON object a line")
    options = parser.parse_args()
    config = DenseConfig(vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16,
                         num_kv_heads=8, head_dim=128, rope_theta=1e6, tie_embeddings=True)
    model = DenseModel(config, device="cuda", dtype=torch.bfloat16)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    facts = {"model": "qwen3-0.6b shape, bf16", "device": torch.cuda.get_device_name(), "torch": torch.__version__,
             "commit": git.stdout.strip()}
    for tokens in options.tokens:
        for row in rows_for(tokens, model):
            line = json.dumps(facts | row)
            print(line, flush=True)
            if options.out:
                with open(options.out, "a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
