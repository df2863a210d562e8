"""Zigzag cuts by loops over lists: the specification of ops/attention/zigzag.py, for tests."""

from collections.abc import Sequence

Token = tuple[int, int] | None  # document and position in it; None is padding


def naive_rows(lengths: Sequence[int], tokens: int, size: int, place: int) -> list[Token]:
    """What stands in each of the tokens / size rows of rank `place` of `size`.

    Raises ValueError where the padded documents do not fit in `tokens`.
    """
    rows: list[Token] = []
    for document, length in enumerate(lengths):
        parts = _parts(document, length, size)
        rows += parts[place] + parts[2 * size - 1 - place]
    return _filled(rows, tokens // size)


def naive_prefixes(lengths: Sequence[int], tokens: int, size: int, place: int) -> list[Token]:
    """What stands in each of the tokens + tokens / (2 size) places of keys of rank `place` of
    `size`."""
    keys: list[Token] = []
    for document, length in enumerate(lengths):
        parts = _parts(document, length, size)
        for last in (place, 2 * size - 1 - place):
            keys += [token for part in parts[: last + 1] for token in part]
    return _filled(keys, tokens + tokens // (2 * size))


def _parts(document: int, length: int, size: int) -> list[list[Token]]:
    width = -(-length // (2 * size))
    padded: list[Token] = [(document, position) for position in range(length)]
    padded += [None] * (2 * size * width - length)
    return [padded[part * width : (part + 1) * width] for part in range(2 * size)]


def _filled(found: list[Token], room: int) -> list[Token]:
    if len(found) > room:
        raise ValueError(f"{len(found)} places do not fit in {room}")
    return found + [None] * (room - len(found))
