"""Run by torchrun: eager against graphs on a Qwen3-8B-shaped pipeline over NCCL, then a soak.

    torchrun --nproc-per-node 4 tests/gpu/pipeline_ranks.py --chunks 2 --layers 8 --soak 100

Every rank compares digests of loss, all gradients and random state after every step; prints one
JSON line; exits with an error when anything differs, is not finite, or does not end.
"""

import argparse
import faulthandler
import json
import os
import random
import time

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist

import packgraph
from packgraph.graphs.graphed import graph
from packgraph.models.decoder import DecoderConfig, DecoderModel
from packgraph.parallel.layout import Layout
from packgraph.parallel.mesh import make_mesh
from packgraph.parallel.pipeline.executor import Pipeline
from packgraph.parallel.pipeline.links import make_links
from packgraph.parallel.pipeline.schedule import slot_counts

CAPACITIES = [packgraph.Capacity(1024, 16), packgraph.Capacity(2048, 32)]
COUNTS = (8, 4, 6, 8, 2, 5, 12)


def digest(tensor):
    """A few sums over the bits of a tensor: equal for equal bits."""
    bits = (
        tensor.detach().reshape(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    )
    return torch.stack([part.sum(dtype=torch.int64) for part in (bits, bits[::7], bits[3::13])])


def microbatches(order, count, vocabulary):
    packs = []
    for _ in range(count):
        capacity = order.choice(CAPACITIES)
        lengths, room = [], capacity.tokens
        while room > 8 and len(lengths) < capacity.documents:
            lengths.append(min(room, max(4, round(order.lognormvariate(5.0, 1.0)))))
            room -= lengths[-1]
        documents = [[order.randrange(vocabulary) for _ in range(n)] for n in lengths]
        packs.append(packgraph.PackedBatch.build(documents, capacity))
    return packs


class Run:
    """One way of running the pipeline, from fresh parameters."""

    def __init__(self, way, config, chunks, mesh, links, device):
        self.way, self.device, self.vocabulary = way, device, config.vocab_size
        stages = [chunk * links.size + links.rank for chunk in range(chunks)]
        self.modules = [
            DecoderModel(
                config,
                seed=1,
                device=device,
                dtype=torch.bfloat16,
                stage=stage,
                stages=links.size * chunks,
            )
            for stage in stages
        ]
        self.slots = slot_counts(links.size, chunks)[links.rank]
        self.graphed = [
            graph(
                m,
                capacities=CAPACITIES,
                warmup=0,
                slots=s,
                strict=True,
                granularity=way if way in ("layer", "chunk") else "chunk",
            )
            for m, s in zip(self.modules, self.slots, strict=True)
        ]
        self.pipeline = Pipeline(
            self.graphed,
            links,
            config.hidden_size,
            torch.bfloat16,
            device,
            whole_steps=way == "step",
        )
        self.links = links

    def steps(self, counts, compare=True):
        """Digests per step; milliseconds per step after the second."""
        torch.manual_seed(1 + self.links.rank)
        order, trace, times = random.Random(0), [], []
        for step, count in enumerate(counts):
            host = microbatches(order, count, self.vocabulary)
            batches = [batch.to(self.device) for batch in host]
            tokens = torch.tensor(sum(batch.num_loss_tokens for batch in host), device=self.device)
            if step == 1 and self.way != "eager":
                samples = [
                    packgraph.PackedBatch.build([[1] * (c.tokens // 2)] * 2, c) for c in CAPACITIES
                ]
                assert self.pipeline.build(
                    [sample.to(self.device) for sample in samples], self.slots
                )
            torch.cuda.synchronize()
            started = time.perf_counter()
            if step == 0 or self.way == "eager":
                with packgraph.eager("warm-up"):
                    loss = self.pipeline.step(batches, tokens)
            else:
                loss = self.pipeline.step(batches, tokens)
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - started))
            assert loss.isfinite(), f"loss of step {step} is {loss}"
            if compare:
                parameters = [p for m in self.modules for p in m.parameters()]
                trace.append(
                    torch.stack([digest(loss), *(digest(p.grad) for p in parameters)]).cpu()
                )
            with torch.no_grad():
                for module in self.modules:
                    for parameter in module.parameters():
                        parameter.add_(parameter.grad, alpha=-1e-3)
                        parameter.grad = None
        return trace, times

    def close(self):
        pool = sum(chunk.stats.pool_bytes for chunk in self.graphed)
        if self.pipeline.step_stats is not None:
            pool += self.pipeline.step_stats.pool_bytes
        self.pipeline.close()
        return pool


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--soak", type=int, default=100)
    parser.add_argument("--ways", nargs="+", default=["layer", "chunk", "step"])
    parser.add_argument(
        "--limit",
        type=float,
        default=400.0,
        help="seconds after which to show where each rank stands",
    )
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.limit, exit=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("nccl", device_id=device)
    mesh = make_mesh(Layout(pp=dist.get_world_size()), device)
    links = make_links(mesh)
    config = DecoderConfig(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=options.layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        tie_embeddings=False,
        dropout=0.1,
    )
    run = Run("eager", config, options.chunks, mesh, links, device)
    expected, times = run.steps(COUNTS)
    report = {
        "rank": mesh.rank,
        "ranks": links.size,
        "chunks": options.chunks,
        "layers": options.layers,
        "slots": list(run.slots),
        "eager_ms": [round(t) for t in times],
    }
    run.close()
    for way in options.ways:
        run = Run(way, config, options.chunks, mesh, links, device)
        trace, times = run.steps(COUNTS)
        wrong = [
            step
            for step, (a, b) in enumerate(zip(expected, trace, strict=True))
            if not torch.equal(a, b)
        ]
        report |= {f"{way}_ms": [round(t) for t in times], f"{way}_differs_at": wrong}
        if way == "chunk" and options.soak:
            soak = random.Random(1)
            _, times = run.steps(
                [COUNTS[0], *(soak.randint(1, 12) for _ in range(options.soak))], compare=False
            )
            report["soak_ms"] = round(sum(times[2:]) / len(times[2:]))
        report[f"{way}_pool_bytes"] = run.close()
        del run
    print(json.dumps(report), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    assert not any(report[f"{way}_differs_at"] for way in options.ways), "graphs differ from eager"


if __name__ == "__main__":
    main()
