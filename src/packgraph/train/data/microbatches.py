"""The stream of packs of a run, which can be stopped and continued between any two packs.

All state is integers: epoch and position of the next document in the order of that epoch, and for
each waiting document its index and part. So a checkpoint is small, and continuing tokenizes at most
the window again. Nothing of it is of the workers that tokenize ahead (`workers.py`), where there
are any: the stream is the same.

The window is not emptied between epochs: a pack may hold the last documents of one and the first of
the next.

With dynamic context parallelism steps are planned as a whole: which documents share a row, on how
many ranks.

    documents ─▶ wait, in order of arrival ─▶ plan of one step ─▶ its packs, microstep by microstep

Enough documents wait to fill a step, and `data.window` more for its gaps; what finds no room waits
for the next one, at the front. All ranks read the whole stream and make the same plan, so nothing
is sent. The state is that of `Microbatches`, to be taken between two steps: of plans it knows only
the costs that the run has measured, so that a run that goes on makes the plans that it would have
made; it may go on with other ranks.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, repeat
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from packgraph.packing.batch import PackedBatch, count_pairs
from packgraph.packing.capacity import Capacity, CapacitySet
from packgraph.packing.document import Document, PackableDocument
from packgraph.packing.pack import PackingWindow, PackReport, PlannedPack, fitting_parts
from packgraph.parallel.context.plan import ContextPlan, plan_context
from packgraph.parallel.context.request import ContextCost, ContextRequest
from packgraph.train.config.reading import shown
from packgraph.train.config.sections import DataConfig
from packgraph.train.data.order import (
    LARGEST,
    DocumentOrder,
    KnownAhead,
    SourcePart,
    WeightedSource,
    is_count,
)
from packgraph.train.data.pairs import Pair, capacities_of_pairs
from packgraph.train.data.source import (
    BadDocumentError,
    BadDocuments,
    DataError,
    DocumentSource,
    StoredSource,
)
from packgraph.train.data.tokenizer import (
    TokenizedDocument,
    Tokenizer,
    check_largest,
    is_made_by,
    read_tokenized,
)
from packgraph.train.data.workers import TokenizedAhead, Work

VERSION = 2
StepPack = PackedBatch | PlannedPack  # facts of it are known to all ranks
Pack = TypeVar("Pack", bound=StepPack)


@runtime_checkable
class StepSource(Protocol[Pack]):
    """A stream whose steps are planned as a whole."""

    def next_step(self) -> list[Pack]:
        """The packs of the next step; none at the end."""
        ...


Packs = Iterator[PackedBatch] | StepSource[PackedBatch]


def take_step(packs: Iterator[Pack] | StepSource[Pack], tokens_per_step: int) -> list[Pack]:
    """Packs from `packs` until they hold `tokens_per_step` real tokens (or `packs` ends); a step as
    it is planned."""
    if isinstance(packs, StepSource):
        return packs.next_step()
    taken, tokens = list[Pack](), 0
    while tokens < tokens_per_step and (pack := next(packs, None)) is not None:
        taken.append(pack)
        tokens += pack.num_tokens
    return taken


def overlong_of(
    document: PackableDocument, config: DataConfig
) -> Literal["error", "split", "drop"]:
    """Action for a document longer than every capacity. One that is predicted in part, such as a
    chat, is dropped where others are split: an answer is never cut from its prompt."""
    is_text = document.loss_tokens == len(document) - 1
    return "drop" if config.overlong == "split" and not is_text else config.overlong


def _name(found: TokenizedDocument, part: PackableDocument) -> str:
    """The place of a part of a document, for messages."""
    return found.where + (" with both answers" if isinstance(part, Pair) else "")


class Waiting(NamedTuple):
    """A document that waits to be packed.

    Attributes:
        source_index: Place in the source.
        part: Number among the documents that it gives.
        tokens: In it.
        loss_tokens: Those to be predicted.
        document: None where it is all that is stored at the index; it is looked up to be read.
    """

    source_index: int
    part: int
    tokens: int
    loss_tokens: int
    document: PackableDocument | None


class Microbatches:
    """Iterator of packs on the host.

    report: counts of packing. empty_documents: texts without a token, left out.
    unlabelled_documents: documents in which no token is to be predicted, such as a chat without an
    assistant's turn, left out too.
    """

    def __init__(
        self,
        config: DataConfig,
        source: DocumentSource,
        tokenizer: Tokenizer,
        capacities: Iterable[Capacity],
        multiple: int = 1,
    ) -> None:
        """multiple: of places that documents take up; no part of the state, so a run may go on with
        another.

        Raises ValueError for bad capacities, DataError for an empty source."""
        if not len(source):
            raise DataError("the source has no documents")
        self._skips_bad = config.on_bad == "skip"
        if not self._skips_bad:
            check_largest(*source.largest_id, tokenizer.vocab_size)
        self._config, self._source, self._tokenizer = config, source, tokenizer
        self._capacities = CapacitySet(capacities, multiple)
        self.report = PackReport()
        self.empty_documents = self.unlabelled_documents = 0
        self._first_unlabelled = ""
        self._bad = BadDocuments()
        self._window = self._new_window()
        parts = source.parts if isinstance(source, WeightedSource) else [SourcePart(len(source))]
        self._order = DocumentOrder(parts, config.seed, config.epochs)
        self._known: KnownAhead | None = None
        if isinstance(source, StoredSource) and is_made_by(source.made, tokenizer):
            self._known = KnownAhead(source, self._order, self._capacities.longest)
        work = Work(config, source, tokenizer.fingerprint)
        self._ahead = TokenizedAhead(work, tokenizer, config.workers)

    def __iter__(self) -> Iterator[PackedBatch]:
        return self

    def __next__(self) -> PackedBatch:
        """The next pack. Raises DataError for a document that cannot be used; the epoch's end is no
        error."""
        planned = self._plan()
        if planned is None:
            raise StopIteration
        return planned.load()

    def plan_step(self, tokens: int) -> list[PlannedPack]:
        """The packs of the next step of so many tokens, which are not read yet."""
        return take_step(iter(self._plan, None), tokens)

    def _plan(self) -> PlannedPack | None:
        """The next pack, None at the end of the data."""
        while (wanted := self._config.window - len(self._window)) > 0 and self._add_next(wanted):
            pass
        assert isinstance(self._window, PackingWindow)
        if not len(self._window):
            return None
        chosen, pack = self._window.take()
        return self._planned(chosen, pack.capacity(self._capacities))

    def _planned(self, chosen: Sequence[Waiting], capacity: Capacity) -> PlannedPack:
        """A pack of these documents; counted."""
        lengths = [one.tokens for one in chosen]
        tokens = sum(lengths)
        self.report.count_pack(len(chosen), tokens, capacity.tokens)
        loss_tokens = sum([one.loss_tokens for one in chosen])
        return PlannedPack(
            capacity,
            len(chosen),
            tokens,
            loss_tokens,
            count_pairs(lengths),
            partial(self._documents_of, chosen),
        )

    def _documents_of(self, chosen: Sequence[Waiting]) -> list[Document]:
        """These documents, from where they are. Raises DataError for one that cannot be read, or is
        not what it was."""
        documents = [self._stored(one) if one.document is None else one.document for one in chosen]
        return [document.load() for document in documents]

    def _stored(self, one: Waiting) -> PackableDocument:
        document = self._source[one.source_index]
        stored = document.stored
        if stored is None or len(stored) != 1 or len(stored[0]) != one.tokens:
            raise DataError(f"{document.where}: damaged: it has not {one.tokens} tokens any more")
        return stored[0]

    @property
    def bad(self) -> BadDocuments:
        """Documents that were left out as bad: when the source was opened, and since."""
        return self._source.bad + self._bad

    def _new_window(self) -> "PackingWindow[Waiting] | InOrder":
        """Makes the window of waiting documents."""
        return PackingWindow[Waiting](self._capacities)

    def state_dict(self) -> dict[str, Any]:
        """State of the stream, JSON-able, to be taken between two packs."""
        return {
            "version": VERSION,
            "identity": self.identity(),
            **self._order.state_dict(),
            "waiting": [[one.source_index, one.part] for one in self._window.items()],
            "report": self.report.state_dict(),
            "empty_documents": self.empty_documents,
            "unlabelled_documents": self.unlabelled_documents,
        } | ({"bad": asdict(self._bad)} if self._bad.count else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises DataError when this stream is not the same, naming
        what differs."""
        if not isinstance(state, dict) or state.get("version", VERSION) != VERSION:
            found = state.get("version") if isinstance(state, dict) else shown(state)
            raise DataError(
                f"the data position was written in version {found!r} of its format, this program "
                "reads "
                f"version {VERSION}"
            )
        problem = self._damage(state)
        if problem is not None:
            raise DataError(
                f"the data position is damaged: {problem}; go on from another checkpoint"
            )
        differences = [
            f"{name} was {state['identity'].get(name)!r}, is {value!r}"
            for name, value in self.identity().items()
            if state["identity"].get(name) != value
        ]
        if differences:
            raise DataError(
                "the run cannot go on with other data than before: " + "; ".join(differences)
            )
        # Encoding and cutting count in the report, so the counts of the state come last.
        self._window = self._new_window()
        parts: dict[int, list[PackableDocument]] = {}
        for index, part in state["waiting"]:
            if index not in parts:
                read = partial(read_tokenized, self._source, index, self._tokenizer)
                parts[index] = self._parts(read)
            if part >= len(parts[index]):
                raise DataError(
                    f"the data position is damaged: document {index} has no part {part}; go on "
                    "from "
                    "another checkpoint"
                )
            self._wait(index, {part: parts[index][part]})
        self._order.load_state_dict(state)
        self._ahead.forget()
        self.report.load_state_dict(state["report"])
        self.empty_documents = state["empty_documents"]
        self.unlabelled_documents = state["unlabelled_documents"]
        bad = state.get("bad", {"count": 0, "first": []})
        self._bad = BadDocuments(bad["count"], [*bad["first"]])

    def _damage(self, state: dict[str, Any]) -> str | None:
        """Returns what is wrong with a state, of these data or not; None if nothing is."""
        own = self.state_dict()
        missing = sorted(own.keys() - state.keys() - {"bad", "cost"})
        if missing:
            return f"it has no {', '.join(missing)}"
        is_known = state["identity"] == own["identity"]
        last = len(self._source) - 1 if is_known else LARGEST
        report, waiting = state["report"], state["waiting"]
        bad = state.get("bad", {"count": 0, "first": []})
        checks = {
            "empty_documents is": is_count(state["empty_documents"], LARGEST),
            "unlabelled_documents is": is_count(state["unlabelled_documents"], LARGEST),
            "identity is": isinstance(state["identity"], dict),
            "report is": isinstance(report, dict)
            and report.keys() == own["report"].keys()
            and all(is_count(value, LARGEST) for value in report.values()),
            "waiting documents are": isinstance(waiting, list)
            and all(
                isinstance(tag, (list, tuple))
                and len(tag) == 2
                and is_count(tag[0], last)
                and is_count(tag[1], LARGEST)
                for tag in waiting
            ),
            "bad documents are": isinstance(bad, dict)
            and is_count(bad.get("count"), LARGEST)
            and isinstance(bad.get("first"), list)
            and all(isinstance(text, str) for text in bad["first"]),
        }
        wrong = self._order.damage(state, bounded=is_known)
        wrong += [
            f"its {what} {shown(state[what.split()[0]])}"
            for what, is_good in checks.items()
            if not is_good
        ]
        return next(iter(wrong), None)

    def _wait(self, index: int, parts: Mapping[int, PackableDocument]) -> None:
        """Let parts of what the source has at `index` wait."""
        items = [
            Waiting(index, part, len(document), document.loss_tokens, document)
            for part, document in parts.items()
        ]
        self._window.extend([one.tokens for one in items], items)

    def _add_next(self, most: int) -> bool:
        """Let the parts of the next document wait, or up to `most` of the next ones where they are
        known ahead; False when all epochs are over."""
        order = self._order
        if order.is_at_end:
            if not order.turn.usable:
                raise DataError(self._nothing_usable())
            self._source.check_unchanged()
            order.begin_epoch()
        if order.is_over:
            return False
        if self._known is not None and (run := self._known.run(most)).indexes:
            columns = run.indexes, repeat(0), run.lengths, run.loss_tokens, repeat(None)
            # As Waiting._make, at a third of its time.
            items = map(tuple.__new__, repeat(Waiting), zip(*columns))
            self._window.extend(run.lengths, items)
            order.advance(len(run.indexes), sum(run.lengths), len(run.indexes))
            return True
        place = order.turn.place
        parts = self._parts(partial(self._ahead.take, order))
        self._wait(place.document, dict(enumerate(parts)))
        order.advance(len(parts), sum(map(len, parts)))
        return True

    def _nothing_usable(self) -> str:
        """Explains why an epoch gave no document to train on, and what to do."""
        reasons = [f"{self.empty_documents} are empty"] if self.empty_documents else []
        if self.report.dropped_documents:
            reasons.append(
                f"{self.report.dropped_documents} were dropped as longer than "
                f"{self._capacities.longest} "
                "tokens (use a larger capacity, or data.overlong = split for texts: an answer is "
                "never cut from its prompt)"
            )
        if self.unlabelled_documents:
            reasons.append(
                f"{self.unlabelled_documents} have no token to predict ({self._first_unlabelled})"
            )
        if self._bad.count:
            reasons.append(f"{self._bad.count} are bad ({self._bad.first[0]})")
        documents = self._order.turn.part.documents
        return f"none of the {documents} documents can be used: {', '.join(reasons)}"

    def interrupt(self) -> None:
        """Let a thread that waits for a process that tokenizes wait no longer; `close` follows."""
        self._ahead.interrupt()

    def close(self) -> None:
        """End the processes that tokenize, if there are any; they begin anew when needed."""
        self._ahead.close()

    def _parts(self, read: Callable[[], TokenizedDocument]) -> list[PackableDocument]:
        """Parts of the document that `read` gives which go into the window."""
        try:
            found = read()
        except BadDocumentError as error:
            if not self._skips_bad:
                raise
            self._bad.add(error)
            return []
        if not found.documents:
            self.empty_documents += 1
        labelled = [whole for whole in found.documents if whole.predicts]
        self.unlabelled_documents += len(found.documents) - len(labelled)
        self._first_unlabelled = self._first_unlabelled or found.why_unlabelled
        limit = self._capacities.longest
        if all(len(whole) <= limit for whole in labelled):
            return labelled
        try:
            return [
                part
                for whole in labelled
                for part in fitting_parts(
                    whole, limit, overlong_of(whole, self._config), self.report, _name(found, whole)
                )
            ]
        except ValueError as error:
            raise DataError(f"{error} (data.overlong)") from error

    def identity(self) -> dict[str, Any]:
        """Facts that must be equal for the stream to be the same, JSON-able."""
        return {
            "documents": len(self._source),
            "data fingerprint": self._source.fingerprint(),
            "tokenizer": self._tokenizer.fingerprint,
            "data.seed": self._config.seed,
            "data.window": self._config.window,
            "data.overlong": self._config.overlong,
            "capacities": [[c.tokens, c.documents, c.bound] for c in self._capacities.sorted],
        }


class PairedMicrobatches(Microbatches):
    """Packs of whole pairs: documents 2k and 2k + 1 of a pack are the chosen and the rejected
    answer of its pair k."""

    def __init__(
        self,
        config: DataConfig,
        source: DocumentSource,
        tokenizer: Tokenizer,
        capacities: Iterable[Capacity],
    ) -> None:
        """source: of pairs. capacities: of at least 2 documents, and no longest one. Raises as
        `Microbatches` does."""
        self._whole = capacities_of_pairs(capacities)
        super().__init__(config, source, tokenizer, self._whole)

    def _planned(self, chosen: Sequence[Waiting], capacity: Capacity) -> PlannedPack:
        planned = super()._planned(chosen, capacity)
        lengths = map(len, self._documents_of(chosen))
        return replace(
            planned,
            capacity=self._whole[capacity],
            num_documents=2 * len(chosen),
            num_pairs=count_pairs(lengths),
        )

    def _documents_of(self, chosen: Sequence[Waiting]) -> list[Document]:
        pairs = super()._documents_of(chosen)
        return [answer for pair in pairs if isinstance(pair, Pair) for answer in pair.answers()]


class PlannedSteps(Microbatches):
    """Planned steps on the host; as `Microbatches`, but `next_step` takes the place of `next`.

    plan: of the step that was taken last, None before the first. Its figures are summed up for
    `summary`. request: of the next step.
    """

    def __init__(
        self,
        config: DataConfig,
        source: DocumentSource,
        tokenizer: Tokenizer,
        capacities: Iterable[Capacity],
        request: ContextRequest,
        multiple: int = 1,
    ) -> None:
        """capacities: of the largest group. request: of every step; its microsteps are the
        microbatches of a rank. multiple: of places that documents take up in any row."""
        self.request = self._estimated = request
        self.plan: ContextPlan | None = None
        self._balances: list[float] = []
        self._sizes: Counter[int] = Counter()
        super().__init__(config, source, tokenizer, capacities, multiple)

    def __next__(self) -> PackedBatch:
        """Raises TypeError: single packs of a planned step mean nothing."""
        raise TypeError("these packs are planned a step at a time; take them by next_step()")

    def next_step(self) -> list[PackedBatch]:
        """The packs of the next step, microstep by microstep and by first rank; empty at the end of
        the data.

        Raises DataError for a document that cannot be used.
        """
        planned = self.plan_step()
        if planned and self.plan is not None:
            self.count(self.plan)
        return [pack.load() for pack in planned]

    def plan_step(self, tokens: int = 0) -> list[PlannedPack]:
        """See `Microbatches.plan_step`; a step has the tokens of the request."""
        while (wanted := self._wanted()) > 0 and self._add_next(wanted):
            pass
        waiting = self._waiting
        if not len(waiting):
            return []
        self.plan = plan_context(
            [self._capacities.places(length) for length in waiting.lengths], self.request
        )
        groups = [group for microstep in self.plan.microsteps for group in microstep]
        packs = [
            self._planned([waiting.documents[place] for place in group.documents], group.bucket)
            for group in groups
        ]
        waiting.keep(self.plan.left)
        return packs

    def count(self, plan: ContextPlan) -> None:
        """A step was made by this plan."""
        self._balances.append(plan.balance)
        self._sizes.update(group.size for microstep in plan.microsteps for group in microstep)

    @property
    def is_measured(self) -> bool:
        """True if plans go by measured costs, not by estimates."""
        return self.request is not self._estimated

    def plan_by(self, cost: ContextCost) -> None:
        """Plan by these costs, which were measured, from the next step on."""
        self.request = replace(self._estimated, cost=cost)

    def state_dict(self) -> dict[str, Any]:
        """State as that of `Microbatches`, with the measured costs, if any."""
        return super().state_dict() | (
            {"cost": vars(self.request.cost)} if self.is_measured else {}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state as `Microbatches` does. Rows are cut by this run, not by the one that the
        costs were measured in."""
        self.request = self._estimated
        super().load_state_dict(state)
        if "cost" in state:
            self.plan_by(ContextCost(**state["cost"] | {"zigzag": self._estimated.cost.zigzag}))

    def summary(self) -> dict[str, Any]:
        """Statistics of this process's steps (`count`): balance, the lower bound of a step's time
        over its prediction; rows by number of ranks; the costs that the last step was planned
        by."""
        if not self._balances:
            return {}
        return {
            "cost": vars(self.request.cost),
            "cost_is_measured": self.is_measured,
            "balance_mean": sum(self._balances) / len(self._balances),
            "balance_least": min(self._balances),
            "rows_by_ranks": {str(size): count for size, count in sorted(self._sizes.items())},
        }

    def _wanted(self) -> int:
        """Least number of documents missing to fill a step and a window behind it."""
        assert self.request.microsteps is not None
        room = self.request.microsteps * self.request.world * self.request.tokens
        return self._config.window - self._waiting.behind(room)

    def _new_window(self) -> "InOrder":
        self._waiting = InOrder()
        return self._waiting


class InOrder:
    """Documents that wait in order of arrival."""

    def __init__(self) -> None:
        self.documents: list[Waiting] = []
        self.lengths: list[int] = []
        self._through: list[int] = []  # tokens of all documents up to each

    def __len__(self) -> int:
        return len(self.documents)

    def extend(self, lengths: Sequence[int], items: Iterable[Waiting]) -> None:
        """Let documents of these lengths wait, in this order."""
        before = self._through[-1] if self._through else 0
        self._through += [before + tokens for tokens in accumulate(lengths)]
        self.documents += items
        self.lengths += lengths

    def items(self) -> Iterator[Waiting]:
        """All that wait, in order."""
        return iter(self.documents)

    def behind(self, tokens: int) -> int:
        """Number of documents that wait behind the first ones with `tokens` tokens together."""
        return len(self) - bisect_left(self._through, tokens) - 1

    def keep(self, places: Sequence[int]) -> None:
        """Go on with the documents at these places, in this order."""
        kept = [self.documents[place] for place in places]
        self.documents, self.lengths, self._through = [], [], []
        self.extend([one.tokens for one in kept], kept)
