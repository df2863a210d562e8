"""Losses of training in float8 beside those in bfloat16, and beside those of a control.

    PYTHONPATH=src python benchmarks/fp8_loss.py --out rows.jsonl           # one H100, < 900 s
    python benchmarks/fp8_loss.py --seeds 0 --ways bf16 fp8 --out rows.jsonl # some of the runs
    python benchmarks/fp8_loss.py rows.jsonl                                # compares all that ran
    python benchmarks/fp8_loss.py rows.jsonl --picture docs/fp8_loss.svg

Trained is the shape of Qwen3-0.6B (with an embedding of bytes) on the sources of Python's own
library, which every machine has, by the trainer's own steps: graphs, compiled layers, AdamW with
float32 masters, linear warm-up, cosine decay to zero. All runs of a seed take the very same packs,
and no document is trained on twice. Documents that no seed trains on are held out; the loss on them
is that of the weights after the last step.

The control is a second run in bfloat16 (`bf16+rounding`). Each of its initial weights is multiplied
by 1 + e, with e uniform in +-2^-8, and rounded to bfloat16, which moves about a third of them to a
neighbouring number. Training is chaotic: how far the control ends from bf16 is what a difference
means nothing below.

One JSON row for each run, so that runs can be spread over processes and GPUs. The comparison reads
rows, prints a table of relative differences to bf16, and exits with 1 where float8 is not within
the limit, or where rows do not belong together.
"""

import argparse
import gc
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from packgraph.ops.float8.linear import FLOAT8, LAYERS
from packgraph.ops.names import NATIVE
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity
from packgraph.parallel.mesh import single_process
from packgraph.train.build import build_chunks, make_executor, make_optimizer
from packgraph.train.config.presets import qwen3_0_6b, qwen3_tiny
from packgraph.train.config.sections import EvalConfig, TrainConfig
from packgraph.train.data import Microbatches
from packgraph.train.data.microbatches import take_step
from packgraph.train.feed import count_loss_tokens
from packgraph.train.launch import prepare
from packgraph.train.optimizer import learning_rate_of

VOCABULARY = 320  # bytes, and what ends a document
WHOLE_LIBRARY = 1_000_000  # documents: more than it has
LAST = 50  # steps whose mean training loss a run is judged by
LIMIT = 0.005  # relative difference of these means
ROUNDING = 2.0**-8  # the largest relative error of a number rounded to bfloat16
CONTROL = f"{NATIVE}+rounding"
STYLES = {NATIVE: "-", CONTROL: ":", **dict.fromkeys([*LAYERS][1:], "--")}  # of the picture
Row = dict[str, Any]
TABLE = """\
| seed | bf16, last {last} steps | held out | compared | last {last} steps | held out |
|---|---|---|---|---|---|"""


def run_config(options: argparse.Namespace, precision: str, seed: int) -> TrainConfig:
    """A run of these options."""
    base = qwen3_0_6b() if torch.cuda.is_available() else qwen3_tiny()
    optimizer = replace(
        base.optimizer,
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup,
        min_learning_rate_fraction=0.0,
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
        model=replace(
            base.model, vocab_size=VOCABULARY, precision=precision, bf16_ends=options.bf16_ends
        ),
        graph=graph,
        data=replace(base.data, seed=seed, epochs=1, max_documents_loaded=WHOLE_LIBRARY),
        eval=EvalConfig(every=options.steps, share=options.held_out),
        optimizer=optimizer,
        run=replace(base.run, steps=options.steps, tokens_per_step=options.step_tokens, seed=seed),
    )


def read_data(
    config: TrainConfig, device: torch.device
) -> tuple[list[list[PackedBatch]], list[PackedBatch]]:
    """The packs of every step, and those that are held out. Raises SystemExit where the text ends
    before the steps do."""
    prepared = prepare(config, device)
    steps = [
        take_step(prepared.microbatches, config.run.tokens_per_step)
        for _ in range(config.run.steps)
    ]
    if sum(pack.num_tokens for pack in steps[-1]) < config.run.tokens_per_step:
        raise SystemExit(f"the text ends before step {config.run.steps}: train on less")
    (held_out,) = prepared.evaluation.values()
    return steps, all_packs(held_out)


def all_packs(packs: Microbatches) -> list[PackedBatch]:
    """What is left of a stream that ends."""
    return list(iter(lambda: next(packs, None), None))


def digest(steps: Sequence[Sequence[PackedBatch]]) -> str:
    """Says whether two runs saw the same packs in the same steps."""
    found = hashlib.sha256()
    for step in steps:
        found.update(b"step")
        for pack in step:
            found.update(pack.data.numpy().tobytes())
    return found.hexdigest()[:16]


@torch.no_grad()
def move_by_roundings(parameters: Iterable[nn.Parameter], seed: int) -> None:
    """Multiply each number by 1 + e, e uniform in +-ROUNDING, by this seed."""
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in parameters:
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        moved = torch.rand(parameter.shape, generator=generators[device], device=device)
        parameter.copy_(parameter.float() * (1 + ROUNDING * (2 * moved - 1)))


def train(
    config: TrainConfig,
    device: torch.device,
    steps: Sequence[Sequence[PackedBatch]],
    held_out: Sequence[PackedBatch],
    moved: bool,
) -> tuple[list[float], float]:
    """The loss of every step of a run, and that of the held-out packs after the last one. moved:
    whether the run starts from weights moved by roundings."""
    mesh = single_process()
    model = build_chunks(config, device, mesh)
    if moved:
        move_by_roundings(model.parameters(), config.run.seed)
    optimizer = make_optimizer(model, config, mesh)
    executor = make_executor(model, config, device, mesh)
    losses = []
    for number, packs in enumerate(steps):
        executor.before_step(number)
        loss, _ = executor.train_step(
            packs,
            count_loss_tokens(packs),
            optimizer,
            learning_rate_of(config.optimizer, config.run.steps, number),
        )
        losses.append(loss.detach().clone())
    # By the graphs of training, whose gradients nothing takes up: these decoders have no dropout.
    evaluated = executor.run_step(held_out, count_loss_tokens(held_out)).item()
    found = torch.stack(losses).tolist()
    executor.close()
    return found, evaluated


def measure(options: argparse.Namespace) -> Iterable[Row]:
    """The row of each run."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    for seed in options.seeds:
        steps, held_out = read_data(run_config(options, NATIVE, seed), device)
        for way in options.ways:
            precision = NATIVE if way == CONTROL else way
            config, begun = run_config(options, precision, seed), time.perf_counter()
            losses, evaluated = train(config, device, steps, held_out, way == CONTROL)
            last = losses[-LAST:]
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            yield {
                "benchmark": "fp8_loss",
                "way": way,
                "seed": seed,
                "mean_of_last": sum(last) / len(last),
                "last": len(last),
                "held_out": evaluated,
                "held_out_tokens": count_loss_tokens(held_out),
                "seconds": round(time.perf_counter() - begun, 1),
                "losses": [round(loss, 5) for loss in losses],
                "tokens": sum(pack.num_tokens for step in steps for pack in step),
                "data": digest([*steps, held_out]),
                "tokens_per_step": config.run.tokens_per_step,
                "optimizer": asdict(config.optimizer),
                "model": asdict(config.model),
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                "torch": torch.__version__,
                "commit": options.commit,
            }


def by_seed(rows: Iterable[Row]) -> dict[int, dict[str, Row]]:
    """The newest run of each seed and way. Raises ValueError where runs of a seed cannot be
    compared."""
    found: dict[int, dict[str, Row]] = {}
    for row in rows:
        if row["benchmark"] == "fp8_loss":
            found.setdefault(row["seed"], {})[row["way"]] = row
    for seed, runs in found.items():
        if NATIVE not in runs:
            raise ValueError(f"seed {seed} has no run in {NATIVE}")
        for kind in ("data", "tokens_per_step", "optimizer", "device", "torch", "last"):
            if len({json.dumps(row[kind], sort_keys=True) for row in runs.values()}) > 1:
                raise ValueError(f"runs of seed {seed} differ in {kind}")
    return dict(sorted(found.items()))


def difference(row: Row, base: Row, kind: str) -> float:
    """How far a run is from bf16, relative to that."""
    return float(row[kind] / base[kind] - 1)


def compare(rows: Iterable[Row]) -> tuple[str, bool]:
    """A table of Markdown, and whether all runs in float8 are within the limit. Raises ValueError
    as `by_seed`, and where nothing ran in float8 or as a control."""
    seeds = by_seed(rows)
    lines, within = [], True
    missing = [seed for seed, runs in seeds.items() if CONTROL not in runs or len(runs) < 3]
    if missing or not seeds:
        raise ValueError(f"seeds {missing}: a comparison needs {CONTROL} and a float8 run of each")
    for seed, runs in seeds.items():
        base = runs[NATIVE]
        for way in (way for way in STYLES if way in runs and way != NATIVE):
            trained = difference(runs[way], base, "mean_of_last")
            evaluated = difference(runs[way], base, "held_out")
            within &= way == CONTROL or abs(trained) <= LIMIT
            lines.append(
                f"| {seed} | {base['mean_of_last']:.4f} | {base['held_out']:.4f} | {way} "
                f"| {trained:+.2%} | {evaluated:+.2%} |"
            )
    last = next(iter(seeds.values()))[NATIVE]["last"]
    return "\n".join([TABLE.format(last=last), *lines]), within


def draw(rows: Iterable[Row], path: Path) -> None:
    """Losses of all runs, means of 10 steps, and how far the means of LAST steps are from bf16."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for seed, runs in by_seed(rows).items():
        base = torch.tensor(runs[NATIVE]["losses"])
        for way, row in runs.items():
            style = {"linestyle": STYLES[way], "color": f"C{seed}", "label": f"{way}, seed {seed}"}
            losses = torch.tensor(row["losses"])
            means = losses[: len(losses) // 10 * 10].view(-1, 10).mean(1)
            left.plot(range(10, 10 * len(means) + 1, 10), means, **style)
            if way != NATIVE:
                last = row["last"]
                apart = losses.unfold(0, last, 1).mean(1) / base.unfold(0, last, 1).mean(1) - 1
                right.plot(range(last, len(losses) + 1), 100 * apart, **style)
    left.set(xlabel="step", ylabel="loss, mean of 10 steps", yscale="log")
    right.set(xlabel="step", ylabel=f"% from bf16, means of {LAST} steps")
    right.axhspan(-100 * LIMIT, 100 * LIMIT, color="0.9")
    left.legend()
    right.legend()
    figure.savefig(path)


def read(path: Path) -> list[Row]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="?", type=Path, help="rows to compare")
    parser.add_argument("--picture", type=Path, help="of these rows")
    parser.add_argument("--out", type=Path, help="where the row of each run is added")
    parser.add_argument(
        "--ways", choices=[*STYLES], default=[NATIVE, CONTROL, FLOAT8], nargs="+", metavar="WAY"
    )
    parser.add_argument("--seeds", type=int, default=[0, 1, 2], nargs="+")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=40, help="steps")
    parser.add_argument("--tokens", type=int, default=4096, help="of a row")
    parser.add_argument("--step-tokens", type=int, default=16_000)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--held-out", type=float, default=0.02, help="share of the documents")
    parser.add_argument("--bf16-ends", type=int, default=1)
    parser.add_argument("--commit")
    return parser.parse_args(words)


def main() -> int:
    """Train and write rows, or compare those that there are."""
    options = parsed()
    if options.rows is None:
        for row in measure(options):
            print(json.dumps(row | {"losses": "in --out"}), flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        return 0
    rows = read(options.rows)
    table, within = compare(rows)
    print(f"{table}\n\nwithin {LIMIT:.1%} of bf16: {'yes' if within else 'no'}")
    if options.picture is not None:
        draw(rows, options.picture)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
