"""`packgraph plan memory PRESET`: time against memory of recomputation, offloading and both, for one
row, from the shape of the model. Nothing is run.

    held     weights + gradients + optimizer state
    kept     what all layers keep for the backward, or have on the host        per token
    working  what one layer computes again, and the head

With `--world N`, ways to spread a run over N ranks: `plan_world.py`.

Times are those of the products, attention and scans at the device's speed, copies beside them. The
estimates of activations are those of `decoder_estimates.py`, within 15 % of what Qwen3-0.6B took.
"""  # noqa: E501

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from packgraph.graphs.memory.budget import budget_bytes
from packgraph.models.branches import token_weights
from packgraph.models.config import DecoderConfig
from packgraph.models.recompute import FULL, NONE, SELECTIVE
from packgraph.packing.capacity import Capacity
from packgraph.train.config.reading import ConfigError
from packgraph.train.config.sections import ParallelConfig, TrainConfig
from packgraph.train.config.values import CommandArguments, Count, option
from packgraph.train.memory import need_of
from packgraph.train.plan_world import (
    RowWork,
    Speeds,
    activation_choices,
    world_choices,
)
from packgraph.train.predicted_peak import activation_bytes, kept_columns
from packgraph.train.resident_state import planned_state, without_host_state
from packgraph.viz.drawing import aligned

FITS = {None: "-", True: "yes", False: "no"}
BYTES_AGAIN = 4  # of a result that selective recomputation makes: operands are read, it is written
USAGE = """\
usage: packgraph plan memory [PRESET] [--tokens N] [--memory SIZE] [--json] [--section.option VALUE ...]
       packgraph plan memory [PRESET] --world N [--tokens N] [--step-tokens N] [--memory SIZE] [...]

Show time against memory of one row: activations kept, recomputed, on the host, and both. With
--world, show the ways to spread the run over N GPUs that fit, the fastest first. Estimates from the
shape of the model; nothing is run, no GPU is needed.

    packgraph plan memory qwen3-0.6b --tokens 65536 --memory 139GiB
    packgraph plan memory moonlight --world 1024 --tokens 8192 --memory 139GiB
"""  # noqa: E501
WITH_WORLD = ("step_tokens", "per_host", "link_gb_s", "net_gb_s", "top")


@dataclass(frozen=True, kw_only=True)
class PlanMemoryArguments(CommandArguments):
    """Own options of `packgraph plan memory`."""

    preset: str | None = option(
        None, "the run whose model is meant (see `packgraph presets`)", positional=True
    )
    config: Path | None = option(None, "values from a .toml or .json file", metavar="FILE")
    tokens: Count = option(65536, "of the row", metavar="N")
    length: int | None = option(None, "of its documents in tokens; default: one", metavar="N")
    memory: str | None = option(None, "of the device, as 139GiB", metavar="SIZE")
    tflops: float = option(500.0, "that products make of the device", metavar="N")
    gb_s: float = option(50.0, "gigabytes a second of copies to the host", metavar="N")
    device_gb_s: float = option(4000.0, "gigabytes a second of the device's memory", metavar="N")
    json: bool = option(False, "print JSON instead of a table")
    world: int | None = option(
        None, "show ways to spread the run over N GPUs; the following go with it", metavar="N"
    )
    step_tokens: int | None = option(
        None, "of a step over all GPUs; default: a row for each", metavar="N"
    )
    per_host: int = option(8, "GPUs of a host", metavar="N")
    link_gb_s: float = option(
        300.0, "gigabytes a second that a GPU sends to those of its host", metavar="N"
    )
    net_gb_s: float = option(40.0, "gigabytes a second that a GPU sends to others", metavar="N")
    top: int = option(10, "show so many ways", metavar="N")

    def problems(self, given: Collection[str] = ()) -> list[str]:
        """Lists what is wrong with these options, of which `given` were given."""
        numbers = ("length", "tflops", "gb_s", "device_gb_s", "world", *WITH_WORLD)
        found = [
            f"--{name.replace('_', '-')}: must be more than 0"
            for name in numbers
            if (value := getattr(self, name)) is not None and not value > 0
        ]
        if self.world is None:
            found += [
                f"--{name.replace('_', '-')}: goes with --world N"
                for name in WITH_WORLD
                if name in given
            ]
        try:
            self.limit()
        except ValueError as error:
            found.append(f"--memory: {error}")
        return found

    def limit(self) -> int | None:
        """Bytes of the device. Raises ValueError."""
        return None if self.memory is None else budget_bytes(self.memory, None)


@dataclass(frozen=True)
class MemoryChoice:
    """One way to hold activations. device, host: bytes there at the peak; time: over that of
    keeping everything. fits: None where the device's memory is not known."""

    recompute: str
    offload: bool
    device: int
    host: int
    time: float
    fits: bool | None


def memory_choices(config: TrainConfig, asked: PlanMemoryArguments) -> list[MemoryChoice]:
    """All choices for a row, none first."""
    tokens = asked.tokens
    capacity = Capacity(tokens, 1)
    sized = replace(
        config,
        graph=replace(config.graph, enabled=False, capacities=(capacity,)),
        parallel=ParallelConfig(),
    )
    state, work = need_of(sized, "cuda").state, row_work(config, asked)
    whole = need_of(without_host_state(sized), "cuda").optimizer
    forward_s, found = work.forward_s, []
    for kind, offload in activation_choices():
        of_kind = replace(sized, run=replace(config.run, recompute=kind))
        kept = activation_bytes(of_kind, capacity, 1, offload)
        copy_s = kept.moved / (asked.gb_s * 1e9)
        spent = max(forward_s, copy_s) + max(2 * forward_s + work.again_s[kind], copy_s)
        peak, limit = state + kept.device, asked.limit()
        stays, away = planned_state(sized, whole, peak, limit)
        fits = None if limit is None else peak + stays <= limit
        time, host = spent / (3 * forward_s), kept.moved + away
        found.append(MemoryChoice(kind, offload, peak + stays, host, time, fits))
    return found


def row_work(config: TrainConfig, asked: PlanMemoryArguments) -> RowWork:
    """Estimates the cost of one row on one device."""
    model, tokens = config.model, asked.tokens
    itemsize = 4 if config.run.dtype == "float32" else 2
    forward = _operations(model, tokens, asked.length or tokens) / (asked.tflops * 1e12)
    cheap = (kept_columns(model, NONE) - kept_columns(model, SELECTIVE)) * itemsize * tokens
    again = {NONE: 0.0, SELECTIVE: BYTES_AGAIN * cheap / (asked.device_gb_s * 1e9), FULL: forward}
    return RowWork(forward, again)


def _operations(model: DecoderConfig, tokens: int, length: int) -> float:
    """Floating point operations of the forward of all layers."""
    rest = tokens % length
    lengths = [length] * (tokens // length) + [rest] * (rest > 0)
    beside = sum(
        model.count(name) * branch.operations(model, lengths)
        for name, branch in model.kinds().items()
    )
    return float(2 * token_weights(model) * tokens + beside)


def plan_memory_choices(config: TrainConfig, asked: PlanMemoryArguments) -> str:
    """The table, or JSON."""
    if asked.world is not None:
        return _plan_world(config, asked, asked.world)
    choices = memory_choices(config, asked)
    if asked.json:
        return json.dumps([asdict(choice) for choice in choices], indent=2) + "\n"
    title = (
        f"{config.preset}, {config.model.num_layers} layers, a row of {asked.tokens:,} tokens, "
        f"{config.run.dtype}: estimates"
    )
    rows: Sequence[Sequence[str]] = [
        ("recompute", "offload", "device GiB", "host GiB", "time of none", "fits"),
        *(
            (
                choice.recompute,
                _moves(choice),
                f"{choice.device / 2**30:.1f}",
                f"{choice.host / 2**30:.1f}",
                f"{choice.time:.2f}",
                FITS[choice.fits],
            )
            for choice in choices
        ),
    ]
    told = [] if asked.memory is None else ["", *map(_automatic, _by_offloading(choices))]
    return "\n".join([title, "", *aligned(rows), *told]) + "\n"


def _by_offloading(choices: Sequence[MemoryChoice]) -> list[list[MemoryChoice]]:
    return [[one for one in choices if one.offload == offload] for offload in (False, True)]


def _automatic(choices: Sequence[MemoryChoice]) -> str:
    """Tells what `run.recompute = auto` chooses among these, the least recomputation first."""
    chosen = next((choice.recompute for choice in choices if choice.fits), choices[-1].recompute)
    also = "" if any(choice.fits for choice in choices) else ", which does not fit"
    moving = (
        "with everything on the host that may move" if choices[0].offload else "without offloading"
    )
    return f"--run.recompute auto, {moving}: {chosen}{also}"


def _moves(choice: MemoryChoice) -> str:
    if not choice.offload:
        return "-"
    return "everything" if choice.recompute == NONE else "layer_input"


def _plan_world(config: TrainConfig, asked: PlanMemoryArguments, world: int) -> str:
    """The fastest ways to spread the run over `world` GPUs. Raises ConfigError where none is
    legal."""
    speeds = Speeds(
        asked.tflops, asked.device_gb_s, asked.gb_s, asked.link_gb_s, asked.net_gb_s, asked.per_host
    )
    step_tokens, work = asked.step_tokens or world * asked.tokens, row_work(config, asked)
    choices = world_choices(config, world, asked.tokens, step_tokens, work, speeds, asked.limit())
    if not choices:
        raise ConfigError([f"--world: no layout of {world} GPUs is there for this run"])
    if asked.json:
        return json.dumps([asdict(choice) for choice in choices[: asked.top]], indent=2) + "\n"
    fitting = sum(choice.fits is not False for choice in choices)
    title = (
        f"{config.preset} on {world:,} GPUs, rows of {asked.tokens:,} tokens, {step_tokens:,} a "
        f"step, {config.run.dtype}: {len(choices)} ways, {fitting} fit; estimates"
    )
    head = ("dp", "pp", "cp", "tp", "ep", "shard", "recompute", "offload", "device GiB", "host GiB")
    rows: list[Sequence[str]] = [
        (*head, "GB sent", "waits", "tokens/s and GPU", "fits"),
        *(
            (
                *(str(getattr(choice, axis)) for axis in ("dp", "pp", "cp", "tp", "ep")),
                choice.shard + (f"/{choice.shard_ranks}" if choice.shard_ranks else ""),
                choice.recompute,
                "yes" if choice.offload else "-",
                f"{choice.device / 2**30:.1f}",
                f"{choice.host / 2**30:.1f}",
                f"{sum(choice.sent.values()) / 1e9:.1f}",
                f"{choice.waits:.0%}",
                f"{choice.tokens_per_second:,.0f}",
                FITS[choice.fits],
            )
            for choice in choices[: asked.top]
        ),
    ]
    return "\n".join([title, "", *aligned(rows)]) + "\n"
