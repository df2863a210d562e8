"""Shape of a scan, whole and on each of several ranks: plain numbers."""

import math
from typing import NamedTuple


class ScanShape(NamedTuple):
    """heads, head_dim: of the state space of Mamba-2, or of the values of a delta rule. groups: of
    heads, each with two projections of `state` columns: into the state and out of it, or queries
    and keys. heads_last: the columns of heads come after the projections, not before.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    heads_last: bool = False

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Number and size of the heads and of each projection's groups, in the order of columns."""
        heads, shared = (self.heads, self.head_dim), (self.groups, self.state)
        return (shared, shared, heads) if self.heads_last else (heads, shared, shared)

    @property
    def columns(self) -> list[int]:
        """Columns of each of `parts`."""
        return [count * size for count, size in self.parts]


def ranks_problem(shape: ScanShape, ranks: int) -> str | None:
    """Returns why the heads of a scan cannot be shared by `ranks`, None if they can."""
    parts = math.lcm(shape.groups, ranks)
    if shape.heads % parts:
        return (
            f"{shape.heads} heads in {shape.groups} groups cannot be shared by {ranks} ranks; the "
            "heads must be a "
            f"multiple of {parts}, so that every rank has as many heads of every group that it "
            "needs"
        )
    return None


def own_shape(shape: ScanShape, ranks: int) -> ScanShape:
    """Shape of the scan on one of `ranks`; groups that several ranks need count on each."""
    return shape._replace(heads=shape.heads // ranks, groups=math.lcm(shape.groups, ranks) // ranks)
