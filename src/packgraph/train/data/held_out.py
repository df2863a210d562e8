"""Documents to evaluate on: of their own paths, or a share of the training documents.

    training documents ─▶ hash of the index in its part ─┬─▶ below the share: evaluated on
                                                         └─▶ all others: trained on

The invariant: which documents are held out follows from their places in the source and the share
alone. So seeds, the order of an epoch, ranks and resumed runs hold out the same ones, and documents
that are appended to a file leave those before them where they were. Of a mixture each part gives
its share.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from packgraph.train.config.sections import SOURCES, DataConfig, TrainConfig
from packgraph.train.data.formats import open_documents
from packgraph.train.data.order import SourcePart, WeightedSource
from packgraph.train.data.shards import MANIFEST
from packgraph.train.data.source import (
    BadDocumentError,
    DataError,
    DocumentSource,
    SourceDocument,
    StoredSource,
)
from packgraph.train.data.tokenizer import Tokenizer, tokenized

WHOLE = "data"  # name of training documents that are one source


class Selected:
    """Some documents of a source, in its order; a `WeightedSource` where that is one.

    Attributes:
        parts: Set where the source has parts.
        made: Tokenizer of a `StoredSource`; None for other sources.
        bad: Those of the whole source.
        largest_id: That of the whole source.
        check_unchanged: Checks the whole source.
    """

    parts: Sequence[SourcePart]

    def __init__(self, source: DocumentSource, indices: NDArray[np.int64], what: str) -> None:
        """indices: ascending. what: says in the fingerprint which these are."""
        self._source, self._indices = source, indices
        self.bad, self.largest_id = source.bad, source.largest_id
        self.check_unchanged = source.check_unchanged
        self.made = source.made if isinstance(source, StoredSource) else None
        digest = hashlib.sha256(f"{source.fingerprint()} {what} {len(indices)}".encode())
        self._fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> SourceDocument:
        return self._source[int(self._indices[index])]

    def lengths(self, indexes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `StoredSource.lengths`; only where the source is one."""
        assert isinstance(self._source, StoredSource)
        return self._source.lengths(self._indices[indexes])

    def fingerprint(self) -> str:
        """Hash of that of the source, and of which documents these are."""
        return self._fingerprint


class Split(NamedTuple):
    """training: what is left to train on. held_out: by name, what is evaluated on."""

    training: DocumentSource
    held_out: dict[str, DocumentSource]


def is_held_out(indices: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Tells which documents with these indices are held out: `share` of them, by a hash.

    Source of the hash: the finalizer of SplitMix64 (Steele, Lea and Flood 2014).
    """
    mixed = indices.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    found: NDArray[np.bool_] = (mixed >> np.uint64(11)) < np.uint64(round(share * 2**53))
    return found


def split(source: DocumentSource, share: float, names: Sequence[str] = ()) -> Split:
    """Hold out a share of the documents of every part of `source`.

    names: of its parts, where it has several. Raises DataError where one of the sides is empty.
    """
    weighted = isinstance(source, WeightedSource)
    parts = source.parts if isinstance(source, WeightedSource) else [SourcePart(len(source))]
    held, kept, first = dict[str, DocumentSource](), list[NDArray[np.int64]](), 0
    for name, part in zip(names if weighted else [WHOLE], parts, strict=True):
        indices = np.arange(part.documents, dtype=np.int64)
        out = is_held_out(indices, share)
        if out.all() or not out.any():
            raise DataError(
                f"eval.share = {share} holds out {int(out.sum())} of the {part.documents} documents"
                f"{f' of {name}' if weighted else ''}: {'lower' if out.any() else 'raise'} it, or "
                "name documents to evaluate on by eval.path"
            )
        held[name] = Selected(source, first + indices[out], f"held out {share} {name}")
        kept.append(first + indices[~out])
        first += part.documents
    training = Selected(source, np.concatenate(kept), f"not held out {share}")
    if weighted:
        training.parts = [
            SourcePart(len(own), part.weight) for own, part in zip(kept, parts, strict=True)
        ]
    return Split(training, held)


def first_tokens(
    source: DocumentSource, tokens: int, tokenizer: Tokenizer, *, skip_bad: bool
) -> DocumentSource:
    """Documents of `source`, drawn always alike, until they have `tokens` tokens to be packed.

    Raises BadDocumentError for one that cannot be used, unless those are skipped.
    """
    taken: list[int] = []
    for index in np.random.default_rng(0).permutation(len(source)).tolist():
        try:
            found = sum(len(one) for one in tokenized(source[index], tokenizer) if one.predicts)
        except BadDocumentError:
            if not skip_bad:
                raise
            continue
        taken += [index] if found else []
        tokens -= found
        if tokens <= 0:
            break
    return Selected(source, np.sort(np.array(taken, dtype=np.int64)), f"first {taken}")


def open_for_evaluation(config: TrainConfig, source: DocumentSource, tokenizer: Tokenizer) -> Split:
    """Opens the documents of training and those of evaluation. source: of `data`. Raises
    DataError."""
    options, names = config.eval, tuple(config.data.weights())
    if options.share:
        found = split(source, options.share, names)
    else:
        pairs = config.loss.is_of_pairs
        paths = {
            path: open_documents(_data_of(path, config.data), paired=pairs) for path in options.path
        }
        found = Split(source, paths)
    if options.every == 0:
        return found._replace(held_out={})
    skip_bad = config.data.on_bad == "skip"
    if options.tokens:
        chosen = {
            name: first_tokens(own, options.tokens, tokenizer, skip_bad=skip_bad)
            for name, own in found.held_out.items()
        }
        found = found._replace(held_out=chosen)
    for name, own in found.held_out.items():
        if not len(own):
            raise DataError(f"{name}: there are no documents to evaluate on")
    return found


def _data_of(path: str, data: DataConfig) -> DataConfig:
    """Options of the documents at `path`."""
    where = Path(path).expanduser()
    known = data.source if data.source in ("jsonl", "parquet") else "text"
    named = SOURCES.get(where.suffix.lower(), known)
    return replace(
        data,
        source="shards" if (where / MANIFEST).is_file() else named,
        path=path,
        mixture=(),
        epochs=None,
        max_documents_loaded=None,
        workers=0,
    )


def evaluation_stream(data: DataConfig) -> DataConfig:
    """Options by which documents to evaluate on are packed: once each, as those of training,
    whatever the seed of the order is, and without workers. Their source is known already."""
    return replace(
        data,
        source="stdlib",
        path=None,
        mixture=(),
        max_documents_loaded=None,
        seed=0,
        epochs=1,
        workers=0,
    )
