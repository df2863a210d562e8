"""Number of pages that a stash needs, and the memory it saves, from numbers known before training.

    eager, balanced   |n|n|n|n|n|n|n|n|                  n rows per layer and microbatch in flight:
                                                         the lower limit
    static, worst     |R    |R    |R    |R    | ...      R = capacity factor * n rows for each
    stash             |n|n|n|n|n|n|n|n| + |R    |        pages for n rows each, and one layer's [R,
                                                         w] tensors at a time

A rank's experts get tokens * top_k rows of a layer on average, whatever the expert parallelism: as
many tokens come in as go out. How far a single layer is from that does not matter, since all layers
and microbatches share the pages; what counts is the sum, and `factor` is the room for that. A
record's last page is half empty on average, and up to page_rows - 1 rows are: one page for each
record.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
Column = tuple[str, int]  # dtype, width


def pages_for(
    tokens: int,
    top_k: int,
    layers: int,
    in_flight: int,
    factor: float = 1.05,
    page_rows: int = 64,
    resident: bool = False,
) -> int:
    """Pages for the records that are out at most.

    tokens: of a microbatch on this rank, padding not counted if it is known. layers: with experts,
    on this rank (of all its chunks). in_flight: microbatches between a layer's forward and
    backward. factor: room over the balanced load. resident: one record is not stashed, since its
    backward follows at once (the last layer of a rank with the loss). Raises ValueError that names
    every illegal value.
    """
    records = layers * in_flight - resident
    wrong = [
        f"{name} is {value}, must be positive"
        for name, value in (
            ("tokens", tokens),
            ("top_k", top_k),
            ("layers", layers),
            ("in_flight", in_flight),
            ("page_rows", page_rows),
        )
        if value < 1
    ]
    if factor < 1:
        wrong.append(f"factor is {factor}, below the balanced load")
    if not wrong and records < 1:
        wrong.append("the only record is resident, nothing is stashed")
    if wrong:
        raise ValueError("pages cannot be counted: " + "; ".join(wrong))
    return math.ceil(records * tokens * top_k * factor / page_rows) + records


@dataclass(frozen=True)
class StashMemory:
    """Bytes that experts' saved activations take on a rank.

    pages: of the pool. columns: bytes of the pool by (dtype, width). transient: one layer's [R, w]
    tensors, which exist while its experts run forward or backward; those of a resident layer exist
    when no others do. balanced: what eager training with the same rows for every expert would keep.
    worst: what graphs without a stash keep.
    """

    pages: int
    columns: Mapping[Column, int]
    transient: int
    balanced: int
    worst: int

    @property
    def pool(self) -> int:
        """Bytes of all pages."""
        return sum(self.columns.values())

    @property
    def total(self) -> int:
        """Bytes at the peak: when the last layer's experts run."""
        return self.pool + self.transient

    @property
    def ratio(self) -> float:
        """Memory relative to balanced eager's. At least 1 + (capacity factor - 1) / records: one
        layer is always there whole."""
        return self.total / self.balanced

    def report(self) -> str:
        """Formats the figures for people, a line per column."""
        lines = [
            f"{dtype} x {width}: {nbytes / 2**20:.1f} MiB"
            for (dtype, width), nbytes in self.columns.items()
        ]
        lines.append(
            f"{self.pages} pages, {self.pool / 2**20:.1f} MiB, and {self.transient / 2**20:.1f} "
            "MiB for the "
            f"layer that runs: {self.ratio:.3f} of balanced eager ({self.balanced / 2**20:.1f} "
            "MiB); without "
            f"a stash {self.worst / self.balanced:.3f}"
        )
        return "\n".join(lines)


def stash_memory(
    columns: Mapping[Column, int],
    tokens: int,
    top_k: int,
    layers: int,
    in_flight: int,
    capacity: float,
    factor: float = 1.05,
    page_rows: int = 64,
    resident: bool = False,
) -> StashMemory:
    """Memory that a stash for these layers takes. columns: tensors that one layer saves, by dtype
    and width. capacity: static rows of a layer over the balanced load. The rest as in `pages_for`.

    Raises ValueError like `pages_for`, for a capacity below 1 and for dtypes that are not stashed.
    """
    pages = pages_for(tokens, top_k, layers, in_flight, factor, page_rows, resident)
    unknown = sorted({dtype for dtype, _ in columns} - set(BYTES))
    if capacity < 1 or unknown:
        raise ValueError(
            f"a capacity of {capacity} is below the balanced load"
            if capacity < 1
            else f"tensors of {', '.join(unknown)} are not stashed; known are {', '.join(BYTES)}"
        )
    row = {column: BYTES[column[0]] * column[1] * count for column, count in columns.items()}
    balanced_rows = tokens * top_k
    static_rows = math.ceil(balanced_rows * capacity)
    row_bytes = sum(row.values())
    return StashMemory(
        pages,
        {column: pages * page_rows * nbytes for column, nbytes in row.items()},
        static_rows * row_bytes,
        layers * in_flight * balanced_rows * row_bytes,
        layers * in_flight * static_rows * row_bytes,
    )


def grown_pages(pages: int, need: int, most: int | None = None, room: float = 1.1) -> int:
    """Pages for the next attempt after an overflow: `room` times the high-water mark `need`, at
    most `most` (None = as many as there is memory for).

    Demand is counted whether it fits or not, so that `need` pages would have sufficed. Raises
    ValueError when even `most` is not enough, or when `need` was there.
    """
    if need <= pages:
        raise ValueError(
            f"{pages} pages were enough for a demand of {need}: there is no reason to grow"
        )
    if most is None:
        return math.ceil(need * room)
    if need > most:
        raise ValueError(
            f"{need} pages were in demand, but there may be {most}: fewer microbatches in flight, "
            "smaller "
            "ones, host pages, or a higher limit would help"
        )
    return min(math.ceil(need * room), most)
