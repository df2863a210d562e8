"""`packgraph plan memory PRESET`: time against memory of recomputation, offloading and both, for one
row, from the shape of the model. Nothing is run.

    held     weights + gradients + optimizer state
    kept     what all layers keep for the backward, or have on the host        per token
    working  what one layer computes again, and the head

Times are those of the products, attention and scans at the device's speed, copies beside them. The
estimates of activations are those of `decoder_estimates.py`, within 15 % of what Qwen3-0.6B took.
"""  # noqa: E501

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from packgraph.graphs.memory.budget import budget_bytes
from packgraph.models.branches import token_weights
from packgraph.models.config import DecoderConfig
from packgraph.models.recompute import FULL, KINDS, NONE, SELECTIVE
from packgraph.packing.capacity import Capacity
from packgraph.train.config.sections import TrainConfig
from packgraph.train.config.values import CommandArguments, Count, option
from packgraph.train.decoder_estimates import DecoderMemory
from packgraph.train.memory import need_of
from packgraph.viz.drawing import aligned

BYTES_AGAIN = 4  # of a result that selective recomputation makes: operands are read, it is written
USAGE = """\
usage: packgraph plan memory [PRESET] [--tokens N] [--memory SIZE] [--json] [--section.option VALUE ...]

Show time against memory of one row: activations kept, recomputed, on the host, and both. Estimates
from the shape of the model; nothing is run, no GPU is needed.

    packgraph plan memory qwen3-0.6b --tokens 65536 --memory 139GiB
"""  # noqa: E501


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

    def problems(self) -> list[str]:
        """What is wrong with these options."""
        found = [
            f"--{name}: must be more than 0"
            for name, value in (
                ("length", self.length),
                ("tflops", self.tflops),
                ("gb-s", self.gb_s),
                ("device-gb-s", self.device_gb_s),
            )
            if value is not None and not value > 0
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
    model, tokens = config.model, asked.tokens
    sized = replace(
        config, graph=replace(config.graph, enabled=False, capacities=(Capacity(tokens, 1),))
    )
    need = need_of(sized, "cuda")
    itemsize = 4 if config.run.dtype == "float32" else 2
    head = DecoderMemory(model, 0, itemsize)(Capacity(tokens, 1))
    columns = {kind: _columns(model, kind) for kind in KINDS}
    forward_s = _operations(model, tokens, asked.length or tokens) / (asked.tflops * 1e12)
    layer = columns[NONE] / model.num_layers
    found = []
    for offload in (False, True):
        for kind in KINDS:
            if offload and kind == SELECTIVE:
                continue  # what it keeps does not pass the hooks of offloading
            kept = round(columns[kind] * itemsize * tokens)
            working = round((0 if kind == NONE else layer) * itemsize * tokens)
            again_s = forward_s if kind == FULL else 0.0
            if kind == SELECTIVE:
                cheap = (columns[NONE] - columns[kind]) * itemsize * tokens
                again_s = BYTES_AGAIN * cheap / (asked.device_gb_s * 1e9)
            near = 2 * kept / model.num_layers if offload else kept
            copy_s = kept / (asked.gb_s * 1e9) if offload else 0.0
            spent = max(forward_s, copy_s) + max(2 * forward_s + again_s, copy_s)
            device = need.state + head + working + round(near)
            fits = None if (limit := asked.limit()) is None else device <= limit
            host = kept if offload else 0
            found.append(MemoryChoice(kind, offload, device, host, spent / (3 * forward_s), fits))
    return found


def _columns(model: DecoderConfig, kind: str) -> float:
    """Numbers per token that all layers keep."""
    hidden, layers = model.hidden_size, model.num_layers
    if kind == FULL:
        return layers * hidden
    found = float(layers * hidden if kind == SELECTIVE else 0)
    for name, branch in model.kinds().items():
        count = model.count(name)
        if kind == SELECTIVE:
            found += count * branch.product_columns(model)
        else:
            found += count * (3 * hidden + branch.saved_columns(model))
    return found


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
                {None: "-", True: "yes", False: "no"}[choice.fits],
            )
            for choice in choices
        ),
    ]
    return "\n".join([title, "", *aligned(rows)]) + "\n"


def _moves(choice: MemoryChoice) -> str:
    if not choice.offload:
        return "-"
    return "everything" if choice.recompute == NONE else "layer_input"
