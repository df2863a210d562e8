"""The default tokenizer: one token a byte of UTF-8, and a few ids above for structure. Needs no
file, loses nothing.

    text  <begin> bytes <end>
    chat  <begin> <user> bytes <turn end> <assistant> bytes <turn end> ...

In a chat only the assistant's bytes and ends of turn are predicted.
"""

import numpy as np

from packgraph.packing.document import IGNORED, Document, Ids
from packgraph.train.data.source import ROLES, SourceDocument
from packgraph.train.data.tokenized_row import documents_of_row

BEGIN, END, PAD, TURN_END = 256, 257, 258, 259
FIRST_ROLE = 260


class ByteTokenizer:
    """256 bytes, begin, end, padding, end of turn, and one id for each role of a chat."""

    vocab_size = FIRST_ROLE + len(ROLES)
    fingerprint = "bytes"

    def encode(self, document: SourceDocument) -> list[Document]:
        """See `Tokenizer.encode`."""
        if document.row is not None:
            return documents_of_row(document.row, document.where, self.vocab_size)
        if document.messages is not None:
            return [self._chat(document)]
        if not document.text:
            return []
        return [Document(np.concatenate([[BEGIN], _bytes(document.text), [END]]))]

    def decode(self, ids: list[int]) -> str:
        """The text of `ids` without structure; bytes that are no UTF-8 become U+FFFD."""
        return bytes(value for value in ids if value < BEGIN).decode("utf-8", errors="replace")

    def _chat(self, document: SourceDocument) -> Document:
        tokens = [np.array([BEGIN])]
        targets = [np.array([IGNORED])]
        for message in document.messages or ():
            said = np.concatenate([_bytes(message.content), [TURN_END]])
            tokens += [np.array([FIRST_ROLE + ROLES.index(message.role)]), said]
            targets += [
                np.array([IGNORED]),
                said if message.role == "assistant" else np.full_like(said, IGNORED),
            ]
        return Document(np.concatenate(tokens), np.concatenate(targets))


def _bytes(text: str) -> Ids:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
