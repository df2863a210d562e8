"""Writing documents into the buffer of one microbatch, without a loop over tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from packgraph.packing.capacity import Capacity
from packgraph.packing.document import IGNORED, Document
from packgraph.packing.layout import Field, layout_of

NUMPY_TYPES = {torch.int64: np.int64, torch.int32: np.int32, torch.bool: np.bool_}


def fill(documents: Sequence[Document], capacity: Capacity) -> tuple[Tensor, int, int]:
    """The buffer of a pack of `documents` (none: all padding), which must fit, its number of loss
    tokens, and the largest of its token ids and labels (-1 without any).

    Returns (uint8 [layout_of(capacity).nbytes] on the host, host int, host int). All bytes are
    defined, gaps too, so equal packs are equal buffers.
    """
    layout = layout_of(capacity)
    data = torch.zeros(layout.nbytes, dtype=torch.uint8)
    buffer = data.numpy()

    def field(place: Field) -> NDArray[Any]:
        return buffer[place.start : place.stop].view(NUMPY_TYPES[place.dtype])

    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    stops = np.cumsum(lengths)
    used = int(lengths.sum())

    tokens = np.concatenate(
        [np.empty(0, dtype=np.int64), *(document.tokens for document in documents)]
    )
    field(layout.tokens)[:used] = tokens
    if any(document.targets is not None for document in documents):
        targets = np.concatenate(
            [
                document.tokens if document.targets is None else document.targets
                for document in documents
            ]
        )
    else:
        targets = tokens
    labels = field(layout.labels)
    labels[: max(used - 1, 0)] = targets[1:]
    labels[stops - 1] = IGNORED
    labels[used:] = IGNORED

    field(layout.position_ids)[:used] = np.arange(used) - np.repeat(stops - lengths, lengths)
    document_ids = field(layout.document_ids)
    document_ids[:used] = np.repeat(np.arange(len(documents)), lengths)
    document_ids[used:] = capacity.documents
    boundaries = field(layout.cu_seqlens)
    boundaries[1 : len(documents) + 1] = stops
    boundaries[len(documents) + 1 :] = used

    loss_mask = field(layout.loss_mask)
    np.not_equal(labels, IGNORED, out=loss_mask)
    field(layout.padding_mask)[used:] = True
    largest = max(int(tokens.max(initial=-1)), int(labels.max(initial=-1)))
    return data, int(np.count_nonzero(loss_mask)), largest
