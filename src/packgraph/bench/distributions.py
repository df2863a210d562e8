"""Lengths of documents as they occur: three families, by their names. All in tokens, at least 1."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Draw = Callable[[int, np.random.Generator], NDArray[np.float64]]


def _lognormal(count: int, draw: np.random.Generator) -> NDArray[np.float64]:
    """Mean 1024, sigma 1.5."""
    return draw.lognormal(math.log(1024) - 1.5**2 / 2, 1.5, count)


def _chat(count: int, draw: np.random.Generator) -> NDArray[np.float64]:
    """Single turns, talks of several turns, and turns with something long pasted in."""
    kind = draw.choice(3, size=count, p=[0.6, 0.33, 0.07])
    return draw.lognormal(np.log([220, 900, 3500])[kind], np.array([0.8, 0.8, 0.6])[kind])


def _code(count: int, draw: np.random.Generator) -> NDArray[np.float64]:
    """Files, one in twelve of them longer than 8192 tokens."""
    return draw.lognormal(math.log(900), 1.6, count)


DISTRIBUTIONS: Mapping[str, Draw] = MappingProxyType(
    {"lognormal": _lognormal, "chat": _chat, "code": _code}
)


def lengths_like(name: str, count: int, longest: int, seed: int) -> list[int]:
    """`count` lengths of the family called `name`, those above `longest` cut there."""
    drawn = DISTRIBUTIONS[name](count, np.random.default_rng(seed))
    return [int(length) for length in np.clip(np.round(drawn), 1, longest)]
