"""Run by torchrun: rows cut in zigzag over NCCL, eagerly and through CUDA graphs, against whole
rows in one process.

    PYTHONPATH=src:tests/helpers torchrun --nproc-per-node 4 tests/gpu/zigzag_ranks.py

Decoders with grouped queries and with latent attention (192 columns in keys, 128 in values),
bfloat16, by torch's varlen kernel and by flash-attn-4 where it can run; six heads, which four ranks
cannot share. Every rank compares losses and all gradients of replays with those of eager calls bit
by bit, over rows whose lengths change, and sums over ranks with float32, from which they must not
be much further than one process is in bfloat16. One JSON line per case and rank, with microseconds
of a forward and backward pass of the last row; ends with an error when anything differs.
"""

import argparse
import dataclasses
import json
import random

import torch
import torch.distributed as dist

from packgraph.graphs.graphed import graph
from packgraph.models.config import DecoderConfig, LatentConfig
from packgraph.models.decoder import DecoderModel
from packgraph.ops.attention.flash import flash_problems
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import pack
from packgraph.parallel.context.rows import spread_context
from packgraph.parallel.layout import Layout
from packgraph.parallel.ranks import Launch, processes
from packgraph.train.launch import use_deterministic_kernels

CAPACITY, WORDS = Capacity(4096, 64), 512
SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 128,
}
LATENT = LatentConfig(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
# How much further than bfloat16 itself takes one process from float32 (norms of differences), and
# what always passes.
MOST_TIMES, ALWAYS = 3.0, 1e-3


def rows(ranks, device):
    """Rows of changing lengths: one document over all, single tokens, no document, and what
    comes."""
    draw = random.Random(0)
    multiple, tokens = 2 * ranks, CAPACITY.tokens
    kinds = [
        [tokens - 3],
        [1] * 64,
        [draw.randint(1, 300) for _ in range(12)],
        [700, 1, 2000, 9],
        [multiple * 16] * (tokens // (multiple * 16)),
        [17, 3, 1333],
        [1200, 900, 300, 33, 2],
    ]
    made = []
    for lengths in kinds:
        documents = [[draw.randrange(WORDS) for _ in range(length)] for length in lengths[:64]]
        made += pack(documents, CAPACITY, multiple=multiple)
    return [batch.to(device) for batch in (*made[:3], PackedBatch.empty(CAPACITY), *made[3:])]


def run(call, model, batches, context):
    """Loss and gradients of every row, on the device."""
    found = []
    for batch in batches:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        loss = call(batch, None, None, context)
        loss.backward()
        found.append(
            [loss.detach().clone(), *(parameter.grad.clone() for parameter in model.parameters())]
        )
    return found


def microseconds(call, batch, context, group, times=20):
    """Of one forward and backward pass, on the device and the host together, ranks starting
    together."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for number in range(times + 3):
        if number == 3:
            dist.all_reduce(torch.zeros(1, device=batch.data.device), group=group)
            start.record()
        call(batch, None, None, context).backward()
    end.record()
    end.synchronize()
    return round(1000 * start.elapsed_time(end) / times)


def too_far(ours, whole, reference):
    """Which sums over ranks are too far from the reference, by the distance of one process in the
    same dtype; and the largest ratio of both distances where either counts."""
    wrong, worst = [], 0.0
    for row, sides in enumerate(zip(ours, whole, reference, strict=True)):
        for number, (mine, one, exact) in enumerate(zip(*sides, strict=True)):
            exact = exact.double()
            size = float(exact.norm())
            ours_apart, one_apart = (
                float((found.double() - exact).norm()) for found in (mine, one)
            )
            if not ours_apart <= MOST_TIMES * one_apart + ALWAYS * size:
                wrong.append(
                    f"row {row}, tensor {number}: {ours_apart:.3g}, {one_apart:.3g} of {size:.3g}"
                )
            elif one_apart > ALWAYS * size:
                worst = max(worst, ours_apart / one_apart)
    return wrong, worst


def float32_twin(model, config):
    """The same decoder in float32, attention by a mask."""
    twin = DecoderModel(
        dataclasses.replace(config, attention_backend="sdpa"), device=model.rotary.inv_freq.device
    )
    twin.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    return twin.train()


def check(mesh, ranks, backend, latent, device, dtype=torch.bfloat16):
    """One decoder: facts for people, and what is wrong with it."""
    torch.manual_seed(0)
    config = DecoderConfig(
        **SHAPE, attention_backend=backend, **({"latent": LATENT} if latent else {})
    )
    model = DecoderModel(config, device=device, dtype=dtype).train()
    spread_context(model, mesh, wish="zigzag")
    batches = rows(ranks, device)
    whole, twin = run(model, model, batches, 1), float32_twin(model, config)
    reference = run(twin, twin, batches, 1)
    eager = run(model, model, batches, ranks)
    again = run(model, model, batches, ranks)
    eager_time = microseconds(model, batches[-1], ranks, mesh.group("cp"))
    call = graph(model, capacities=CAPACITY, granularity="chunk", strict=True, warmup=1)
    run(call, model, batches[:1], ranks)  # warm-up
    replays = run(call, model, batches, ranks)
    graph_time = microseconds(call, batches[-1], ranks, mesh.group("cp"))
    replayed = call.stats.replayed
    call.close()

    def differing(found):
        return [
            f"row {row}, tensor {number}"
            for row, (a, b) in enumerate(zip(eager, found, strict=True))
            for number, (x, y) in enumerate(zip(a, b, strict=True))
            if not torch.equal(x, y)
        ]

    summed = [[tensor.to(torch.float32, copy=True) for tensor in row] for row in eager]
    for row in summed:
        for tensor in row:
            dist.all_reduce(tensor, group=mesh.group("cp"))
    far, worst = too_far(summed, whole, reference)
    wrong = {
        "two eager runs differ": differing(again),
        "replays differ from eager": differing(replays),
        "too little was replayed": replayed < len(batches),
        "sums over ranks are too far from float32": far,
    }
    facts = {
        "rank": mesh.rank,
        "backend": backend,
        "latent": latent,
        "rows": len(batches),
        "replayed": replayed,
        "distance_over_that_of_one_process": round(worst, 3),
        "eager_us": eager_time,
        "graph_us": graph_time,
        "losses": [round(float(row[0]), 4) for row in whole],
    }
    return facts, {text: value for text, value in wrong.items() if value}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", default="varlen,flash")
    options = parser.parse_args()
    launch = Launch.read()
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    use_deterministic_kernels(device)
    failed = []
    with processes(Layout(dp=1, cp=launch.world), device, launch) as mesh:
        for backend in options.backends.split(","):
            for latent in (False, True):
                sizes = (192, 128) if latent else (128, 128)
                problems = (
                    flash_problems(device, torch.bfloat16, *sizes) if backend == "flash" else []
                )
                if problems:
                    print(
                        json.dumps(
                            {
                                "rank": mesh.rank,
                                "backend": backend,
                                "latent": latent,
                                "left_out": problems,
                            }
                        )
                    )
                    continue
                facts, wrong = check(mesh, launch.world, backend, latent, device)
                print(
                    json.dumps(
                        facts | {"wrong": {text: str(value)[:200] for text, value in wrong.items()}}
                    ),
                    flush=True,
                )
                failed += [f"{backend}{' latent' if latent else ''}: {text}" for text in wrong]
        assert not failed, failed


if __name__ == "__main__":
    main()
