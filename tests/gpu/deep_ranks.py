"""Run by torchrun, or alone: one eager run of a model, then graph runs of many kinds, compared bit
by bit.

    PYTHONPATH=src torchrun --nproc-per-node 4 tests/gpu/deep_ranks.py --ways layer chunk+stash
    --steps 100 -- \
        moonlight --parallel.ep 4 --run.dtype bfloat16

As `packgraph verify --apart`, whose words stand behind `--`, but the eager run, which takes the
longest, is made once for all ways, so nothing is compared that belongs to a stash alone, and no
step has all its microbatches in flight (graphs of whole steps never do). A way is a granularity;
`+stash` gives what experts keep for the backward a stash with room for twice a balanced load. A way
that cannot be begun at least `--each` seconds before `--seconds` have passed is left out, and said
to be; the clock starts with this script. Prints the table of each way and a line that begins with
"ok" or "WRONG", with the most memory of any rank until then; exits with an error when anything
differs, or when there was no time for any way.
"""

import argparse
import dataclasses
import sys
import time

import torch.distributed as dist
from rich.console import Console

from packgraph.graphs.memory.allocator import most_reserved
from packgraph.parallel.ranks import Launch, from_all, processes
from packgraph.train.config.command_line import parse_arguments
from packgraph.train.config.presets import PRESETS, preset
from packgraph.train.config.reading import CommandArguments, read_config
from packgraph.train.launch import choose_device, prepare, use_deterministic_kernels
from packgraph.train.progress import Phases
from packgraph.verification.command import print_report
from packgraph.verification.ranks import RanksReport
from packgraph.verification.verify import SequentialRuns

WAYS = ("layer", "layer+stash", "chunk", "chunk+stash", "step", "step+stash")
ROOM = 2.0


def options_of(words):
    """What this script is told itself, and the training, whose words stand behind `--`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--each", type=float, default=0.0)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("training", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    base = preset(options.preset)
    config = read_config(
        base, [parse_arguments(options.training, CommandArguments(), base).overrides]
    )
    return options, dataclasses.replace(
        config, run=dataclasses.replace(config.run, steps=options.steps)
    )


class AnyWay(SequentialRuns):
    """Compares what runs with a stash and without have in common."""

    def _steps(self, phase, side, config):
        for step, found in super()._steps(phase, side, config):
            yield (
                step,
                [
                    {
                        kind: {
                            name: digest
                            for name, digest in values.items()
                            if not name.endswith("stash_state")
                        }
                        for kind, values in moment.items()
                    }
                    for moment in found
                ],
            )


def way_of(config, name):
    """The training of a graph run."""
    granularity, _, stash = name.partition("+")
    parallel = dataclasses.replace(config.parallel, expert_stash=ROOM) if stash else config.parallel
    return dataclasses.replace(
        config, graph=dataclasses.replace(config.graph, granularity=granularity), parallel=parallel
    )


def largest(number, world):
    """Of all ranks, the same on all of them: so they agree on what there is time for."""
    every = [number] * world
    if world > 1:
        dist.all_gather_object(every, number)
    return max(every)


def most_memory(device, world):
    """GiB of the rank that has held the most since the start; 0 without a GPU."""
    return largest(most_reserved(device) / 2**30, world) if device.type == "cuda" else 0.0


def main():
    """Compare; collective."""
    started = time.monotonic()
    options, config = options_of(sys.argv[1:])
    launch = Launch.read()
    device = choose_device(config.run.device, launch)
    use_deterministic_kernels(device)
    console = Console(quiet=launch.rank != 0)

    def say(text):
        if launch.rank == 0:
            print(f"{text} ({time.monotonic() - started:.0f} s since the start)", flush=True)

    with processes(config.parallel.layout(), device, launch) as mesh:
        apart = AnyWay(
            lambda: iter(prepare(config, device, launch.world).microbatches),
            device,
            mesh,
            lambda step: False,
            progress=Phases(say),
        )
        began = time.monotonic()
        expected = apart.eager_run(config)
        say(
            f"eager run: {time.monotonic() - began:.1f} s, {most_memory(device, mesh.world):.1f} "
            "GiB at the most"
        )
        compared, good = 0, True
        for name in options.ways:
            began = time.monotonic()
            if largest(began - started, mesh.world) + options.each > options.seconds:
                say(f"left out for want of time: {name}")
                continue
            made = way_of(config, name)
            title = f"{name}, {made.model.num_layers} layers, {mesh.layout}"
            mine = apart.graph_run(title, made, expected)
            report = RanksReport(title, tuple(from_all(mesh, mine)), None)
            print_report(report, console)
            say(
                f"{'ok' if report.good else 'WRONG'} {name}: {time.monotonic() - began:.1f} s, "
                f"{most_memory(device, mesh.world):.1f} GiB until now"
            )
            compared, good = compared + 1, good and report.good
    assert good, "graphs differ from eager"
    assert compared, "there was no time for any way"


if __name__ == "__main__":
    main()
