"""Losses of training in float8 beside those in bfloat16, at the same seeds and on the same text.

    PYTHONPATH=src python benchmarks/fp8_loss.py --out rows.jsonl                # one H200, < 400 s
    python benchmarks/fp8_loss.py --precision fp8 fp8_weight_gradients --seeds 1 --out rows.jsonl
    python benchmarks/fp8_loss.py --picture docs/fp8_loss.svg rows.jsonl

Trained is the shape of Qwen3-0.6B (with an embedding of bytes) on the sources of Python's own
library, which every machine has, by the trainer's own step: graphs, compiled layers, AdamW with
float32 masters. One JSON row for each run, with the loss of every step and their mean over the last
ones; one for each seed and precision with the relative difference of these means; one that says
whether all of them are within the limit. Exits with 1 where they are not.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from packgraph.ops.float8.linear import FLOAT8, LAYERS
from packgraph.ops.linear import NATIVE
from packgraph.packing.capacity import Capacity
from packgraph.train.config.presets import qwen3_0_6b, qwen3_tiny
from packgraph.train.config.sections import TrainConfig
from packgraph.train.launch import open_data
from packgraph.train.optimizer import learning_rate_of
from packgraph.train.step import take_step
from packgraph.verification.compared_run import ComparedRun

VOCABULARY = 320  # bytes, and what ends a document
LAST = 50  # steps that a run is judged by
LIMIT = 0.005  # relative difference of their mean losses
STYLES = dict(zip(LAYERS, ("-", "--", ":"), strict=True))  # lines of the picture


def run_config(options: argparse.Namespace, precision: str, seed: int) -> TrainConfig:
    """A run of these options."""
    base = qwen3_0_6b() if torch.cuda.is_available() else qwen3_tiny()
    model = replace(
        base.model, vocab_size=VOCABULARY, precision=precision, bf16_ends=options.bf16_ends
    )
    graph = replace(
        base.graph,
        granularity="chunk",
        compile=torch.cuda.is_available(),
        capacities=(Capacity(options.tokens, 64),),
        autotune=False,
        strict=True,
    )
    return replace(
        base,
        model=model,
        graph=graph,
        data=replace(base.data, seed=seed),
        optimizer=replace(base.optimizer, learning_rate=options.learning_rate, warmup_steps=30),
        run=replace(base.run, steps=options.steps, tokens_per_step=options.step_tokens, seed=seed),
    )


def train(config: TrainConfig) -> list[float]:
    """The loss of every step of a run."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    packs, run = open_data(config, device), ComparedRun(config, device)
    losses = []
    for step in range(config.run.steps):
        batches = take_step(packs, config.run.tokens_per_step)
        loss, _ = run.whole_step(step, batches, learning_rate_of(config, step))
        losses.append(loss.detach().clone())
    return torch.stack(losses).tolist()


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of all runs, of all seeds, and of all together."""
    differences = []
    for seed in options.seeds:
        means = {}
        for precision in (NATIVE, *options.precision):
            config, begun = run_config(options, precision, seed), time.perf_counter()
            losses = train(config)
            means[precision] = sum(losses[-LAST:]) / len(losses[-LAST:])
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            yield {
                "benchmark": "fp8_loss",
                "precision": precision,
                "seed": seed,
                "mean_of_last": means[precision],
                "last": LAST,
                "seconds": round(time.perf_counter() - begun, 1),
                "losses": [round(loss, 5) for loss in losses],
                "tokens_per_step": config.run.tokens_per_step,
                "model": asdict(config.model),
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                "torch": torch.__version__,
                "commit": options.commit,
            }
        for precision in options.precision:
            differences.append(means[precision] / means[NATIVE] - 1)
            yield {
                "benchmark": "fp8_loss",
                "precision": precision,
                "seed": seed,
                "difference": differences[-1],
            }
    within = all(abs(difference) <= LIMIT for difference in differences)
    yield {"benchmark": "fp8_loss", "differences": differences, "limit": LIMIT, "within": within}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Losses of all runs as a picture; means of 10 steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    for row in rows:
        if "losses" in row:
            losses = torch.tensor(row["losses"])
            means = losses[: len(losses) // 10 * 10].view(-1, 10).mean(1)
            style = STYLES[row["precision"]]
            label = f"{row['precision']}, seed {row['seed']}"
            axes.plot(
                range(10, 10 * len(means) + 1, 10),
                means,
                style,
                color=f"C{row['seed']}",
                label=label,
            )
    axes.set(xlabel="step", ylabel="loss, mean of 10 steps", yscale="log")
    axes.legend()
    figure.savefig(path)


def main() -> int:
    """Write the rows, or draw those that there are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="?", type=Path, help="rows to draw")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--precision", choices=[*LAYERS][1:], default=[FLOAT8], nargs="+")
    parser.add_argument("--seeds", type=int, default=[0, 1, 2], nargs="+")
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--tokens", type=int, default=4096, help="of a row")
    parser.add_argument("--step-tokens", type=int, default=8000)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--bf16-ends", type=int, default=1)
    parser.add_argument("--commit")
    options = parser.parse_args()
    if options.picture is not None:
        draw([json.loads(line) for line in options.rows.read_text().splitlines()], options.picture)
        return 0
    found: dict[str, Any] = {}
    for found in measure(options):
        line = json.dumps(found)
        print(line if "losses" not in found else json.dumps(found | {"losses": "in --out"}))
        sys.stdout.flush()
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(line + "\n")
    return 0 if found["within"] else 1


if __name__ == "__main__":
    sys.exit(main())
