"""Worker processes that read and tokenize documents ahead of their turn.

    order ─▶ batches of indices, a bounded number ahead ─▶ pipes ─▶ workers: read, tokenize
    stream ◀── in order ◀── answers, each batch from its own worker ◀── pipes ◀──┘

The live stream takes documents by an order of epochs (`take`), a build of shards takes all of them
(`each`). Workers get the opened source once, so that they see the files that this process saw, and
build their tokenizer from the config. They hold no state: what was handed out may be forgotten at
any time, and is handed out anew. So a run with workers is the run without, and a checkpoint says
nothing of them.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
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

from packgraph.graphs.errors import PackgraphWarning
from packgraph.train.config.sections import DataConfig
from packgraph.train.data.order import DocumentOrder, OrderPlace
from packgraph.train.data.source import DataError, DocumentSource
from packgraph.train.data.tokenizer import Tokenizer, build_tokenizer, read_tokenized
from packgraph.train.signals import SIGNALS

# With BPE a batch of documents of 240 tokens takes a worker 4 ms, and all that is ahead 130 ms:
# more than a scheduler takes a core away for.
BATCH = 8  # documents
AHEAD = 32  # batches for each worker that are handed out and not taken
SECONDS = 10.0  # that a process that closed its pipe has to end
TICK = 0.5  # seconds between two looks at a worker that does not answer
SILENCE = 30.0  # seconds without an answer until that is told
RESUME = "Resume the run: any number of data.workers, also 0, goes on with the same documents"


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
    """Work of a worker.

    Attributes:
        config: Names the tokenizer.
        source: Can be pickled.
        fingerprint: Of the tokenizer that this process has.
        answer: Function of a module that makes what is sent back of a document, out of the source,
            its index and the tokenizer.
    """

    config: DataConfig
    source: DocumentSource
    fingerprint: str
    answer: Callable[[DocumentSource, int, Tokenizer], Any] = read_tokenized


class Failure(NamedTuple):
    """Answer of a worker that failed at a document. why: its error."""

    why: str


def serve(pipe: Connection, work: Work) -> None:
    """Answer batches of indices until the pipe is closed or the parent ends; what a worker runs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def end_with_parent() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    problem = ""
    try:
        tokenizer = build_tokenizer(work.config)
        if tokenizer.fingerprint != work.fingerprint:
            problem = f"{work.config.tokenizer} was changed since the run opened it"
    except DataError as error:
        problem = str(error)
    thread = ThreadPoolExecutor(1)
    with contextlib.suppress(EOFError, OSError):  # nobody asks any more
        while True:
            indices: list[int] = pipe.recv()
            failures = [Failure(problem)] * len(indices)
            pipe.send(failures if problem else _answers(thread, work, indices, tokenizer))


def _answers(
    thread: Executor, work: Work, indices: Sequence[int], tokenizer: Tokenizer
) -> list[Any]:
    """Answers to a batch. thread: keeps whatever error a document meets, so the worker goes on."""
    answers: list[Any] = []

    def read() -> None:
        for index in indices[len(answers) :]:
            answers.append(work.answer(work.source, index, tokenizer))

    while len(answers) < len(indices):
        error = thread.submit(read).exception()
        if error is not None:
            answers.append(Failure(f"{type(error).__name__}: {error}"))
    return answers


@dataclass(eq=False)
class Batch:
    """Documents that are handed out together. answers: None until they are received."""

    places: list[OrderPlace]
    worker: "TokenizerProcess"
    answers: list[Any] | None = None


class TokenizerProcess:
    """A worker and its pipe.

    Attributes:
        asked: Batches that it has not answered yet, in order.
        is_lost: It ended, or did not answer in time.
    """

    def __init__(self, number: int, work: HandedOver, limit: float) -> None:
        """work: of `Work`. limit: seconds that an answer may take. Raises OSError and ValueError
        where it cannot be started."""
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
        with contextlib.suppress(OSError):  # what it has answered before is still to be read
            self.pipe.send([place.document for place in batch.places])

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
            answers = self.pipe.recv()
        except (EOFError, OSError):
            self.is_lost = True
            return
        self.asked.popleft().answers = answers

    def _tell(self, waited: float) -> None:
        asked = ", ".join(str(place.document) for place in self.asked[0].places)
        warnings.warn(
            f"a worker that tokenizes (process {self.process.pid}) has not answered for "
            f"{waited:g} s; it has documents {asked}. It is waited for up to {self._limit:g} s "
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
    """Documents of one part of the order that are handed out.

    Attributes:
        coming: Places that are not handed out yet.
        most: Documents that are handed out and not taken.
        waiting: Those, by place, batch and number in that; the first one was taken last.
    """

    coming: Iterator[OrderPlace]
    most: int
    waiting: deque[tuple[OrderPlace, Batch, int]] = field(default_factory=deque)

    @property
    def place(self) -> OrderPlace | None:
        """Place of the document taken last, or of the first; None at the end of the data."""
        return self.waiting[0][0] if self.waiting else None


class TokenizedAhead:
    """Documents that worker processes tokenize, or this one where there are none.

    The processes start with the first document that is taken, and end with `close`, or when this
    object or its process ends.
    """

    def __init__(
        self, work: Work, tokenizer: Tokenizer, workers: int, remedy: str = RESUME
    ) -> None:
        """tokenizer: the one that `work` names, for what workers fail at. remedy: what to do where
        a worker is lost."""
        self._work, self._tokenizer, self._count, self._remedy = work, tokenizer, workers, remedy
        self._workers: list[TokenizerProcess] = []
        self._parts: list[ComingDocuments] = []
        self._finalizer: Finalize | None = None

    def take(self, order: DocumentOrder) -> Any:
        """The document whose turn it is. To be called once or more for each turn, without a gap.

        Raises what reading it in this process raises, and DataError where a worker is lost.
        """
        if not self._count:
            return self._here(order.turn.place.document)
        if not self._parts:
            most = [BATCH * max(2, ceil(share * AHEAD * self._count)) for share in order.shares()]
            self._begin(list(map(ComingDocuments, order.coming(), most)))
        place, part = order.turn.place, self._parts[order.turn.place.part]
        if part.place != place:
            self._go_on(part)
        if part.place != place:
            raise RuntimeError(f"expected the document at {part.place}, not at {place}")
        return self._answer(part)

    def each(self, indices: Iterable[int]) -> Iterator[Any]:
        """All documents of these indices, in this order. Raises what `take` raises."""
        if not self._count:
            yield from map(self._here, indices)
            return
        places = (OrderPlace(0, 0, index, index) for index in indices)
        part = ComingDocuments(places, BATCH * AHEAD * self._count)
        self._begin([part])
        while part.place is not None:
            yield self._answer(part)
            self._go_on(part)

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

    def _here(self, index: int) -> Any:
        return self._work.answer(self._work.source, index, self._tokenizer)

    def _begin(self, parts: list[ComingDocuments]) -> None:
        """Start the workers, if they are not, and hand out the first documents."""
        if not self._workers:
            # Before multiprocessing itself ends them by SIGTERM, which workers do not heed.
            self._finalizer = Finalize(self, _end, args=(self._workers,), exitpriority=10)
            with contextlib.ExitStack() as failed:
                failed.callback(self.close)
                self._start()
                failed.pop_all()
        self._parts = parts
        for part in parts:
            self._hand_out(part)

    def _start(self) -> None:
        with contextlib.closing(HandedOver(self._work)) as handed:
            for number in range(self._count):
                limit = self._work.config.worker_timeout
                try:
                    self._workers.append(TokenizerProcess(number, handed, limit))
                except (OSError, ValueError) as error:
                    raise DataError(
                        "a worker that tokenizes was killed as it started, or could not be "
                        f"({error}). {self._remedy}"
                    ) from error

    def _go_on(self, part: ComingDocuments) -> None:
        """To the next document of a part."""
        if part.waiting:
            part.waiting.popleft()
            self._hand_out(part)

    def _hand_out(self, part: ComingDocuments) -> None:
        while len(part.waiting) <= part.most - BATCH and (
            places := list(islice(part.coming, BATCH))
        ):
            batch = Batch(places, self._next_worker())
            batch.worker.ask(batch)
            part.waiting += ((place, batch, number) for number, place in enumerate(places))

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

    def _answer(self, part: ComingDocuments) -> Any:
        """What is sent back of the document that a part is at."""
        place, batch, number = part.waiting[0]
        index = place.document
        while batch.answers is None:
            if batch.worker.is_lost:
                raise DataError(
                    f"a worker that tokenizes {batch.worker.in_words()}; document {index} was to "
                    f"come from it. {self._remedy}"
                )
            batch.worker.receive()
        answer = batch.answers[number]
        if not isinstance(answer, Failure):
            return answer
        self._here(index)
        raise DataError(
            f"{self._work.source[index].where}: a worker failed at it ({answer.why}), but this "
            "process does not. Go on without workers: data.workers = 0 in a run, --workers 1 in a "
            "build"
        )
