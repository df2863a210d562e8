"""Builds a folder of shards: a source is tokenized once, by all cores.

    source ─▶ workers tokenize and encode ─▶ rows, in order ─▶ shards, each written whole
                                                           └─▶ manifest.json after each

Rows come back as bytes, so this process only puts them behind each other; it holds one shard. What
a shard holds follows from the source alone, whatever the workers. The invariants: a shard in the
manifest is whole on the disk; a build that was killed goes on with the shards that are, after their
checksums were compared; a folder of another source or tokenizer is never written to.
"""

import contextlib
import fcntl
import hashlib
import io
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np

from packgraph.packing.document import Document
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
from packgraph.train.run_files import sync_file, sync_folder, write_json, writing

MOST_SHARDS, FEWEST_ROWS = 1024, 2048  # where the size of shards is not given
SECONDS = 10.0  # between lines of progress
REMEDY = "Make room there or choose another folder; finished shards are kept"
AGAIN = "Run the same command again, which keeps finished shards"
UNFINISHED = ".unfinished"


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
    records, firsts, tokens, targets = [], [0], bytearray(), bytearray()
    bad, largest, length_so_far = BadDocuments(), -1, 0
    for row in rows:
        for length, loss_tokens, checksum, kind, own_tokens, own_targets in row.documents:
            record = length_so_far, len(targets), length, loss_tokens, checksum, kind
            records.append(record)
            length_so_far += length
            tokens += own_tokens
            targets += own_targets
        firsts.append(len(records))
        largest = max(largest, row.largest_id)
        if row.bad:
            bad.add(row.bad)
    index = np.array(records, RECORD)
    arrays = dict(zip(INDEX, (index, np.array(firsts, np.int64)), strict=True))
    contents = {"tokens": tokens, **({"targets": targets} if targets else {})}
    contents |= {name: _in_numpys_format(array) for name, array in arrays.items()}
    with writing(folder, REMEDY):
        files = {
            f"{number:05}.{name}": _write(folder / f"{number:05}.{name}", content)
            for name, content in contents.items()
        }
        sync_folder(folder)
    return ShardFacts(
        number=number,
        rows=len(firsts) - 1,
        documents=len(records),
        tokens=length_so_far,
        loss_tokens=int(index["loss_tokens"].sum(dtype=np.int64)),
        largest_id=largest,
        bad=bad.count,
        first_bad=bad.first,
        files=files,
    )


def _in_numpys_format(array: np.ndarray) -> bytearray:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=False)
    return bytearray(stream.getbuffer())


def _write(path: Path, content: bytearray) -> ShardFile:
    """Write a file, which has its name only when the disk has all of it."""
    partial_ = path.with_name(path.name + UNFINISHED)
    try:
        partial_.write_bytes(content)
        sync_file(partial_)
        os.replace(partial_, path)
    finally:
        partial_.unlink(missing_ok=True)
    return ShardFile(len(content), hashlib.sha256(content).hexdigest())


def build_shards(
    config: DataConfig,
    folder: Path,
    *,
    workers: int | None = None,
    rows_per_shard: int | None = None,
    tell: Callable[[str], None] = print,
) -> Manifest:
    """Tokenizes the source of `config` into shards, or goes on with a build that was stopped.

    Args:
        config: Source, tokenizer and `on_bad`; packing does not matter.
        folder: Where the shards are or are to be.
        workers: Processes that tokenize; 1 = this one. None takes all cores.
        rows_per_shard: Documents of the source in a shard. None follows from their number.
        tell: Gets lines of progress.

    Returns:
        The manifest, which is complete.

    Raises:
        DataError: For data that cannot be tokenized, for a folder of another source or tokenizer,
            and where a worker is lost.
        RunFileError: If the folder cannot be written.
    """
    tokenizer = build_tokenizer(config)
    source = open_documents(config)
    rows = len(source)
    manifest = Manifest(
        tokenizer=tokenizer.fingerprint,
        tokenizer_name=config.tokenizer,
        source=source.fingerprint(),
        source_name=f"{config.source} {config.path or ''}".strip(),
        rows=rows,
        rows_per_shard=rows_per_shard or max(FEWEST_ROWS, -(-rows // MOST_SHARDS)),
        on_bad=config.on_bad,
        token_bytes=2 if tokenizer.vocab_size <= 2**16 else 4,
    )
    with writing(folder, REMEDY):
        folder.mkdir(parents=True, exist_ok=True)
    with _only_builder(folder):
        manifest = _with_earlier(folder, manifest, tell)
        missing = [number for number in range(manifest.count) if number not in manifest.shards]
        count = min(workers or len(os.sched_getaffinity(0)), -(-rows // BATCH))
        answer = partial(
            encode_row, token_bytes=manifest.token_bytes, skips_bad=config.on_bad == "skip"
        )
        work = Work(config, source, tokenizer.fingerprint, answer)
        ahead = TokenizedAhead(work, tokenizer, 0 if workers == 1 else count, AGAIN)
        began = told = time.monotonic()
        tokens = 0
        with contextlib.closing(ahead):
            coming = ahead.each(row for one in missing for row in manifest.rows_of(one))
            for number in missing:
                shard = write_shard(folder, number, islice(coming, len(manifest.rows_of(number))))
                manifest.shards[number] = shard
                write_json(folder / MANIFEST, manifest.to_json())
                tokens, now = tokens + shard.tokens, time.monotonic()
                if now - told >= SECONDS:
                    told, speed = now, tokens / (now - began)
                    done = f"shard {len(manifest.shards)} of {manifest.count}"
                    tell(f"{done}, {speed:,.0f} tokens/s")
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
    for number in earlier.shards:
        if problems := _problems(folder, earlier, number):
            tell(f"shard {number} is written again: {problems[0]}")
            del kept[number]
    manifest = replace(manifest, shards=kept)
    write_json(folder / MANIFEST, manifest.to_json())
    return manifest


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
    numbers = range(manifest.count)
    return manifest, [text for number in numbers for text in _problems(folder, manifest, number)]
