"""One microbatch of packed documents: static shapes, one buffer, boundaries known on the host.

All tensors are views of the one buffer `data`: one pinned upload per microbatch, one copy into a
graph's static memory, one leaf as a pytree. `lengths` and the counts are host ints; code inside a
captured graph must not see them, since a graph would bake them (`without_lengths`).

    tokens   a a a b b c c c c . .   position_ids  0 1 2 0 1 0 1 2 3 0 0
    labels   a a _ b _ c c c _ _ _   document_ids  0 0 0 1 1 2 2 2 2 N N     cu_seqlens  0 3 5 9 9 9

The layout of the buffer follows from the capacity alone, so two batches of equal capacity are the
same bytes in the same places:

    tokens 8T, labels 8T, position_ids 8T, document_ids 4T, cu_seqlens 4(N+1), loss_mask T,
    padding_mask T

Every field starts at a multiple of `ALIGNMENT` bytes, so that each is a valid view and vector loads
are allowed. `fill` writes documents into it without a loop over tokens.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from packgraph.packing.capacity import Capacity
from packgraph.packing.document import IGNORED, Document, read_documents

ALIGNMENT = 16
NUMPY_TYPES = {torch.int64: np.int64, torch.int32: np.int32, torch.bool: np.bool_}


@dataclass(frozen=True)
class Field:
    """One tensor of a batch: `length` elements of `dtype` from byte `start` on."""

    start: int
    length: int
    dtype: torch.dtype

    @property
    def stop(self) -> int:
        """First byte after the field."""
        return self.start + self.length * self.dtype.itemsize


@dataclass(frozen=True)
class BatchLayout:
    """All fields of a batch of one capacity; `nbytes` is the size of the buffer in bytes."""

    fields: dict[str, Field]
    nbytes: int


def count_pairs(lengths: Iterable[int]) -> int:
    """Pairs of a query and a key of its document that is not behind it, of documents of these
    lengths."""
    return sum(length * (length + 1) // 2 for length in lengths)


@functools.cache
def layout_of(capacity: Capacity) -> BatchLayout:
    """The layout of a batch of `capacity`."""
    start = 0
    fields: dict[str, Field] = {}
    for name, length, dtype in (
        ("tokens", capacity.tokens, torch.int64),
        ("labels", capacity.tokens, torch.int64),
        ("position_ids", capacity.tokens, torch.int64),
        ("document_ids", capacity.tokens, torch.int32),
        ("cu_seqlens", capacity.documents + 1, torch.int32),
        ("loss_mask", capacity.tokens, torch.bool),
        ("padding_mask", capacity.tokens, torch.bool),
    ):
        fields[name] = Field(start, length, dtype)
        start = -(-fields[name].stop // ALIGNMENT) * ALIGNMENT
    return BatchLayout(fields, start)


def fill(documents: Sequence[Document], capacity: Capacity) -> tuple[Tensor, int, int]:
    """The buffer of a pack of `documents` (none: all padding), which must fit, its number of loss
    tokens, and the largest of its token ids and labels (-1 without any).

    Returns (uint8 [layout_of(capacity).nbytes] on the host, host int, host int). All bytes are
    defined, gaps too, so equal packs are equal buffers.
    """
    layout = layout_of(capacity)
    data = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cpu")
    buffer = data.numpy()

    def field(name: str) -> NDArray[Any]:
        place = layout.fields[name]
        return buffer[place.start : place.stop].view(NUMPY_TYPES[place.dtype])

    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    stops = np.cumsum(lengths)
    used = int(lengths.sum())

    tokens = np.concatenate(
        [np.empty(0, dtype=np.int64), *(document.tokens for document in documents)]
    )
    field("tokens")[:used] = tokens
    targets = tokens
    if any(document.targets is not None for document in documents):
        targets = np.concatenate(
            [
                document.tokens if document.targets is None else document.targets
                for document in documents
            ]
        )
    labels = field("labels")
    labels[: max(used - 1, 0)] = targets[1:]
    labels[stops - 1] = IGNORED
    labels[used:] = IGNORED

    field("position_ids")[:used] = np.arange(used) - np.repeat(stops - lengths, lengths)
    document_ids = field("document_ids")
    document_ids[:used] = np.repeat(np.arange(len(documents)), lengths)
    document_ids[used:] = capacity.documents
    boundaries = field("cu_seqlens")
    boundaries[1 : len(documents) + 1] = stops
    boundaries[len(documents) + 1 :] = used

    loss_mask = field("loss_mask")
    np.not_equal(labels, IGNORED, out=loss_mask)
    field("padding_mask")[used:] = True
    largest = max(int(tokens.max(initial=-1)), int(labels.max(initial=-1)))
    return data, int(np.count_nonzero(loss_mask)), largest


class HostFacts:
    """Facts about a batch that the host knows: `lengths` of its documents, `loss_tokens`, and
    `largest_id` of tokens and labels; None when they were taken away.

    Any two compare equal: they are no part of a batch's structure, and pytrees of batches with
    different lengths must have the same structure.
    """

    __slots__ = ("largest_id", "lengths", "loss_tokens")

    def __init__(
        self,
        lengths: tuple[int, ...] | None,
        loss_tokens: int | None,
        largest_id: int | None = None,
    ) -> None:
        self.lengths = lengths
        self.loss_tokens = loss_tokens
        self.largest_id = largest_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostFacts)

    def __hash__(self) -> int:
        return hash(HostFacts)

    def __repr__(self) -> str:
        return "HostFacts"


NO_FACTS = HostFacts(None, None)


class PackedBatch:
    """A microbatch of static shape. T = `capacity.tokens`, N = `capacity.documents`.

    Made by `packgraph.pack` or `PackedBatch.build`. All tensors are views of one buffer. It cannot
    be changed. It is no dataclass: loops of others take these apart and build them anew.

    Args:
        data: uint8 [bytes of the layout], contiguous, aligned to 8 bytes.
        capacity: The static shape.
        host: Lengths and other host integers of the batch.

    Examples:
        >>> batch, = packgraph.pack([[5, 6, 7]], [packgraph.Capacity(tokens=4, documents=1)])
        >>> batch.labels.tolist(), batch.padding_mask.tolist()
        ([6, 7, -100, -100], [False, False, False, True])
    """

    data: Tensor
    capacity: Capacity
    host: HostFacts

    def __init__(self, data: Tensor, capacity: Capacity, host: HostFacts = NO_FACTS) -> None:
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "capacity", capacity)
        object.__setattr__(self, "host", host)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a PackedBatch cannot be changed, and so not its {name}")

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    @staticmethod
    def build(documents: Any, capacity: Capacity) -> "PackedBatch":
        """Exactly one pack of `documents` (any form `packgraph.pack` takes), in their order.

        Raises ValueError with the numbers if they do not fit in `capacity`, or if there are none.
        """
        found = list(read_documents(documents))
        lengths = tuple(len(document) for document in found)
        if not found:
            raise ValueError("PackedBatch.build needs at least one document")
        if not capacity.holds(sum(lengths), len(lengths), max(lengths)):
            raise ValueError(
                f"{len(lengths)} documents of {sum(lengths)} tokens, the longest of "
                f"{max(lengths)}, do not fit in "
                f"{capacity}; use a larger capacity, or packgraph.pack, which makes several packs"
            )
        return PackedBatch.of_documents(found, capacity)

    @staticmethod
    def empty(capacity: Capacity) -> "PackedBatch":
        """A pack without documents, all padding: for a rank that has nothing to do but take part in
        exchanges."""
        return PackedBatch.of_documents([], capacity)

    @staticmethod
    def of_documents(documents: Sequence[Document], capacity: Capacity) -> "PackedBatch":
        """The pack of `documents`, which were found to be good and to fit in `capacity`."""
        data, *numbers = fill(documents, capacity)
        return PackedBatch(data, capacity, HostFacts(tuple(map(len, documents)), *numbers))

    @property
    def tokens(self) -> Tensor:
        """int64 [T]: token ids, 0 in the tail."""
        return self._view(layout_of(self.capacity).fields["tokens"])

    @property
    def labels(self) -> Tensor:
        """int64 [T]: the next token of the same document; -100 at its last token, where masked, and
        in the tail."""
        return self._view(layout_of(self.capacity).fields["labels"])

    @property
    def position_ids(self) -> Tensor:
        """int64 [T]: place within the document, 0 in the tail."""
        return self._view(layout_of(self.capacity).fields["position_ids"])

    @property
    def document_ids(self) -> Tensor:
        """int32 [T]: number of the document within the pack, N in the tail."""
        return self._view(layout_of(self.capacity).fields["document_ids"])

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [N+1]: boundaries of the documents; after the last one its end repeats."""
        return self._view(layout_of(self.capacity).fields["cu_seqlens"])

    @property
    def loss_mask(self) -> Tensor:
        """bool [T]: True where `labels` is a token."""
        return self._view(layout_of(self.capacity).fields["loss_mask"])

    @property
    def padding_mask(self) -> Tensor:
        """bool [T]: True in the tail."""
        return self._view(layout_of(self.capacity).fields["padding_mask"])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document, as host ints. Raises RuntimeError on a batch without them."""
        if self.host.lengths is None:
            raise RuntimeError(_no_facts("lengths"))
        return self.host.lengths

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents (without padding), a host int."""
        return sum(self.lengths)

    @property
    def num_documents(self) -> int:
        """Documents in the pack, a host int."""
        return len(self.lengths)

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key of its document that is not behind it, a host int: what causal
        attention computes."""
        return count_pairs(self.lengths)

    @property
    def num_loss_tokens(self) -> int:
        """Places whose label is a token, a host int. Raises RuntimeError on a batch without host
        facts."""
        if self.host.loss_tokens is None:
            raise RuntimeError(_no_facts("num_loss_tokens"))
        return self.host.loss_tokens

    def check_words(self, vocab_size: int) -> None:
        """Raise ValueError if a token or a label is no word of a vocabulary of `vocab_size` words.

        Costs nothing: it goes by what the host knows. A batch without host facts passes; kernels
        make NaN of its illegal words.
        """
        if self.host.largest_id is not None and self.host.largest_id >= vocab_size:
            raise ValueError(
                f"the batch has the token id or label {self.host.largest_id}, but the model has a "
                f"vocabulary of {vocab_size}: ids must be below it; was it made with another "
                "tokenizer?"
            )

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "PackedBatch":
        """The batch on `device`: one upload, through pinned memory when `device` is a CUDA device.

        With non_blocking the host does not wait; work on the current stream sees the batch.
        """
        target = torch.device(device)
        data = self.data
        if data.device.type == "cpu" and target.type == "cuda" and not data.is_pinned():
            data = data.pin_memory()
        # Device to host is never asynchronous here: the caller would read bytes that have not
        # arrived.
        data = data.to(target, non_blocking=non_blocking and target.type != "cpu")
        return PackedBatch(data, self.capacity, self.host)

    def pin_memory(self) -> "PackedBatch":
        """The batch in pinned memory, from where `to` uploads it without a copy on the host: what
        `DataLoader(pin_memory=True)` asks for."""
        return PackedBatch(self.data.pin_memory(), self.capacity, self.host)

    def without_lengths(self) -> "PackedBatch":
        """The same tensors without what the host knows: how code inside a captured graph sees a
        batch."""
        return PackedBatch(self.data, self.capacity, NO_FACTS)

    def _view(self, field: Field) -> Tensor:
        part = self.data[field.start : field.stop]
        if field.dtype is torch.bool and torch.compiler.is_compiling():
            return part != 0  # Inductor of torch 2.11 has no view of bytes as bool
        return part.view(field.dtype)

    def __repr__(self) -> str:
        known = (
            ""
            if self.host.lengths is None
            else f", {self.num_documents} documents, {self.num_tokens} tokens"
        )
        return f"PackedBatch({self.capacity}{known}, on {getattr(self.data, 'device', None)})"


def _no_facts(name: str) -> str:
    return (
        f"PackedBatch.{name} is not available here: it is a host number of one microbatch, and a "
        "captured graph "
        "would bake it for all. Use the tensors (cu_seqlens, loss_mask, padding_mask), or bounds "
        "of .capacity"
    )


register_pytree_node(
    PackedBatch,
    lambda batch: ([batch.data], (batch.capacity, batch.host)),
    lambda children, context: PackedBatch(*children, *context),
    serialized_type_name="packgraph.PackedBatch",
)
