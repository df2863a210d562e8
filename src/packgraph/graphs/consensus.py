"""Whether a capture went well on every rank that exchanges data with this one.

Ranks that share rows, matrices or experts must run a call the same way. Whoever captures with
others therefore asks after each capture, before anything relies on it; `parallel/consensus.py`
knows how ranks ask each other.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from packgraph.graphs.errors import CaptureError
from packgraph.packing.batch import PackedBatch

# what was captured, for people; why that failed here, or None -> why it failed on any rank, or None
Vote = Callable[[str, CaptureError | None], CaptureError | None]


def alone(what: str, error: CaptureError | None) -> CaptureError | None:
    """The vote of a process that exchanges nothing."""
    return error


def call_name(module: nn.Module, args: tuple[Any, ...]) -> str:
    """The entry of a bank for a call of `module` with these arguments, for people."""
    shapes = [str(arg.capacity) for arg in args if isinstance(arg, PackedBatch)]
    return f"{type(module).__name__} for {', '.join(shapes) or 'these arguments'}"
