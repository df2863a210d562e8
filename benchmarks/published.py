"""Figures that others have published, and packgraph's for the same settings.

    PYTHONPATH=src python benchmarks/published.py --list
    PYTHONPATH=src python benchmarks/published.py --only qwen3-0.6b-8k llama3-8b-lora --out rows.jsonl
    PYTHONPATH=src torchrun --nproc-per-node 2 benchmarks/published.py --only llama3.1-8b --out rows.jsonl
    PYTHONPATH=src python benchmarks/published.py --tiny              toys on the CPU

Every setting (`published_settings.py`) is a run of `packgraph train`: documents of random tokens
from a file, packed, whole steps with their update, weights drawn by a seed, no checkpoints. Tokens
a second are real tokens of a step over its seconds, at the median of the steps behind warm-up and
capture. TFLOP/s count the products of the model (bench/models.py): 6 operations for each weight and
token, 4 where the weight is frozen, and causal attention within documents; nothing that is
recomputed. Without --only a call runs all settings for the GPUs that it has; under torchrun one.
"""  # noqa: E501

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from published_settings import SETTINGS, Setting
from result_rows import commit_of_source, read_rows
from step_figures import model_flops

from packgraph.bench.comparison import start_anew
from packgraph.bench.rows import FAILURES, Column, Row, facts, gibibytes, value, why
from packgraph.models.branches import head_weights, token_weights
from packgraph.models.config import DecoderConfig
from packgraph.ops.symmetric_memory import most_symmetric_bytes
from packgraph.packing.capacity import Capacity
from packgraph.parallel.ranks import Launch
from packgraph.train.config.reading import ConfigError
from packgraph.train.config.sections import (
    DataConfig,
    GraphConfig,
    LoraConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from packgraph.train.launch import choose_device, train
from packgraph.train.metrics import METRICS, read_metrics

AHEAD = 3  # steps that do not count: eager and compiling, capture, and one more
TOKENS_IN_FILE = 600_000
TINY = 128  # times fewer tokens


def lengths_of(setting: Setting, seed: int = 0) -> list[int]:
    """Lengths of the documents of a setting, of TOKENS_IN_FILE tokens together."""
    documents = setting.documents
    count = max(2 * setting.window, TOKENS_IN_FILE // documents.mean)
    if not documents.sigma:
        return [documents.mean] * count
    mu = np.log(documents.mean) - documents.sigma**2 / 2
    drawn = np.random.default_rng(seed).lognormal(mu, documents.sigma, count)
    return [int(length) for length in np.clip(np.round(drawn), 2, documents.longest)]


def write_data(folder: Path, lengths: Sequence[int], words: int) -> DataConfig:
    """Documents of these lengths, of random words, and a tokenizer that knows the words."""
    draw = np.random.default_rng(0)
    rows = (json.dumps({"input_ids": draw.integers(words, size=n).tolist()}) for n in lengths)
    vocabulary = {f"w{number}": number for number in range(words)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    documents, tokenizer = folder / "documents.jsonl", folder / "tokenizer.json"
    _write(documents, "".join(f"{row}\n" for row in rows))
    _write(tokenizer, json.dumps({"version": "1.0", "model": model}))
    return DataConfig(source="jsonl", path=str(documents), tokenizer=str(tokenizer))


def _write(path: Path, text: str) -> None:
    """Whole or not at all, by the first rank that comes: all of them write the same, and a file
    that another rank has opened must stay."""
    own = path.with_suffix(f".{os.getpid()}")
    own.write_text(text, encoding="utf-8")
    with suppress(FileExistsError):
        os.link(own, path)
    own.unlink()


def run_config(setting: Setting, world: int, folder: Path, data: DataConfig) -> TrainConfig:
    """The run of a setting on so many GPUs, written to `folder`."""
    lora = LoraConfig(rank=setting.lora_rank)
    graph = GraphConfig(
        warmup=1,
        strict=True,
        autotune=False,
        granularity="step" if setting.one_graph else "chunk",
        optimizer=setting.one_graph,
        compile=setting.compile,
        capacities=setting.capacities,
    )
    run = RunConfig(
        name="run",
        folder=str(folder),
        steps=AHEAD + setting.timed,
        tokens_per_step=setting.tokens_per_step(world),
        checkpoint_every=0,
        tracker=(),
        dtype=setting.dtype,
        recompute=setting.recompute,
    )
    return TrainConfig(
        preset="published",
        model=replace(setting.model, precision=setting.precision),
        lora=lora,
        data=replace(data, window=setting.window),
        optimizer=OptimizerConfig(gradients=setting.gradients),
        graph=graph,
        parallel=setting.parallel(world),
        run=run,
    )


def operations_per_token(setting: Setting, lengths: Sequence[int]) -> float:
    """Operations of forward and backward for a token, on average over documents of these
    lengths. Adapters are not counted."""
    model, tokens = setting.model, sum(lengths)
    found = model_flops(model, lengths, head=True)
    if setting.lora_rank:  # no gradients of frozen weights
        found -= 2 * (token_weights(model) + head_weights(model)) * tokens
    return found / tokens


def measure(setting: Setting, launch: Launch, device: torch.device) -> Row:
    """Train, and read the figures off the run's own files. setting: as it is on these GPUs."""
    lengths = lengths_of(setting)
    with _shared_folder(launch) as folder:
        data = write_data(folder, lengths, setting.model.vocab_size)
        config = run_config(setting, launch.world, folder, data)
        config = replace(config, run=replace(config.run, device=device.type))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        where, summary = train(config)
        if launch.rank:  # the first rank reads its files, and deletes them then
            return {}
        rows = [row for row in read_metrics(where / METRICS) if not row["starting"]]
    peaks = {}
    if device.type == "cuda":
        peaks["peak_bytes"] = torch.cuda.max_memory_reserved(device) + most_symmetric_bytes()
    counted = rows[1:]  # the first began while the device captured
    rate = median(row["tokens"] / row["seconds"] for row in counted) / launch.world
    return peaks | {
        "tokens_per_second": round(rate, 1),
        "tflops": round(rate * operations_per_token(setting, lengths) / 1e12, 2),
        "step_ms": round(1000 * median(row["seconds"] for row in counted), 2),
        "data_wait": round(median(row["data_wait"] / row["seconds"] for row in counted), 4),
        "padding": round(
            1 - sum(r["tokens"] for r in counted) / sum(r["places"] for r in counted), 4
        ),
        "microbatches": rows[-1]["microbatches"],
        "loss": rows[-1]["loss"],
        "steps_counted": len(counted),
        "replayed": summary["replayed"],
        "fallbacks": summary["fallbacks"],
    }


@contextmanager
def _shared_folder(launch: Launch) -> Iterator[Path]:
    """A temporary folder, one for all ranks of a host."""
    if launch.world == 1:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
        return
    name = f"packgraph-published-{os.environ['MASTER_PORT']}-{os.environ['TORCHELASTIC_RUN_ID']}"
    folder = Path(tempfile.gettempdir(), name)
    folder.mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        if launch.rank == 0:
            shutil.rmtree(folder)


def row_of(name: str, launch: Launch) -> Row:
    """What a row says of a setting before it was measured."""
    setting = SETTINGS[name].on(launch.world)
    return {
        "benchmark": "published",
        "way": name,
        "ranks": launch.world,
        "layers": setting.model.num_layers,
        "of_layers": SETTINGS[name].model.num_layers,
        "tokens": setting.tokens,
        "recompute": setting.recompute,
        "precision": setting.precision,
        "lora": setting.lora_rank,
        "compile": setting.compile,
        "theirs": None if setting.theirs is None else asdict(setting.theirs),
        "reason": None,
    }


def tiny(setting: Setting) -> Setting:
    """A toy of the same kinds of layers and documents, for the CPU."""
    model = setting.model
    experts, latent = model.experts, model.latent
    if experts.enabled:
        experts = replace(experts, count=8, per_token=2, intermediate_size=32)
    if latent.enabled:
        latent = replace(latent, kv_rank=16, nope_dim=16, rope_dim=16, value_dim=16)
    small = DecoderConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        tie_embeddings=model.tie_embeddings,
        qk_norm=model.qk_norm,
        latent=latent,
        experts=experts,
    )
    documents, rows = setting.documents, setting.capacities
    documents = replace(documents, mean=documents.mean // TINY, longest=documents.longest // TINY)
    fewer = (Capacity(row.tokens // TINY, row.documents, max(2, row.bound // TINY)) for row in rows)
    return replace(
        setting,
        model=small,
        documents=documents,
        capacities=tuple(dict.fromkeys(fewer)),
        step_tokens=setting.step_tokens and setting.step_tokens // TINY,
        gpus=dict.fromkeys(setting.gpus, 0),
        dispatcher="auto",
        compile=False,
        dtype="float32",
        gradients="auto",
        timed=2,
    )


def ratio_to(row: Row, rows: Sequence[Row]) -> float | None:
    """What a row is told as, over the newest row of the setting that it names; None = there is
    none."""
    over = SETTINGS[row["way"]].over
    alike = [
        other["tokens_per_second"]
        for other in rows
        if other["way"] == over and all(other[key] == row[key] for key in ("ranks", "device"))
    ]
    return row["tokens_per_second"] / alike[-1] if alike else None


def line_of(row: Row, rows: Sequence[Row]) -> str:
    """A row for people: ours beside theirs."""
    name, setting = row["way"], SETTINGS[row["way"]]
    if row["reason"]:
        return f"{name}: {row['reason']}"
    text = f"{name}, {row['ranks']} × {row['device']}: "
    text += f"{row['tokens_per_second']:,.0f} tokens/s and GPU, "
    text += f"{row['tflops']:.0f} TFLOP/s, {row['step_ms']:.1f} ms"
    if (peak := row.get("peak_bytes")) is not None:
        text += f", {peak / 2**30:.1f} GiB"
    if (ratio := ratio_to(row, rows)) is not None:
        text += f", {ratio:.2f} times padded"
    theirs = setting.theirs
    if theirs is None:
        return text
    where = theirs.source.partition(",")[0]
    text += f" | theirs {theirs.figure:,g} {theirs.unit}, {theirs.chip}"
    return f"{text} ({where}, {theirs.date})"


def _theirs(name: str) -> Callable[[Row], str]:
    """A field of the figure of others."""

    def cell(row: Row) -> str:
        found = getattr(SETTINGS[row["way"]].theirs, name, None)
        return "-" if found is None else str(found)

    return cell


def _their_figure(row: Row) -> str:
    theirs = SETTINGS[row["way"]].theirs
    return "-" if theirs is None else f"{theirs.figure:,g} {theirs.unit.split(' and ')[0]}"


def _to_theirs(row: Row) -> str:
    """Ours over theirs, where all layers are there or both are ratios."""
    theirs = SETTINGS[row["way"]].theirs
    if theirs is None:
        return "-"
    if theirs.unit == "times padded":
        times = row["times_padded"]
        return "-" if times is None else f"{times / theirs.figure:.2f}"
    whole = row["layers"] == row["of_layers"]
    return f"{row['tokens_per_second'] / theirs.figure:.2f}" if whole else "-"


def _chip(device: str) -> str:
    """Its name in one word: `H100` of `NVIDIA H100 80GB HBM3`."""
    return device.removeprefix("NVIDIA ").split()[0]


COLUMNS: list[Column] = [
    ("setting", value("way")),
    ("GPUs", lambda row: f"{row['ranks']} × {_chip(row['device'])}"),
    ("layers", lambda row: f"{row['layers']} of {row['of_layers']}"),
    ("tokens/s and GPU", value("tokens_per_second", ",.0f")),
    ("times padded", value("times_padded", ".2f")),
    ("TFLOP/s", value("tflops", ".0f")),
    ("step ms", value("step_ms", ".1f")),
    ("peak GiB", gibibytes("peak_bytes")),
    ("padding", value("padding", ".1%")),
    ("theirs", _their_figure),
    ("their TFLOP/s", _theirs("tflops")),
    ("their GPUs", _theirs("chip")),
    ("ours to theirs", _to_theirs),
    ("commit", value("commit")),
]
SOURCES: list[Column] = [
    ("setting", value("way")),
    ("source", _theirs("source")),
    ("date", _theirs("date")),
    ("their setting", _theirs("settings")),
    ("what differs here", lambda row: SETTINGS[row["way"]].differs or "-"),
]


def sources(rows: Sequence[Row]) -> list[Row]:
    """One row for each setting that has a figure of others."""
    found = {row["way"]: row for row in rows if SETTINGS[row["way"]].theirs is not None}
    return list(found.values())


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Rows with their `times_padded`, which is of the padded row on the same device."""
    return [row | {"times_padded": ratio_to(row, rows)} for row in rows]


def names_to_run(asked: argparse.Namespace, world: int) -> list[str]:
    """The settings that are asked for and run on so many GPUs. Raises ConfigError."""
    unknown = [name for name in asked.only or () if name not in SETTINGS]
    if unknown:
        raise ConfigError([f"no setting is called {', '.join(unknown)}; see --list"])
    wrong = [name for name in asked.only or () if world not in SETTINGS[name].gpus]
    if wrong:
        raise ConfigError([f"{', '.join(wrong)}: not for {world} GPUs; see --list"])
    found = asked.only or [name for name, setting in SETTINGS.items() if world in setting.gpus]
    if world > 1 and len(found) > 1:
        raise ConfigError(["under torchrun a call runs one setting: name it with --only"])
    return list(found)


def listing() -> str:
    """All settings, a line each."""
    return "\n".join(
        f"{name:28} {'/'.join(map(str, setting.gpus))} GPU  "
        + ("" if setting.theirs is None else f"{_their_figure({'way': name})}, ")
        + (setting.theirs.source if setting.theirs is not None else "no figure of others")
        for name, setting in SETTINGS.items()
    )


def main(words: Sequence[str] | None = None) -> int:
    """Run settings; the exit code says whether all of them could be measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    asked = parser.parse_args(words)
    if asked.list:
        print(listing())
        return 0
    launch = Launch.read()
    try:
        names = names_to_run(asked, launch.world)
    except ConfigError as error:
        parser.error(str(error))
    device = choose_device("cpu" if asked.tiny else "auto", launch)
    shared, failed = facts(device, asked.commit or commit_of_source()), False
    before = read_rows([asked.out]) if asked.out is not None and asked.out.exists() else []
    rows = [row for row in before if row["benchmark"] == "published"]  # for ratios
    for name in names:
        setting = SETTINGS[name]
        row = row_of(name, launch) | shared | {"tiny": asked.tiny}
        try:
            made = tiny(setting) if asked.tiny else setting
            row |= measure(made.on(launch.world), launch, device)
        except FAILURES as error:
            row["reason"] = why(error)
            failed = True
        if launch.rank == 0:
            rows.append(row)
            print(line_of(row, rows), flush=True)
            if asked.out is not None:
                with asked.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        gc.collect()
        start_anew(device)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
