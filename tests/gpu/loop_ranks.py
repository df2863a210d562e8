"""Run by torchrun: loops of other libraries and `packgraph.replicate` over NCCL (gloo on the CPU).

    PYTHONPATH=src:tests/helpers:benchmarks torchrun --nproc-per-node 2 tests/gpu/loop_ranks.py

Accelerate, an own loop, Trainer and TRL (where installed): weights by graphs are those of eager
steps, bit by bit, and alike on all ranks. Then an own loop of a larger model, in tokens a second
and rank, beside one rank that trains alone. Prints one line that begins with "ok" for each.
"""

import argparse
import contextlib
import importlib.util
import os
import tempfile
import time
from statistics import median

import torch
import torch.distributed as dist
from bench_models import draw_batches, shape
from loopkit import assert_same, own_loop, with_accelerate, with_trainer

import packgraph
from packgraph.models.decoder import DecoderModel
from packgraph.packing.capacity import Capacity
from packgraph.train.launch import use_deterministic_kernels

AHEAD, STEPS = 5, 20


def report(name: str, found: str = "") -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        print("ok", name, found, flush=True)


def tokens_per_second(device, words, rows, *, alone):
    """Of this rank in an own loop: forward and backward of two rows, AdamW."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = DecoderModel(shape(words)).to(dtype)
    capacity = Capacity(rows, 32)
    called = packgraph.graph(model, capacities=[capacity])
    if not alone:
        called = packgraph.replicate(called)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    drawn = draw_batches(
        capacity, 8, model.config.vocab_size, mean=512, sigma=1.0, seed=dist.get_rank()
    )
    batches = [batch.to(device) for batch in drawn]
    times, tokens = [], 0
    for step in range(AHEAD + STEPS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        first, second = batches[2 * step % 8], batches[(2 * step + 1) % 8]
        with contextlib.nullcontext() if alone else called.no_sync():
            called(first).sum().backward()
        called(second).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
        tokens += (first.num_tokens + second.num_tokens) * (step >= AHEAD)
    return tokens / STEPS / median(times[AHEAD:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, nargs="*", default=[4096, 16_384])
    options = parser.parse_args()
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    use_deterministic_kernels(device)
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    world = dist.get_world_size()

    graphs, eager, compared = with_accelerate(rank, device)
    own = own_loop(rank, world, device)
    assert compared > 0
    assert_same(graphs, eager)
    assert_same(graphs, own)
    report("accelerate and replicate")
    for library in ("transformers", "trl"):
        if importlib.util.find_spec(library) is None:
            report(library, "is not installed: not run")
            continue
        folders = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folders)
        graphs, eager = with_trainer(folders[0], library, {"use_cpu": not cuda})
        assert graphs["replayed"] >= graphs["packs"] - 2 >= 4 and eager["replayed"] == 0
        assert_same(graphs["weights"], eager["weights"])
        assert graphs["losses"] == eager["losses"]
        report(f"trainer of {library}")
    for rows in options.rows:
        found = [torch.zeros((), device=device) for _ in range(world)]
        together = tokens_per_second(device, options.model, rows, alone=False)
        dist.all_gather(found, torch.tensor(together, device=device, dtype=torch.float32))
        dist.barrier()
        alone = 0.0
        if rank == 0:
            alone = tokens_per_second(device, options.model, rows, alone=True)
        each = min(float(one) for one in found)
        report(f"rows of {rows}", f"{each:.0f} tokens/s and rank, alone {alone:.0f}, "
               f"{each / max(alone, 1):.3f}")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
