"""What stands for a saved tensor, and brings it back, may be asked for it several times by one backward.

Autograd unpacks a tensor whenever somebody looks at it: `ctx.saved_tensors` read twice in one backward is two times.
The invariant: what was given goes when autograd lets go of its node, which is when that has run, and where the graph is
kept (`retain_graph`) when the backward ends.
"""
import weakref

import torch
from torch import Tensor


class Given:
    """What was given to the backward that is running."""

    def __init__(self) -> None:
        self._kept: tuple[int, Tensor] | None = None

    def again(self) -> Tensor | None:
        """What this backward was given before, None if it asks for the first time."""
        return self._kept[1] if self._kept is not None and self._kept[0] == _backward() else None

    def keep(self, tensor: Tensor) -> Tensor:
        """Remember `tensor` for this backward."""
        self._kept = _backward(), tensor
        if _backward() >= 0:
            this = weakref.ref(self)

            def forget() -> None:
                living = this()
                if living is not None:
                    living._kept = None

            torch.autograd.Variable._execution_engine.queue_callback(forget)
        return tensor


def _backward() -> int:
    """Number of the backward that is running, negative outside of one."""
    return torch._C._current_graph_task_id()
