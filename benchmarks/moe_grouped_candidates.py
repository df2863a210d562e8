"""What `moe_grouped.py` tries: ways to make grouped products of experts, the likely ones first.

Ways with more stages than a multiprocessor has memory for are left in where it is close: they say
so and cost little.
"""

from packgraph.ops.grouped_gemm import Added, Multiplied

ALL = 1 << 20  # programs per multiprocessor: one for each tile


def added() -> list[Added]:
    """Ways to add gradients of matrices; the two of the table by pointers first."""
    by = "descriptors"
    one = [
        (64, 128, 256, 8, 3),
        (64, 256, 128, 8, 3),
        (32, 128, 256, 8, 5),
        (16, 128, 256, 8, 6),
        (64, 128, 128, 8, 4),
        (128, 128, 128, 8, 2),
        (64, 256, 64, 8, 3),
    ]
    two = [
        (32, 128, 128, 4, 3),
        (64, 128, 128, 4, 2),
        (64, 128, 128, 8, 2),
        (32, 128, 128, 8, 3),
        (32, 128, 128, 4, 4),
        (64, 64, 256, 4, 2),
        (32, 64, 256, 4, 3),
        (32, 256, 64, 4, 3),
    ]
    reading = [
        Added(by, 64, 128, 256, 8, 3, parts=2, reduce=False, prefetch=prefetch)
        for prefetch in (True, False)
    ]
    reading += [
        Added(by, 32, 128, 128, 4, 3, programs=2, reduce=False, prefetch=prefetch)
        for prefetch in (True, False)
    ]
    reading += [
        Added(by, 32, 128, 128, 8, 3, programs=2, reduce=False, prefetch=prefetch)
        for prefetch in (True, False)
    ]
    return [
        Added("pointers", 32, 128, 128),
        Added("pointers", 64, 128, 256),
        *(Added(by, *sizes) for sizes in one),
        *(Added(by, *sizes, programs=2) for sizes in two),
        *reading,
        Added(by, 32, 128, 128, 4, 2, programs=3),
        Added(by, 64, 128, 256, 8, 4, parts=2),
        Added(by, 128, 128, 256, 8, 2, parts=2),
        Added(by, 64, 128, 128, 4, 2, programs=ALL),
        Added(by, 32, 128, 128, 8, 3, programs=ALL),
        Added(by, 64, 128, 256, 8, 3, programs=ALL),
        *(Added(by, 64, 128, 256, 8, 3, group=group) for group in (1, 4, 22)),
        Added(by, 64, 64, 128, 4, 3, programs=3),
        Added(by, 32, 128, 128, 8, 2, programs=2, reduce=False),
    ]


def multiplied() -> list[Multiplied]:
    """Ways to multiply rows with matrices, torch's first."""
    one = [
        (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 3),
        (64, 256, 64, 8, 4),
        (64, 256, 64, 4, 4),
        (128, 128, 128, 8, 2),
        (128, 128, 64, 8, 5),
        (64, 128, 128, 4, 3),
        (256, 128, 64, 8, 3),
        (128, 64, 128, 8, 3),
    ]
    two = [
        (64, 128, 64, 4, 3),
        (128, 128, 64, 4, 2),
        (128, 128, 64, 8, 2),
        (64, 128, 64, 4, 4),
        (128, 64, 64, 4, 3),
        (128, 128, 32, 8, 4),
    ]
    return [
        Multiplied("torch"),
        *(Multiplied("descriptors", *sizes) for sizes in one),
        *(Multiplied("descriptors", *sizes, programs=2) for sizes in two),
    ]
