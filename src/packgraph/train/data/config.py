"""What a run can be told about its data."""

from dataclasses import dataclass
from typing import Literal

from packgraph.train.config_values import path_problem, shown

NEEDS_PATH = ("jsonl", "text", "parquet")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where documents come from, how they become tokens and how they are packed.

    source: where documents come from; stdlib = the source code of Python's own library (no
        download), jsonl = one JSON object a line with text or chat messages, text = a folder of
        text files, parquet = tables with the same columns as jsonl.
    path: file or folder of the source (not for stdlib).
    suffixes: endings of the files that count in a folder of text files.
    text_column: name of the column that holds the text in jsonl and parquet.
    tokenizer: bytes = one token a byte, or the path of a tokenizer.json.
    overlong: documents longer than every capacity: error = stop, split = cut into pieces, drop =
        leave out.
    on_bad: documents that cannot be read, or hold words that the tokenizer has not: stop = end the
        run at the first, skip = leave them out and count them.
    window: documents that wait to be combined into packs; more means less padding.
    seed: seed of the order of documents.
    epochs: passes over the documents; none = repeat until the run has all its steps.
    max_documents_loaded: only the first documents up to this number; none = all (stdlib: a sample
        of 6000).
    """

    source: Literal["stdlib", "jsonl", "text", "parquet"] = "stdlib"
    path: str | None = None
    suffixes: tuple[str, ...] = (".txt", ".md", ".rst")
    text_column: str = "text"
    tokenizer: str = "bytes"
    overlong: Literal["error", "split", "drop"] = "error"
    on_bad: Literal["stop", "skip"] = "stop"
    window: int = 256
    seed: int = 0
    epochs: int | None = None
    max_documents_loaded: int | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least 1, got {value}"
            for name, value in (
                ("window", self.window),
                ("epochs", self.epochs),
                ("max_documents_loaded", self.max_documents_loaded),
            )
            if value is not None and value < 1
        ]
        if self.seed < 0:
            problems.append(f"seed must not be negative, got {self.seed}")
        if self.source in NEEDS_PATH and not self.path:
            problems.append(f"source = {self.source} needs a path, the file or folder to read")
        if self.source not in NEEDS_PATH and self.path:
            problems.append(
                f"path is set ({self.path}), but source = {self.source} reads none; set source to "
                "one of "
                f"{', '.join(NEEDS_PATH)}"
            )
        for name, path in (("path", self.path or ""), ("tokenizer", self.tokenizer)):
            problem = path_problem(path)
            if problem:
                problems.append(
                    f"{name} cannot be the path of a file or folder, got {shown(path)}: {problem}"
                )
        if problems:
            raise ValueError("; ".join(problems))
