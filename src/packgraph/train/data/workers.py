"""Worker processes that read and tokenize documents ahead of their turn.

    order ─▶ batches of indices, a bounded number ahead ─▶ pipes ─▶ workers: read, tokenize
    stream ◀── in order ◀── tokens, each batch from its own worker ◀── pipes ◀──┘

Workers get the opened source once, so that they see the files that this process saw, and build
their tokenizer from the config. They hold no state of the stream: what was handed out may be
forgotten at any time, and the next documents are handed out anew. So a run with workers is the run
without, and a checkpoint says nothing of them.

Failures are those of one process. A document that a worker fails at is read here when its turn
comes, which raises the same error with the same place. A worker that is lost, or does not answer
for `data.worker_timeout`, is an error where the first document is missing. Workers leave signals to
their parent, which may have a step to save, and end with it, whatever ends it.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import numpy as np

from packgraph.graphs.errors import PackgraphWarning
from packgraph.packing.document import Document, Ids
from packgraph.train.config.sections import DataConfig
from packgraph.train.data.order import DocumentOrder, OrderPlace
from packgraph.train.data.source import DataError, DocumentSource
from packgraph.train.data.tokenizer import (
    TokenizedDocument,
    Tokenizer,
    build_tokenizer,
    read_tokenized,
)
from packgraph.train.signals import SIGNALS

# With BPE a batch of documents of 240 tokens takes a worker 4 ms, and all that is ahead 130 ms:
# more than a scheduler takes a core away for.
BATCH = 8  # documents
AHEAD = 32  # batches for each worker that are handed out and not taken
SECONDS = 10.0  # that a process that closed its pipe has to end
TICK = 0.5  # seconds between two looks at a worker that does not answer
SILENCE = 30.0  # seconds without an answer until that is told
Outcome = TokenizedDocument | str  # str: why a worker failed


def follow_parent() -> None:
    """In a new process: end with the one that started it."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


class HandedOver:
    """An object for new processes, in memory that they read themselves. Python would write it to a
    pipe before a process runs, for ever where that one is killed or stopped meanwhile."""

    def __init__(self, content: Any) -> None:
        """content: can be pickled; processes that are started with this object get that instead."""
        self._memory = open(os.memfd_create("packgraph"), "w+b")  # noqa: SIM115 (see close)
        pickle.dump(content, self._memory)
        self._memory.flush()

    def __reduce__(self) -> tuple[Any, ...]:
        return _handed_over, (DupFd(self._memory.fileno()),)

    def close(self) -> None:
        """Free the memory; what was started before keeps its own hold of it."""
        self._memory.close()


def _handed_over(memory: Any) -> Any:
    # All processes share one position in the memory, so none reads by it.
    with open(f"/proc/self/fd/{(own := memory.detach())}", "rb") as stream:
        os.close(own)
        return pickle.load(stream)


class Work(NamedTuple):
    """The work of a tokenizing worker. fingerprint: of the tokenizer."""

    config: DataConfig
    source: DocumentSource
    fingerprint: str


def serve(pipe: Connection, work: Work) -> None:
    """Tokenize batches of indices until the pipe is closed; what a worker runs."""
    follow_parent()
    config, source, fingerprint = work
    tokenizer: Tokenizer | None = None
    try:
        tokenizer = build_tokenizer(config)
        problem = f"{config.tokenizer} was changed since the run opened it"
    except DataError as error:
        problem = str(error)
    if tokenizer is not None and tokenizer.fingerprint != fingerprint:
        tokenizer = None
    thread = ThreadPoolExecutor(1)
    outcomes: list[Outcome] | None = None
    while True:
        try:
            if outcomes is not None:
                pipe.send(outcomes)
            indices: list[int] = pipe.recv()
        except (EOFError, OSError):
            return  # nobody asks any more
        if tokenizer is None:
            outcomes = [problem] * len(indices)
        else:
            outcomes = _outcomes(thread, source, indices, tokenizer)


def _outcomes(
    thread: Executor, source: DocumentSource, indices: Sequence[int], tokenizer: Tokenizer
) -> list[Outcome]:
    """Outcomes of a batch. thread: keeps whatever error a document meets, so this process goes
    on."""
    outcomes: list[Outcome] = []
    kind = np.dtype("int32" if tokenizer.vocab_size <= 2**31 else "int64")

    def read() -> None:
        for index in indices[len(outcomes) :]:
            outcomes.append(_with_type(read_tokenized(source, index, tokenizer), kind))

    while len(outcomes) < len(indices):
        error = thread.submit(read).exception()
        if error is not None:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


def _with_type(found: TokenizedDocument, kind: np.dtype[Any]) -> TokenizedDocument:
    """The same with ids of another type: half as many bytes for the pipe."""

    def changed(ids: Ids | None) -> Ids | None:
        return None if ids is None else ids.astype(kind)

    loaded = [document.load() for document in found.documents]
    documents = [Document(one.tokens.astype(kind), changed(one.targets)) for one in loaded]
    return TokenizedDocument(found.where, documents, found.why_unlabelled)


@dataclass(eq=False)
class Batch:
    """Documents that are handed out together. outcomes: None until they are received."""

    places: list[OrderPlace]
    worker: "TokenizerProcess"
    outcomes: list[Outcome] | None = None


class TokenizerProcess:
    """A worker and its pipe. asked: batches that it has not answered yet, in order."""

    def __init__(self, number: int, work: HandedOver, limit: float) -> None:
        """work: of `Work`. limit: seconds that an answer may take."""
        self._limit = limit
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.asked: deque[Batch] = deque()
        self.is_lost = False
        name = f"packgraph-tokenizer-{number}"
        self.process: BaseProcess = spawn.Process(
            target=serve, args=(theirs, work), name=name, daemon=True
        )
        # What is blocked in this thread is so in the new process, from its first moment on.
        # Started by the first process, it would unblock SIGINT and SIGTERM before that one begins.
        resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()  # so that the pipe ends with the worker

    def ask(self, batch: Batch) -> None:
        """Hand out a batch. A worker that is lost is noticed where an answer is missing."""
        self.asked.append(batch)
        try:
            self.pipe.send([place.document for place in batch.places])
        except OSError:
            return  # what it has answered before is still to be read

    def receive(self) -> None:
        """Wait for the next answer, for the end of the worker, or until the limit is over."""
        waited = 0.0  # by looks, since time in which all of this is stopped does not count
        try:
            while not self.pipe.poll(TICK):
                waited += TICK
                if waited >= self._limit:
                    self.is_lost = True
                    return
                if waited == min(SILENCE, self._limit / 2 // TICK * TICK):
                    self._tell(waited)
            outcomes = self.pipe.recv()
        except (EOFError, OSError):
            self.is_lost = True
            return
        self.asked.popleft().outcomes = outcomes

    def _tell(self, waited: float) -> None:
        asked = ", ".join(str(place.document) for place in self.asked[0].places)
        warnings.warn(
            f"a worker that tokenizes (process {self.process.pid}) has not answered for "
            f"{waited:g} s; it has documents {asked}. The run waits up to {self._limit:g} s "
            "(data.worker_timeout): is the worker stopped, or at a file system that hangs?",
            PackgraphWarning,
            stacklevel=2,
        )

    def in_words(self) -> str:
        """Tells how a lost worker ended."""
        self.process.join(SECONDS)
        code = self.process.exitcode
        if code is None:
            return (
                f"(process {self.process.pid}) did not answer for {self._limit:g} s "
                "(data.worker_timeout)"
            )
        if code < 0:
            return f"was killed by {signal.Signals(-code).name} (is there enough memory for it?)"
        return f"ended with exit code {code} (what it said stands above)"


def _end(workers: list[TokenizerProcess]) -> None:
    """End the processes; they hold nothing that has to be kept."""
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.process.close()
        worker.pipe.close()
    workers.clear()


@dataclass(eq=False)
class ComingDocuments:
    """Documents of one part of the order that are handed out. at: which of the first batch was
    taken last. most: batches."""

    coming: Iterator[OrderPlace]
    most: int
    batches: deque[Batch] = field(default_factory=deque)
    at: int = 0

    @property
    def place(self) -> OrderPlace | None:
        """Place of the document taken last, or of the first; None at the end of the data."""
        return self.batches[0].places[self.at] if self.batches else None


class TokenizedAhead:
    """The documents of an order, tokenized by worker processes.

    The processes start with the first document that is taken, and end with `close`, or when this
    object or its process ends.
    """

    def __init__(
        self, config: DataConfig, source: DocumentSource, tokenizer: Tokenizer, workers: int
    ) -> None:
        """source: can be pickled. tokenizer: the one that `config` names, for what workers fail
        at."""
        self._config, self._source, self._tokenizer = config, source, tokenizer
        self._count = workers
        self._workers: list[TokenizerProcess] = []
        self._parts: list[ComingDocuments] = []
        self._finalizer: Finalize | None = None

    def take(self, order: DocumentOrder) -> TokenizedDocument:
        """The document whose turn it is. To be called once or more for each turn, without a gap.

        Raises what reading it in this process raises, and DataError where a worker is lost.
        """
        if not self._workers:
            self._start()
        if not self._parts:
            most = [max(2, ceil(share * AHEAD * self._count)) for share in order.shares()]
            self._parts = list(map(ComingDocuments, order.coming(), most))
            for part in self._parts:
                self._hand_out(part)
        place, part = order.place, self._parts[order.place.part]
        if part.place != place:
            self._go_on(part)
        if part.place != place:
            raise RuntimeError(f"expected the document at {part.place}, not at {place}")
        return self._outcome(part.batches[0], part.at)

    def forget(self) -> None:
        """The order goes on elsewhere: what is handed out is not needed any more."""
        self._parts = []

    def interrupt(self) -> None:
        """End what another thread waits for in `take`; it gets a DataError. `close` follows."""
        for worker in list(self._workers):
            worker.process.kill()

    def close(self) -> None:
        """End the processes; the next document that is taken starts others."""
        self.forget()
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None

    def _start(self) -> None:
        # Before multiprocessing itself ends its processes by SIGTERM, which workers do not heed.
        self._finalizer = Finalize(self, _end, args=(self._workers,), exitpriority=10)
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    def _start_all(self) -> None:
        work = Work(self._config, self._source, self._tokenizer.fingerprint)
        with contextlib.closing(HandedOver(work)) as handed:
            for number in range(self._count):
                limit = self._config.worker_timeout
                self._workers.append(TokenizerProcess(number, handed, limit))

    def _go_on(self, part: ComingDocuments) -> None:
        """To the next document of a part."""
        part.at += 1
        if part.batches and part.at == len(part.batches[0].places):
            part.batches.popleft()
            part.at = 0
            self._hand_out(part)

    def _hand_out(self, part: ComingDocuments) -> None:
        while len(part.batches) < part.most and (places := list(islice(part.coming, BATCH))):
            batch = Batch(places, self._next_worker())
            batch.worker.ask(batch)
            part.batches.append(batch)

    def _next_worker(self) -> TokenizerProcess:
        """The worker that has least to do, as far as is known; none has more than AHEAD batches to
        answer, also of those that were forgotten."""
        alive = [worker for worker in self._workers if not worker.is_lost]
        ready = wait([worker.pipe for worker in alive], timeout=0)
        for worker in alive:
            if worker.pipe in ready:
                worker.receive()
        found = min(self._workers, key=lambda worker: (worker.is_lost, len(worker.asked)))
        while len(found.asked) >= AHEAD and not found.is_lost:
            found.receive()
        return found

    def _outcome(self, batch: Batch, number: int) -> TokenizedDocument:
        index = batch.places[number].document
        while batch.outcomes is None:
            if batch.worker.is_lost:
                raise DataError(
                    f"a worker that tokenizes {batch.worker.in_words()}; document {index} was to "
                    "come from it. Resume the run: any number of data.workers, also 0, goes on "
                    "with the same documents"
                )
            batch.worker.receive()
        outcome = batch.outcomes[number]
        if isinstance(outcome, TokenizedDocument):
            return _with_type(outcome, np.dtype(np.int64))
        found = read_tokenized(self._source, index, self._tokenizer)
        raise DataError(
            f"{found.where}: a worker failed at it ({outcome}), but this process does not. Resume "
            "the run with another number of data.workers, such as 0"
        )
