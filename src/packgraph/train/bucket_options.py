"""What a run can be told about the capacities that it chooses itself."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BucketConfig:
    """What graph.capacities = auto may choose.

    max_tokens: tokens of the largest capacity, and so of the longest document that is not cut or
        dropped.
    max_count: how many capacities at most.
    memory_gib: GiB of device memory that the graphs of all slots may take, by a prediction; none =
        no limit.
    documents: how many documents are read to know their lengths.
    """

    max_tokens: int = 8192
    max_count: int = 8
    memory_gib: float | None = None
    documents: int = 20_000

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least 1, got {getattr(self, name)}"
            for name in ("max_tokens", "max_count", "documents")
            if getattr(self, name) < 1
        ]
        if self.memory_gib is not None and self.memory_gib <= 0:
            problems.append(f"memory_gib must be positive, got {self.memory_gib}")
        if problems:
            raise ValueError("; ".join(problems))
