"""Number of pages that a stash needs, from numbers known before training.

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


def grown_pages(pages: int, need: int) -> int:
    """Pages for the next attempt after an overflow: a tenth more than the high-water mark `need`.

    Demand is counted whether it fits or not, so that `need` pages would have sufficed. Raises
    ValueError when `need` was there.
    """
    if need <= pages:
        raise ValueError(
            f"{pages} pages were enough for a demand of {need}: there is no reason to grow"
        )
    return math.ceil(need * 1.1)
