"""From a configuration to a finished run, and what a person is told at its end.

Before a folder is created the configuration is checked as a whole, the data are opened, which finds
what is missing or malformed, and what the run needs is held against the memory that there is. A
document that turns out to be unusable only when it is tokenized (too long, say) ends the run later;
finished steps are then in a checkpoint, and a run without one leaves its name free.

With `parallel.shard = auto` as little of the layers is sharded as memory allows:

    none ──▶ fits? ──▶ gradients ──▶ fits? ──▶ parameters

What is whole on every rank is exchanged once a step; what is sharded, in every microbatch. So the
first that fits is the fastest, and each takes more memory than the next. What was chosen is written
into the run's config.json; a run goes on with it, unless it is told `auto` again.
"""

import contextlib
import hashlib
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from packgraph.graphs.memory import budget
from packgraph.models.decoder import stage_weights
from packgraph.models.foreign import REMEDY, naming
from packgraph.models.hf import WeightsError
from packgraph.models.hf_config import config_to_json
from packgraph.models.stack import DecoderStack
from packgraph.ops.names import NATIVE
from packgraph.parallel.heartbeat import Whereabouts, signs_of_life
from packgraph.parallel.layout import SHARDS
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.ranks import (
    Launch,
    decided_by_first,
    everywhere,
    from_all,
    on_first,
    processes,
    set_nccl,
)
from packgraph.train.build import with_shape
from packgraph.train.config.reading import ConfigError, differences, shown, to_dict
from packgraph.train.config.request import RunRequest
from packgraph.train.config.sections import AUTO, DataConfig, TrainConfig
from packgraph.train.data import (
    DataError,
    DocumentSource,
    Microbatches,
    PairedMicrobatches,
    PlannedSteps,
    build_tokenizer,
    evaluation_stream,
    open_documents,
    open_for_evaluation,
    row_notes,
    tokenizer_notes,
)
from packgraph.train.data.order import WeightedSource
from packgraph.train.data.shards import ShardSource
from packgraph.train.evaluation import STOPPED_EARLY
from packgraph.train.features.context import (
    context_choices,
    context_notes,
    context_request,
    places_multiple,
)
from packgraph.train.features.live import live_shape, running
from packgraph.train.features.offload import TrainerOffloading, report_offloading
from packgraph.train.features.profile import profiled_steps
from packgraph.train.memory import SHARE, Agree, available_memory, check_memory, predicted_peak
from packgraph.train.metrics import BOARD
from packgraph.train.plan import with_capacities, with_stored_capacities
from packgraph.train.progress import ProgressView, left_out_line, phases_of_command
from packgraph.train.run_files import CHECKPOINTS, CONFIG, SUMMARY, RunFileError, sampled_digest
from packgraph.train.run_folder import (
    FREE_ON_RESUME,
    TakenError,
    begin_in,
    can_go_on,
    check_same_run,
    choose_folder,
    has_checkpoint,
    model_name,
    take_folder,
)
from packgraph.train.signals import stop_on_signals
from packgraph.train.trainer import COMPLETED, DATA_ENDED, Trainer
from packgraph.train.validate import validate


def with_chosen_shard(
    config: TrainConfig,
    device_type: str,
    available: int | None,
    world: int,
    rank: int,
    agree: Agree,
) -> tuple[TrainConfig, list[str]]:
    """`config` with `parallel.shard` chosen if it is `auto`, and what is to be said of it.

    Collective where `agree` is: every rank predicts its own peak, and the choice is what fits on
    all. Where none is sure to fit it is what takes the least; where the memory of a device is not
    known nothing is sharded. Where there are no replicas `auto` stays, for a run that goes on with
    some.

    Args:
        config: A run whose capacities are known.
        device_type: `cpu` or `cuda`.
        available: Bytes that this process may still take there; None = nobody knows.
        world: Number of processes.
        rank: This one's.
        agree: Whether something holds on all ranks.
    """
    if config.parallel.shard != AUTO:
        return config, []
    choices = shard_choices(config, device_type, world)
    if len(choices) == 1:
        return config, []
    if not agree(available is not None):
        return choices[0], ["parallel.shard auto: the memory of devices is not known, so none"]
    told, room = [], round(SHARE * (available or 0))
    for chosen in choices:
        peak = predicted_peak(chosen, device_type, world, rank)
        told.append(f"{chosen.parallel.shard} {budget.shown(peak)}")
        if agree(peak <= room):
            break
    if chosen.parallel.shard == "none":
        return chosen, []
    return chosen, [
        f"parallel.shard auto chose {chosen.parallel.shard}: predicted peaks, {', '.join(told)}; "
        f"{budget.shown(room)} may be used"
    ]


def shard_choices(config: TrainConfig, device_type: str, world: int) -> list[TrainConfig]:
    """All that `auto` may choose, none first, each taking less memory than the one before; `config`
    itself where it has chosen."""
    if config.parallel.shard != AUTO:
        return [config]
    # How many ranks share a layer says nothing where none is shared.
    none = replace(config, parallel=replace(config.parallel, shard="none", shard_ranks=0))
    layout = config.parallel.layout().resolved(world)
    if layout.replicas(world) * layout.cp == 1:
        return [none]
    tried = [
        replace(config, parallel=replace(config.parallel, shard=shard)) for shard in SHARDS[1:]
    ]
    return [none, *(one for one in tried if not validate(one, device_type, world=world))]


ALONE = Launch()
PACKAGES = ("packgraph", "torch", "transformers", "tokenizers", "numpy")  # whose versions count
MOST_NAMED = 3  # differences of a rank, and ranks, in one message


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
    """Inputs of a run. config: with its capacities known. notes: what was chosen for it, for
    people. evaluation: by name, the packs that it evaluates on. data: how much there is to train
    on, in words."""

    config: TrainConfig
    microbatches: Microbatches
    notes: Sequence[str]
    evaluation: Mapping[str, Microbatches]
    data: str


def prepare(config: TrainConfig, device: torch.device, world: int = 1) -> Prepared:
    """Open the data of `config`, after all sections were found to agree, and choose its capacities
    if they are auto.

    world: number of processes; each of them reads all packs, and finds the same. Raises ConfigError
    and DataError.
    """
    if problems := validate(config, device.type, world=world):
        raise ConfigError(problems)
    tokenizer = build_tokenizer(config.data)
    if problems := validate(config, device.type, tokenizer.vocab_size, world):
        raise ConfigError(problems)
    documents, held_out = open_for_evaluation(
        config, open_documents(config.data, paired=config.loss.is_of_pairs), tokenizer
    )
    config, notes = with_capacities(config, documents, tokenizer, device)

    def packs(data: DataConfig, source: DocumentSource) -> Microbatches:
        stream = data, source, tokenizer, config.graph.packing_capacities()
        multiple = places_multiple(config)
        if config.loss.is_of_pairs:
            return PairedMicrobatches(*stream)
        if config.parallel.dynamic_cp:
            return PlannedSteps(*stream, context_request(config, world, device), multiple)
        return Microbatches(*stream, multiple)

    once = evaluation_stream(config.data)
    evaluation = {name: packs(once, source) for name, source in held_out.items()}
    notes = [*notes, *context_notes(context_choices(config)), *row_notes(documents)]
    notes += tokenizer_notes(documents, tokenizer)
    learned = None if config.hf.random else config.hf.path or config.run.init_from
    if config.data.tokenizer == "bytes" and learned is not None:
        notes.append(
            f"warning: text becomes one token a byte, which weights in {learned} have learned only "
            "if they were trained so; else name their tokenizer.json by --data.tokenizer"
        )
    data = _data_in_words(config, documents)
    return Prepared(config, packs(config.data, documents), notes, evaluation, data)


def _data_in_words(config: TrainConfig, documents: DocumentSource) -> str:
    """Documents of a source, and of shards their tokens and steps of an epoch."""
    count, per_step = len(documents), config.run.tokens_per_step
    told = f"{config.data.path or config.data.source}: {count:,} documents"
    tokens = documents.tokens if isinstance(documents, ShardSource) else None
    if tokens is not None:
        told += f", {tokens:,} tokens"
        if not isinstance(documents, WeightedSource):
            told += f"; an epoch has about {max(1, round(tokens / per_step)):,} steps"
    return f"{told}; {per_step:,} tokens a step"


def input_facts(given: TrainConfig, prepared: Prepared) -> dict[str, Any]:
    """Facts of what this process trains on, by name; those of all ranks must be the same.

    Args:
        given: The configuration that this process was started with; that of rank 0 counts.
        prepared: What it has read by the configuration of rank 0.

    Raises:
        WeightsError: If the model's files cannot be read.
    """
    config, steps = prepared.config, prepared.microbatches
    facts = {**to_dict(given), **steps.identity()}
    facts |= {f"evaluation {name}": on.identity() for name, on in prepared.evaluation.items()}
    if isinstance(steps, PlannedSteps):
        facts["plan"] = steps.request
    # A run that goes on has the weights of its checkpoint.
    for path in (config.hf.path, None if config.run.resume else config.run.init_from):
        if path is not None:
            facts[f"weights in {path}"] = _sampled(Path(path).expanduser())
    every = metadata.distributions()
    return facts | {each.name: each.version for each in every if each.name in PACKAGES}


def _sampled(folder: Path) -> str:
    """A digest of the config, and of the weights or samples of them, in the folder of a model."""
    found = []
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors*")]):
        with naming(file, "cannot be read", WeightsError, REMEDY):
            found.append((file.name, sampled_digest(file)))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def check_alike(mesh: Mesh, facts: Mapping[str, Any]) -> None:
    """Agree that all ranks train on the same. Collective.

    Args:
        mesh: All processes.
        facts: Of this rank, by `input_facts`.

    Raises:
        DataError: On all ranks, naming those whose facts are not those of rank 0, and which.
    """
    (host, first), *others = from_all(mesh, (socket.gethostname(), dict(facts)))
    found = []
    for rank, (where, own) in enumerate(others, start=1):
        differing = [
            f"{name} is {shown(new)} and not {shown(old)}"
            for name, (old, new) in differences(first, own).items()
            if name not in FREE_ON_RESUME
        ]
        more = ", …" if len(differing) > MOST_NAMED else ""
        if differing:
            found.append(f"rank {rank} on {where}: {', '.join(differing[:MOST_NAMED])}{more}")
    if found:
        more = f"; and {len(found) - MOST_NAMED} more ranks" if len(found) > MOST_NAMED else ""
        raise DataError(
            f"these ranks would not train on the same as rank 0 on {host}: "
            f"{'; '.join(found[:MOST_NAMED])}{more}. Give all ranks the same files, packages and "
            "options"
        )


def run_train(asked: RunRequest, options: Collection[str]) -> int:
    """Trains what `packgraph train` was asked for; returns the exit code. options: dotted names of
    the values that were given as options. Raises as `train` does."""
    launch = Launch.read()
    device = choose_device(asked.read()[0].run.device, launch)
    config, notes = with_shape(asked, device.type)
    folder, summary = train(config, options, [f"note: {note}" for note in notes])
    if launch.rank == 0:
        lines = closing_lines(config, folder, summary, launch)
        print(*lines, sep="\n", file=sys.stderr)
    return int(summary.get("exit_code", 0))


def train(
    config: TrainConfig, asked: Collection[str] = (), notes: Sequence[str] = ()
) -> tuple[Path, dict[str, Any]]:
    """Run or resume `config` in the processes that torchrun has started, or in this one alone.

    asked: dotted names of the values that were given as options; see `check_same_run`. notes: what
    is said at the start. Returns the
    run's folder and its summary; only rank 0 writes and shows anything. Raises ConfigError,
    LaunchError, DataError, CheckpointError, RunFileError, NonFiniteLossError and LostRankError; all
    of them say what to do. A process that hangs in a collective because another one is lost ends
    without returning (`parallel/heartbeat.py`).
    """
    launch = Launch.read()
    while True:
        try:
            with signs_of_life(launch, config.run.timeout) as whereabouts:
                return _train(config, asked, notes, launch, whereabouts)
        except TakenError:
            # Of starts at the same time, all but one wait for that one, and go on from its end.
            if config.run.resume != "auto" or launch.world > 1:
                raise


def _nccl_notes(device: torch.device, launch: Launch) -> list[str]:
    """Sets NCCL's options for several processes on GPUs; returns notes. Raises ConfigError."""
    if device.type != "cuda" or launch.world == 1:
        return []
    try:
        note = set_nccl(os.environ)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    return [] if note is None else [note]


def _train(
    config: TrainConfig,
    asked: Collection[str],
    noted: Sequence[str],
    launch: Launch,
    whereabouts: Whereabouts,
) -> tuple[Path, dict[str, Any]]:
    device = choose_device(config.run.device, launch)
    if config.run.deterministic:
        use_deterministic_kernels(device)
    given = config
    # Other nodes may have no such folder, or see later what is in it.
    config, folder, notes = decided_by_first(
        whereabouts.store, launch, partial(_decide, config, asked), ConfigError
    )
    quiet = launch.rank != 0
    with phases_of_command(quiet=quiet) as phases, phases.during("reading documents"):
        prepared = prepare(config, device, launch.world)
    config = prepared.config
    available = available_memory(device, launch.local_world)
    least = shard_choices(config, device.type, launch.world)[-1]
    check_memory(least, device, available, world=launch.world, rank=launch.rank)
    told = _nccl_notes(device, launch)
    # The folder was chosen before the processes meet, so all have looked before one of them creates
    # it.
    console = Console(stderr=True, highlight=False, quiet=quiet)
    with (
        processes(config.parallel.layout(), device, launch, store=whereabouts.store) as mesh,
        contextlib.ExitStack() as held,
        ProgressView(config.run.steps, config.run.log_every, console) as view,
        stop_on_signals(config.run.max_minutes) as stop,
    ):
        if mesh.world > 1:
            check_alike(mesh, input_facts(given, prepared))
        chosen = folder
        folder = on_first(
            mesh, lambda: take_folder(chosen, config, held), ConfigError, RunFileError
        )
        nodes = begin_in(folder, mesh, config.run.per_node_folder, held)
        whereabouts.at("start")
        config, sharding = with_chosen_shard(
            config,
            device.type,
            available,
            launch.world,
            launch.rank,
            partial(everywhere, mesh.everyone()),
        )
        layout = "" if mesh.world == 1 else f", {mesh.layout}"
        view.note(f"{model_name(config)} on {device}{layout}, written to {folder}")
        if nodes.others:
            count = 1 + len(nodes.others)
            view.note(f"{count} nodes have folders of their own: checkpoints are here")
        with view.phases.during("making the model"):
            trainer = Trainer(
                config,
                folder,
                prepared.microbatches,
                device,
                view,
                mesh,
                whereabouts,
                nodes,
                prepared.evaluation,
            )
        facts = run_facts(config, trainer, prepared.data, available)
        view.note(*(f"  {name:9}  {fact}" for name, fact in facts.items()))
        view.note(*noted, *prepared.notes, *told, *sharding)
        decoders = (chunk for chunk in trainer.model.chunks if isinstance(chunk, DecoderStack))
        if choices := dict.fromkeys(str(chunk.attention_choice()) for chunk in decoders):
            view.note(f"attention by {', '.join(choices)}")
        if (state := trainer.optimizer.host_state) is not None:
            view.note(f"optimizer state: {state.places()}")
        if isinstance(offloading := trainer.executor.prepare, TrainerOffloading):
            offloading.when_planned = partial(
                report_offloading, mesh=mesh, folder=folder, note=view.note
            )
        try:
            if config.run.resume:
                trainer.resume()
                if trainer.step < config.run.steps:
                    view.note(*(f"note: {note}" for note in notes))
            with running(config.hf.path), profiled_steps(trainer) as trainer.after_step:
                summary = trainer.run(stop)
        finally:
            trainer.close()
        view.log(*closing_lines(config, folder, summary, launch))
    return folder, summary


def run_facts(
    config: TrainConfig, trainer: Trainer, data: str, available: int | None
) -> dict[str, str]:
    """What a run is, by name, in words.

    Args:
        config: Of the run, with all of it chosen.
        trainer: Of this rank.
        data: How much there is to train on, in words.
        available: Bytes that this process may take on its device; None = nobody knows.
    """
    model, mesh, device, run = config.model, trainer.mesh, trainer.device, config.run
    live, offload = config.hf.path, config.optimizer.offload
    count = sum(stage_weights(model, 0, 1)[:2]) if live is None else live_shape(live).elements
    trained = "all trained"
    if config.lora.enabled:
        adapters = [p.numel() for p in trainer.model.parameters() if p.requires_grad]
        count, trained = count + sum(adapters), f"{sum(adapters):,} of them trained (adapters)"
    precision = run.dtype + ("" if model.precision == NATIVE else f", products {model.precision}")
    if run.dtype != "float32":
        precision += f"; gradients are summed in {config.gradient_dtype(mesh.world)}"
    world = "1 process" if mesh.world == 1 else f"{mesh.world} processes, {mesh.layout}"
    world += f", {config.parallel.known_shard} sharded" if config.parallel.shards else ""
    waiting = [*config.offload.modules, *(["optimizer state"] if offload else [])]
    peak = predicted_peak(config, device.type, mesh.world, mesh.rank)
    free = "" if available is None else f", {budget.shown(available)} free"
    loss = config.loss
    of_pairs = f"{loss.name} of pairs, beta {loss.strength:g}"
    beside = "a frozen copy of" if config.copies_weights else "the base under adapters, as"
    against = f", against {beside} the weights at the start" if loss.has_reference else ""
    return {
        "model": f"{count:,} parameters, {trained}",
        "data": data,
        **({"loss": of_pairs + against} if loss.is_of_pairs else {}),
        "precision": precision,
        "world": world,
        "recompute": f"{run.recompute}, offload {', '.join(waiting) or 'none'}",
        "memory": f"about {budget.shown(peak)} predicted at the peak{free}",
    }


def _decide(config: TrainConfig, asked: Collection[str]) -> tuple[TrainConfig, Path, list[str]]:
    """Decides whether a run goes on, by which configuration, and where, with notes for people.

    Raises ConfigError.
    """
    if config.run.resume == "auto":
        config = replace(config, run=replace(config.run, resume=can_go_on(config)))
    folder = choose_folder(config)
    if not config.run.resume:
        return config, folder, []
    config = with_stored_capacities(folder, config)
    return config, folder, check_same_run(folder, config, asked)


def closing_lines(
    config: TrainConfig, folder: Path, summary: Mapping[str, Any], launch: Launch
) -> list[str]:
    """Lines on how the run in `folder` went, by its summary, and what can be done next. launch: of
    this process."""
    lines = [f"{summary['ended']}: {summary['steps']} steps, summary in {folder / SUMMARY}"]
    if "loss_first" in summary:
        first, last = (
            _mean_in_words(summary[f"loss_{end}"], summary.get(f"loss_{end}_steps"))
            for end in ("first", "last")
        )
        lines.append(
            f"loss {first} → {last}, {summary['tokens_per_second']:,.0f} tokens/s, padding "
            f"{summary['padding_fraction']:.1%}, {summary['replayed']} replays, fallbacks "
            f"{summary['fallbacks'] or 'none'}"
        )
    best = summary.get("evaluation", {})
    if best.get("loss") is not None:
        where = folder / CHECKPOINTS / f"step-{best['step']:08d}"
        lines.append(f"best evaluation loss {best['loss']:.4f} at step {best['step']}: {where}")
    if line := left_out_line(summary.get("documents", {})):
        lines.append(line)
    found = next_commands(config, folder, summary, launch)
    width = max(map(len, found), default=0)
    return lines + [
        f"{what + ':':{width + 1}}  {shlex.join(words)}" for what, words in found.items()
    ]


def next_commands(
    config: TrainConfig, folder: Path, summary: Mapping[str, Any], launch: Launch
) -> dict[str, list[str]]:
    """Commands for what can be done after the run in `folder`."""
    found: dict[str, list[str]] = {}
    steps, ended = summary["steps"], summary["ended"]
    target = folder / f"weights-step-{steps}"
    if has_checkpoint(folder):
        if ended != DATA_ENDED:
            start = _program("packgraph", "packgraph.cli")
            if launch.world > 1:  # how several hosts find each other is not known here
                alone = launch.world == launch.local_world
                hosts = ["--nproc-per-node", str(launch.world)] if alone else ["..."]
                torchrun = _program("torchrun", "torch.distributed.run")
                start = [*torchrun, *hosts, "-m", "packgraph.cli"]
            resume = [*start, "train", "--config", str(folder / CONFIG)]
            more = ["--run.steps", str(2 * steps)] if ended == COMPLETED else []
            more += ["--eval.patience", "0"] if ended.startswith(STOPPED_EARLY) else []
            found["to go on"] = [*resume, "--resume", *more]
        export = [*_program("packgraph", "packgraph.cli"), "export", str(folder), str(target)]
        with contextlib.suppress(ValueError):  # transformers has no such model
            if config.hf.path is None:
                config_to_json(config.model, getattr(torch, config.run.dtype))
            found |= {} if target.exists() else {"Hugging Face weights": export}
    board = folder / BOARD
    if board.is_dir() and any(board.iterdir()):
        found["curves"] = [*_program("tensorboard", "tensorboard.main"), "--logdir", str(board)]
    return found


def _mean_in_words(loss: float, steps: Sequence[int] | None) -> str:
    """A mean of losses with the steps it is of; None = not known, of an older version."""
    if steps is None:
        return f"{loss:.4f}"
    first, last = steps[0], steps[-1]
    if first == last:
        return f"{loss:.4f} (step {first})"
    some = "" if len(steps) == last - first + 1 else f"{len(steps)} of the "
    return f"{loss:.4f} (mean of {some}steps {first} to {last})"


def _program(script: str, module: str) -> list[str]:
    """The words that start `script` of this installation, or else `module`."""
    path = Path(sys.executable).with_name(script)
    if not path.exists():
        found = os.environ.get("PYTHONPATH")
        source = [f"PYTHONPATH={found}"] if found else []
        return [*source, sys.executable, "-m", module]
    if shutil.which(script) == str(path):
        return [script]
    here = Path.cwd()
    return [str(path.relative_to(here) if path.is_relative_to(here) else path)]
