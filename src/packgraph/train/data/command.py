"""`packgraph data build` and `packgraph data check`."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packgraph.train.config.command_line import options_help, parse_arguments
from packgraph.train.config.reading import ConfigError
from packgraph.train.config.sections import SOURCES, DataConfig
from packgraph.train.config.values import CommandArguments, Count, option, printable
from packgraph.train.data.shard_build import build_shards, check_shards
from packgraph.train.data.shards import Manifest
from packgraph.train.data.source import DataError

USAGE = """\
usage: packgraph data build FOLDER --source jsonl --path FILE [--tokenizer FILE] ...
       packgraph data check FOLDER

Tokenize documents once, by all cores, into memory-mapped shards:

    packgraph data build shards/chats --source jsonl --path chats.jsonl --tokenizer tokenizer.json
    packgraph train qwen3-0.6b --data.source shards --data.path shards/chats \\
        --data.tokenizer tokenizer.json

A build that was stopped goes on when the same command is run again. `check` compares every file
with its SHA-256 and names those that differ (exit code 2)."""


@dataclass(frozen=True, kw_only=True)
class DataArguments(CommandArguments):
    """Options of `packgraph data`."""

    action: Literal["build", "check"] = option(
        "build", "build or check", positional=True, required=True
    )
    folder: Path = option(Path(), "of the shards", positional=True, required=True)
    source: Literal["stdlib", "jsonl", "text", "parquet"] = option(
        "stdlib", "what is tokenized, as --data.source of train"
    )
    path: str | None = option(None, "file or folder of the source", metavar="PATH")
    suffixes: tuple[str, ...] = option(
        DataConfig().suffixes, "endings of the files that count in a folder of text files"
    )
    text_column: str = option("text", "column of the text in jsonl and parquet", metavar="NAME")
    tokenizer: str = option(
        "bytes", "bytes = one token a byte, or the path of a tokenizer.json", metavar="FILE"
    )
    on_bad: Literal["stop", "skip"] = option(
        "stop", "documents that cannot be read: end the build, or leave them out and count them"
    )
    max_documents: Count | None = option(
        None, "only the first documents up to this number", metavar="N"
    )
    workers: Count | None = option(None, "processes that tokenize (default: all cores)")
    rows_per_shard: Count | None = option(
        None,
        "documents of the source in a shard (default: at least 2048, and at most 1024 shards)",
        metavar="N",
    )

    def config(self, *, names_source: bool = True) -> DataConfig:
        """Options of the data; the path's ending names the source if nothing else does. Raises
        ConfigError."""
        named = SOURCES.get(Path(self.path or "").suffix.lower())
        try:
            return DataConfig(
                source=self.source if names_source or named is None else named,
                path=self.path,
                suffixes=self.suffixes,
                text_column=self.text_column,
                tokenizer=self.tokenizer,
                on_bad=self.on_bad,
                max_documents_loaded=self.max_documents,
            )
        except ValueError as error:
            raise ConfigError([str(error)]) from error


def data_command(words: Sequence[str]) -> int:
    """Run `packgraph data`; returns the exit code. Raises ConfigError, DataError and
    RunFileError."""
    parsed = parse_arguments(words, DataArguments())
    asked = parsed.own
    if asked.help:
        print(f"{USAGE}\n{options_help(DataArguments())}")
        return 0
    if asked.action == "check":
        foreign = sorted(parsed.given - {"action", "folder"})
        if foreign:
            raise ConfigError([f"--{name.replace('_', '-')}: goes with build" for name in foreign])
        return _check(asked.folder)
    began = time.perf_counter()
    manifest = build_shards(
        asked.config(names_source="source" in parsed.given),
        asked.folder,
        workers=asked.workers,
        rows_per_shard=asked.rows_per_shard,
        tell=_tell,
    )
    _tell(f"{_summary(manifest)} in {asked.folder}, {time.perf_counter() - began:.1f} s")
    for text in [text for one in manifest.shards.values() for text in one.first_bad][:5]:
        _tell(f"left out: {text}")
    return 0


def _check(folder: Path) -> int:
    manifest, problems = check_shards(folder)
    if problems:
        raise DataError("\n  ".join([f"{len(problems)} problems:", *problems]))
    _tell(f"{_summary(manifest)}: all checksums are right")
    return 0


def _summary(manifest: Manifest) -> str:
    shards = manifest.shards.values()
    bad = sum(one.bad for one in shards)
    left_out = f", {bad:,} bad ones left out" if bad else ""
    return (
        f"{manifest.rows:,} documents, {sum(one.tokens for one in shards):,} tokens in "
        f"{len(shards):,} shards{left_out}"
    )


def _tell(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)
