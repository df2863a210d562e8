"""`packgraph bench step`: forward and backward of one packed microbatch, by every way, at every
number of tokens.

    block of a round    one call ahead, then calls x (forward, backward) as in gradient
                        accumulation, then a wait
    all ways            the same documents in the same order, taking turns round by round; a new
                        draw in every call

Times are per call: on the device from the end of one call to the end of the next, on the host the
mean of the block. The call ahead is not counted: a step of training begins while the device works
on the one before, so what the host does once a step costs time only where the host is what
everything waits for. Peak memory is what a way holds beyond parameters and gradients, which all
ways share.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from bench_models import (
    PARTS,
    SHAPES,
    TimedPart,
    build_part,
    draw_batches,
    dtype_on,
    planned_buckets,
    refit,
    shape,
    squared_gradients,
    zero_gradients,
)
from bench_ways import FLOAT8_WAYS, WAYS, Maker, Setting, Way, make_way

from packgraph.bench.comparison import Check, Comparison, Deadline, Sample, agreement, time_calls
from packgraph.bench.rows import Column, Row, Rows, gibibytes, median, quantile, value
from packgraph.models.stack import DecoderStack
from packgraph.ops.attention.api import BACKENDS
from packgraph.ops.float8.linear import is_float8
from packgraph.packing.batch import PackedBatch
from packgraph.parallel.ranks import Launch
from packgraph.train.config.reading import CommandArguments, Count, option

KILO = 1024
CPU_TOKENS = (128,)
CAPTURABLE = tuple(name for name in BACKENDS if name != "naive")
Shape = Annotated[str, tuple(SHAPES)]
Part = Annotated[str, PARTS]
FIRST = "the first is what others are compared with"
PART_HELP = "the whole model, or its layers without embedding and head"


@dataclass(frozen=True, kw_only=True)
class BenchArguments(CommandArguments):
    """Options of every benchmark."""

    seed: int = option(0, "of the documents", metavar="N")
    seconds: float | None = option(None, "begin nothing further after this time", metavar="S")
    out: Path | None = option(None, "append the rows to this file, too", metavar="FILE")
    commit: str | None = option(
        None, "what rows say about the commit of the source", metavar="TEXT"
    )

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ValueError("; ".join(problems))

    def problems(self) -> list[str]:
        """Lists what is wrong with the options."""
        found, folder = list[str](), self.out and self.out.resolve().parent
        if self.seconds is not None and self.seconds <= 0:
            found.append(f"--seconds must be positive, got {self.seconds:g}")
        if self.seed < 0:
            found.append(f"--seed must be at least 0 and below 2^63, got {self.seed}")
        if self.out is not None and self.out.exists() and not self.out.is_file():
            found.append(f"--out {self.out}: it is no file")
        elif folder is not None and not folder.is_dir():
            found.append(f"--out {self.out}: the folder {folder} does not exist")
        ways = getattr(self, "ways", None) or ()
        if len(set(ways)) < len(ways):
            found.append(f"--ways names a way twice: {' '.join(ways)}")
        return found

    def on(self, device_type: str, launch: Launch) -> Self:
        """These options with what is usual for a device and a number of processes put in. Raises
        ConfigError where these processes cannot run the benchmark."""
        return self

    def holds(self, rows: Sequence[Row]) -> bool:
        """Returns whether the rows are as they should be; says why not on stderr."""
        return True


@dataclass(frozen=True, kw_only=True)
class WorkArguments(BenchArguments):
    """Options of benchmarks that run a model."""

    usual_models: ClassVar[tuple[str, str]] = ("qwen3-0.6b", "tiny")  # on CUDA, and on a CPU
    usual_tokens: ClassVar[tuple[int, ...]] = (KILO,)

    model: Shape | None = option(
        None,
        "shape of the model (default: {own.usual_models[0]} on CUDA, {own.usual_models[1]} on a "
        "CPU)",
    )
    layers: Count | None = option(None, "another number of layers", metavar="N")
    tokens: tuple[Count, ...] = option(
        (),
        "tokens of a microbatch (default: {own.usual_tokens_text}; 128 on a CPU)",
        metavar="T ...",
    )
    mean: float = option(1024.0, "mean length of documents, in tokens", metavar="T")
    sigma: float = option(1.5, "of the lognormal distribution of lengths", metavar="F")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "what it runs on")

    def problems(self) -> list[str]:
        """Lists what is wrong with the options."""
        found = super().problems()
        if self.mean <= 0 or self.sigma < 0:
            given = f"{self.mean:g} and {self.sigma:g}"
            found.append(f"--mean must be positive and --sigma not negative, got {given}")
        return found

    @property
    def usual_tokens_text(self) -> str:
        """The default of --tokens as it is typed."""
        return " ".join(map(str, self.usual_tokens))

    def on(self, device_type: str, launch: Launch) -> Self:
        """These options with the usual model and tokens of a device of this type put in."""
        small = device_type == "cpu"
        tokens = self.tokens or (CPU_TOKENS if small else self.usual_tokens)
        return replace(self, model=self.model or self.usual_models[small], tokens=tokens)

    @property
    def drawn(self) -> dict[str, Any]:
        """The distribution of lengths, as `draw_batches` takes it and rows tell it."""
        return {"mean": self.mean, "sigma": self.sigma, "seed": self.seed}


@dataclass(frozen=True, kw_only=True)
class ComparedArguments(WorkArguments):
    """Options of benchmarks whose ways run in turn."""

    rounds: Count = option(15, "how often all ways take turns", metavar="N")
    together: Count | None = option(
        None,
        "measure so many ways side by side, the first always among them, and free them before the "
        "next: less memory; 1 = each by itself (default: all)",
        metavar="N",
    )


MOE_WAYS = ("eager", "chunk+compile", "chunk", "reduce-overhead", "compile")
MAKERS: dict[str, Maker] = dict.fromkeys((*WAYS, *FLOAT8_WAYS), make_way)
StepWay = Annotated[str, tuple(MAKERS)]


def per_layer_text(row: Row) -> str:
    """Cell with milliseconds of capture per layer and bucket."""
    seconds = row.get("capture_layer_seconds")
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


COLUMNS: list[Column] = [
    ("tokens", value("tokens")),
    ("way", value("way")),
    ("attention", value("attention")),
    ("ms / 1000 tokens", median("ms_per_1000_tokens", 3)),
    ("p99", quantile("ms_per_1000_tokens", "p99", 3)),
    ("ratio", value("ratio", ".2f")),
    ("device ms", median("device_ms")),
    ("host ms", median("host_ms")),
    ("prepare s", value("prepare_seconds", ".1f")),
    ("capture ms / layer", per_layer_text),
    ("peak GiB", gibibytes("peak_bytes")),
    ("padding", value("padding", ".1%")),
    ("result", agreement),
]


@dataclass(frozen=True, kw_only=True)
class StepArguments(ComparedArguments):
    """Forward and backward of one microbatch."""

    usual_tokens: ClassVar[tuple[int, ...]] = (KILO, 2 * KILO, 4 * KILO)
    makers: ClassVar[Mapping[str, Maker]] = MAKERS
    compiler: ClassVar[str] = "inductor"

    part: Part = option("model", PART_HELP)
    ways: tuple[StepWay, ...] = option(WAYS, FIRST)
    documents: Count | None = option(
        None,
        "places for documents of ways that have one shape (default: the most that occur)",
        metavar="N",
    )
    calls: Count = option(4, "microbatches in a row without a wait", metavar="N")
    buckets: Count = option(8, "of the ways auto, at most", metavar="K")
    attention: Annotated[str, ("own", *CAPTURABLE)] = option(
        "own", "attention of every way; own = what each way's stack has; rows say which"
    )


@dataclass(frozen=True, kw_only=True)
class MoeArguments(StepArguments):
    """Forward and backward of layers with experts: step with other defaults."""

    usual_models: ClassVar[tuple[str, str]] = ("moonlight", "moonlight-tiny")
    usual_tokens: ClassVar[tuple[int, ...]] = (KILO, 4 * KILO, 16 * KILO)

    part: Part = option("layers", PART_HELP)
    ways: tuple[StepWay, ...] = option(MOE_WAYS, FIRST)


class StepComparison(Comparison[Way]):
    """All ways at one number of tokens."""

    main, least_rounds = "device_ms", 3

    def __init__(
        self,
        options: StepArguments,
        tokens: int,
        model: DecoderStack,
        device: torch.device,
        deadline: Deadline,
    ) -> None:
        super().__init__(options.ways, options.rounds, device, deadline)
        self.options, self.tokens, self.model = options, tokens, model
        config, attention = model.config, options.attention
        backend = model.attention_choice().name if attention == "own" else attention
        buckets = planned_buckets(
            config, tokens, options.buckets, backend, options.documents, **options.drawn
        )
        self.draws = draw_batches(
            buckets[-1], options.rounds * options.calls + 1, config.vocab_size, **options.drawn
        )
        work = TimedPart(model, tokens, min(batch.num_tokens for batch in self.draws))
        self.setting = Setting(work, model, buckets[-1], buckets, attention, options.compiler)
        self.batches: dict[str, list[PackedBatch]] = {}

    def make(self, name: str) -> Way:
        """The way called `name`, and the microbatches in its shapes."""
        way = self.options.makers[name](name, self.setting)
        self.batches[name] = [
            refit(batch, way.capacity(batch)).to(self.device) for batch in self.draws
        ]
        return way

    def warm_up(self, way: Way) -> None:
        """Capture, compile and run the first microbatches."""
        way.prepare(self.batches[way.name])

    def check(self, way: Way) -> Check:
        """Computes the figures of a way on the first microbatch."""
        zero_gradients([self.model])
        score = self.setting.work.score(way.run(self.batches[way.name][0]))
        return Check(score, squared_gradients([self.model]) ** 0.5)

    def heaviest(self, way: Way) -> object:
        """Run the largest microbatch."""
        most = max(self.batches[way.name], key=lambda batch: (batch.capacity, batch.num_tokens))
        return way.run(most)

    def time(self, way: Way, number: int) -> list[Sample]:
        """The microbatches of a round, in a row."""
        batches = self.batches[way.name][self.block(number)]
        zero_gradients([self.model])
        laps, host_ms = time_calls(
            self.device, lambda mark: run_all(way, batches, mark), lambda: self.lead(way)
        )
        return [
            Sample({"device_ms": lap, "host_ms": host_ms / len(batches)}, batch.num_tokens)
            for lap, batch in zip(laps, batches, strict=True)
        ]

    def what(self, name: str) -> Row:
        """Shapes, lengths and attention of a way."""
        options, batches = self.options, self.batches.get(name, self.draws)
        real = sum(batch.num_tokens for batch in batches)
        choice = self.setting.attention_of(name)
        return {
            "benchmark": "step",
            "part": options.part,
            "way": name,
            "model": options.model,
            "layers": self.model.config.num_layers,
            "dtype": str(dtype_on(self.device)).removeprefix("torch."),
            "tokens": self.tokens,
            "documents": self.setting.capacity.documents,
            "attention": self.model.attention_choice().name if choice == "auto" else choice,
            "attention_asked": options.attention,
            "calls": options.calls,
            **options.drawn,
            "real_tokens": round(real / len(batches), 1),
            "documents_mean": round(statistics.mean(batch.num_documents for batch in batches), 2),
            "padding": round(1 - real / sum(batch.capacity.tokens for batch in batches), 5),
        }

    def row(self, name: str) -> Row:
        """The row of one way at this number of tokens."""
        row = super().row(name)
        count = len(self.results.samples[name]) if row["reason"] is None else 0
        return row | {"rounds": count // self.options.calls}

    def tolerance(self, name: str) -> float:
        """Largest relative difference of the losses of a way that is rounding; in float8, of
        numbers with four bits."""
        return 1e-2 if any(map(is_float8, name.split("+"))) else super().tolerance(name)

    def block(self, number: int) -> slice:
        """The microbatches of a round."""
        return slice(number * self.options.calls, (number + 1) * self.options.calls)

    def lead(self, way: Way) -> None:
        """A call ahead of those that count, on a draw of its own."""
        run_all(way, self.batches[way.name][-1:])


def run_all(way: Way, batches: list[PackedBatch], mark: Callable[[], None] = lambda: None) -> None:
    """The microbatches in a row; calls `mark` after each."""
    with way.frozen():
        for batch in batches:
            way.run(batch)
            mark()


def bench_step(
    options: StepArguments,
    device: torch.device,
    rows: Rows,
    deadline: Deadline,
    comparison: type[StepComparison] = StepComparison,
) -> None:
    """Measure everything in `options`; one row per number of tokens and way."""
    config = shape(str(options.model), options.layers)
    model = build_part(options.part, config, device, dtype_on(device))
    zero_gradients([model])
    for tokens in options.tokens:
        comparison(options, tokens, model, device, deadline).measure(rows, options.together)
