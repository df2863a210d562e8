"""Shape of the state space of Mamba-2, whole and on each of several ranks: plain numbers."""

import math
from typing import NamedTuple


class ScanShape(NamedTuple):
    """heads, head_dim: of the state space. groups: of heads, each with two projections of `state`
    columns."""

    heads: int
    head_dim: int
    groups: int
    state: int


def ranks_problem(shape: ScanShape, ranks: int) -> str | None:
    """Returns why the heads of a state space cannot be shared by `ranks`, None if they can."""
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
    """Shape of the state space on one of `ranks`; groups that several ranks need count on each."""
    return shape._replace(heads=shape.heads // ranks, groups=math.lcm(shape.groups, ranks) // ranks)
