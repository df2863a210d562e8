"""Run by torchrun: whole training runs of the trainer at a layout, eager against graphs, over NCCL
(gloo on the CPU).

    PYTHONPATH=src:tests/helpers torchrun --nproc-per-node 4 tests/gpu/training_ranks.py --tp 2
    --pp 2 --chunks 2 --tied

With --offload the run by graphs moves what these modules save, and the other keeps everything.
With --compile both runs are of compiled stages, without dropout; the one that is not by graphs
calls them as they are.

Every rank compares digests of all its weights, optimizer state and random states after the last
step; rank 0 also the loss and norm of every step. Prints one JSON line a rank; exits with an error
when anything differs or does not end.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from trainkit import RandomPacks

from packgraph.graphs.parameters import local_tensor
from packgraph.models.config import ExpertConfig
from packgraph.models.decoder import DecoderConfig
from packgraph.ops.names import NATIVE, PRECISIONS
from packgraph.packing.capacity import Capacity
from packgraph.packing.pack import pack
from packgraph.parallel.pieces import Pieces
from packgraph.parallel.ranks import Launch, processes
from packgraph.train.config.sections import (
    GraphConfig,
    OffloadConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from packgraph.train.launch import use_deterministic_kernels
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.progress import ProgressView
from packgraph.train.random_state import random_states
from packgraph.train.signals import StopRequest
from packgraph.train.trainer import Trainer
from packgraph.train.validate import validate

SHAPES = {
    "tiny": DecoderConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        dropout=0.1,
    ),
    "8b": DecoderConfig(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=8,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        dropout=0.1,
    ),
}
EAGER = {"warmup": 10**6}
CAPACITIES = {
    "tiny": (Capacity(64, 8), Capacity(128, 16)),
    "8b": (Capacity(1024, 16), Capacity(2048, 32)),
}


class Packs(RandomPacks):
    """Endless packs of lognormal documents; pack number n depends on n alone."""

    def __init__(self, vocabulary, capacities):
        super().__init__()
        self.vocabulary, self.capacities = vocabulary, list(capacities)

    def __next__(self):
        draw = random.Random(self.position)
        self.position += 1
        room, lengths = draw.choice(self.capacities).tokens, []
        while room > 8 and len(lengths) < 12:
            lengths.append(min(room, max(4, round(draw.lognormvariate(4.5, 1.0)))))
            room -= lengths[-1]
        return pack(
            [[draw.randrange(self.vocabulary) for _ in range(n)] for n in lengths], self.capacities
        )[0]


def digest(tensor):
    """Sums over the bits of what this rank holds: equal for equal bits."""
    held = (
        [part for _, part in tensor.pieces]
        if isinstance(tensor, Pieces)
        else [local_tensor(tensor.detach())]
    )
    found = []
    for part in held:
        bits = part.contiguous().view(-1).view(torch.uint8).to(torch.int64)
        found += [
            int(bits.sum()),
            int((bits * torch.arange(1, bits.numel() + 1, device=bits.device) % 65_521).sum()),
        ]
    return found


def train(config, folder, device, mesh):
    """Digests at the end, figures of every step, what the graphs did, seconds."""
    view = ProgressView(config.run.steps, 1000, Console(quiet=True))
    run = Trainer(
        config, folder, Packs(config.model.vocab_size, config.graph.capacities), device, view, mesh
    )
    started = time.monotonic()
    run.run(StopRequest())
    states = run.tensors() | {
        f"random.{name}": value for name, value in random_states(device).items()
    }
    found, totals = {name: digest(value) for name, value in states.items()}, run.executor.totals()
    run.close()
    rows = read_metrics(folder / METRICS) if mesh.rank == 0 else []
    return (
        found,
        [(row["loss"], row["gradient_norm"]) for row in rows],
        totals,
        {
            "all": round(time.monotonic() - started, 1),
            "steps": [round(row["seconds"], 4) for row in rows[-4:]],
        },
    )


def settings(options, device):
    """The run that was asked for."""
    shape = SHAPES[options.model]
    changes = {
        "tie_embeddings": options.tied,
        "num_layers": options.layers or shape.num_layers,
        "precision": options.precision,
        "dropout": 0.0 if options.compile else shape.dropout,
    }
    if options.ep > 1:
        changes["experts"] = ExpertConfig(
            count=8, per_token=2, intermediate_size=shape.intermediate_size // 8
        )
    return TrainConfig(
        preset="ranks",
        model=DecoderConfig(**(vars(shape) | changes)),
        optimizer=OptimizerConfig(learning_rate=1e-4),
        graph=GraphConfig(
            granularity=options.granularity,
            optimizer=options.optimizer,
            compile=options.compile,
            strict=True,
            capacities=CAPACITIES[options.model],
        ),
        parallel=ParallelConfig(
            tp=options.tp,
            pp=options.pp,
            cp=options.cp,
            ep=options.ep,
            chunks=options.chunks,
            shard=options.shard,
            expert_stash=options.stash,
        ),
        run=RunConfig(
            steps=options.steps,
            checkpoint_every=0,  # of gigabytes, which would say nothing here
            deterministic=True,
            tokens_per_step=options.packs * CAPACITIES[options.model][-1].tokens // 2,
            dtype="bfloat16" if device.type == "cuda" else "float32",
        ),
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("tp", "pp", "cp", "ep", "chunks"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--model", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--optimizer", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--precision", choices=PRECISIONS, default=NATIVE)
    parser.add_argument("--granularity", default="chunk")
    parser.add_argument("--shard", default="none")
    parser.add_argument("--stash", type=float, default=0.0, help="parallel.expert_stash")
    parser.add_argument("--offload", default="", help="modules, as offload.modules has them")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--packs", type=int, default=4, help="about as many microbatches a step")
    options = parser.parse_args()
    launch = Launch.read()
    device = (
        torch.device("cuda", launch.local_rank)
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    use_deterministic_kernels(device)
    config = settings(options, device)
    problems = validate(config, device.type, world=launch.world)
    if problems:
        raise SystemExit("; ".join(problems))
    with (
        processes(config.parallel.layout(), device, launch) as mesh,
        tempfile.TemporaryDirectory() as here,
    ):
        folders = [here]
        if mesh.world > 1:
            dist.broadcast_object_list(folders, src=0)
        results = {}
        for enabled in (False, True):
            # Code is compiled where graphs are on: before the first of them, where none is to be.
            changes = {"enabled": enabled or options.compile} | ({} if enabled else EAGER)
            graph = GraphConfig(**(vars(config.graph) | changes))
            modules = tuple(filter(None, options.offload.split(","))) if enabled else ()
            moving = OffloadConfig(modules=modules, min_bytes=1, margin=0)
            one = TrainConfig(**(vars(config) | {"graph": graph, "offload": moving}))
            results[enabled] = train(one, Path(folders[0]) / str(enabled), device, mesh)
        (eager, eager_rows, _, eager_seconds), (found, rows, totals, seconds) = (
            results[False],
            results[True],
        )
        differing = [name for name in eager if eager[name] != found[name]]
        print(
            json.dumps(
                {
                    "rank": mesh.rank,
                    "layout": str(mesh.layout),
                    "chunks": options.chunks,
                    "differs": differing,
                    "rows_equal": rows == eager_rows,
                    "loss": [row[0] for row in rows][-1:],
                    "graphs": totals,
                    "seconds": {"eager": eager_seconds, "graphs": seconds},
                }
            ),
            flush=True,
        )
        assert not differing and rows == eager_rows, "graphs differ from eager"
        assert totals["replayed"] > 0, "nothing was replayed"


if __name__ == "__main__":
    main()
