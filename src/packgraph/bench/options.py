"""Options of `packgraph bench NAME`: one dataclass for each benchmark."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from packgraph.bench.banks import CAPTURE_WAYS
from packgraph.bench.context_steps import CONTEXT_WAYS, USUAL_WAYS
from packgraph.bench.integrations import WAYS as INTEGRATION_WAYS
from packgraph.bench.models import DISTRIBUTIONS, PARTS, SHAPES
from packgraph.bench.moe_variants import EXPERT_WAYS, MOE_WAYS
from packgraph.bench.offload import OFFLOAD_WAYS, USUAL_MODULES
from packgraph.bench.pipeline import PIPELINE_WAYS
from packgraph.bench.variants import STEP_WAYS
from packgraph.offloading.rules import MODULES
from packgraph.ops.attention.api import BACKENDS
from packgraph.parallel.context.request import PLACES
from packgraph.train.config_values import CommandArguments, Count, option

KILO = 1024
CPU_TOKENS = (128,)
CAPTURABLE = tuple(name for name in BACKENDS if name != "naive")
Shape = Annotated[str, tuple(SHAPES)]
Part = Annotated[str, PARTS]
Attention = Annotated[str, ("auto", *CAPTURABLE)]
StepWay = Annotated[str, (*STEP_WAYS, *EXPERT_WAYS)]
FIRST = "the first is what others are compared with"


@dataclass(frozen=True, kw_only=True)
class BenchArguments(CommandArguments):
    """Options of every benchmark."""

    seed: int = option(0, "of the documents", metavar="N")
    seconds: float | None = option(None, "begin nothing further after this time", metavar="S")
    out: Path | None = option(None, "append the rows to this file, too", metavar="FILE")
    commit: str | None = option(
        None, "what rows say about the commit, where there is no git checkout", metavar="TEXT"
    )

    def __post_init__(self) -> None:
        problems = []
        if self.seconds is not None and self.seconds <= 0:
            problems.append(f"--seconds must be positive, got {self.seconds:g}")
        if self.seed < 0:
            problems.append(f"--seed must be at least 0 and below 2^63, got {self.seed}")
        if self.out is not None and self.out.exists() and not self.out.is_file():
            problems.append(f"--out {self.out}: it is no file")
        elif self.out is not None and not self.out.resolve().parent.is_dir():
            problems.append(
                f"--out {self.out}: the folder {self.out.resolve().parent} does not exist"
            )
        ways = getattr(self, "ways", None) or ()
        if len(set(ways)) < len(ways):
            problems.append(f"--ways names a way twice: {' '.join(ways)}")
        problems += self.problems()
        if problems:
            raise ValueError("; ".join(problems))

    def problems(self) -> list[str]:
        """What is wrong with further options."""
        return []


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
        """What is wrong with further options."""
        if self.mean > 0 and self.sigma >= 0:
            return []
        return [
            f"--mean must be positive and --sigma not negative, got {self.mean:g} and "
            f"{self.sigma:g}"
        ]

    @property
    def usual_tokens_text(self) -> str:
        """The default of --tokens as it is typed."""
        return " ".join(map(str, self.usual_tokens))

    def on(self, device_type: str) -> Self:
        """These options with the usual model and tokens of a device of this type put in."""
        small = device_type == "cpu"
        more: dict[str, Any] = {
            "model": self.model or self.usual_models[small],
            "tokens": self.tokens or (CPU_TOKENS if small else self.usual_tokens),
        }
        return replace(self, **more)


@dataclass(frozen=True, kw_only=True)
class ComparedArguments(WorkArguments):
    """Options of benchmarks whose ways run in turn."""

    rounds: Count = option(15, "how often all ways take turns", metavar="N")
    together: Count | None = option(
        None,
        "measure so many ways side by side, the first always among them, and free them before the "
        "next: less memory (default: all)",
        metavar="N",
    )

    def problems(self) -> list[str]:
        """What is wrong with further options."""
        alone = "--together must be at least 2: every way is compared with the first one"
        return super().problems() + ([alone] if self.together == 1 else [])


@dataclass(frozen=True, kw_only=True)
class StepArguments(ComparedArguments):
    """Forward and backward of one microbatch."""

    usual_tokens: ClassVar[tuple[int, ...]] = (KILO, 2 * KILO, 4 * KILO)

    part: Part = option("model", "the whole model, or its layers without embedding and head")
    ways: tuple[StepWay, ...] = option(STEP_WAYS, FIRST)
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
    """As step, with defaults and ways for layers with experts."""

    usual_models: ClassVar[tuple[str, str]] = ("moonlight", "moonlight-tiny")
    usual_tokens: ClassVar[tuple[int, ...]] = (KILO, 4 * KILO, 16 * KILO)

    part: Part = option("layers", "the whole model, or its layers without embedding and head")
    ways: tuple[StepWay, ...] = option(MOE_WAYS, FIRST)
    room: float = option(
        1.0,
        "rows that experts of static shapes have, over those that are routed: what a rank of "
        "several needs for an uneven load",
        metavar="F",
    )

    def problems(self) -> list[str]:
        """What is wrong with further options."""
        small = [] if self.room >= 1 else [f"--room must be at least 1, got {self.room:g}"]
        return super().problems() + small


@dataclass(frozen=True, kw_only=True)
class IntegrationArguments(WorkArguments):
    """Whole steps of a model of transformers, by itself and through graphs."""

    usual_tokens: ClassVar[tuple[int, ...]] = (4 * KILO,)

    model: str | None = option(
        None,
        "shape of the model, or a config.json of transformers (default: {own.usual_models[0]} on "
        "CUDA, {own.usual_models[1]} on a CPU)",
        metavar="NAME|FILE",
    )
    ways: tuple[Annotated[str, tuple(INTEGRATION_WAYS)], ...] = option(
        tuple(INTEGRATION_WAYS), FIRST
    )
    sigma: float = option(1.0, "of the lognormal distribution of lengths", metavar="F")
    documents: Count = option(64, "at most in one microbatch", metavar="N")
    step_tokens: Count = option(32 * KILO, "tokens of a step", metavar="T")
    steps: Count = option(8, "that are timed, after three others", metavar="N")
    lora: int = option(
        0, "train adapters of this rank on every linear layer, by peft (default: all)", metavar="R"
    )


@dataclass(frozen=True, kw_only=True)
class PipelineArguments(ComparedArguments):
    """A whole step of a pipeline, under torchrun."""

    rounds: Count = option(12, "how often all ways take turns", metavar="N")
    ways: tuple[Annotated[str, PIPELINE_WAYS], ...] = option(PIPELINE_WAYS, FIRST)
    documents: Count = option(64, "at most in one microbatch", metavar="N")
    attention: Annotated[str, ("auto", *BACKENDS)] = option(
        "auto", "attention of every way; auto = the fastest that there is; rows say which"
    )
    pp: Count | None = option(None, "pipeline ranks (default: all processes)", metavar="N")
    chunks: Count = option(1, "chunks per rank", metavar="N")
    microbatches: Count = option(8, "in a step", metavar="N")


@dataclass(frozen=True, kw_only=True)
class ContextArguments(WorkArguments):
    """Training steps, rows over a fixed number of ranks or over what they need, under torchrun."""

    usual_models: ClassVar[tuple[str, str]] = ("gpt-2048", "tiny")
    usual_tokens: ClassVar[tuple[int, ...]] = (2 * KILO,)

    ways: tuple[Annotated[str, CONTEXT_WAYS], ...] = option(
        USUAL_WAYS, f"{FIRST}; compiling takes minutes"
    )
    rounds: Count = option(18, "how often all ways take turns", metavar="N")
    fixed: Count | None = option(
        None, "ranks of every row of the fixed ways (default: 4, or all there are)", metavar="N"
    )
    places: tuple[Count, ...] = option(PLACES, "for documents in a row", metavar="N ...")
    longest: Count | None = option(
        None,
        "longest document, in tokens (default: 8192, or what fits the fixed ways)",
        metavar="T",
    )
    microbatches: Count = option(8, "in a step", metavar="N")
    granularity: Literal["layer", "chunk"] = option("chunk", "what one graph holds")


@dataclass(frozen=True, kw_only=True)
class AttentionArguments(WorkArguments):
    """The attention operation, by places for documents."""

    usual_tokens: ClassVar[tuple[int, ...]] = tuple(KILO * size for size in (1, 2, 4, 8, 16))

    ways: tuple[Annotated[str, CAPTURABLE], ...] = option(
        (), "backends (default: all that have kernels for this device)"
    )
    draws: Count = option(5, "microbatches", metavar="N")


@dataclass(frozen=True, kw_only=True)
class PaddingArguments(BenchArguments):
    """Places for tokens that stay empty in chosen buckets; needs no device."""

    ways: tuple[Annotated[str, tuple(DISTRIBUTIONS)], ...] = option(
        tuple(DISTRIBUTIONS), "families of lengths"
    )
    tokens: Count = option(8 * KILO, "of the largest bucket", metavar="T")
    buckets: Count = option(8, "at most", metavar="K")
    documents: Count = option(20_000, "of a draw", metavar="N")


@dataclass(frozen=True, kw_only=True)
class BankArguments(WorkArguments):
    """Options of benchmarks that capture buckets."""

    usual_tokens: ClassVar[tuple[int, ...]] = (8 * KILO,)

    part: Part = option("model", "the whole model, or its layers without embedding and head")
    documents: Count = option(64, "at most in one microbatch", metavar="N")
    attention: Attention = option("auto", "attention of all graphs")
    banks: tuple[Count, ...] = option((1, 8), "numbers of buckets", metavar="K ...")


@dataclass(frozen=True, kw_only=True)
class MemoryArguments(BankArguments):
    """Bytes of a bank of buckets in one slot, against eager's peak."""

    banks: tuple[Count, ...] = option((1, 4, 8), "numbers of buckets", metavar="K ...")
    compile: bool = option(False, "graphs of compiled code")


@dataclass(frozen=True, kw_only=True)
class CaptureArguments(BankArguments):
    """Seconds of capturing a bank of buckets."""

    ways: tuple[Annotated[str, CAPTURE_WAYS], ...] = option(CAPTURE_WAYS, "what is captured")


@dataclass(frozen=True, kw_only=True)
class OffloadArguments(WorkArguments):
    """Activations on the host from inside a chunk graph, against kept ones.

    Shares `of kept for backward` are of what a forward has saved and is alive when it ends.
    """

    usual_models: ClassVar[tuple[str, str]] = ("qwen3-8b", "tiny")
    usual_tokens: ClassVar[tuple[int, ...]] = (8 * KILO, 16 * KILO)

    part: Part = option("layers", "the whole model, or its layers without embedding and head")
    documents: Count = option(64, "at most in one microbatch", metavar="N")
    ways: tuple[Annotated[str, OFFLOAD_WAYS], ...] = option(
        OFFLOAD_WAYS, "those to measure; kept always is"
    )
    attention: Attention = option("auto", "attention of every way")
    modules: tuple[Annotated[str, MODULES], ...] = option(USUAL_MODULES, "what may move")
    lost: float = option(0.01, "share of the time that the way `planned` may lose", metavar="SHARE")
    in_flight: Count = option(2, "copies to the host at a time", metavar="N")
    min_bytes: Count = option(2**20, "bytes of the smallest tensor that moves", metavar="N")
    rounds: Count = option(9, "how often all ways take turns", metavar="N")
    largest: int = option(
        0, "look for the most tokens that run, in steps of T; 0 = do not", metavar="T"
    )
    host_gib: float | None = option(
        None,
        "pinned memory that this search may take, in GiB, by what the measured rows took per token "
        "in their first passes, which move all that may move (default: half of what is free)",
        metavar="N",
    )
    draw: Path | None = option(None, "write pictures of the plans there", metavar="FOLDER")
    compile: bool = option(False, "graphs of compiled code")
