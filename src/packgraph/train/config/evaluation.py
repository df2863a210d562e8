"""Options of evaluation: its steps and its documents."""

from dataclasses import dataclass

from packgraph.train.config.values import path_problem, shown


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluations between the steps of a run, on documents that it does not train on.

    every: steps between two evaluations; 0 = none.
    path: files or folders with documents to evaluate on, separated by commas, each with a loss of
        its own; folders of shards, .jsonl and .parquet are known, others are read as data.source
        says, or as text.
    share: share of the training documents that is held out, to be evaluated on and never trained
        on; the same ones whatever the seed, the order and the ranks.
    tokens: of each path, or of each part of a mixture, documents are taken until they have so many
        tokens; 0 = all.
    patience: evaluations in a row without a lower loss after which the run ends; 0 = it never does.
    """

    every: int = 0
    path: tuple[str, ...] = ()
    share: float = 0.0
    tokens: int = 0
    patience: int = 0

    def __post_init__(self) -> None:
        problems = {
            f"{name} must not be negative, got {getattr(self, name)}": getattr(self, name) < 0
            for name in ("every", "tokens", "patience")
        }
        problems |= {
            f"share must lie in [0, 1), got {self.share}": not 0 <= self.share < 1,
            "path and share are two ways to say what is evaluated on: give one of them": bool(
                self.path and self.share
            ),
            f"every = {self.every} needs documents to evaluate on: give a path, or a share of the "
            "training documents": self.every > 0 and not self.path and not self.share,
            "path, tokens and patience are of evaluations, so they need every": self.every == 0
            and bool(self.path or self.tokens or self.patience),
            "path names one file or folder twice": len(set(self.path)) < len(self.path),
        }
        found = [text for text, wrong in problems.items() if wrong]
        for path in self.path:
            if problem := path_problem(path):
                found.append(
                    f"path cannot be that of a file or folder, got {shown(path)}: {problem}"
                )
        if found:
            raise ValueError("; ".join(found))
