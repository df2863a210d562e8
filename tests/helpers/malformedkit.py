"""Malformed inputs: what each of them is, and what the command must say of it.

A case is a name, the words of a command, and a pattern that its message must match: what is wrong,
where, or the way out. `{dir}` in words stands for the test's folder. Every case must end with one
clear block on stderr.
"""

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from packgraph import cli
from packgraph.models.config import DecoderConfig
from packgraph.models.decoder import DecoderModel
from packgraph.models.hf import save_pretrained

SECONDS = 30  # longer is a hang
LONGEST = 1200  # characters of a message
DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "9" * 5000
SMALL = [
    "--model.hidden-size",
    "16",
    "--model.intermediate-size",
    "32",
    "--model.num-layers",
    "1",
    "--model.num-heads",
    "2",
    "--model.num-kv-heads",
    "1",
    "--model.head-dim",
    "8",
    "--graph.capacities",
    "32x4,64x8",
    "--run.tokens-per-step",
    "100",
    "--run.steps",
    "2",
    "--optimizer.warmup-steps",
    "2",
    "--graph.warmup",
    "1",
    "--run.device",
    "cpu",
]
TRAIN = ["train", "qwen3-tiny", *SMALL, "--run.folder", "{dir}/runs"]

Content = str | bytes | Callable[[Path], None]


class Hang(BaseException):
    """A command took too long; an OSError such as TimeoutError might be taken for one of a file."""


class Case(NamedTuple):
    """One malformed input. files: path below the test's folder → content, or what makes it."""

    name: str
    words: Sequence[str]
    says: str
    files: Mapping[str, Content] = {}


def cases(*rows: Case) -> Any:
    """The parameters of a test, one for each case."""
    return pytest.mark.parametrize("case", [pytest.param(row, id=row.name) for row in rows])


def pipe(path: Path) -> None:
    """A named pipe, which a reader would wait for."""
    os.mkfifo(path)


def folder(path: Path) -> None:
    """An empty folder where a file belongs."""
    path.mkdir()


def loop(path: Path) -> None:
    """A link to itself."""
    path.symlink_to(path.name)


def nowhere(path: Path) -> None:
    """A link to what does not exist."""
    path.symlink_to("absent")


def dead(path: Path) -> None:
    """A file on a disk that fails: reading it is an input/output error."""
    path.symlink_to("/proc/self/mem")


def bound(path: Path) -> None:
    """A socket."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def make(base: Path, files: Mapping[str, Content]) -> None:
    """Write the files of a case."""
    for name, content in files.items():
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() or path.is_symlink():
            path.unlink()
        if callable(content):
            content(path)
        else:
            path.write_bytes(
                content.encode(errors="surrogatepass") if isinstance(content, str) else content
            )


def refuse(
    case: Case, base: Path, capsys: pytest.CaptureFixture[str], *, at_once: bool = False
) -> str:
    """Run a case and check how it ends. Returns what it said. at_once: before the run has a
    folder."""
    make(base, case.files)
    before = sorted(base.rglob("*"))
    with limit():
        code = cli.main([word.replace("{dir}", str(base)) for word in case.words])
    captured = capsys.readouterr()
    said = captured.err
    assert code in (cli.USER_ERROR, cli.FAILED), said
    assert "Traceback" not in said and "weights_only" not in said
    flat = " ".join(said.split())
    assert re.search(case.says, flat), said[:2000]
    assert "error: " in said or "training failed: " in said
    assert all(letter.isprintable() or letter == "\n" for letter in said.replace("\u00a0", " "))
    assert len(said) < LONGEST, len(said)
    assert not at_once or sorted(base.rglob("*")) == before, "something was written"
    return said


@contextmanager
def limit() -> Iterator[None]:
    """Within the block a hang becomes an error."""

    def late(number: int, frame: Any) -> None:
        raise Hang

    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def line(row: Any) -> str:
    """One line of JSONL."""
    return json.dumps(row) + "\n"


LONG = "x" * 300
GOOD = 10 * line({"text": "to be or not to be"})
DATA = ["--data.source", "jsonl", "--data.path", "{dir}/d.jsonl"]


def write_weights(path: Path) -> Path:
    """A small checkpoint in Hugging Face's layout."""
    save_pretrained(
        DecoderModel(
            DecoderConfig(
                vocab_size=264,
                hidden_size=16,
                intermediate_size=32,
                num_layers=1,
                num_heads=2,
                num_kv_heads=1,
                head_dim=8,
            )
        ),
        path,
    )
    return path
