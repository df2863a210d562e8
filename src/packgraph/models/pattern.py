"""Which branches each layer of a decoder has, written as a pattern of letters.

    M  Mamba-2    *  attention    -  feed-forward    E  experts

    M-M*-E            six layers of one branch each, as in Nemotron-H
    (M-)(M-)(*-)      three layers of two branches, as in Bamba; a decoder of attention and
                      feed-forward alone is (*-)

A pattern is repeated until there are as many layers as the decoder has, and what is beyond them is
left out.
"""

from functools import cache

from packgraph.models.branches import KINDS

BRANCHES = {kind.letter: name for name, kind in KINDS.items()}
MIXERS = tuple(kind.letter for kind in KINDS.values() if kind.is_mixer)


@cache
def read_pattern(text: str) -> tuple[tuple[str, ...], ...]:
    """The branches of each layer, by the names of their stages (`moe` for experts).

    A layer is one letter, or a mixer and a feed-forward branch (- or E) in parentheses.
    Raises ValueError.
    """
    layers: list[tuple[str, ...]] = []
    rest = text
    while rest:
        letters, rest = (
            (rest[1:3], rest[4:]) if rest[0] == "(" and rest[3:4] == ")" else (rest[0], rest[1:])
        )
        if any(letter not in BRANCHES for letter in letters) or (
            len(letters) == 2 and (letters[0] in MIXERS, letters[1] in MIXERS) != (True, False)
        ):
            raise ValueError(
                f"pattern {text!r} makes no sense from layer {len(layers)} on: a layer is one of "
                f"{' '.join(BRANCHES)}, or {' or '.join(MIXERS)} followed by - or E in "
                "parentheses, as in (M-)(*E)"
            )
        layers.append(tuple(BRANCHES[letter] for letter in letters))
    return tuple(layers)


def write_pattern(layers: list[tuple[str, ...]]) -> str:
    """The pattern of these layers: what `read_pattern` reads."""
    letters = {branch: letter for letter, branch in BRANCHES.items()}
    words = ["".join(letters[branch] for branch in layer) for layer in layers]
    return "".join(f"({word})" if len(word) > 1 else word for word in words)
