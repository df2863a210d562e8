"""Counts of what packing did, so that nothing is dropped or cut in silence."""

import dataclasses
from dataclasses import dataclass


@dataclass
class PackReport:
    """Totals of one or several packing runs, for the `report` of `packgraph.pack`.

    Attributes:
        documents: Packed documents; a piece of a split document counts as one.
        tokens: Packed tokens.
        packs: Packed batches.
        places: Tokens that these have room for.
        split_documents: Documents that were split.
        dropped_documents: Documents that were left out, being too long.
        dropped_tokens: Their tokens.

    Example:
        >>> report = packgraph.PackReport()
        >>> _ = packgraph.pack([[1, 2, 3]], packgraph.Capacity(4, 1), report=report)
        >>> report.padding_fraction
        0.25
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
