"""`packgraph verify`: run the comparisons that were asked for, in one process or in all that
torchrun has started.

In one process graphs are compared with eager training; over several each rank does so, and the run
is compared with one process. Rank 0 alone prints: a table of all runs to stdout, and one of its own
for a run that is alone or differs; how far it is to stderr. The invariant: every process returns
the same verdict.
"""

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from packgraph.models.foreign import read_object
from packgraph.packing.batch import PackedBatch
from packgraph.parallel.layout import Layout
from packgraph.parallel.ranks import Launch, processes
from packgraph.train.build import with_shape
from packgraph.train.config.commands import VerifyArguments
from packgraph.train.config.reading import ConfigError, ConfigLayer, one_problem, render
from packgraph.train.config.request import RunRequest
from packgraph.train.config.sections import TrainConfig
from packgraph.train.features.context import places_multiple
from packgraph.train.launch import choose_device, prepare, use_deterministic_kernels
from packgraph.train.progress import phases_of_command
from packgraph.train.run_files import CONFIG
from packgraph.train.run_folder import model_name
from packgraph.train.validate import validate
from packgraph.verification.compared_run import KINDS, RANKS_KINDS
from packgraph.verification.matrix import default_matrix, random_packs, ranks_matrix
from packgraph.verification.ranks import OneProcessReport, RanksReport, verify_ranks

PRESET_STEPS, MATRIX_STEPS, HF_STEPS = 50, 30, 6
HF_TOKENS, HF_CAPACITY = 256, "256x16"  # of a step, replica and stage; of a microbatch
FEWEST_STEPS = 3  # without a preset: of which two are warm-up
EQUAL = "bitwise equal"
LIMITS_EXPLAINED = (
    "Distances are relative. Sums over ranks are rounded in another order than in one process, so "
    "they are not zero; the limits stand well above what one step rounds in {dtype}. Without "
    "dropout; the update is compared on equal gradients."
)


def run_verify(asked: RunRequest | None, own: VerifyArguments) -> int:
    """Run `packgraph verify`; returns the exit code. Raises as `verify_command` does."""
    config, launch = None, Launch.read()
    with tempfile.TemporaryDirectory() as folder:
        if asked is not None:
            device = choose_device(asked.read()[0].run.device, launch)
            if own.hf_config is not None:
                drawn = hf_config_layer(own.hf_config, own.layers, Path(folder), device.type)
                parallel = asked.read()[0].parallel
                each = HF_TOKENS * parallel.layout().replicas(launch.world) * parallel.pp
                drawn.values["run"]["tokens_per_step"] = each * parallel.chunks
                asked = replace(asked, layers=(drawn, *asked.layers))
            config, notes = with_shape(asked, device.type)
            for note in notes if launch.rank == 0 else ():
                print(f"note: {note}", file=sys.stderr, flush=True)
        good = verify_command(
            config,
            HF_STEPS if own.steps is None and own.hf_config is not None else own.steps,
            one_process=not own.skip_one_process,
            apart=own.apart,
            drawn=own.hf_config is not None,
            verbose=own.verbose,
        )
    return 0 if good else 1


def verify_command(
    config: TrainConfig | None,
    steps: int | None,
    *,
    one_process: bool,
    apart: bool,
    drawn: bool = False,
    verbose: bool = False,
) -> bool:
    """Verify `config`, or a small model in many ways when it is None; print what was found. True if
    all is good.

    steps: of the run (default 50), or of each run of the small model (default 30). one_process:
    over several processes, also compare with one. apart: hold one of the runs that are compared at
    a time, not both. drawn: of random documents, not those of `config.data`. verbose: print a table
    for every run. Raises ConfigError, DataError.
    """
    launch = Launch.read()
    problems = verify_problems(config, steps, launch.world, one_process=one_process, apart=apart)
    if problems:
        raise ConfigError(problems)
    device = choose_device("auto" if config is None else config.run.device, launch)
    use_deterministic_kernels(device)
    layout, several, reports = Layout(), launch.world > 1, list[RanksReport]()
    if config is not None:
        config = replace(config, run=replace(config.run, steps=steps or PRESET_STEPS))
        # Finds all that is wrong before the processes wait for each other.
        if not drawn:
            prepared = prepare(config, device, launch.world).config
            config = prepared if config.graph.capacities == "auto" else config
        elif problems := drawn_problems(config, device, launch.world):
            raise ConfigError(problems)
        layout = config.parallel.layout()
    console = Console(quiet=launch.rank != 0)
    with (
        processes(layout, device, launch) as mesh,
        phases_of_command(quiet=launch.rank != 0) as progress,
    ):
        if config is not None:
            made, title = config, model_name(config) + (f", {mesh.layout}" if several else "")
            found: Iterable[RanksReport] = [
                verify_ranks(
                    title,
                    made,
                    lambda: open_packs(made, device, launch.world, drawn),
                    device,
                    mesh,
                    one_process=one_process and several,
                    apart=apart,
                    progress=progress,
                )
            ]
        elif several:
            count = steps or MATRIX_STEPS
            found = ranks_matrix(
                device, count, launch.world, one_process=one_process, progress=progress
            )
        else:
            matrix = default_matrix(device, steps or MATRIX_STEPS, progress)
            found = (RanksReport(report.title, (report,), None) for report in matrix)
        for report in found:
            reports.append(report)
            if verbose or config is not None or not report.good:
                print_report(report, console)
    if config is None:
        console.print(summary_of(reports))
    print_total(reports, console)
    return all(report.good for report in reports)


def summary_of(reports: Sequence[RanksReport]) -> Table:
    """A row for each verified run."""
    table = Table("run", "verdict", "steps", "replayed", title="eager against graph")
    table.title_justify = "left"
    for report in reports:
        verdict = EQUAL if report.good else "DIFFERS: against one process"
        if found := report.found():
            verdict = f"DIFFERS: {found[0].kind}"
        elif report.silent_ranks():
            verdict = "nothing replayed"
        replayed = sum(rank.replayed for rank in report.ranks)
        table.add_row(report.title, verdict, str(report.ranks[0].steps), str(replayed))
    return table


def open_packs(
    config: TrainConfig, device: torch.device, world: int, drawn: bool
) -> Iterator[PackedBatch]:
    """The packs of a run from its beginning, drawn at random or made of its data."""
    if drawn:
        sizes, multiple = config.graph.packing_capacities(), places_multiple(config)
        return random_packs(0, sizes, config.model.vocab_size, multiple)
    return iter(prepare(config, device, world).microbatches)


def drawn_problems(config: TrainConfig, device: torch.device, world: int) -> list[str]:
    """Lists why a run cannot be compared on random documents, in place of `prepare`."""
    if config.parallel.dynamic_cp or config.graph.capacities == "auto":
        return [
            "parallel.dynamic_cp and graph.capacities = auto go by the lengths of documents, which "
            "--hf-config draws: name hf:FOLDER and a file of documents instead"
        ]
    return validate(config, device.type, world=world)


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


def verdict(report: RanksReport, kind: str) -> str:
    """`bitwise equal`, or the first difference; of several ranks with its rank and the others that
    have one."""
    found, several = report.found(kind), len(report.ranks) > 1
    if not found:
        return EQUAL + (" on every rank" if several else "")
    if not several:
        return str(found[0].difference)
    others = ", ".join(str(one.rank) for one in sorted(found[1:], key=lambda one: one.rank))
    return str(found[0]) + (f"; also on rank {others}" if others else "")


def print_report(report: RanksReport, console: Console) -> None:
    """One table for one verified run, and why it counts as failed if it does."""
    first, several, table = report.ranks[0], len(report.ranks) > 1, Table(title=report.title)
    table.title_justify = "left"
    table.add_column("eager against graph" + f" on {len(report.ranks)} ranks" * several)
    table.add_column(f"{first.steps} steps, {first.microbatches} microbatches", overflow="fold")
    for kind in RANKS_KINDS if several else KINDS:
        table.add_row(kind, verdict(report, kind))
    # All ranks count all rows of a step, and make a step again together. A size that is missing
    # was not compared.
    sizes = (f"{render(capacity)}: {count}" for capacity, count in sorted(first.rows.items()))
    table.add_row("sizes of rows", ", ".join(sizes) or "none")
    counted = sum((Counter(rank.fallbacks) for rank in report.ranks), Counter[str]())
    fallbacks = ", ".join(f"{count} {reason}" for reason, count in counted.items()) or "none"
    replayed = sum(rank.replayed for rank in report.ranks)
    table.add_row("replayed / fallbacks", f"{replayed} / {fallbacks}")
    if count := first.made_again:
        times = f"{count} time{'s' * (count > 1)}"
        table.add_row("made again", f"{times}, with more room for experts (parallel.expert_room)")
    if report.one_process is not None:
        _add_one_process(table, report.one_process)
    console.print(table)
    if several and (found := report.found()):
        told = f"First difference between eager and graph: {found[0].kind}: {found[0]}"
        console.print(told, highlight=False)
    if silent := report.silent_ranks():
        much = "Hardly anything" if report.ranks[silent[0]].replayed else "Nothing"
        where = f" on rank {', '.join(map(str, silent))}" if several else ""
        told = f"{much} was replayed{where}, so nothing was shown{' there' * several}"
        console.print(f"{told}: see the fallbacks above.", highlight=False)


def _add_one_process(table: Table, report: OneProcessReport) -> None:
    """The rows that compare the run with one process."""
    table.add_section()
    table.add_row("against one process", f"{report.steps} steps, the largest distances")
    if report.changed:
        table.add_row("updated", report.changed)
    for kind, distance in report.distances.items():
        size, limit = distance.size, distance.limit
        told = f"{size:.1g} of at most {limit:.0e}"
        if not distance.good:
            told = f"DIFFERS: {size:.2g}, at most {limit:.0e} is allowed"
        if size != 0.0:
            told += f" (step {distance.step}{', ' * bool(distance.name)}{distance.name})"
        table.add_row(kind, EQUAL if size == limit == 0.0 else told)
    if not report.steps:
        table.add_row("", "DIFFERS: there was no step to compare")


def print_total(reports: Sequence[RanksReport], console: Console) -> None:
    """The last line: how many runs were right."""
    types = sorted({one.one_process.dtype for one in reports if one.one_process is not None})
    if types:
        console.print(LIMITS_EXPLAINED.format(dtype=" and ".join(types)), highlight=False)
    good = sum(report.good for report in reports)
    where = " on every rank" if any(len(report.ranks) > 1 for report in reports) else ""
    alone = " and, within the limits, those of one process" if types else ""
    console.print(f"{good} of {len(reports)} runs bitwise equal{where}{alone}", highlight=False)


def hf_config_layer(file: Path, layers: int | None, folder: Path, device: str) -> ConfigLayer:
    """A model of transformers with random weights as values of a run.

    Args:
        file: A config.json, or the folder that it lies in.
        layers: Another number of layers, for models that do not fit.
        folder: Gets what is read, where the run cannot begin from FOLDER/config.json itself.
        device: `cuda`, where it is in bfloat16, or `cpu`, where it is in float32.

    Raises:
        ConfigError: It cannot be read, is no JSON object, or names no `model_type`.
    """
    file = file / CONFIG if file.is_dir() else file
    content = read_hf_config(file, layers)
    if layers is not None or file.name != CONFIG:
        file = folder / re.sub(r"\W", "_", content["model_type"]) / CONFIG
        file.parent.mkdir()
        file.write_text(json.dumps(content), encoding="utf-8")
    values: dict[str, dict[str, Any]] = {
        "hf": {"path": str(file.parent), "random": True},
        "data": {"tokenizer": "bytes"},
        "graph": {"capacities": HF_CAPACITY},
        "run": {"dtype": "float32"} if device == "cpu" else {},
    }
    return ConfigLayer("--hf-config", values)


def read_hf_config(file: Path, layers: int | None = None) -> dict[str, Any]:
    """The entries of a config.json, for `AutoConfig.for_model`.

    Raises:
        ConfigError: It cannot be read, is no JSON object, or names no `model_type`.
    """
    content = read_object(file, one_problem)
    if not content.get("model_type") or not isinstance(content["model_type"], str):
        raise ConfigError([f"{file} is no config.json of transformers: it names no model_type"])
    if layers is not None:
        content["num_hidden_layers"] = layers
        if isinstance(content.get("layer_types"), list):
            content["layer_types"] = content["layer_types"][:layers]
    return content
