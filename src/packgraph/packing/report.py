"""Counts of what packing did, so that nothing is dropped or cut in silence."""

import dataclasses
from dataclasses import dataclass


@dataclass
class PackReport:
    """Totals of one or several packing runs.

    documents, tokens: packed (pieces of split documents count as documents). packs: microbatches
    made. places: tokens they have room for. split_documents: documents that were cut.
    dropped_documents, dropped_tokens: left out, too long.
    """

    documents: int = 0
    tokens: int = 0
    packs: int = 0
    places: int = 0
    split_documents: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0

    @property
    def padding_fraction(self) -> float:
        """Share of all places that hold no token."""
        return 1 - self.tokens / self.places if self.places else 0.0

    def count_pack(self, documents: int, tokens: int, places: int) -> None:
        """Add one pack."""
        self.documents += documents
        self.tokens += tokens
        self.packs += 1
        self.places += places

    def state_dict(self) -> dict[str, int]:
        """The counts, JSON-able."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over counts from `state_dict`. Raises TypeError for unknown ones."""
        self.__dict__.update(PackReport(**state).__dict__)
