"""Run by torchrun: rows spread over ranks by NCCL (gloo on a CPU), eager against graphs, bit by
bit.

    PYTHONPATH=src:tests/helpers:benchmarks torchrun --nproc-per-node 4 tests/gpu/context_ranks.py

Static groups of 2 and of all ranks, groups whose size changes with every microbatch, and a soak of
planned steps whose lengths change: every rank compares loss, gradients (its own and the sums over
ranks), parameters and random states after every step. The soak also asks that nothing is captured,
falls back or takes more memory once it is warm. Prints one line that begins with "ok" or "WRONG"
for each, on rank 0; exits with an error when anything is wrong or does not end.
"""

import argparse
import dataclasses
import itertools
import time

import torch
import torch.distributed as dist
from bench_models import draw_batches
from context_steps import DYNAMIC, plan_steps

from packgraph.models.decoder import DecoderConfig
from packgraph.packing.capacity import Capacity
from packgraph.parallel.layout import context_sizes
from packgraph.parallel.mesh import make_mesh
from packgraph.parallel.ranks import Launch, processes
from packgraph.train.config.sections import (
    GraphConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from packgraph.train.features.context import (
    context_request,
    measured_cost,
    slowest_rank,
    time_row,
    undisturbed,
)
from packgraph.train.launch import use_deterministic_kernels
from packgraph.verification.compare import first_difference
from packgraph.verification.compared_run import ComparedRun
from packgraph.verification.matrix import SwitchingSteps
from packgraph.verification.ranks import verify_ranks

VOCABULARY = 1024
PLACES = (16, 64)
WARM = 12  # steps of the soak after which nothing new may come


def settings(options, device, world, cp, dynamic, steps):
    """A small model on groups of up to `cp` ranks."""
    wide = 128 if device.type == "cuda" else 8
    model = DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=4 * wide,
        intermediate_size=8 * wide,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        head_dim=wide,
        dropout=0.1,
    )
    tokens = options.tokens or (1024 if device.type == "cuda" else 32)
    return TrainConfig(
        preset="ranks",
        model=model,
        optimizer=OptimizerConfig(learning_rate=1e-4),
        graph=GraphConfig(
            capacities=tuple(Capacity(cp * tokens, places) for places in PLACES),
            strict=True,
            granularity=options.granularity,
            autotune=False,
        ),
        parallel=ParallelConfig(dp=world // cp, cp=cp, dynamic_cp=dynamic, cp_kind="ulysses"),
        run=RunConfig(
            steps=steps,
            tokens_per_step=4 * world * tokens,
            deterministic=True,
            dtype="bfloat16" if device.type == "cuda" else "float32",
        ),
    )


def packs_for(config):
    """Packs of lognormal documents, of all capacities in turn."""
    drawn = [
        draw_batches(capacity, 32, VOCABULARY, mean=capacity.tokens / 8, sigma=1.5, seed=3)
        for capacity in config.graph.capacities
    ]
    return itertools.chain.from_iterable(zip(*drawn, strict=True))


def verified(title, config, opened, device, options):
    """Whether eager and graphs are equal on every rank, in words."""
    mesh = make_mesh(config.parallel.layout(), device)
    report = verify_ranks(title, config, opened, device, mesh, one_process=options.one_process)
    replayed = sum(rank.replayed for rank in report.ranks)
    found = "; ".join(map(str, report.found()[:3])) or (
        "" if report.good else "nothing replayed, or not one process"
    )
    return found, f"{replayed} microbatches replayed, {report.ranks[0].fallbacks} on rank 0"


def soak(config, device, steps):
    """100 steps of changing lengths by two sides with equal random states; what is wrong on this
    rank, and figures.

    In the middle rows are timed by the graphs, as a run does, which must leave no trace.
    """
    mesh = make_mesh(config.parallel.layout(), device)
    request = context_request(config, mesh.world, device)
    drawn = plan_steps(
        16,
        request,
        config.parallel.cp,
        VOCABULARY,
        longest=request.longest,
        mean=request.tokens / 2,
        sigma=1.5,
        seed=7,
    )
    eager, graph = (
        ComparedRun(
            dataclasses.replace(config, graph=dataclasses.replace(config.graph, enabled=enabled)),
            device,
            mesh,
        )
        for enabled in (False, True)
    )
    wrong, warm, note = [], None, "rows were not timed"
    for number, step in enumerate(itertools.islice(itertools.cycle(drawn), steps)):
        if number == WARM:
            with graph.executor.aside(), undisturbed(graph.model.chunks, device):
                note = measured_cost(
                    request,
                    VOCABULARY,
                    time_row(graph.executor.run_step, device, slowest_rank(mesh)),
                ).note
        packs = step.packs[DYNAMIC]
        losses = [side.gradients_of(number, packs, False) for side in (eager, graph)]
        norms = [side.optimizer.step(1e-4) for side in (eager, graph)]
        pairs = [
            ({"loss": losses[0], "norm": norms[0]}, {"loss": losses[1], "norm": norms[1]}),
            (eager.optimizer.gradients(), graph.optimizer.gradients()),
            (eager.random, graph.random),
        ]
        pairs += [(eager.parameters(), graph.parameters())] if number % 10 == 9 else []
        wrong += [
            str(found)
            for pair in pairs
            if (found := first_difference(number + 1, *pair)) is not None
        ]
        totals = graph.executor.totals()
        state = totals["captured"], sum(totals["fallbacks"].values()), graph.executor.pool_bytes()
        warm = state if number == WARM else warm
        if warm is not None and state != warm:
            wrong.append(
                f"step {number + 1}: captures, fallbacks and pool bytes are {state}, were {warm} "
                "when warm"
            )
        if wrong:
            break
    sizes = sorted(
        {pack.capacity.tokens // request.tokens for step in drawn for pack in step.packs[DYNAMIC]}
    )
    told = (
        f"{steps} steps, groups of {sizes}, {graph.executor.totals()['replayed']} replayed on rank "
        f"0; {note}"
    )
    graph.close()
    eager.close()
    return "; ".join(wrong[:3]), told


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="of the soak")
    parser.add_argument("--tokens", type=int, help="of a rank")
    parser.add_argument("--granularity", choices=["layer", "chunk"], default="chunk")
    parser.add_argument("--only", default="", help="what is run: titles that begin so")
    parser.add_argument(
        "--one-process", action="store_true", help="also compare with one process on rank 0"
    )
    options = parser.parse_args()
    launch = Launch.read()
    device = (
        torch.device("cuda", launch.local_rank)
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    use_deterministic_kernels(device)
    world, good = launch.world, True
    first = settings(options, device, world, world, True, 8)
    with processes(first.parallel.layout(), device, launch):
        work = []
        for cp in sorted({2, world}):
            static = settings(options, device, world, cp, False, 6)
            work.append(
                (
                    f"static CP{cp}",
                    lambda config=static: verified(
                        "static", config, lambda: packs_for(config), device, options
                    ),
                )
            )
            forced = settings(options, device, world, cp, True, 8)
            tokens = forced.graph.capacities[0].tokens // cp
            switching = SwitchingSteps, (world, tokens, context_sizes(cp), PLACES, VOCABULARY)
            work.append(
                (
                    f"switching up to CP{cp}",
                    lambda config=forced, made=switching: verified(
                        "switching", config, lambda: made[0](*made[1]), device, options
                    ),
                )
            )
        planned = settings(options, device, world, world, True, options.steps)
        work.append(("soak", lambda: soak(planned, device, options.steps)))
        for title, run in [one for one in work if one[0].startswith(options.only)]:
            started = time.monotonic()
            found, told = run()
            every = [None] * world
            dist.all_gather_object(every, found)
            wrong = next((f"rank {rank}: {text}" for rank, text in enumerate(every) if text), "")
            good = good and not wrong
            if launch.rank == 0:
                print(
                    f"{'WRONG' if wrong else 'ok'} {title}: {wrong or told}, "
                    f"{time.monotonic() - started:.1f} s",
                    flush=True,
                )
    assert good, "graphs differ from eager"


if __name__ == "__main__":
    main()
