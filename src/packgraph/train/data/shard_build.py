"""Builds a folder of shards: a source is tokenized once, by all cores.

    source ─▶ ranges of documents, a few ahead ─▶ worker processes ─▶ shards, each written whole
                                                                  └─▶ manifest.json after each

A worker tokenizes the documents of one shard at a time and streams them into files, so nothing
grows with the source, and only facts travel between processes. What a shard holds follows from the
source alone, whatever the workers. The invariants: a shard in the manifest is whole on the disk; a
build that was killed goes on with the shards that are, after their checksums were compared; a
folder of another source or tokenizer is never written to.
"""

import contextlib
import fcntl
import hashlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from packgraph.packing.document import Document
from packgraph.train.config.sections import DataConfig
from packgraph.train.data.formats import open_documents
from packgraph.train.data.shards import (
    MANIFEST,
    RECORD,
    Manifest,
    ShardFacts,
    ShardFile,
    check_file,
    encode_targets,
    read_manifest,
)
from packgraph.train.data.source import (
    BadDocumentError,
    BadDocuments,
    DataError,
    DocumentSource,
)
from packgraph.train.data.tokenizer import Tokenizer, build_tokenizer, largest_id
from packgraph.train.data.workers import SILENCE, HandedOver, follow_parent
from packgraph.train.run_files import sync_file, sync_folder, write_json, writing

MOST_SHARDS, FEWEST_ROWS = 1024, 2048  # where the size of shards is not given
AHEAD = 2  # shards for each worker that are handed out
SECONDS = 10.0  # between lines of progress
LOOK = 5.0  # seconds between two looks at what workers write, where no shard is finished
REMEDY = "Make room there or choose another folder; finished shards are kept"
UNFINISHED = "*.unfinished"
Task = tuple[Callable[[int], Any], int]  # and the number of the shard


class HashedFile:
    """A new file and its SHA-256, under a name that shows it is not finished until `finish`."""

    def __init__(self, path: Path) -> None:
        self._path, self._partial = path, path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        self._stream, self._digest, self.size = self._partial.open("wb"), hashlib.sha256(), 0

    def write(self, content: bytes) -> None:
        """Append."""
        self._stream.write(content)
        self._digest.update(content)
        self.size += len(content)

    def finish(self) -> ShardFile:
        """Wait for the disk and give the file its name."""
        self._stream.close()
        sync_file(self._partial)
        os.replace(self._partial, self._path)
        return ShardFile(self.size, self._digest.hexdigest())

    def drop(self) -> None:
        """Close and remove what is not finished."""
        self._stream.close()
        self._partial.unlink(missing_ok=True)


class ShardWriter:
    """Streams documents into the files of one shard."""

    def __init__(self, folder: Path, number: int, token_type: np.dtype[Any]) -> None:
        self._folder, self._number, self._type = folder, number, token_type
        self._files = {name: HashedFile(self._path(name)) for name in ("tokens", "targets")}
        self._records: list[tuple[int, int, int, int, int, int]] = []
        self._rows = [0]
        self._tokens = self._loss_tokens = 0
        self._largest = -1

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._number:05}.{name}"

    def add(self, documents: Sequence[Document]) -> None:
        """The documents of the next row."""
        tokens, targets = self._files["tokens"], self._files["targets"]
        for document in documents:
            content = document.tokens.astype(self._type).tobytes()
            kind, predicted = encode_targets(document)
            checksum = crc32(predicted, crc32(content))
            loss_tokens, length = document.loss_tokens, len(document)
            self._records.append((self._tokens, targets.size, length, loss_tokens, checksum, kind))
            tokens.write(content)
            targets.write(predicted)
            self._tokens, self._loss_tokens = self._tokens + length, self._loss_tokens + loss_tokens
        self._largest = max(self._largest, largest_id(list(documents)))
        self._rows.append(len(self._records))

    def finish(self, bad: BadDocuments) -> ShardFacts:
        """Make the shard whole on the disk."""
        written: dict[str, ShardFile] = {}
        for name, content in (
            ("documents.npy", np.array(self._records, RECORD)),
            ("rows.npy", np.array(self._rows, np.int64)),
        ):
            file = self._files[name] = HashedFile(self._path(name))
            np.lib.format.write_array(file, content, allow_pickle=False)
        if not self._files["targets"].size:
            self._files.pop("targets").drop()
        for name, file in self._files.items():
            written[self._path(name).name] = file.finish()
        sync_folder(self._folder)
        return ShardFacts(
            number=self._number,
            rows=len(self._rows) - 1,
            documents=len(self._records),
            tokens=self._tokens,
            loss_tokens=self._loss_tokens,
            largest_id=self._largest,
            bad=bad.count,
            first_bad=bad.first,
            files=written,
        )

    def drop(self) -> None:
        """Remove what was written."""
        for file in self._files.values():
            file.drop()


@dataclass(frozen=True)
class ShardWork:
    """Work of a worker: the opened source, the tokenizer's name, and the shards' folder."""

    config: DataConfig
    source: DocumentSource
    folder: Path
    manifest: Manifest

    def write(self, number: int, tokenizer: Tokenizer) -> ShardFacts:
        """Tokenize and write one shard. Raises DataError and RunFileError."""
        bad = BadDocuments()
        with writing(self.folder, REMEDY):
            writer = ShardWriter(self.folder, number, self.manifest.token_type)
        try:
            for row in self.manifest.rows_of(number):
                documents = self._documents(row, tokenizer, bad)
                with writing(self.folder, REMEDY):
                    writer.add(documents)
            with writing(self.folder, REMEDY):
                return writer.finish(bad)
        finally:
            writer.drop()

    def _documents(self, row: int, tokenizer: Tokenizer, bad: BadDocuments) -> list[Document]:
        try:
            return tokenizer.encode(self.source[row])
        except BadDocumentError as error:
            if self.config.on_bad == "stop":
                raise
            bad.add(error)
            return []

    def check(self, number: int) -> str | None:
        """Problem of a written shard, or None."""
        for name, expected in self.manifest.shards[number].files.items():
            try:
                check_file(self.folder / name, expected)
            except DataError as error:
                return str(error)
        return None


_worker: list[tuple[ShardWork, Tokenizer]] = []


def _hold(work: ShardWork) -> None:
    """In a new worker: what it is to work on."""
    _worker[:] = [(work, build_tokenizer(work.config))]


def _begin(work: ShardWork) -> None:
    """In a new process: end with the one that started it, and leave Ctrl-C to that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow_parent()
    _hold(work)


def _write(number: int) -> ShardFacts:
    work, tokenizer = _worker[0]
    return work.write(number, tokenizer)


def _check(number: int) -> str | None:
    return _worker[0][0].check(number)


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
        workers: Processes that tokenize. None takes all cores.
        rows_per_shard: Documents of the source in a shard. None follows from their number.
        tell: Gets lines of progress.

    Returns:
        The manifest, which is complete.

    Raises:
        DataError: For data that cannot be tokenized, and for a folder of another source or
            tokenizer.
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
        for left in folder.glob(UNFINISHED):
            left.unlink()
        work = ShardWork(config, source, folder, manifest)
        _run(work, workers or len(os.sched_getaffinity(0)), tell)
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
    """`manifest` with the shards that an earlier build has left, none where its manifest is
    damaged. Raises DataError if that was of something else."""
    if not (folder / MANIFEST).exists():
        others = [path.name for path in folder.iterdir() if not path.match(UNFINISHED)]
        if others:
            raise DataError(
                f"{folder}: holds {sorted(others)[0]}, but no {MANIFEST}; name a new folder"
            )
        write_json(folder / MANIFEST, manifest.to_json())
        return manifest
    try:
        earlier = read_manifest(folder)
    except DataError as error:
        tell(f"all shards are written again: {error}")
        write_json(folder / MANIFEST, manifest.to_json())
        return manifest
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
    return replace(manifest, shards=earlier.shards)


@contextlib.contextmanager
def _pool(work: ShardWork, workers: int) -> Iterator[Executor]:
    """Runs the workers within the block; one of them needs no process of its own."""
    pool: Executor
    with contextlib.ExitStack() as held:
        if workers == 1:
            pool = ThreadPoolExecutor(1, initializer=_hold, initargs=(work,))
        else:
            handed: Any = held.enter_context(contextlib.closing(HandedOver(work)))
            spawn = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(workers, spawn, initializer=_begin, initargs=(handed,))
        held.callback(pool.shutdown, cancel_futures=True)
        yield pool


def _submit(pool: Executor, task: Task) -> Future[Any]:
    try:
        return pool.submit(task[0], task[1])
    except (OSError, ValueError) as error:  # a killed worker closed pipes of the one that starts
        raise BrokenProcessPool from error


def _run(work: ShardWork, workers: int, tell: Callable[[str], None]) -> None:
    """Check the shards that are there and write the others, a few ahead."""
    manifest = work.manifest
    tasks: Iterator[Task] = (
        (_check if number in manifest.shards else _write, number)
        for number in range(manifest.count)
    )
    open_: dict[Future[Any], Task] = {}
    progress, standstill = BuildProgress(manifest, tell), Standstill(work, tell)
    try:
        with _pool(work, min(workers, manifest.count)) as pool:
            while True:
                while len(open_) < AHEAD * workers and (task := next(tasks, None)) is not None:
                    open_[_submit(pool, task)] = task
                if not open_:
                    break
                finished = wait(open_, LOOK, FIRST_COMPLETED).done
                standstill.look(len(finished))
                for future in finished:
                    kind, number = open_.pop(future)
                    found = future.result()
                    if kind is _check and found is not None:
                        tell(f"shard {number} is written again: {found}")
                        del manifest.shards[number]
                        open_[_submit(pool, (_write, number))] = (_write, number)
                    elif kind is _write:
                        manifest.shards[number] = found
                        write_json(work.folder / MANIFEST, manifest.to_json())
                        progress.count(found)
    except BrokenProcessPool as error:
        raise DataError(
            f"{work.folder}: a worker was killed (is there enough memory for it?); run the same "
            "command again, which keeps finished shards"
        ) from error


class Standstill:
    """Time in which no worker has got any further."""

    def __init__(self, work: ShardWork, tell: Callable[[str], None]) -> None:
        """work: of the build, whose workers are started later."""
        self._folder, self._limit, self._tell = work.folder, work.config.worker_timeout, tell
        self._others = multiprocessing.active_children()
        self._written, self._waited = -1, 0.0

    def look(self, finished: int) -> None:
        """Look again, after `LOOK` seconds or as soon as shards are `finished`. Raises DataError
        after the limit, and ends the workers, since the build would wait for them."""
        written = 0
        for path in self._folder.glob(UNFINISHED):
            with contextlib.suppress(FileNotFoundError):
                written += path.stat().st_size
        if finished or written != self._written:
            self._written, self._waited = written, 0.0
            return
        self._waited += LOOK
        started = [one for one in multiprocessing.active_children() if one not in self._others]
        named = f"; processes {', '.join(str(one.pid) for one in started)}" if started else ""
        what = f"{self._folder}: no worker has written anything for {self._waited:g} s{named}"
        if started and self._waited >= self._limit:
            for one in started:
                one.kill()
            raise DataError(f"{what}. Run the same command again, which keeps finished shards")
        if not self._waited % SILENCE:
            self._tell(f"{what}: stopped, or at a file system that hangs?")


class BuildProgress:
    """Says now and then how far a build is."""

    def __init__(self, manifest: Manifest, tell: Callable[[str], None]) -> None:
        self._manifest, self._tell = manifest, tell
        self._began = self._told = time.monotonic()
        self._tokens = 0

    def count(self, shard: ShardFacts) -> None:
        """One more shard is written."""
        self._tokens, now = self._tokens + shard.tokens, time.monotonic()
        if now - self._told < SECONDS:
            return
        self._told = now
        speed = self._tokens / (now - self._began)
        done, all_ = len(self._manifest.shards), self._manifest.count
        self._tell(f"shard {done} of {all_}, {speed:,.0f} tokens/s")


def check_shards(folder: Path) -> tuple[Manifest, list[str]]:
    """The manifest of a folder, and what is wrong with its files and the number of its shards.

    Raises DataError where there is no manifest.
    """
    manifest = read_manifest(folder)
    problems = []
    for number in range(manifest.count):
        if number not in manifest.shards:
            problems.append(f"{folder}: shard {number} of {manifest.count} is not written")
            continue
        for name, expected in manifest.shards[number].files.items():
            try:
                check_file(folder / name, expected)
            except DataError as error:
                problems.append(str(error))
    return manifest, problems
