"""What a source of documents is: a finite list with access by index; and the errors of data.

Access by index is what makes a run resumable: the position of a run in its data is a handful of
integers, whatever the source. Nothing is tokenized here.

The message of an error is all a user needs: where (file:line), what, and what to do. Bad documents
that are left out are counted, with the places of the first ones (`BadDocuments`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from packgraph.packing.document import PackableDocument
from packgraph.train.config.values import SHOWN, shown

PLACES_KEPT = 5
MOST_NAMED = 8  # columns in one message
ROLES = ("system", "user", "assistant", "tool")
# Who speaks in ShareGPT's `conversations`, as roles.
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
PREFERENCES = ("chosen", "rejected")


class DataError(ValueError):
    """Data that cannot be trained on: malformed, empty, missing, or not those a checkpoint was
    written with."""


class BadDocumentError(DataError):
    """One document that cannot be trained on, whatever the options say; `data.on_bad = skip` leaves
    it out."""


class DataChangedError(DataError):
    """A file of the run's data was replaced, written to or removed since it was opened."""


class MissingPackageError(DataError, ImportError):
    """A source or tokenizer that needs an optional package which is not installed."""


@dataclass
class BadDocuments:
    """A count of bad documents. first: what is wrong with the first PLACES_KEPT of them, with file
    and line."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, error: BadDocumentError) -> None:
        """Count the document that `error` is about."""
        self.count += 1
        if len(self.first) < PLACES_KEPT:
            self.first.append(str(error))

    def state_dict(self) -> dict[str, Any]:
        """The count and the places, JSON-able."""
        return {"count": self.count, "first": list(self.first)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from `state`."""
        self.count, self.first = state["count"], list(state["first"])

    def __add__(self, other: "BadDocuments") -> "BadDocuments":
        return BadDocuments(self.count + other.count, [*self.first, *other.first][:PLACES_KEPT])


@dataclass(frozen=True)
class Message:
    """One turn of a chat. role: one of ROLES. learned: whether it is predicted, where an assistant
    says it."""

    role: str
    content: str
    learned: bool = True


@dataclass(frozen=True)
class TokenizerName:
    """The tokenizer that stored tokens were made with."""

    fingerprint: str
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.fingerprint})"


@dataclass(frozen=True)
class SourceDocument:
    """One document before tokenization; exactly one of text, messages, row and stored is not None.

    where: place it came from, such as `file:line`, for messages. row: an already tokenized row
    (`input_ids`, and what else `packgraph.pack` takes). stored: the documents that it was tokenized
    into, by the tokenizer `made`; their tokens are read when they are used. prompt: what stands
    before text and is not predicted. rejected: of a preference, whose chosen answer this is, the
    same with the other answer.
    """

    where: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    row: Mapping[str, Any] | None = None
    stored: Sequence[PackableDocument] | None = None
    made: TokenizerName | None = None
    prompt: str = ""
    rejected: "SourceDocument | None" = None


@runtime_checkable
class StoredSource(Protocol):
    """What a `DocumentSource` of stored tokens has besides: lengths of many documents at once.

    made: the tokenizer that all of them were stored with; None where there is no such one.
    """

    @property
    def made(self) -> TokenizerName | None: ...

    def lengths(self, indexes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and loss tokens of what is stored at each of `indexes`, where that is one
        document, 0 elsewhere."""
        ...


class DocumentSource(Protocol):
    """A finite list of documents, the same each time it is opened."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> SourceDocument: ...

    @property
    def bad(self) -> BadDocuments:
        """Documents that were found bad and left out when the source was opened."""
        ...

    @property
    def largest_id(self) -> tuple[int, str]:
        """Largest token id or label of tokenized rows that is known so far, and the place of its
        row; (-1, "") if none is."""
        ...

    def check_unchanged(self) -> None:
        """Raise DataChangedError naming a file that is not what it was when the source was
        opened."""
        ...

    def fingerprint(self) -> str:
        """Text that changes when the documents change; a checkpoint is resumed on the same data
        only."""
        ...


def document_of_row(row: Mapping[str, Any], where: str, text_column: str) -> SourceDocument:
    """The document of one JSON object or table row.

    It has text, a chat as `messages` or ShareGPT's `conversations`, `prompt` and `completion`,
    `chosen` and `rejected` with or without a `prompt`, or tokens. Raises BadDocumentError naming
    `where`.
    """
    if row.get(text_column) is not None:
        return SourceDocument(where, text=_text(row[text_column], f"{where}: `{text_column}`"))
    if row.get("messages") is not None:
        return SourceDocument(where, messages=_messages(row["messages"], where))
    if row.get("conversations") is not None:
        return SourceDocument(where, messages=_conversations(row["conversations"], where))
    if row.get("prompt") is not None and row.get("completion") is not None:
        return _answered(row["prompt"], row["completion"], where, "completion")
    if any(row.get(name) is not None for name in PREFERENCES):
        return _preference(row, where)
    if row.get("input_ids") is not None:
        return SourceDocument(where, row=row)
    names = sorted(row)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    found = ", ".join(_cut(name) for name in names[:MOST_NAMED]) + more or "nothing"
    raise BadDocumentError(
        f"{where}: expected `{text_column}`, `messages`, `conversations`, `prompt` and "
        f"`completion`, `chosen` and `rejected`, or `input_ids`, found {found}. Another column can "
        "be named by data.text_column"
    )


def preference_notes(documents: DocumentSource) -> list[str]:
    """What is to be said of documents whose first one is a preference."""
    try:
        first = documents[0]
    except BadDocumentError:  # left out, or named when its turn comes
        return []
    if first.rejected is None:
        return []
    return [
        f"{first.where}: a preference. Training is on the chosen answer alone, by the loss of its "
        "tokens; for a loss of both see examples/dpo.py"
    ]


def _cut(name: str) -> str:
    return name if len(name) <= SHOWN else name[:SHOWN] + "…"


def _messages(messages: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise BadDocumentError(
            f'{where}: `messages` must be a list of {{"role", "content"}} with at least one entry'
        )
    turns = []
    for number, message in enumerate(messages):
        name = f"{where}: message {number}"
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise BadDocumentError(
                f"{name} must be an object with `role` and `content`, got {str(message)[:80]!r}"
            )
        if message["role"] not in ROLES:
            raise BadDocumentError(
                f"{name} has role {shown(message['role'])}; known roles: {', '.join(ROLES)}"
            )
        turns.append(Message(message["role"], _text(message["content"], f"{name}, content")))
    return tuple(turns)


def _conversations(turns: Any, where: str) -> tuple[Message, ...]:
    """The messages of ShareGPT's list of {"from", "value"}."""
    if not isinstance(turns, list) or not turns:
        raise BadDocumentError(
            f'{where}: `conversations` must be a list of {{"from", "value"}} with at least one '
            "entry"
        )
    found = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
            found.append(turn)  # of `messages`, or refused as one
            continue
        speaker = turn["from"]
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise BadDocumentError(
                f"{where}: turn {number} is from {shown(speaker)}; known are {', '.join(SPEAKERS)}"
            )
        found.append({"role": SPEAKERS[speaker], "content": turn["value"]})
    return _messages(found, where)


def _answered(prompt: Any, answer: Any, where: str, name: str) -> SourceDocument:
    """Two texts, or two parts of a chat, of which the second is predicted. name: of its column."""
    if isinstance(prompt, list) != isinstance(answer, list):
        raise BadDocumentError(
            f"{where}: `prompt` and `{name}` must both be texts, or both lists of messages"
        )
    if not isinstance(prompt, list):
        text = _text(answer, f"{where}: `{name}`")
        return SourceDocument(where, text=text, prompt=_text(prompt, f"{where}: `prompt`"))
    asked = _messages(prompt, where) if prompt or name == "completion" else ()
    turns = tuple(replace(turn, learned=False) for turn in asked)
    return SourceDocument(where, messages=(*turns, *_messages(answer, where)))


def _preference(row: Mapping[str, Any], where: str) -> SourceDocument:
    """The chosen answer, and beside it the rejected one. Without `prompt` (the implicit form of
    TRL), or with one as text beside whole chats, it is what both begin with."""
    given: Any = row.get("prompt")
    chosen: Any = row.get("chosen")
    rejected: Any = row.get("rejected")
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise BadDocumentError(
            f"{where}: `chosen` and `rejected` must both be texts, or both lists of messages"
        )
    if not isinstance(chosen, list):
        chosen = _text(chosen, f"{where}: `chosen`")
        rejected = _text(rejected, f"{where}: `rejected`")
    if given is None or (isinstance(given, str) and isinstance(chosen, list)):
        shared = _shared(chosen, rejected)
        given, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not chosen or not rejected:
        raise BadDocumentError(
            f"{where}: `chosen` or `rejected` has no answer; where one of them begins with the "
            "other, name what both answer as `prompt`"
        )
    found, other = (
        _answered(given, answer, where, name)
        for name, answer in zip(PREFERENCES, (chosen, rejected), strict=True)
    )
    return replace(found, rejected=other)


def _shared(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """How many characters or messages two answers begin with; a space before words is theirs."""
    pairs = zip(chosen, rejected, strict=False)
    shared = next(
        (place for place, (one, other) in enumerate(pairs) if one != other),
        min(len(chosen), len(rejected)),
    )
    return shared - (isinstance(chosen, str) and chosen[:shared].endswith(" "))


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadDocumentError(f"{name} must be a text, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadDocumentError(
            f"{name} is not valid Unicode ({error.reason} at character {error.start})"
        ) from error
    return value
