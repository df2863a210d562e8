"""Sources of documents for tests of worker processes, which can be sent to them."""

import json
import multiprocessing
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardkit import write_rows

from packgraph.train.data import DataConfig, SourceDocument
from packgraph.train.data.files import OpenedFiles
from packgraph.train.data.order import SourcePart
from packgraph.train.data.source import BadDocumentError


def write_mixed(path: Path, count: int = 60) -> DataConfig:
    """A file with all kinds of documents: rows, texts of which some are empty, chats with and
    without an answer, prompts and completions."""
    draw = random.Random(1)

    def words() -> str:
        return "".join(draw.choice("abcdé ") for _ in range(draw.randint(1, 150)))

    config = write_rows(path, count)
    with path.open("a") as stream:
        for number in range(count):
            roles = ("user", "assistant") if number % 3 else ("system", "user")
            chat = [{"role": role, "content": words()} for role in roles]
            row: dict[str, Any] = {"text": words() if number % 7 else ""}
            if number % 5 == 1:
                row = {"messages": chat}
            if number % 5 == 2:
                row = {"prompt": words(), "completion": words()}
            stream.write(json.dumps(row) + "\n")
    return config


class Texts(OpenedFiles):
    """A source of texts in memory. reads: a file that gets a byte with each document that is
    read."""

    def __init__(self, count: int = 60, reads: Path | None = None) -> None:
        super().__init__()
        self.count, self.reads = count, reads

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> SourceDocument:
        if self.reads is not None:
            with self.reads.open("ab", buffering=0) as stream:
                stream.write(b".")
        return SourceDocument(f"text {index}", text=chr(97 + index % 26) * (1 + index * 37 % 200))


class Mixture(Texts):
    """Texts of several parts with weights."""

    def __init__(self, parts: Sequence[SourcePart]) -> None:
        super().__init__(sum(part.documents for part in parts))
        self.parts = parts


class Faulty(Texts):
    """Texts of which one cannot be read.

    kind: bad = a bad document, bug = an error that is none of data, worker = a bad document in
    workers alone, exit = the process ends, kill = it is killed.
    """

    def __init__(self, kind: str, faulty: int, count: int = 60) -> None:
        super().__init__(count)
        self.kind, self.faulty = kind, faulty

    def __getitem__(self, index: int) -> SourceDocument:
        in_worker = multiprocessing.parent_process() is not None
        if index == self.faulty:
            if self.kind == "bad" or (self.kind == "worker" and in_worker):
                raise BadDocumentError(f"text {index}: no good")
            if self.kind == "bug":
                raise KeyError(f"text {index}")
            if self.kind == "exit" and in_worker:
                os._exit(3)
            if self.kind == "kill" and in_worker:
                os.kill(os.getpid(), 9)
        return super().__getitem__(index)
