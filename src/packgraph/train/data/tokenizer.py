"""Tokenizers: what they are, and the one a configuration names."""

from typing import Protocol

from packgraph.packing.document import Document
from packgraph.train.data.byte_tokenizer import ByteTokenizer
from packgraph.train.data.config import DataConfig
from packgraph.train.data.file_tokenizer import FileTokenizer
from packgraph.train.data.source import SourceDocument


class Tokenizer(Protocol):
    """Turns documents into tokens. vocab_size: number of ids. fingerprint: changes when the tokens
    would change."""

    vocab_size: int
    fingerprint: str

    def encode(self, document: SourceDocument) -> list[Document]:
        """The tokens of one document; several for a tokenized row with boundaries, none for an
        empty text.

        In a chat only what the assistant says may be predicted. Raises DataError.
        """
        ...


def build_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that `config` names. Raises DataError for a missing or foreign file."""
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    return FileTokenizer(config.tokenizer)
