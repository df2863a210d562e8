"""Options that benchmarks share. Those of one benchmark stand beside it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from packgraph.bench.models import PARTS, SHAPES
from packgraph.bench.rows import Row
from packgraph.ops.attention.api import BACKENDS
from packgraph.parallel.ranks import Launch
from packgraph.train.config.values import CommandArguments, Count, option

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
        """Returns what is wrong with further options."""
        return []

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
        """Returns what is wrong with further options."""
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

    def on(self, device_type: str, launch: Launch) -> Self:
        """These options with the usual model and tokens of a device of this type put in."""
        small = device_type == "cpu"
        more: dict[str, Any] = {
            "model": self.model or self.usual_models[small],
            "tokens": self.tokens or (CPU_TOKENS if small else self.usual_tokens),
        }
        return replace(self, **more)

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
