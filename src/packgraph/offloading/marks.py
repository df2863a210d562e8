"""What a model says: from here to there, under this name, things are saved for backward that may
wait elsewhere.

    with self.offload("core_attn", leave=(rotary, metadata)):
        out = attention(q, k, v, metadata)

`self.offload` is `nowhere` until somebody attaches an engine (`attach.py`): then the block is as if
it were not there.
"""

import contextlib
from typing import Any, Protocol


class Mark(Protocol):
    """Opens a block whose saved tensors are the group `name`. leave: a pytree of tensors that stay
    where they are, because something else keeps them anyway."""

    def __call__(self, name: str, leave: Any = ()) -> contextlib.AbstractContextManager[None]: ...


def nowhere(name: str, leave: Any = ()) -> contextlib.AbstractContextManager[None]:
    """Everything stays where it is."""
    return contextlib.nullcontext()
