"""Documents as users have them → documents as the packers want them.

Accepted, one by one or in a list: token ids (list, tuple, NumPy array, CPU tensor); a mapping with
`input_ids` and optionally `labels` (Hugging Face: the label of token i stands at place i, -100 =
not to be predicted) or, where it has none, masks over the tokens (1 = may be predicted: labels are
finished, and TRL leaves masks beside them that are not to be applied); rows with `seq_lengths`
(several documents concatenated, as TRL packs them); the output of transformers'
DataCollatorWithFlattening ([1, total] with boundaries in cu_seq_lens_q, seq_idx or position_ids).

Invariant: everything is on the host. A tensor on a device is refused, since reading it would make
the host wait.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

IGNORED = -100
MASKS = ("loss_mask", "completion_mask", "assistant_masks")
BOUNDARIES = ("seq_lengths", "cu_seq_lens_q", "seq_idx", "position_ids")
# All that is read of a mapping.
COLUMNS = ("input_ids", "labels", *MASKS, "attention_mask", *BOUNDARIES)
Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Document:
    """One document on the host.

    tokens: int64 [n], n >= 1. targets: int64 [n], what is to be predicted at each place (-100:
    nothing), None = tokens. The target of the first token is never used: nothing of the same
    document stands before it.
    """

    tokens: Ids
    targets: Ids | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def predicts(self) -> bool:
        """True if any token of it is to be predicted; a document of one token never has one."""
        return len(self) > 1 and (self.targets is None or bool((self.targets[1:] != IGNORED).any()))

    @property
    def loss_tokens(self) -> int:
        """Number of its tokens that are to be predicted."""
        if self.targets is None:
            return len(self) - 1
        return int(np.count_nonzero(self.targets[1:] != IGNORED))

    def part(self, start: int, stop: int) -> "Document":
        """The tokens from `start` to `stop` as a document of its own."""
        return Document(
            self.tokens[start:stop], None if self.targets is None else self.targets[start:stop]
        )

    def load(self) -> "Document":
        """Itself: its tokens are in memory."""
        return self


class PackableDocument(Protocol):
    """Part of a document that packing needs; its tokens may be read later, by `load`."""

    def __len__(self) -> int:
        """Number of its tokens."""

    @property
    def predicts(self) -> bool:
        """See `Document`."""

    @property
    def loss_tokens(self) -> int:
        """See `Document`."""

    def part(self, start: int, stop: int) -> "PackableDocument":
        """The tokens from `start` to `stop` as a document of its own."""

    def load(self) -> Document:
        """The document, whose tokens are read now."""


def items_of(documents: Any) -> Any:
    """Returns the iterable of items that documents are read from, each of the forms above; one
    collator's output is a list of one.

    Raises TypeError for what is no such iterable.
    """
    if isinstance(documents, Mapping):
        return [documents]
    if isinstance(documents, (str, bytes)) or not isinstance(documents, Iterable):
        raise TypeError(
            f"documents must be a list of documents (token ids), got {type(documents).__name__}"
        )
    if isinstance(documents, (torch.Tensor, np.ndarray)):
        shape = list(documents.shape)
        raise TypeError(
            f"documents must be a list of documents, got one {type(documents).__name__} of shape "
            f"{shape}; "
            + (
                "write [ids] for a single document"
                if len(shape) < 2
                else "its rows may end in padding, which would be trained on: "
                "pass [row[:length] for each row], "
                "or list(ids) if no row is padded"
            )
        )
    return documents


def read_documents(documents: Any) -> Iterator[Document]:
    """All documents of `documents`, in order.

    Raises ValueError or TypeError with the index of the item that is wrong.
    """
    items = items_of(documents)
    for index, item in enumerate(items):
        yield from read_item(item, f"document {index}" if items is documents else "documents")


def read_item(item: Any, name: str) -> Iterator[Document]:
    """The documents of one item (one, or several for a row with boundaries). `name` is used in
    messages."""
    if isinstance(item, Document):
        yield _checked(item.tokens, item.targets, name)
    elif isinstance(item, Mapping):
        yield from _from_mapping(item, name)
    else:
        yield _checked(_ids(item, name), None, name)


def _from_mapping(item: Mapping[str, Any], name: str) -> Iterator[Document]:
    if "input_ids" not in item:
        raise ValueError(
            f"{name}: a mapping must have `input_ids`; it has {sorted(map(str, item))}"
        )
    tokens, flattened = _row(_ids(item["input_ids"], f"{name}, input_ids"), name)
    targets = _targets(item, tokens, name)
    if (lengths := _lengths(item, len(tokens), name)) is None:
        if flattened:
            raise ValueError(
                f"{name}: input_ids is [1, {len(tokens)}] without boundaries; pass position_ids, "
                "cu_seq_lens_q or seq_lengths with it, or one document as a flat list"
            )
        lengths = np.array([len(tokens)])
    if lengths.sum() != len(tokens):
        raise ValueError(
            f"{name}: its documents' lengths sum to {lengths.sum()}, but it has {len(tokens)} "
            "tokens"
        )
    if len(lengths) and lengths.max() > len(tokens):  # the sum of huge numbers wraps around
        raise ValueError(
            f"{name}: one of its documents has a length of {lengths.max()}, but it has "
            f"{len(tokens)} "
            "tokens"
        )
    if flattened and not len(tokens):
        return
    stops = np.cumsum(lengths)
    for number, (start, stop) in enumerate(zip(stops - lengths, stops)):
        own_name = name if len(lengths) == 1 else f"{name}, part {number}"
        yield _checked(
            tokens[start:stop], None if targets is None else targets[start:stop], own_name
        )


def _targets(item: Mapping[str, Any], tokens: Ids, name: str) -> Ids | None:
    """Returns the targets at each place, from labels, else from masks; None = every token."""
    targets = None
    if item.get("labels") is not None:
        targets = _same_length(item["labels"], tokens, name, "labels")
    else:
        for key in MASKS:
            if item.get(key) is not None:
                mask = _same_length(item[key], tokens, name, key)
                targets = np.where(mask != 0, tokens if targets is None else targets, IGNORED)
    if item.get("attention_mask") is not None:
        attended = _same_length(item["attention_mask"], tokens, name, "attention_mask")
        if not attended.all():
            raise ValueError(
                f"{name}: attention_mask has zeros, so input_ids holds padding; pass it without "
                "padding"
            )
        if (attended != 1).any():
            raise ValueError(
                f"{name}: attention_mask has the value {attended[attended != 1][0]}; it must be 1 "
                "for "
                "every token. Numbers of documents belong in seq_idx"
            )
    return targets


def _lengths(item: Mapping[str, Any], total: int, name: str) -> Ids | None:
    """Lengths of the documents in a row from whatever boundaries it has; None when it has none."""
    lengths, problem = None, ""
    if item.get("seq_lengths") is not None:
        lengths = _ids(item["seq_lengths"], f"{name}, seq_lengths").reshape(-1)
        problem = "seq_lengths has a negative length"
    elif item.get("cu_seq_lens_q") is not None:
        lengths = np.diff(_ids(item["cu_seq_lens_q"], f"{name}, cu_seq_lens_q").reshape(-1))
        problem = "cu_seq_lens_q falls"
    if lengths is not None:
        if (lengths < 0).any():
            raise ValueError(f"{name}: {problem} ({lengths.min()}); boundaries must not go back")
        return lengths[lengths > 0]  # a zero stands for no document
    for key, step in (("seq_idx", 0), ("position_ids", 1)):
        if item.get(key) is not None and total:
            values = _ids(item[key], f"{name}, {key}").reshape(-1)
            if len(values) != total:
                raise ValueError(f"{name}: {key} has {len(values)} values for {total} tokens")
            starts = np.flatnonzero(np.diff(values, prepend=values[0] - step - 1) != step)
            return np.diff(starts, append=total)
    return None


def _same_length(values: Any, tokens: Ids, name: str, key: str) -> Ids:
    array, _ = _row(_ids(values, f"{name}, {key}", allow_bool=True), f"{name}, {key}")
    if len(array) != len(tokens):
        raise ValueError(f"{name}: {key} has {len(array)} values for {len(tokens)} tokens")
    return array


def _row(array: Ids, name: str) -> tuple[Ids, bool]:
    """A [n] or [1, n] array as [n], and whether it was [1, n]."""
    if array.ndim == 2 and array.shape[0] == 1:
        return array[0], True
    if array.ndim != 1:
        raise ValueError(
            f"{name}: expected token ids of shape [n] or [1, n], got {list(array.shape)}; pass "
            "padded "
            "rows as separate documents without their padding"
        )
    return array, False


def _ids(values: Any, name: str, *, allow_bool: bool = False) -> Ids:
    """Whole numbers of any form as an int64 array. Raises ValueError naming what else was found."""
    if isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise ValueError(
                f"{name} is a tensor on {values.device}; packing reads its values, which would "
                "make the host wait for the device. Pass it before it is moved there (CPU tensor, "
                "array or list)"
            )
        values = values.detach().numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name}: not a flat sequence of token ids ({error})") from error
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in ("iub" if allow_bool else "iu"):
        wanted = "whole numbers or booleans" if allow_bool else "whole numbers (token ids)"
        raise ValueError(
            f"{name}: expected {wanted}, got {array.dtype}"
            + ("" if allow_bool else "; tokenize text first")
        )
    if array.dtype == np.uint64 and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: {array.max()} does not fit in int64, so it is no token id")
    return array.astype(np.int64, copy=False)


def _checked(tokens: Ids, targets: Ids | None, name: str) -> Document:
    if tokens.ndim != 1:
        hint = "; one document is a list of token ids: write [ids]" if tokens.ndim == 0 else ""
        raise ValueError(f"{name}: expected token ids of shape [n], got {list(tokens.shape)}{hint}")
    if not len(tokens):
        raise ValueError(f"{name} is empty; leave it out")
    if tokens.min() < 0:
        raise ValueError(
            f"{name} has a negative token id ({tokens.min()}); -100 belongs in labels, not in "
            "input_ids"
        )
    if targets is not None and ((targets < 0) & (targets != IGNORED)).any():
        illegal = targets[(targets < 0) & (targets != IGNORED)][0]
        raise ValueError(
            f"{name} has the label {illegal}; a label is a token id, or {IGNORED} where nothing is "
            "to be "
            "predicted"
        )
    return Document(tokens, targets)
