"""What `ssd_tiles.py` tries for each piece of SSD: today's way first, then others, the likely ones
first."""

from packgraph.mamba.ssd_configs import Carry, Mix, Pairs, Scores, Steps, Summed, Tables, Values

Way = Tables | Scores | Carry | Mix | Pairs | Summed | Values | Steps


def carries() -> list[Carry]:
    """Ways to carry states, in either direction."""
    sizes = [
        (64, 128, 4, 3),
        (64, 64, 4, 4),
        (64, 128, 4, 2),
        (32, 128, 4, 2),
        (32, 64, 4, 4),
        (64, 128, 8, 3),
        (16, 128, 4, 3),
        (128, 128, 8, 3),
    ]
    return [Carry(), *(Carry(*each) for each in sizes)]


def mixes() -> list[Mix]:
    """Ways to make y, by scores from memory, by groups of heads, and without states in memory."""
    heads = [
        Mix(warps=warps, stages=stages, registers=most)
        for warps, stages, most in ((4, 2, 0), (4, 3, 128), (4, 3, 168), (8, 3, 0))
    ]
    groups = [
        Mix("groups", tile, share, warps=warps, stages=stages)
        for tile, warps, stages in ((128, 8, 3), (128, 8, 2), (64, 4, 2), (64, 4, 3))
        for share in (8, 4)
    ]
    groups += [
        Mix("groups", 128, 4, warps=8, stages=2, registers=128),
        Mix("groups", 64, 4, stages=2, registers=168),
        Mix("groups", 128, 2, warps=8),
        Mix("groups", 64, 2, stages=2),
        Mix("groups", 128, 1, warps=8, stages=2),
        Mix("groups", 32, 4, stages=2),
    ]
    return [Mix(), *heads, *groups]


def pairs() -> list[Pairs]:
    """Ways to make gradients of scores and of decays."""
    by_shuffles = [(0, 2, 0), (8, 3, 168), (4, 3, 168)]
    by_products = [
        (0, 3, 0),
        (0, 2, 0),
        (8, 3, 0),
        (8, 3, 168),
        (4, 3, 168),
        (4, 2, 168),
        (8, 2, 168),
    ]
    return [
        Pairs(),
        *(
            Pairs(share, False, stages=stages, registers=most)
            for share, stages, most in by_shuffles
        ),
        *(Pairs(share, True, stages=stages, registers=most) for share, stages, most in by_products),
    ]


def shared() -> list[Summed]:
    """Ways to make gradients of b and c."""
    sizes = [
        (64, 0, 4, 3),
        (64, 8, 8, 2),
        (64, 4, 4, 3),
        (128, 8, 8, 3),
        (128, 4, 8, 3),
        (128, 4, 8, 2),
        (64, 4, 8, 2),
    ]
    return [Summed(), *(Summed(*each) for each in sizes)]


def values() -> list[Values]:
    """Ways to make gradients of x."""
    heads = [Values(stages=stages, registers=most) for stages, most in ((2, 0), (3, 168), (2, 168))]
    groups = [
        Values("groups", tile, share, warps=warps, stages=stages)
        for tile, share, warps, stages in (
            (128, 8, 8, 3),
            (128, 4, 8, 3),
            (128, 8, 8, 2),
            (128, 4, 8, 2),
            (64, 8, 4, 2),
            (64, 4, 4, 2),
            (64, 2, 4, 2),
            (64, 4, 4, 3),
        )
    ]
    return [Values(), *heads, *groups]


def candidates(cuda: bool) -> list[tuple[str, Way]]:
    """All ways with the piece that each is of; the number of a way in this list is its name between
    processes."""
    tables = [
        Tables(heads, rows, warps)
        for heads, rows, warps in (
            (16, 64, 4),
            (16, 128, 4),
            (32, 64, 4),
            (16, 64, 8),
            (32, 64, 8),
            (16, 64, 2),
        )
    ]
    lists: dict[str, list[Way]] = {
        "mix": [*mixes()],
        "carry": [*carries()],
        "values": [*values()],
        "pairs": [*pairs()],
        "back": [*carries()],
        "of_c": [*shared()],
        "of_b": [*shared()],
        "tables": [*tables],
        "steps": [
            Steps(heads, warps) for heads, warps in ((8, 4), (4, 4), (8, 8), (16, 8), (2, 4))
        ],
        "scores": [Scores(warps) for warps in (4, 8)],
    }
    if not cuda:
        lists = {
            "mix": [Mix(), Mix("groups", 16, 2)],
            "pairs": [Pairs(products=True)],
            "values": [Values("groups", 16, 2)],
        }
    return [(piece, way) for piece, ways in lists.items() for way in ways]
