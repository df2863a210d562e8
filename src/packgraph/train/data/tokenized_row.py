"""Rows that hold tokens already."""

from collections.abc import Mapping
from typing import Any

from packgraph.packing.document import Document, read_item
from packgraph.train.data.errors import BadDocumentError


def read_row(row: Mapping[str, Any], where: str) -> list[Document]:
    """The documents of a tokenized row. Raises BadDocumentError for bad ids, labels, masks or
    boundaries."""
    try:
        return list(read_item(row, where))
    except ValueError as error:
        raise BadDocumentError(str(error)) from error


def documents_of_row(row: Mapping[str, Any], where: str, vocab_size: int) -> list[Document]:
    """As `read_row`, and raises BadDocumentError for ids and labels that the tokenizer does not
    have."""
    documents = read_row(row, where)
    check_largest(largest_id(documents), where, vocab_size)
    return documents


def largest_id(documents: list[Document]) -> int:
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
