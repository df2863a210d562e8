"""Sources of documents, finite lists with access by index, and the errors of data.

Access by index is what makes a run resumable: the position of a run in its data is a handful of
integers, whatever the source. Nothing is tokenized here.

The message of an error is all a user needs: where (file:line), what, and what to do. Bad documents
that are left out are counted, with the places of the first ones (`BadDocuments`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from packgraph.packing.document import PackableDocument

PLACES_KEPT = 5
ROLES = ("system", "user", "assistant", "tool")


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

    def add(self, error: BadDocumentError | str) -> None:
        """Count the document that `error` is about."""
        self.count += 1
        if len(self.first) < PLACES_KEPT:
            self.first.append(str(error))

    def __add__(self, other: "BadDocuments") -> "BadDocuments":
        return BadDocuments(self.count + other.count, [*self.first, *other.first][:PLACES_KEPT])


@dataclass(frozen=True)
class Message:
    """One turn of a chat.

    Attributes:
        role: One of ROLES, or another that a chat template knows.
        content: Its words.
        learned: Whether it is predicted, where an assistant says it.
        given: Further fields for a chat template, such as `tool_calls`; `content` where that is
            None or a list of texts.
    """

    role: str
    content: str
    learned: bool = True
    given: Mapping[str, Any] = field(default_factory=dict)


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
    same with the other answer. is_pair: both are to be learned from. arguments: of a chat for its
    template, such as `tools`. unread: columns of its row that were not read.
    """

    where: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    row: Mapping[str, Any] | None = None
    stored: Sequence[PackableDocument] | None = None
    made: TokenizerName | None = None
    prompt: str = ""
    rejected: "SourceDocument | None" = None
    is_pair: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()


@runtime_checkable
class StoredSource(Protocol):
    """Addition to a `DocumentSource` of stored tokens: lengths of many documents at once.

    made: the tokenizer that all of them were stored with; None where there is no such one.
    """

    @property
    def made(self) -> TokenizerName | None:
        """See above."""

    def lengths(self, indexes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and loss tokens of what is stored at each of `indexes`, where that is one
        document, 0 elsewhere."""


class DocumentSource(Protocol):
    """A finite list of documents, the same each time it is opened."""

    def __len__(self) -> int:
        """Number of documents."""

    def __getitem__(self, index: int) -> SourceDocument:
        """One document. Raises DataError."""

    @property
    def bad(self) -> BadDocuments:
        """Documents that were found bad and left out when the source was opened."""

    @property
    def largest_id(self) -> tuple[int, str]:
        """Largest token id or label of tokenized rows that is known so far, and the place of its
        row; (-1, "") if none is."""

    def check_unchanged(self) -> None:
        """Raise DataChangedError naming a file that is not what it was when the source was
        opened."""

    def fingerprint(self) -> str:
        """Text that changes when the documents change; a checkpoint is resumed on the same data
        only."""
