"""Options of fine-tuning: a model of transformers, and adapters trained instead of all weights."""

from dataclasses import dataclass

from packgraph.train.config.values import path_problem, shown


@dataclass(frozen=True, kw_only=True)
class HfConfig:
    """A model of transformers, trained as it is: `packgraph train hf:PATH`.

    path: folder with config.json and safetensors of a model of transformers, which is trained by
        its own code; none = a model of packgraph.
    random: start from random values and read config.json alone; else weights must be there.
    """

    path: str | None = None
    random: bool = False

    def __post_init__(self) -> None:
        problem = path_problem(self.path or "")
        if problem is not None:
            raise ValueError(
                f"path cannot be the path of a folder, got {shown(self.path)}: {problem}"
            )
        if self.path == "":
            raise ValueError("path must name a folder with a config.json; . is the current one")
        if self.random and self.path is None:
            raise ValueError("random is of a model of transformers, so it needs a path")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters of low rank, which are trained and stored instead of all weights (package peft).

    rank: of the adapters; 0 = there are none, and all weights are trained.
    alpha: adapters are scaled by alpha / rank; none = twice the rank.
    targets: last names of the linear layers that get adapters, such as q_proj,v_proj; none = all
        linear layers but the head.
    dora: train the length of each row of the weights apart from its direction (DoRA).
    """

    rank: int = 0
    alpha: float | None = None
    targets: tuple[str, ...] | None = None
    dora: bool = False

    def __post_init__(self) -> None:
        problems = {
            f"rank must not be negative, got {self.rank}": self.rank < 0,
            f"alpha must be positive, got {self.alpha}": self.alpha is not None and self.alpha <= 0,
            "targets must name at least one layer; none = all": self.targets == (),
            "alpha, targets and dora are of adapters, so they need a rank": self.rank == 0
            and (self.alpha is not None or self.targets is not None or self.dora),
        }
        found = [text for text, wrong in problems.items() if wrong]
        if found:
            raise ValueError("; ".join(found))

    @property
    def enabled(self) -> bool:
        """True if adapters are trained instead of all weights."""
        return self.rank > 0
