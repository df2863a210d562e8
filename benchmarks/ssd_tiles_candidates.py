"""What `ssd_tiles.py` tries for each piece of SSD: today's way first, then others, the likely ones
first."""

from packgraph.mamba.ssd_forward import KernelConfigs, ScanLaunch

USUAL = KernelConfigs()


def carries() -> list[ScanLaunch]:
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
    return [
        USUAL.carry,
        *(
            ScanLaunch(columns=columns, rows=rows, warps=warps, stages=stages)
            for columns, rows, warps, stages in sizes
        ),
    ]


def mixes() -> list[ScanLaunch]:
    """Ways to make y, by scores from memory, by groups of heads, and without states in memory."""
    heads = [
        ScanLaunch(warps=warps, stages=stages, registers=most)
        for warps, stages, most in ((4, 2, 0), (4, 3, 128), (4, 3, 168), (8, 3, 0))
    ]
    groups = [
        ScanLaunch(kernel="groups", tile=tile, share=share, warps=warps, stages=stages)
        for tile, warps, stages in ((128, 8, 3), (128, 8, 2), (64, 4, 2), (64, 4, 3))
        for share in (8, 4)
    ]
    groups += [
        ScanLaunch(kernel="groups", tile=128, share=4, warps=8, stages=2, registers=128),
        ScanLaunch(kernel="groups", tile=64, share=4, stages=2, registers=168),
        ScanLaunch(kernel="groups", tile=128, share=2, warps=8),
        ScanLaunch(kernel="groups", tile=64, share=2, stages=2),
        ScanLaunch(kernel="groups", tile=128, share=1, warps=8, stages=2),
        ScanLaunch(kernel="groups", tile=32, share=4, stages=2),
    ]
    return [USUAL.mix, *heads, *groups]


def pairs() -> list[ScanLaunch]:
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
        USUAL.pairs,
        *(
            ScanLaunch(share=share, stages=stages, registers=most)
            for share, stages, most in by_shuffles
        ),
        *(
            ScanLaunch(share=share, products=True, stages=stages, registers=most)
            for share, stages, most in by_products
        ),
    ]


def shared() -> list[ScanLaunch]:
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
    return [
        USUAL.of_c,
        *(
            ScanLaunch(tile=tile, share=share, warps=warps, stages=stages)
            for tile, share, warps, stages in sizes
        ),
    ]


def values() -> list[ScanLaunch]:
    """Ways to make gradients of x."""
    heads = [
        ScanLaunch(stages=stages, registers=most) for stages, most in ((2, 0), (3, 168), (2, 168))
    ]
    groups = [
        ScanLaunch(kernel="groups", tile=tile, share=share, warps=warps, stages=stages)
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
    return [USUAL.values, *heads, *groups]


def candidates(cuda: bool) -> list[tuple[str, ScanLaunch]]:
    """All ways with the piece that each is of; the number of a way in this list is its name between
    processes."""
    tables = [
        ScanLaunch(heads=heads, rows=rows, warps=warps)
        for heads, rows, warps in (
            (16, 64, 4),
            (16, 128, 4),
            (32, 64, 4),
            (16, 64, 8),
            (32, 64, 8),
            (16, 64, 2),
        )
    ]
    lists: dict[str, list[ScanLaunch]] = {
        "mix": [*mixes()],
        "carry": [*carries()],
        "values": [*values()],
        "pairs": [*pairs()],
        "back": [*carries()],
        "of_c": [*shared()],
        "of_b": [*shared()],
        "tables": [*tables],
        "steps": [
            ScanLaunch(heads=heads, warps=warps)
            for heads, warps in ((8, 4), (4, 4), (8, 8), (16, 8), (2, 4))
        ],
        "scores": [ScanLaunch(warps=warps) for warps in (4, 8)],
    }
    if not cuda:
        lists = {
            "mix": [USUAL.mix, ScanLaunch(kernel="groups", tile=16, share=2)],
            "pairs": [ScanLaunch(share=0, products=True)],
            "values": [ScanLaunch(kernel="groups", tile=16, share=2)],
        }
    return [(piece, way) for piece, ways in lists.items() for way in ways]
