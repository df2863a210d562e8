"""Tokenizers: what they are, and the one a configuration names. Rows may hold tokens already.

The default (`ByteTokenizer`) needs no file and loses nothing: one token a byte of UTF-8, and a few
ids above for structure.

    text  <begin> bytes <end>
    chat  <begin> <user> bytes <turn end> <assistant> bytes <turn end> ...

In a chat only the assistant's bytes and ends of turn are predicted.

`FileTokenizer` is any tokenizer.json, through the package `tokenizers` (data only: nothing in the
file is executed).

Text ends with the end token, which a tokenizer.json does not name: it is read from a
tokenizer_config.json or special_tokens_map.json beside the file, else the first of the usual names
that the vocabulary has.
Chats are written by the chat template beside it (`chat_template.py`), else as ChatML, which is what
Qwen models use; they are tokenized as one text, since tokens may span a turn's border, and offsets
say which tokens are the assistant's words. Of `prompt` and `completion` only the latter is
predicted.
"""

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from packgraph.models.foreign import naming, read_object
from packgraph.packing.document import IGNORED, Document, Ids, PackableDocument, read_item
from packgraph.train.config.reading import shown
from packgraph.train.config.sections import DataConfig
from packgraph.train.data.chat_template import ASIDE, CLOCK, ChatTemplate, read_options, token_text
from packgraph.train.data.pairs import Pair
from packgraph.train.data.rows import MORE_ROLES, PREFERENCES
from packgraph.train.data.source import (
    ROLES,
    BadDocumentError,
    DataError,
    DocumentSource,
    Message,
    MissingPackageError,
    SourceDocument,
    TokenizerName,
)

BEGIN, END, PAD, TURN_END = 256, 257, 258, 259
FIRST_ROLE = 260
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
# Options of a tokenizer.json's model that draw at random.
DRAWS = ("dropout", "alpha", "nbest_size")
RULES = 2  # of how text becomes tokens here; in fingerprints
IM_START, IM_END = "<|im_start|>", "<|im_end|>"


def read_row(row: Mapping[str, Any], where: str) -> list[Document]:
    """The documents of a tokenized row. Raises BadDocumentError for bad ids, labels, masks or
    boundaries."""
    try:
        return list(read_item(row, where))
    except ValueError as error:
        raise BadDocumentError(str(error)) from error


def largest_id(documents: Sequence[Document]) -> int:
    """The largest token id or label of documents, -1 without any."""
    found = [
        ids
        for document in documents
        for ids in (document.tokens, document.targets)
        if ids is not None
    ]
    return max((int(ids.max()) for ids in found), default=-1)


def check_largest(largest: int, where: str, vocab_size: int) -> None:
    """Raise BadDocumentError if a token id or label is no word of a vocabulary of `vocab_size`
    words."""
    if largest >= vocab_size:
        raise BadDocumentError(
            f"{where}: token id {largest}, but the tokenizer has {vocab_size} ids; set "
            "data.tokenizer to the "
            "tokenizer.json that these tokens and labels were made with"
        )


class Tokenizer(ABC):
    """Turns documents into tokens.

    Attributes:
        vocab_size: Number of ids.
        fingerprint: Changes when the tokens would change.
    """

    vocab_size: int
    fingerprint: str

    def encode(self, document: SourceDocument) -> list[Document]:
        """The tokens of one document; several for a tokenized row with boundaries, none for an
        empty text.

        In a chat only what the assistant says may be predicted. Raises DataError.
        """
        if document.row is not None:
            documents = read_row(document.row, document.where)
            check_largest(largest_id(documents), document.where, self.vocab_size)
            return documents
        if document.messages is not None:
            return [self._chat(document)]
        return self._text(document) if document.text else []

    @abstractmethod
    def _chat(self, document: SourceDocument) -> Document:
        """The tokens of messages."""

    @abstractmethod
    def _text(self, document: SourceDocument) -> list[Document]:
        """The tokens of a text and the prompt before it; none where it gives none."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """The text of tokens, without special ones."""

    @abstractmethod
    def ask(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a chat, up to where the assistant answers."""

    @abstractmethod
    def start(self, text: str) -> list[int]:
        """The tokens of a text that goes on."""

    @property
    @abstractmethod
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a text or a turn."""


class ByteTokenizer(Tokenizer):
    """256 bytes, begin, end, padding, end of turn, and one id for each role of a chat."""

    vocab_size = FIRST_ROLE + len(ROLES)
    fingerprint = "bytes"
    ends = (END, TURN_END)

    def _text(self, document: SourceDocument) -> list[Document]:
        said = np.concatenate([_bytes(document.text or ""), [END]])
        before = np.concatenate([[BEGIN], _bytes(document.prompt)])
        tokens = np.concatenate([before, said])
        if not document.prompt:
            return [Document(tokens)]
        return [Document(tokens, np.concatenate([np.full_like(before, IGNORED), said]))]

    def decode(self, ids: list[int]) -> str:
        """The text of `ids` without structure; bytes that are no UTF-8 become U+FFFD."""
        return bytes(value for value in ids if value < BEGIN).decode("utf-8", errors="replace")

    def ask(self, messages: Sequence[Message]) -> list[int]:
        """See `Tokenizer.ask`."""
        document = self._chat(SourceDocument("", messages=tuple(messages)))
        return [*document.tokens.tolist(), FIRST_ROLE + ROLES.index("assistant")]

    def start(self, text: str) -> list[int]:
        """See `Tokenizer.start`."""
        return [BEGIN, *text.encode()]

    def _chat(self, document: SourceDocument) -> Document:
        tokens = [np.array([BEGIN])]
        targets = [np.array([IGNORED])]
        check_plain(document, ROLES)
        for message in document.messages or ():
            said = np.concatenate([_bytes(message.content), [TURN_END]])
            tokens += [np.array([FIRST_ROLE + ROLES.index(message.role)]), said]
            is_learned = message.role == "assistant" and message.learned
            targets += [
                np.array([IGNORED]),
                said if is_learned else np.full_like(said, IGNORED),
            ]
        return Document(np.concatenate(tokens), np.concatenate(targets))


def check_plain(document: SourceDocument, roles: Sequence[str]) -> None:
    """Raise BadDocumentError for a chat with more than roles and words, which takes a template."""
    more = list(document.arguments)
    for message in document.messages or ():
        more += [name for name in message.given.keys() - ASIDE if name != "content"]
        more += ["content"] if message.given.get("content", "") is None else []
        more += [message.role] if message.role not in roles else []
    if more:
        raise BadDocumentError(
            f"{document.where}: `{more[0]}` of a chat needs a chat template: put the "
            "tokenizer_config.json or chat_template.jinja of your model beside its tokenizer.json, "
            "and name that by data.tokenizer"
        )


def _bytes(text: str) -> Ids:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)


class FileTokenizer(Tokenizer):
    """The tokenizer of a tokenizer.json (or of a folder that holds one).

    Attributes:
        name: The file.
        switched_off: Options of its model that would draw at random.
        template: Of chats, None where there is none.
    """

    def __init__(self, path: str) -> None:
        """Raises DataError for a missing or foreign file, MissingPackageError without
        `tokenizers`."""
        file = Path(path).expanduser()
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise DataError(
                f"{file}: no such file; data.tokenizer must be `bytes` or the path of a "
                "tokenizer.json"
            )
        self.name = str(file)
        self._tokenizer = _load(file)
        # A run that goes on, its ranks and its shards have the same tokens each time.
        self.switched_off = [
            name for name in DRAWS if getattr(self._tokenizer.model, name, None) not in (None, 0)
        ]
        for name in self.switched_off:
            setattr(self._tokenizer.model, name, None)
        self._end = self._end_token(file.parent)
        self.vocab_size = 1 + max(
            self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1
        )
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special)
        self.template = ChatTemplate.beside(file)
        identity = RULES, self._end, self.template and self.template.fingerprint
        digest = hashlib.sha256(repr(identity).encode())
        digest.update(file.read_bytes())
        self.fingerprint = digest.hexdigest()[:16]

    def _text(self, document: SourceDocument) -> list[Document]:
        text = document.text or ""
        with self._named(document.where):
            encoding = self._tokenizer.encode(document.prompt + text)
        tokens, offsets = _without_repeated_ends(encoding)
        if not len(tokens):
            return []
        if self._end is not None and tokens[-1] != self._end:
            tokens = np.append(tokens, self._end)
        if not document.prompt:
            return [Document(tokens)]
        first = len(document.prompt)
        said = np.zeros(len(tokens), dtype=bool)
        within = _within(offsets, [(first, first + len(text))])
        said[: len(within)] = within
        said[-1] |= self._end is not None
        return [Document(tokens, np.where(said, tokens, IGNORED))]

    def decode(self, ids: list[int]) -> str:
        """The text of `ids` without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def ask(self, messages: Sequence[Message]) -> list[int]:
        """See `Tokenizer.ask`."""
        if self.template is not None:
            text = self.template.prompt(messages)
        else:
            document = SourceDocument("the chat", messages=tuple(messages))
            text = self._chatml(document)[0] + f"{IM_START}assistant\n"
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def start(self, text: str) -> list[int]:
        """See `Tokenizer.start`."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids[:-1] if ids[-1:] == [self._end] else ids

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """See `Tokenizer.ends`."""
        turn = self._tokenizer.token_to_id(IM_END)
        if self.template is not None:
            ending = self.template.ending(self._special)
            ids = self._tokenizer.encode(ending, add_special_tokens=False).ids
            turn = ids[0] if len(ids) == 1 else None
        return tuple(dict.fromkeys(end for end in (self._end, turn) if end is not None))

    def _named(self, where: str) -> naming:
        """For tokenizing the document at `where`."""
        return naming(where, f"{self.name} cannot tokenize it", BadDocumentError)

    def _chat(self, document: SourceDocument) -> Document:
        messages, where = document.messages or (), document.where
        if self.template is None:
            text, spans = self._chatml(document)
        else:
            text, spans = self.template.write(messages, where, document.arguments, self._special)
        with self._named(where):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        tokens = np.array(encoding.ids, dtype=np.int64)
        said = _within(encoding.offsets, spans)
        return Document(tokens, np.where(said, tokens, IGNORED))

    def _chatml(self, document: SourceDocument) -> tuple[str, list[tuple[int, int]]]:
        """A chat as ChatML, and the characters of it that are learned."""
        where = document.where
        check_plain(document, (*ROLES, *MORE_ROLES))
        for token in (IM_START, IM_END):
            if self._tokenizer.token_to_id(token) is None:
                raise DataError(
                    f"{where}: chat messages are written as ChatML where there is no chat template "
                    f"beside the tokenizer, but {self.name} has no token {token}; put the "
                    "tokenizer_config.json or chat_template.jinja of your model beside it"
                )
        text = ""
        spans: list[tuple[int, int]] = []
        for message in document.messages or ():
            text += f"{IM_START}{message.role}\n"
            start = len(text)
            text += message.content + IM_END
            if message.role == "assistant" and message.learned:
                spans.append((start, len(text)))
            text += "\n"
        return text, spans

    def _end_token(self, folder: Path) -> int | None:
        end = token_text(read_options(folder), "eos_token")
        is_text = isinstance(end, str) and end == end.encode(errors="ignore").decode()
        if end is not None and not (is_text and self._tokenizer.token_to_id(end) is not None):
            raise DataError(
                f"{folder / 'tokenizer_config.json'}: its eos_token is {shown(end)}, which is no "
                f"token of {self.name}; repair it or remove it"
            )
        known = (self._tokenizer.token_to_id(name) for name in (end, *END_NAMES) if name)
        return next((number for number in known if number is not None), None)


def _without_repeated_ends(encoding: Any) -> tuple[Ids, list[tuple[int, int]]]:
    """Tokens of a text and their offsets, without those that were added at an end which the text
    has already."""
    ids, added = encoding.ids, encoding.special_tokens_mask
    first = int(len(ids) > 1 and added[0] == 1 and added[1] == 0 and ids[0] == ids[1])
    twice = len(ids) - first > 1 and added[-1] == 1 and added[-2] == 0 and ids[-1] == ids[-2]
    kept = slice(first, len(ids) - int(twice))
    return np.array(ids[kept], dtype=np.int64), encoding.offsets[kept]


def _within(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> Any:
    """Marks the tokens within spans of characters, bool. One that also covers the border before a
    span is predicted from what stands before alone: it counts."""
    ends = np.array(offsets, dtype=np.int64).reshape(-1, 2)[:, 1]
    said = np.zeros(len(ends), dtype=bool)
    for start, stop in spans:
        said |= (ends > start) & (ends <= stop)
    return said


def _load(file: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingPackageError(
            f"{file}: needs the package `tokenizers`: pip install tokenizers"
        ) from error
    if "model" not in read_object(file, DataError, "data.tokenizer must be a tokenizer.json"):
        raise DataError(f"{file}: not a tokenizer.json (it has no `model`)")
    what = f"not a tokenizer.json that `tokenizers` {tokenizers.__version__} reads"
    with naming(file, what, DataError):
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    unknown = getattr(tokenizer.model, "unk_token", None)
    if unknown is not None and tokenizer.token_to_id(unknown) is None:
        raise DataError(
            f"{file}: its unk_token is {shown(unknown)}, which is not in its vocabulary, so words "
            "that are "
            "not there either cannot be tokenized; add it to the vocabulary"
        )
    # Padding and truncation may be stored in the file; packing needs documents as they are.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def build_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that `config` names. Raises DataError for a missing or foreign file."""
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    return FileTokenizer(config.tokenizer)


def is_made_by(made: TokenizerName | None, tokenizer: Tokenizer) -> bool:
    """Tells whether stored tokens are of this tokenizer."""
    return made is not None and made.fingerprint == tokenizer.fingerprint


def pair_of(document: SourceDocument, rejected: SourceDocument, tokenizer: Tokenizer) -> Pair:
    """Both answers of a preference. Raises BadDocumentError where one of them has no token to be
    predicted, or both are the same tokens."""
    found = [tokenizer.encode(one) for one in (document, rejected)]
    for name, answer in zip(PREFERENCES, found, strict=True):
        if len(answer) != 1 or not answer[0].predicts:
            raise BadDocumentError(
                f"{document.where}: `{name}` has no token of an answer, so that there is nothing "
                "to prefer"
            )
    (chosen,), (other,) = found
    if np.array_equal(chosen.tokens, other.tokens):
        raise BadDocumentError(
            f"{document.where}: `chosen` and `rejected` are the same tokens, so that there is "
            "nothing to prefer"
        )
    return Pair.of(chosen, other)


def tokenized(document: SourceDocument, tokenizer: Tokenizer) -> Sequence[PackableDocument]:
    """Returns what is packed of `document`: the tokens of `tokenizer`, or those that were stored.

    Raises DataError where it was stored by another tokenizer.
    """
    if document.is_pair and document.rejected is not None:
        return [pair_of(document, document.rejected, tokenizer)]
    if document.stored is None:
        return tokenizer.encode(document)
    if not is_made_by(document.made, tokenizer):
        raise DataError(
            f"{document.where}: tokenized with {document.made}, not with data.tokenizer "
            f"({tokenizer.fingerprint}); name the tokenizer that the shards were built with, or "
            "build them again"
        )
    return document.stored


@dataclass(frozen=True)
class TokenizedDocument:
    """One document of a source, ready to be packed.

    Attributes:
        where: The place that it came from.
        documents: None for an empty text, several for a row with boundaries.
        why_unlabelled: Why one of them has no token to predict; "" where all have.
    """

    where: str
    documents: Sequence[PackableDocument]
    why_unlabelled: str

    def __reduce__(self) -> tuple[Any, ...]:
        # Half the bytes where they can be: a pipe holds twice as many documents.
        documents = [one.load() for one in self.documents]
        kind = np.int32 if largest_id(documents) < 2**31 else np.int64
        ids = [_of_type(one, kind) for one in documents]
        return _received, (self.where, ids, self.why_unlabelled)


def _received(where: str, documents: Sequence[Document], why_unlabelled: str) -> TokenizedDocument:
    return TokenizedDocument(where, [_of_type(one, np.int64) for one in documents], why_unlabelled)


def _of_type(document: Document, kind: type[np.signedinteger[Any]]) -> Document:
    """The same document with ids of another type."""
    targets = None if document.targets is None else document.targets.astype(kind)
    return replace(document, tokens=document.tokens.astype(kind), targets=targets)


def read_tokenized(source: DocumentSource, index: int, tokenizer: Tokenizer) -> TokenizedDocument:
    """Document `index` of `source`, as `tokenized`. Raises DataError."""
    document = source[index]
    documents = tokenized(document, tokenizer)
    is_labelled = all(one.predicts for one in documents)
    return TokenizedDocument(
        document.where, documents, "" if is_labelled else _why_unlabelled(document)
    )


def _why_unlabelled(document: SourceDocument) -> str:
    """Reason why nothing of `document` is to be predicted, naming its place."""
    if document.messages is not None:
        return f"{document.where}: no assistant turn that is learned, nothing to predict"
    if document.row is not None:
        return (
            f"{document.where}: its labels or masks leave nothing to predict, or it has one token "
            "only"
        )
    return f"{document.where}: one token only"


def tokenizer_notes(source: DocumentSource, tokenizer: Tokenizer) -> list[str]:
    """Notes on how text becomes tokens, by the first document."""
    notes = []
    try:
        first = source[0]
        documents = [one.load() for one in tokenized(first, tokenizer) if one.predicts]
    except BadDocumentError:  # left out, or named when its turn comes
        return []
    learned = [one.tokens if one.targets is None else one.targets for one in documents]
    is_written_here = first.stored is None and first.row is None and bool(learned)
    if is_written_here and not any(np.isin(ids, tokenizer.ends).any() for ids in learned):
        notes.append(
            f"{first.where}: no end of turn and no end of text is learned, so the model never "
            "learns to stop; mark it in the chat template, or name an eos_token"
        )
    if not isinstance(tokenizer, FileTokenizer):
        return notes
    if first.messages is not None and tokenizer.template and tokenizer.template.is_dated:
        notes.append(f"{tokenizer.template.name} writes a date: it is always {CLOCK:%d %B %Y}")
    if tokenizer.switched_off:
        notes.append(
            f"{tokenizer.name}: {' and '.join(tokenizer.switched_off)} is switched off, so that "
            "a text has the same tokens each time"
        )
    return notes
