"""Sets of few shapes that hold many given ones at little cost.

    documents
      │   x      x   ┌──────C3    a fill (x) is a row the packer made: so many tokens, so many
      │      x  ┌────C2     │     documents; a corner is a shape that holds every fill left of and
      │  x   ┌──C1 x │    x │     below it, and a fill goes to the first corner that holds it
      └──────┴───────┴────── tokens

Which corners are best is a k-median problem; no efficient exact solution is known where corners
need not hold one another (rows of few long and of many short documents). Exchanging one corner for
another of the grid while it pays (M. B. Teitz and P. Bart, Operations Research 16, 1968) starts
from the quantiles of tokens and documents.

Documents that are packed a batch at a time ask for sizes whose sums lie close to a batch
(`covering_sizes`):

A batch of X tokens goes into as few rows as the largest size needs; all but a few of them are of
the largest size and full, and the packer looks for sizes of the last few whose sum is just enough
(packing/bins.py). Documents are short against rows, so X counts and not how it is cut: padding
is the distance from X to the next sum,

    places(X) = (R - f) * largest + min{s1 + … + sf >= X - (R - f) * largest},   R = ceil(X /
    largest), f = min(R, 3)

and a set of sizes is as good as the mean of places(X) over the batches. Sizes are moved one at a
time while that falls; what they are worth is decided by really packing into them (planner.py).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from packgraph.packing.buckets.cost import CostModel

MOST_TOKEN_VALUES, MOST_DOCUMENT_VALUES = 64, 24
MOST_SWAPS = 64
Corner = tuple[int, int]  # tokens, documents
Fills = Mapping[Corner, int]  # → rows
Floats = NDArray[np.float64]
FREE_ROWS = 3
MOST_STEPS = 64  # places that a size is tried at
MOST_ROUNDS = 20
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ShapeSet:
    """Corners, smallest first, and the cost in µs of all fills, each in the first that holds it."""

    corners: tuple[Corner, ...]
    cost_us: float


@dataclass(frozen=True)
class Grid:
    """The token and document numbers corners may have, ascending; the last ones are those of the
    largest corner."""

    tokens: tuple[int, ...]
    documents: tuple[int, ...]

    @property
    def corners(self) -> NDArray[np.int64]:
        """All corners, int64 [cells, 2], by tokens, then documents."""
        return np.array(
            [(tokens, documents) for tokens in self.tokens for documents in self.documents]
        )


def grid_of(fills: Fills, top: Corner, multiple: int) -> Grid:
    """The numbers that occur in `fills`, tokens rounded up to `multiple`, coarser where there are
    very many.

    A best nested set with such tokens lies on this grid: any other number could be lowered to the
    next one on it.
    """
    step = multiple
    while (
        len(tokens := {min(top[0], -(-tokens // step) * step) for tokens, _ in fills})
        > MOST_TOKEN_VALUES
    ):
        step *= 2
    documents, digits = {documents for _, documents in fills}, 5
    while len(documents) > MOST_DOCUMENT_VALUES:
        documents, digits = {_with_digits(number, digits) for number in documents}, digits - 1
    return Grid(
        tuple(sorted({*tokens, top[0]})),
        tuple(sorted({min(top[1], n) for n in documents} | {top[1]})),
    )


def snapped(fills: Fills, grid: Grid) -> Counter[Corner]:
    """`fills` with both numbers rounded up to the grid's: the same to every corner of it, and fewer
    of them."""
    found: Counter[Corner] = Counter()
    largest = grid.tokens[-1], grid.documents[-1]
    for (tokens, documents), rows in fills.items():
        if tokens > largest[0] or documents > largest[1]:
            raise ValueError(
                f"a row of {tokens} tokens and {documents} documents fits in no corner of the "
                f"grid, the largest is {largest}"
            )
        places = bisect_left(grid.tokens, tokens), bisect_left(grid.documents, documents)
        found[grid.tokens[places[0]], grid.documents[places[1]]] += rows
    return found


def _with_digits(number: int, digits: int) -> int:
    """`number` rounded up to that many binary digits."""
    step = 1 << max(0, number.bit_length() - digits)
    return -(-number // step) * step


def best_set(fills: Fills, grid: Grid, cost: CostModel, most: int) -> ShapeSet:
    """Chooses at most `most` corners of `grid`, its largest too, that hold all fills at little
    cost.

    Raises ValueError for a fill that the largest corner does not hold.
    """
    return swapped(quantiles(fills, grid, most), fills, grid, cost)


def quantiles(fills: Fills, grid: Grid, most: int) -> list[Corner]:
    """`most` corners: quantiles of the rows' tokens and of their documents, and the largest.

    Raises ValueError for a fill that the largest corner does not hold.
    """
    counted = snapped(fills, grid)
    tokens = sorted(tokens for (tokens, _), rows in counted.items() for _ in range(rows))
    documents = sorted(documents for (_, documents), rows in counted.items() for _ in range(rows))
    places = [len(tokens) * part // most for part in range(1, most)] if tokens else []
    return [*((tokens[at], documents[at]) for at in places), (grid.tokens[-1], grid.documents[-1])]


def swapped(start: Sequence[Corner], fills: Fills, grid: Grid, cost: CostModel) -> ShapeSet:
    """`start` after exchanging corners for others of `grid` while it pays, with the largest one of
    `grid`; never dearer. The largest may stand in `start` several times, for corners to come."""
    points, rows = _points(snapped(fills, grid))
    candidates = grid.corners
    fits, order = _fits(candidates, points), _order(candidates)
    price: Floats = cost.shape_us(candidates[:, 0], candidates[:, 1]).astype(np.float64)
    largest: Corner = tuple(candidates[-1].tolist())
    chosen = sorted(start)[: max(len(start) - 1, 0)]
    current = cost_of([*chosen, largest], fills, cost)
    for _ in range(MOST_SWAPS):
        best, exchange = current * (1 - 1e-12), None
        for index in range(len(chosen)):
            held, held_order = _held([*chosen[:index], *chosen[index + 1 :], largest], points, cost)
            taken = fits & (order[:, None] < held_order[None, :])
            totals = np.where(taken, price[:, None], held[None, :]) @ rows
            place = int(totals.argmin())
            if totals[place] < best:
                best, exchange = float(totals[place]), (index, tuple(candidates[place].tolist()))
        if exchange is None:
            break
        chosen[exchange[0]], current = exchange[1], best
    return ShapeSet(tuple(sorted({*chosen, largest})), current)


def cost_of(corners: Sequence[Corner], fills: Fills, cost: CostModel) -> float:
    """Cost in µs of all fills, each in the smallest of `corners` that holds it, as the packer
    chooses (fewest tokens, then fewest documents); infinite when one fits in none.
    """
    points, rows = _points(fills)
    return float(_held(corners, points, cost)[0] @ rows) if fills else 0.0


def _points(fills: Fills) -> tuple[NDArray[np.int64], Floats]:
    """Fills as int64 [points, 2], and their rows as float64 [points]."""
    points = sorted(fills)
    return np.array(points, dtype=np.int64).reshape(-1, 2), np.array(
        [fills[point] for point in points], dtype=float
    )


def _fits(corners: NDArray[np.int64], points: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns whether each corner holds each point, bool [corners, points]."""
    return (points[None, :, 0] <= corners[:, None, 0]) & (points[None, :, 1] <= corners[:, None, 1])


def _order(corners: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers that rise as the packer prefers: by tokens, then documents; int64 [corners]."""
    return corners[:, 0] * 2**32 + corners[:, 1]


def _held(
    corners: Sequence[Corner], points: NDArray[np.int64], cost: CostModel
) -> tuple[Floats, NDArray[np.int64]]:
    """Price of each point in the first of `corners` that holds it, and that corner's order;
    float64, int64 [points]."""
    ordered = np.array(sorted(corners))
    fits = _fits(ordered, points)
    first = fits.argmax(axis=0)
    price: Floats = cost.shape_us(ordered[:, 0], ordered[:, 1]).astype(np.float64)
    found = fits.any(axis=0)
    none = np.iinfo(np.int64).max
    return np.where(found, price[first], np.inf), np.where(found, _order(ordered)[first], none)


def tight_cost(fills: Fills, cost: CostModel) -> float:
    """Cost in µs if every fill had a shape of its own without padding: no set of corners costs
    less."""
    return sum(
        rows * float(cost.shape_us(tokens, documents))
        for (tokens, documents), rows in fills.items()
    )


def covering_places(batches: Ints, sizes: Sequence[int]) -> int:
    """Places that batches of so many tokens (int64 [n]) take in rows of `sizes`, if documents could
    be cut anywhere."""
    largest = max(sizes)
    sums = [np.zeros(1, dtype=np.int64)]
    for _ in range(FREE_ROWS):
        sums.append(np.unique((sums[-1][:, None] + np.array(sizes)[None, :]).reshape(-1)))
    rows = -(-batches // largest)
    total = 0
    for free in range(1, FREE_ROWS + 1):
        chosen = rows == free if free < FREE_ROWS else rows >= free
        full = (rows[chosen] - free) * largest
        total += int((full + sums[free][np.searchsorted(sums[free], batches[chosen] - full)]).sum())
    return total


def covering_sizes(
    batches: Sequence[int], largest: int, count: int, multiple: int
) -> tuple[int, ...]:
    """`count` sizes, ascending, the last of them `largest`, that cover batches of so many tokens
    with few places.

    Sizes are multiples of `multiple`, or fewer than `count` when there are not so many of them. The
    same for the same arguments; a local optimum.
    """
    step = multiple
    while largest // step > MOST_STEPS:
        step *= 2
    places = [*range(step, largest, step)]
    count = min(count, len(places) + 1)
    tokens = np.array(batches, dtype=np.int64)
    sizes = (
        sorted({places[len(places) * number // (count - 1)] for number in range(count - 1)})
        if count > 1
        else []
    )
    best = covering_places(tokens, [*sizes, largest])
    for _ in range(MOST_ROUNDS):
        before = best
        for index in range(len(sizes)):
            others = [*sizes[:index], *sizes[index + 1 :], largest]
            found = min(
                (covering_places(tokens, [*others, place]), place)
                for place in places
                if place not in others
            )
            if found[0] < best:
                best, sizes[index] = found
        if best == before:
            break
    return (*sorted(sizes), largest)
