"""Lengths of the next documents of a stream, looked up many at a time without reading them.

    order of the epoch   i0 i1 i2 ...      one look-up for AHEAD of them: arrays of tokens and loss
                         └── chunk ──┘     tokens, then lists, of which `run` gives pieces

A look-up changes nothing: where a stream is follows from its order alone, and a chunk that does
not hold that place is made anew. So it is no part of a state.
"""

from typing import NamedTuple

from packgraph.train.data.order import DocumentOrder
from packgraph.train.data.source import StoredSource

AHEAD = 4096  # documents of one look-up, which takes about 0.1 µs each


class Upcoming(NamedTuple):
    """Documents that come next: by their indexes in the source, with tokens and loss tokens."""

    indexes: list[int]
    lengths: list[int]
    loss_tokens: list[int]


class _Chunk(NamedTuple):
    epoch: int
    start: int  # position of its first document in the epoch
    documents: Upcoming


class KnownAhead:
    """The next documents of `order`, out of a source of stored ones."""

    def __init__(self, source: StoredSource, order: DocumentOrder, longest: int) -> None:
        """longest: tokens of a document that is packed as it is."""
        self._source, self._order, self._longest = source, order, longest
        self._chunks: dict[int, _Chunk] = {}  # by part of the order

    def run(self, most: int) -> Upcoming:
        """At most so many documents from the place of the order on, as far as each is one document
        that is packed whole; none where the first is not. Of a mixture one at a time."""
        part, epoch, position, _ = self._order.place
        chunk = self._chunks.get(part)
        if chunk is None or not (
            chunk.epoch == epoch and 0 <= position - chunk.start < len(chunk.documents.indexes)
        ):
            chunk = self._chunks[part] = self._look_up(epoch, position)
        start = position - chunk.start
        piece = slice(start, start + (most if self._order.is_single else 1))
        lengths = chunk.documents.lengths[piece]
        if 0 in lengths:
            piece = slice(start, start + lengths.index(0))
        return Upcoming(*(column[piece] for column in chunk.documents))

    def _look_up(self, epoch: int, position: int) -> _Chunk:
        indexes = self._order.upcoming(AHEAD)
        lengths, loss_tokens = self._source.lengths(indexes)
        fits = (lengths <= self._longest) & (loss_tokens > 0)
        found = Upcoming(indexes.tolist(), (lengths * fits).tolist(), loss_tokens.tolist())
        return _Chunk(epoch, position, found)
