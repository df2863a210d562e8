"""Bad documents that are left out: how many, and where the first ones stand."""

from dataclasses import dataclass, field
from typing import Any

from packgraph.train.data.errors import BadDocumentError

PLACES_KEPT = 5


@dataclass
class BadDocuments:
    """A count of bad documents. first: what is wrong with the first PLACES_KEPT of them, with file
    and line."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, error: BadDocumentError) -> None:
        """Count the document that `error` is about."""
        self.count += 1
        if len(self.first) < PLACES_KEPT:
            self.first.append(str(error))

    def state_dict(self) -> dict[str, Any]:
        """The count and the places, JSON-able."""
        return {"count": self.count, "first": list(self.first)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from `state`."""
        self.count, self.first = state["count"], list(state["first"])

    def __add__(self, other: "BadDocuments") -> "BadDocuments":
        return BadDocuments(self.count + other.count, [*self.first, *other.first][:PLACES_KEPT])
