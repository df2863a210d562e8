"""From a configuration to a finished run.

Before a folder is created the configuration is checked as a whole, the data are opened, which finds
what is missing or malformed, and what the run needs is held against the memory that there is. A
document that turns out to be unusable only when it is tokenized (too long, say) ends the run later;
finished steps are then in a checkpoint, and a run without one leaves its name free.
"""

import contextlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from packgraph.parallel.heartbeat import Whereabouts, signs_of_life
from packgraph.parallel.meeting import decided_by_first
from packgraph.parallel.processes import Launch, on_first, processes
from packgraph.train.auto_capacities import with_capacities, with_stored_capacities
from packgraph.train.config import ConfigError
from packgraph.train.context_rows import context_notes, places_multiple
from packgraph.train.data import (
    Microbatches,
    PlannedSteps,
    build_tokenizer,
    open_documents,
    open_microbatches,
)
from packgraph.train.dynamic_context import context_request
from packgraph.train.memory_need import available_memory, check_memory
from packgraph.train.offloading import TrainerOffloading, report_offloading
from packgraph.train.options import TrainConfig
from packgraph.train.progress import ProgressView
from packgraph.train.run_files import RunFileError
from packgraph.train.run_folder import (
    begin_in,
    can_go_on,
    check_same_run,
    choose_folder,
    take_folder,
)
from packgraph.train.signals import stop_on_signals
from packgraph.train.trainer import Trainer
from packgraph.train.validate import validate

ALONE = Launch()


def choose_device(name: str, launch: Launch = ALONE) -> torch.device:
    """The device called `name`; auto = a CUDA device where there is one, else the CPU.

    Of several processes on a host each takes the CUDA device of its local rank. Raises ConfigError
    if it is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if ":" in name and launch.world > 1:
        raise ConfigError(
            [f"run.device = {name} would put all {launch.world} processes on one device; use cuda"]
        )
    index = int(name.partition(":")[2] or launch.local_rank)
    if index >= torch.cuda.device_count():
        raise ConfigError(
            [f"run.device = {name}: there are {torch.cuda.device_count()} CUDA devices here"]
        )
    return torch.device("cuda", index)


def use_deterministic_kernels(device: torch.device) -> None:
    """Let torch use deterministic kernels only. On CUDA to be called before the first kernel is
    launched."""
    if device.type == "cuda":
        # cuBLAS reads this when its first handle is made; without it torch refuses matrix products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


@dataclass(frozen=True)
class Prepared:
    """What a run starts from. config: with its capacities known. notes: what was chosen for it, for
    people."""

    config: TrainConfig
    microbatches: Microbatches
    notes: Sequence[str]


def prepare(config: TrainConfig, device: torch.device, world: int = 1) -> Prepared:
    """Open the data of `config`, after all sections were found to agree, and choose its capacities
    if they are auto.

    world: number of processes; each of them reads all packs, and finds the same. Raises ConfigError
    and DataError.
    """
    problems = validate(config, device.type, world=world)
    if problems:
        raise ConfigError(problems)
    tokenizer = build_tokenizer(config.data)
    problems = validate(config, device.type, tokenizer.vocab_size, world)
    if problems:
        raise ConfigError(problems)
    documents = open_documents(config.data)
    config, notes = with_capacities(config, documents, tokenizer, device)
    stream = config.data, documents, tokenizer, config.graph.packing_capacities()
    multiple = places_multiple(config)
    microbatches = (
        PlannedSteps(*stream, context_request(config, world, device), multiple)
        if config.parallel.dynamic_cp
        else open_microbatches(*stream, multiple)
    )
    return Prepared(config, microbatches, [*notes, *context_notes(config)])


def open_data(config: TrainConfig, device: torch.device, world: int = 1) -> Microbatches:
    """The resumable iterator of packs of `config`; see `prepare`."""
    return prepare(config, device, world).microbatches


def train(config: TrainConfig, asked: Collection[str] = ()) -> tuple[Path, dict[str, Any]]:
    """Run or resume `config` in the processes that torchrun has started, or in this one alone.

    asked: dotted names of the values that were given as options; see `check_same_run`. Returns the
    run's folder and its summary; only rank 0 writes and shows anything. Raises ConfigError,
    DataError, CheckpointError, RunFileError, NonFiniteLossError and LostRankError; all of them say
    what to do. A process that hangs in a collective because another one is lost ends without
    returning (`parallel/heartbeat.py`).
    """
    launch = Launch.read()
    with signs_of_life(launch, config.run.timeout) as whereabouts:
        return _train(config, asked, launch, whereabouts)


def _train(
    config: TrainConfig, asked: Collection[str], launch: Launch, whereabouts: Whereabouts
) -> tuple[Path, dict[str, Any]]:
    device = choose_device(config.run.device, launch)
    if config.run.deterministic:
        use_deterministic_kernels(device)
    # Other nodes may have no such folder, or see later what is in it.
    config, folder, notes = decided_by_first(
        whereabouts.store, launch, partial(_decide, config, asked), ConfigError
    )
    prepared = prepare(config, device, launch.world)
    config = prepared.config
    check_memory(
        config,
        device,
        available_memory(device, launch.local_world),
        world=launch.world,
        rank=launch.rank,
    )
    # The folder was chosen before the processes meet, so all have looked before one of them creates
    # it.
    console = Console(stderr=True, highlight=False, quiet=launch.rank != 0)
    with (
        processes(config.parallel.layout(), device, launch, store=whereabouts.store) as mesh,
        contextlib.ExitStack() as held,
        ProgressView(config.run.steps, config.run.log_every, console) as view,
        stop_on_signals(config.run.max_minutes) as stop,
    ):
        chosen = folder
        folder = on_first(
            mesh, lambda: take_folder(chosen, config, held), ConfigError, RunFileError
        )
        nodes = begin_in(folder, mesh, config.run.per_node_folder, held)
        whereabouts.at("start")
        layout = "" if mesh.world == 1 else f", {mesh.layout}"
        view.note(f"{config.preset} on {device}{layout}, written to {folder}")
        for note in prepared.notes:
            view.note(note)
        if nodes.others:
            view.note(
                f"{1 + len(nodes.others)} nodes have folders of their own: checkpoints are here"
            )
        trainer = Trainer(
            config, folder, prepared.microbatches, device, view, mesh, whereabouts, nodes
        )
        view.note(f"attention by {trainer.attention}")
        if isinstance(offloading := trainer.executor.prepare, TrainerOffloading):
            offloading.when_planned = partial(
                report_offloading, mesh=mesh, folder=folder, note=view.note
            )
        try:
            if config.run.resume:
                trainer.resume()
                for note in notes if trainer.step < config.run.steps else ():
                    view.note(f"note: {note}")
            summary = trainer.run(stop)
        finally:
            trainer.close()
    return folder, summary


def _decide(config: TrainConfig, asked: Collection[str]) -> tuple[TrainConfig, Path, list[str]]:
    """Whether a run goes on, by which configuration, and where; and notes on that for people.

    Raises ConfigError.
    """
    if config.run.resume == "auto":
        config = replace(config, run=replace(config.run, resume=can_go_on(config)))
    folder = choose_folder(config)
    if not config.run.resume:
        return config, folder, []
    config = with_stored_capacities(folder, config)
    return config, folder, check_same_run(folder, config, asked)
