"""Rows that hold tokens already."""
from collections.abc import Mapping
from typing import Any

from packgraph.packing.document import Document, read_item
from packgraph.train.data.errors import DataError


def documents_of_row(row: Mapping[str, Any], where: str, vocab_size: int) -> list[Document]:
    """The documents of a tokenized row. Raises DataError for bad boundaries or ids that the tokenizer does not have."""
    try:
        documents = list(read_item(row, where))
    except ValueError as error:
        raise DataError(str(error)) from error
    largest = max((int(document.tokens.max()) for document in documents), default=0)
    if largest >= vocab_size:
        raise DataError(f"{where}: token id {largest}, but the tokenizer has {vocab_size} ids; set data.tokenizer to "
                        "the tokenizer.json that these tokens were made with")
    return documents
