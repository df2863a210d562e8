"""`packgraph verify`: run the comparisons that were asked for, in one process or in all that torchrun has started.

In one process graphs are compared with eager training; over several each rank does so, and the run is compared with
one process. Rank 0 alone prints. The invariant: every process returns the same verdict.
"""
from collections.abc import Iterable

import torch
from rich.console import Console

from packgraph.diagnose.matrix import default_matrix, ranks_matrix
from packgraph.diagnose.ranks import RanksReport, verify_ranks
from packgraph.diagnose.report import print_ranks_report, print_ranks_total, print_report, print_total
from packgraph.diagnose.verify import VerifyReport, verify
from packgraph.parallel.mesh import Layout
from packgraph.parallel.processes import Launch, processes
from packgraph.train.launch import choose_device, open_data, prepare, use_deterministic_kernels
from packgraph.train.options import TrainConfig

MATRIX_STEPS = 30


def verify_command(config: TrainConfig | None, steps: int | None, *, one_process: bool) -> bool:
    """Verify `config`, or a small model in many ways when it is None; print what was found. True if all is good.

    steps: of each run of the small model (default 30); those of `config` are its own. one_process: over several
    processes, also compare with one. Raises ConfigError, DataError.
    """
    launch = Launch.read()
    device = choose_device("auto" if config is None else config.run.device, launch)
    use_deterministic_kernels(device)
    if config is not None and config.graph.capacities == "auto":
        config = prepare(config, device, launch.world).config
    if launch.world > 1:
        return _over_ranks(config, steps or MATRIX_STEPS, device, launch, one_process)
    if config is None:
        return _shown(default_matrix(device, steps or MATRIX_STEPS))
    return _shown([verify(config.preset, config, iter(open_data(config, device)), device)])


def _shown(reports_as_done: Iterable[VerifyReport]) -> bool:
    console, reports = Console(), []
    for report in reports_as_done:
        print_report(report, console)
        reports.append(report)
    print_total(reports, console)
    return all(report.good for report in reports)


def _over_ranks(config: TrainConfig | None, steps: int, device: torch.device, launch: Launch,
                one_process: bool) -> bool:
    if config is not None:
        open_data(config, device, launch.world)  # finds all that is wrong before the processes wait for each other
    console = Console(quiet=launch.rank != 0)
    reports: list[RanksReport] = []
    with processes(Layout() if config is None else config.parallel.layout(), device, launch) as mesh:
        if config is None:
            reports_as_done: Iterable[RanksReport] = ranks_matrix(device, steps, launch.world, one_process=one_process)
        else:
            made = config
            title = f"{made.preset}, {mesh.layout}"
            reports_as_done = [verify_ranks(title, made, lambda: iter(open_data(made, device, launch.world)), device,
                                            mesh, one_process=one_process)]
        for report in reports_as_done:
            print_ranks_report(report, console)
            reports.append(report)
        print_ranks_total(reports, console)
    return all(report.good for report in reports)
