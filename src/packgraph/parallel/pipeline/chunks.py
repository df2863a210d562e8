"""Assignment of layers to virtual pipeline stages.

A pipeline is as fast as its slowest stage, so stages are cut by what layers cost: layers of a
hybrid differ, and with a large vocabulary the head weighs as much as several of them.

    costs  3 1 3 1 | 3 1 3 1 | 3 1 + head 4      8, 8, 8: no cut has a cheaper slowest stage
"""

import itertools
from bisect import bisect_left
from collections.abc import Sequence

Key = tuple[
    float, tuple[int, ...]
]  # sum of the squares of the stages' costs, and what decides between equal ones


def split_layers(costs: Sequence[float], stages: int, head_cost: float = 0) -> tuple[range, ...]:
    """Cut layers of these costs into `stages` consecutive ranges so that the costliest stage is as
    cheap as possible.

    costs: of the layers, none negative; integers make exact comparisons. head_cost: of the head,
    which the last stage has besides its layers. Of all such cuts one with the least sum of squares
    is taken. Where there is still a choice, the last and the first stage, which holds the
    embedding, get fewer layers, and earlier ones more.

    Raises ValueError when there are fewer layers than stages.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(
            f"{len(costs)} layers cannot be cut into {stages} stages: every stage needs a layer"
        )
    sums = list(itertools.accumulate([*costs[:-1], costs[-1] + head_cost], initial=0))
    candidates = sorted({end - start for start, end in itertools.combinations(sums, 2)})
    # The least cost that the costliest stage can have.
    bound = candidates[
        bisect_left(candidates, True, key=lambda bound: _stages_needed(sums, bound) <= stages)
    ]
    best: dict[int, tuple[Key, tuple[int, ...]]] = {
        0: ((0, ()), ())
    }  # by the layers that are cut so far
    for stage in range(stages):
        best = _further(sums, best, bound, last=stage == stages - 1)
    _, sizes = best[len(costs)]
    starts = [0, *itertools.accumulate(sizes)]
    return tuple(itertools.starmap(range, itertools.pairwise(starts)))


def _stages_needed(sums: Sequence[float], bound: float) -> float:
    """The fewest stages of which none costs more than `bound`; infinite where one layer alone does.
    sums: of the costs before each layer; of all."""
    needed, start = 1, 0
    for layer in range(len(sums) - 1):
        if sums[layer + 1] - sums[layer] > bound:
            return float("inf")
        if sums[layer + 1] - sums[start] > bound:
            needed, start = needed + 1, layer
    return needed


def _further(
    sums: Sequence[float], best: dict[int, tuple[Key, tuple[int, ...]]], bound: float, last: bool
) -> dict[int, tuple[Key, tuple[int, ...]]]:
    """The best ways to cut one stage more, none over `bound`, by the layers that are cut then."""
    found: dict[int, tuple[Key, tuple[int, ...]]] = {}
    for start, ((squares, order), sizes) in best.items():
        for end in [len(sums) - 1] if last else range(start + 1, len(sums)):
            cost, size = sums[end] - sums[start], end - start
            if cost > bound or not size:
                break
            place = (size, *order) if last or not order else (*order, -size)
            entry = (squares + cost * cost, place), (*sizes, size)
            if end not in found or entry < found[end]:
                found[end] = entry
    return found
