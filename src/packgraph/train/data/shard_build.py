"""Builds a folder of shards (`packgraph data build`, `check`): a source is tokenized once, by all
cores.

    source ─▶ workers tokenize and encode ─▶ rows, in order ─▶ shards, each written whole
                                                           └─▶ manifest.json after each

Rows come back as bytes, so this process only writes them behind each other. What a shard holds
follows from the source alone, whatever the workers. The invariants: a shard in the manifest is
whole on the disk; a build that was killed goes on with the shards that are, after their checksums
were compared; a folder of another source or tokenizer is never written to.
"""

import contextlib
import fcntl
import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np

from packgraph.packing.document import Document
from packgraph.parallel.deferred import cores
from packgraph.train.config.commands import DataArguments
from packgraph.train.config.sections import DataConfig
from packgraph.train.data.formats import open_documents
from packgraph.train.data.shards import (
    INDEX,
    MANIFEST,
    RECORD,
    Manifest,
    ShardFacts,
    ShardFile,
    check_file,
    encode_targets,
    read_manifest,
)
from packgraph.train.data.source import BadDocumentError, BadDocuments, DataError, DocumentSource
from packgraph.train.data.tokenizer import Tokenizer, build_tokenizer, largest_id
from packgraph.train.data.workers import BATCH, TokenizedAhead, Work
from packgraph.train.progress import SILENT, Phases, phases_of_command
from packgraph.train.run_files import digest_of, sync_file, sync_folder, write_json, writing

MOST_SHARDS, FEWEST_ROWS = 1024, 2048  # where the size of shards is not given
REMEDY = "Make room there or choose another folder; finished shards are kept"
AGAIN = "Run the same command again, which keeps finished shards"
UNFINISHED = ".unfinished"
FLUSHED = 2**24  # bytes that are written at a time


class EncodedRow(NamedTuple):
    """A document of a source as it is stored.

    Attributes:
        documents: Length, loss tokens, checksum, kind, tokens and targets of each.
        largest_id: Of their tokens and labels, -1 without any.
        bad: Why it is left out; "" where it is not.
    """

    documents: list[tuple[int, int, int, int, bytes, bytes]]
    largest_id: int
    bad: str = ""


def encoded(documents: Sequence[Document], token_bytes: int) -> EncodedRow:
    """These documents as a row, with tokens of so many bytes."""
    found = []
    for document in documents:
        tokens = document.tokens.astype(f"<u{token_bytes}").tobytes()
        kind, targets = encode_targets(document)
        checksum = crc32(targets, crc32(tokens))
        found.append((len(document), document.loss_tokens, checksum, kind, tokens, targets))
    return EncodedRow(found, largest_id(documents))


def encode_row(
    source: DocumentSource, index: int, tokenizer: Tokenizer, *, token_bytes: int, skips_bad: bool
) -> EncodedRow:
    """Document `index` of a source as a row. Raises DataError."""
    try:
        documents = tokenizer.encode(source[index])
    except BadDocumentError as error:
        if not skips_bad:
            raise
        return EncodedRow([], -1, str(error))
    return encoded(documents, token_bytes)


def write_shard(folder: Path, number: int, rows: Iterable[EncodedRow]) -> ShardFacts:
    """Write these rows as shard `number`, whole or not at all. Raises RunFileError, and what `rows`
    raises."""
    pending = {f"{number:05}.{name}": bytearray() for name in ("tokens", "targets", *INDEX)}
    tokens, targets, *index = pending.values()
    partial_paths = {name: folder / f"{name}{UNFINISHED}" for name in pending}

    def flush() -> None:
        with writing(folder, REMEDY):
            for name, content in pending.items():
                with partial_paths[name].open("ab") as stream:
                    stream.write(content)
                content.clear()

    records, firsts, bad, largest = list[tuple[int, ...]](), [0], BadDocuments(), -1
    token_count = target_bytes = 0
    try:
        for row in rows:
            for length, loss_tokens, checksum, kind, own_tokens, own_targets in row.documents:
                record = token_count, target_bytes, length, loss_tokens, checksum, kind
                records.append(record)
                token_count, target_bytes = token_count + length, target_bytes + len(own_targets)
                tokens += own_tokens
                targets += own_targets
            firsts.append(len(records))
            largest = max(largest, row.largest_id)
            if row.bad:
                bad.add(row.bad)
            if len(tokens) + len(targets) > FLUSHED:
                flush()
        arrays = np.array(records, RECORD), np.array(firsts, np.int64)
        for content, array in zip(index, arrays, strict=True):
            stream = io.BytesIO()
            np.lib.format.write_array(stream, array, allow_pickle=False)
            content += stream.getvalue()
        flush()
        with writing(folder, REMEDY):
            has_targets = target_bytes > 0
            files = _finished(
                [one for name, one in partial_paths.items() if has_targets or "targets" not in name]
            )
    finally:
        for path in partial_paths.values():
            path.unlink(missing_ok=True)
    return ShardFacts(
        number=number,
        rows=len(firsts) - 1,
        documents=len(records),
        tokens=token_count,
        loss_tokens=int(arrays[0]["loss_tokens"].sum(dtype=np.int64)),
        largest_id=largest,
        bad=bad.count,
        first_bad=bad.first,
        files=files,
    )


def _finished(paths: Sequence[Path]) -> dict[str, ShardFile]:
    """Give files their names, when the disk has all of them. Returns size and SHA-256 of each."""
    files = {}
    for path in paths:
        sync_file(path)
        whole = path.with_suffix("")
        os.replace(path, whole)
        files[whole.name] = ShardFile(whole.stat().st_size, digest_of(whole))
    sync_folder(paths[0].parent)
    return files


def build_shards(
    config: DataConfig,
    folder: Path,
    *,
    workers: int | None = None,
    rows_per_shard: int | None = None,
    phases: Phases = SILENT,
) -> Manifest:
    """Tokenizes the source of `config` into shards, or goes on with a build that was stopped.

    Args:
        config: Source, tokenizer and `on_bad`; packing does not matter.
        folder: Where the shards are or are to be.
        workers: Processes that tokenize; 1 = this one. None takes all cores.
        rows_per_shard: Documents of the source in a shard. None follows from their number.
        phases: Shows how far it is.

    Returns:
        The manifest, which is complete.

    Raises:
        DataError: For data that cannot be tokenized, for a folder of another source or tokenizer,
            and where a worker is lost.
        RunFileError: If the folder cannot be written.
    """
    source_name = f"{config.source} {config.path or ''}".strip()
    phases.tell(f"reading {source_name}")
    with phases.during(f"reading {source_name}"):
        tokenizer, source = build_tokenizer(config), open_documents(config)
    rows = len(source)
    manifest = Manifest(
        tokenizer=tokenizer.fingerprint,
        tokenizer_name=config.tokenizer,
        source=source.fingerprint(),
        source_name=source_name,
        rows=rows,
        rows_per_shard=rows_per_shard or max(FEWEST_ROWS, -(-rows // MOST_SHARDS)),
        on_bad=config.on_bad,
        token_bytes=2 if tokenizer.vocab_size <= 2**16 else 4,
    )
    with writing(folder, REMEDY):
        folder.mkdir(parents=True, exist_ok=True)
    with _only_builder(folder):
        manifest = _with_earlier(folder, manifest, phases.tell)
        missing = [number for number in range(manifest.count) if number not in manifest.shards]
        count = min(workers or cores(), -(-rows // BATCH))
        answer = partial(
            encode_row, token_bytes=manifest.token_bytes, skips_bad=config.on_bad == "skip"
        )
        work = Work(config, source, tokenizer.fingerprint, answer)
        ahead = TokenizedAhead(work, tokenizer, 0 if workers == 1 else count, AGAIN)
        left = sum(len(manifest.rows_of(one)) for one in missing)
        kept = f" ({rows - left:,} more are done)" if left < rows else ""
        several = "1 process" if count == 1 else f"{count} processes"
        phases.tell(f"tokenizing {left:,} documents{kept} by {several}")
        tokens, began = 0, time.monotonic()
        with contextlib.closing(ahead):
            each = ahead.each(row for one in missing for row in manifest.rows_of(one))
            coming = phases.of("tokenizing", left, each, "document")
            for number in missing:
                shard = write_shard(folder, number, islice(coming, len(manifest.rows_of(number))))
                manifest.shards[number] = shard
                write_json(folder / MANIFEST, manifest.to_json())
                tokens += shard.tokens
        speed = tokens / max(time.monotonic() - began, 1e-9)
        phases.tell(f"tokenized {tokens:,} tokens, {speed:,.0f} tokens/s")
        source.check_unchanged()
    return manifest


@contextlib.contextmanager
def _only_builder(folder: Path) -> Iterator[None]:
    """Hold `folder`. Raises DataError while another process builds there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{folder}: another process is building shards there") from error
        yield
    finally:
        os.close(descriptor)


def _with_earlier(folder: Path, manifest: Manifest, tell: Callable[[str], None]) -> Manifest:
    """`manifest` with the shards of an earlier build that are whole, none where its manifest is
    damaged; what is not finished is removed. Raises DataError if that was of something else."""
    there = sorted(path.name for path in folder.iterdir() if path.suffix != UNFINISHED)
    if there and MANIFEST not in there:
        raise DataError(f"{folder}: holds {there[0]}, but no {MANIFEST}; name a new folder")
    try:
        earlier = read_manifest(folder) if there else manifest
    except DataError as error:
        tell(f"all shards are written again: {error}")
        earlier = manifest
    differences = [
        f"{name} was {before!r}, is {now!r}"
        for name in ("tokenizer", "source", "rows", "rows_per_shard", "on_bad")
        if (before := getattr(earlier, name)) != (now := getattr(manifest, name))
    ]
    if differences:
        raise DataError(
            f"{folder}: holds shards of something else ({'; '.join(differences)}); name a new "
            "folder, or remove it"
        )
    for left in folder.glob(f"*{UNFINISHED}"):
        left.unlink()
    kept = dict(earlier.shards)
    for number, problems in _checked(folder, earlier, earlier.shards):
        if problems:
            tell(f"shard {number} is written again: {problems[0]}")
            del kept[number]
    manifest = replace(manifest, shards=kept)
    write_json(folder / MANIFEST, manifest.to_json())
    return manifest


def _checked(
    folder: Path, manifest: Manifest, numbers: Iterable[int]
) -> Iterator[tuple[int, list[str]]]:
    """Yields the faults of shards, in order; as many are read at once as there are cores."""
    numbers = list(numbers)
    with ThreadPoolExecutor(cores()) as pool:  # a digest holds no thread up
        yield from zip(numbers, pool.map(partial(_problems, folder, manifest), numbers))


def _problems(folder: Path, manifest: Manifest, number: int) -> list[str]:
    """Faults of the files of a shard that is written, or that it is not."""
    if number not in manifest.shards:
        return [f"{folder}: shard {number} of {manifest.count} is not written"]
    found = []
    for name, expected in manifest.shards[number].files.items():
        try:
            check_file(folder / name, expected)
        except DataError as error:
            found.append(str(error))
    return found


def check_shards(folder: Path) -> tuple[Manifest, list[str]]:
    """The manifest of a folder, and what is wrong with its files and the number of its shards.

    Raises DataError where there is no manifest.
    """
    manifest = read_manifest(folder)
    checked = _checked(folder, manifest, range(manifest.count))
    return manifest, [text for _, problems in checked for text in problems]


def run_check(folder: Path) -> int:
    """Run `packgraph data check`; returns the exit code. Raises DataError."""
    manifest, problems = check_shards(folder)
    if problems:
        raise DataError("\n  ".join([f"{len(problems)} problems:", *problems]))
    print(f"{_summary(manifest)}: all checksums are right", file=sys.stderr)
    return 0


def run_build(config: DataConfig, asked: DataArguments) -> int:
    """Run `packgraph data build`; returns the exit code. Raises DataError and RunFileError."""
    began = time.perf_counter()
    with phases_of_command() as phases:
        manifest = build_shards(
            config,
            asked.folder,
            workers=asked.workers,
            rows_per_shard=asked.rows_per_shard,
            phases=phases,
        )
        took = time.perf_counter() - began
        phases.tell(f"{_summary(manifest)} in {asked.folder}, {took:.1f} s")
        for text in [text for one in manifest.shards.values() for text in one.first_bad][:5]:
            phases.tell(f"left out: {text}")
    return 0


def _summary(manifest: Manifest) -> str:
    shards = manifest.shards.values()
    bad = sum(one.bad for one in shards)
    left_out = f", {bad:,} bad ones left out" if bad else ""
    return (
        f"{manifest.rows:,} documents, {sum(one.tokens for one in shards):,} tokens in "
        f"{len(shards):,} shards{left_out}"
    )
