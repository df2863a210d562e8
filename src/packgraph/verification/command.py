"""`packgraph verify`: run the comparisons that were asked for, in one process or in all that
torchrun has started.

In one process graphs are compared with eager training; over several each rank does so, and the run
is compared with one process. Rank 0 alone prints: tables to stdout, how far it is to stderr. The
invariant: every process returns the same verdict.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace

import torch
from rich.console import Console

from packgraph.parallel.mesh import Layout
from packgraph.parallel.ranks import Launch, processes
from packgraph.train.config.reading import ConfigError
from packgraph.train.config.sections import TrainConfig
from packgraph.train.launch import choose_device, open_data, prepare, use_deterministic_kernels
from packgraph.verification.matrix import default_matrix, ranks_matrix
from packgraph.verification.ranks import RanksReport, verify_ranks
from packgraph.verification.report import (
    print_ranks_report,
    print_ranks_total,
    print_report,
    print_total,
)
from packgraph.verification.sequential import verify_sequential
from packgraph.verification.verify import SILENT, VerificationProgress, VerifyReport, verify

PRESET_STEPS, MATRIX_STEPS = 50, 30
FEWEST_STEPS = 3  # without a preset: of which two are warm-up


def verify_command(
    config: TrainConfig | None, steps: int | None, *, one_process: bool, apart: bool
) -> bool:
    """Verify `config`, or a small model in many ways when it is None; print what was found. True if
    all is good.

    steps: of the run (default 50), or of each run of the small model (default 30). one_process:
    over several processes, also compare with one. apart: hold one of the runs that are compared at
    a time, not both. Raises ConfigError, DataError.
    """
    launch = Launch.read()
    problems = verify_problems(config, steps, launch.world, one_process=one_process, apart=apart)
    if problems:
        raise ConfigError(problems)
    device = choose_device("auto" if config is None else config.run.device, launch)
    use_deterministic_kernels(device)
    if config is not None:
        config = replace(config, run=replace(config.run, steps=steps or PRESET_STEPS))
    if config is not None and config.graph.capacities == "auto":
        config = prepare(config, device, launch.world).config
    if launch.world > 1:
        return _over_ranks(config, steps or MATRIX_STEPS, device, launch, one_process, apart)
    if config is None:
        return _shown(default_matrix(device, steps or MATRIX_STEPS))
    made, progress = config, _progress(launch)
    if apart:
        return _shown(
            [
                verify_sequential(
                    made.preset,
                    made,
                    lambda: iter(open_data(made, device)),
                    device,
                    progress=progress,
                )
            ]
        )
    return _shown(
        [verify(made.preset, made, iter(open_data(made, device)), device, progress=progress)]
    )


def verify_problems(
    config: TrainConfig | None, steps: int | None, world: int, *, one_process: bool, apart: bool
) -> list[str]:
    """Lists why `world` processes cannot compare anything, or not in this way. Other arguments are
    those of `verify_command`."""
    problems = []
    if steps is not None and steps < 1:
        problems.append(f"--steps must be at least 1, got {steps}")
    elif steps is not None and config is None and steps < FEWEST_STEPS:
        problems.append(
            f"--steps {steps} is too few: the first steps are warm-up, replay begins with step "
            f"{FEWEST_STEPS}"
        )
    if config is not None and not config.graph.enabled:
        problems.append(
            "graph.enabled = false: verify compares graphs with eager training, so graphs must be "
            "on"
        )
    if apart and config is None:
        problems.append(
            "--apart: is for a model of which two do not fit, and without a preset all models are "
            "tiny; "
            "name a preset, or leave it out"
        )
    elif apart and one_process and world > 1:
        problems.append(
            "--apart: the comparison with one process holds the whole model on rank 0 beside the "
            "run, so "
            "two would have to fit after all; add --skip-one-process, or leave --apart out"
        )
    return problems


def _progress(launch: Launch) -> VerificationProgress:
    return (
        SILENT
        if launch.rank
        else VerificationProgress(lambda text: print(text, file=sys.stderr, flush=True))
    )


def _shown(reports_as_done: Iterable[VerifyReport]) -> bool:
    console, reports = Console(), []
    for report in reports_as_done:
        print_report(report, console)
        reports.append(report)
    print_total(reports, console)
    return all(report.good for report in reports)


def _over_ranks(
    config: TrainConfig | None,
    steps: int,
    device: torch.device,
    launch: Launch,
    one_process: bool,
    apart: bool,
) -> bool:
    if config is not None:
        open_data(
            config, device, launch.world
        )  # finds all that is wrong before the processes wait for each other
    console = Console(quiet=launch.rank != 0)
    reports: list[RanksReport] = []
    with processes(
        Layout() if config is None else config.parallel.layout(), device, launch
    ) as mesh:
        if config is None:
            reports_as_done: Iterable[RanksReport] = ranks_matrix(
                device, steps, launch.world, one_process=one_process
            )
        else:
            made = config
            title = f"{made.preset}, {mesh.layout}"
            reports_as_done = [
                verify_ranks(
                    title,
                    made,
                    lambda: iter(open_data(made, device, launch.world)),
                    device,
                    mesh,
                    one_process=one_process,
                    apart=apart,
                    progress=_progress(launch),
                )
            ]
        for report in reports_as_done:
            print_ranks_report(report, console)
            reports.append(report)
        print_ranks_total(reports, console)
    return all(report.good for report in reports)
