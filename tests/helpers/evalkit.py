"""Small runs that evaluate, on documents of random bytes, and the naive evaluation of their
models."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from trainkit import CPU, tiny

from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.mesh import Mesh
from packgraph.train.config.sections import DataConfig, EvalConfig, ParallelConfig, TrainConfig
from packgraph.train.data import build_tokenizer, open_documents
from packgraph.train.data.held_out import split
from packgraph.train.launch import prepare
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.progress import ProgressView
from packgraph.train.trainer import Trainer

WORDS = 320
EVALUATED = ("eval_loss", "eval_perplexity", "eval_tokens", "eval_seconds")


def documents(
    path: Path,
    count: int = 60,
    seed: int = 0,
    alphabet: str = "abcdefgh",
    longest: int = 24,
) -> str:
    """A .jsonl of short texts; its path."""
    draw = random.Random(seed)
    texts = ["".join(draw.choices(alphabet, k=draw.randint(2, longest))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def config(
    data: str, evaluation: EvalConfig | None = None, graph: bool = True, **changes: Any
) -> TrainConfig:
    """A tiny run on the documents at `data`. changes: of run; and sections by name, such as
    graph_ and model_, as dicts."""
    parallel = changes.pop("parallel", ParallelConfig())
    sections = {name[:-1]: changes.pop(name) for name in list(changes) if name.endswith("_")}
    base = tiny(graph, **{"steps": 8, "tokens_per_step": 120, "checkpoint_every": 4} | changes)
    found = replace(
        base,
        model=replace(base.model, vocab_size=WORDS),
        data=DataConfig(source="jsonl", path=data, window=16),
        graph=replace(base.graph, capacities=(Capacity(32, 4), Capacity(64, 8))),
        eval=evaluation or EvalConfig(),
        parallel=parallel,
    )
    for name, values in sections.items():
        found = replace(found, **{name: replace(getattr(found, name), **values)})
    return found


def made(
    folder: Path, options: TrainConfig, mesh: Mesh | None = None, device: torch.device = CPU
) -> Trainer:
    """The trainer of a run, as `launch` makes it."""
    found = prepare(options, device, 1 if mesh is None else mesh.world)
    rank = 0 if mesh is None else mesh.rank
    console = Console(file=(folder.parent / f"log-{folder.name}-{rank}").open("w"))
    view = ProgressView(options.run.steps, 100, console)
    return Trainer(
        found.config,
        folder,
        found.microbatches,
        device,
        view,
        mesh,
        evaluation=found.evaluation,
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl."""
    return read_metrics(folder / METRICS)


def learned(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row says of training, without times."""
    return tuple(
        row[name] for name in ("step", "loss", "gradient_norm", "tokens", "replayed", "fallbacks")
    )


def naive_loss(
    model: torch.nn.Module, sources: Sequence[tuple[TrainConfig, Any]]
) -> tuple[float, int]:
    """Loss per token and labels of all documents of sources, one document after another."""
    total, labels = 0.0, 0
    was = model.training
    model.eval()
    with torch.no_grad():
        for options, source in sources:
            tokenizer = build_tokenizer(options.data)
            for index in range(len(source)):
                for document in tokenizer.encode(source[index]):
                    ids = document.tokens.tolist()
                    batch = PackedBatch.build([ids], Capacity(len(ids), 1))
                    mean = model(batch)
                    total += mean.item() * (len(ids) - 1)
                    labels += len(ids) - 1
    model.train(was)
    return total / labels, labels


def held_out(options: TrainConfig) -> Any:
    """The documents that a run holds out of its own."""
    (found,) = split(open_documents(options.data), options.eval.share).held_out.values()
    return found


def perplexity(loss: float) -> float:
    return math.exp(loss)
