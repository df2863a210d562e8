"""Documents of a run: where they come from, how they become tokens, and the resumable stream of
packs.

open_documents(config: DataConfig) -> DocumentSource
    the documents, checked: a finite list (len, index). Raises DataError (a ValueError) saying where
        and what to do.
build_tokenizer(config: DataConfig) -> Tokenizer
    `.vocab_size` (int), `.encode(SourceDocument) -> list[Document]`. Raises DataError.
Microbatches(config: DataConfig, documents, tokenizer, capacities: Iterable[Capacity],
multiple: int)
    an iterator of `PackedBatch` on the host; endless unless config.epochs is set.
    `.report` (PackReport) counts packs, padding, split and dropped documents. `.state_dict()` is
    JSON-able and taken between two packs; `.load_state_dict(state)` on a new iterator continues
    with exactly the packs that would have come next, and raises DataError when data, tokenizer,
    capacities or packing are not those of the state.
open_for_evaluation(config: TrainConfig, documents, tokenizer) -> Split
    what is trained on, and by name what is evaluated on: of their own paths, or a share held out.
PairedMicrobatches(...): the same of pairs of answers, for losses of preferences.
PlannedSteps(..., request): the same for dynamic context parallelism, a planned step at a time.

source ──▶ order of the epoch (by seed) ──▶ tokenizer ──▶ window ──▶ PackedBatch
                                            └ in this process, or in workers ahead of it
"""

from packgraph.train.config.sections import DataConfig
from packgraph.train.data.formats import open_documents
from packgraph.train.data.held_out import evaluation_stream, open_for_evaluation
from packgraph.train.data.microbatches import Microbatches, PairedMicrobatches, PlannedSteps
from packgraph.train.data.rows import row_notes
from packgraph.train.data.source import (
    DataError,
    DocumentSource,
    MissingPackageError,
    SourceDocument,
)
from packgraph.train.data.tokenizer import Tokenizer, build_tokenizer, tokenizer_notes

__all__ = [
    "DataConfig",
    "DataError",
    "DocumentSource",
    "Microbatches",
    "MissingPackageError",
    "PairedMicrobatches",
    "PlannedSteps",
    "SourceDocument",
    "Tokenizer",
    "build_tokenizer",
    "evaluation_stream",
    "open_documents",
    "open_for_evaluation",
    "row_notes",
    "tokenizer_notes",
]
