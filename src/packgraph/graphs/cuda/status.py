"""What the code of a module is told when it asks whether it is captured: no, as in an eager call.

`torch.cuda.is_current_stream_capturing` lets code take another way in a capture (transformers
builds masks that it would leave out), and a replay would then have other numbers than an eager
call. Code of torch and packgraph, which asks in order to be capturable at all, is told the truth,
and so is every other thread.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.cuda.graphs

from packgraph.graphs.errors import PACKAGE

_KNOWING = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(torch.__file__).parent,
        PACKAGE / "graphs",
        PACKAGE / "moe",
    )
)
_is_capturing = torch._C._cuda_isCurrentStreamCapturing


class _Here(threading.local):
    """Of a thread. captures: how many it is in."""

    captures = 0


_HERE, _LOCK = _Here(), threading.Lock()
_capturing_threads = 0


@contextlib.contextmanager
def told_as_in_eager_calls() -> Iterator[None]:
    """Within the block, which captures, code of this thread that asks is told that it is not
    captured."""
    _count(1)
    _HERE.captures += 1
    try:
        yield
    finally:
        _HERE.captures -= 1
        _count(-1)


def _count(change: int) -> None:
    """The function that torch's asks is another one as long as any thread captures."""
    global _capturing_threads
    with _LOCK:
        _capturing_threads += change
        torch.cuda.graphs._cuda_isCurrentStreamCapturing = (
            _answer if _capturing_threads else _is_capturing
        )


def _answer() -> bool:
    asking = sys._getframe(
        2
    ).f_code.co_filename  # whoever calls torch.cuda.is_current_stream_capturing
    return (not _HERE.captures or asking.startswith(_KNOWING)) and bool(_is_capturing())
