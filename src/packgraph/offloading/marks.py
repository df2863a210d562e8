"""Blocks of a model whose saved tensors may wait on the host until their backward.

    with self.offload("core_attn", leave=(rotary, metadata)):
        out = attention(q, k, v, metadata)

`self.offload` is `offload_block` until offloading begins (`api.py`): the block is then as if it
were not there.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class HoldsMemory(Protocol):
    """A module with memory besides parameters and buffers that others use, too, and that stays."""

    def held_memory(self) -> Sequence[Tensor]:
        """That memory. What is saved of it is not moved."""


class Mark(Protocol):
    """The attribute `offload` of a module."""

    def __call__(self, name: str, leave: Any = ()) -> contextlib.AbstractContextManager[None]:
        """Opens a block whose saved tensors are the group `name`. leave: a pytree of tensors that
        stay where they are, because something else keeps them anyway."""


def offload_block(name: str, leave: Any = ()) -> contextlib.AbstractContextManager[None]:
    """Marks a block of a module: what it saves for backward may be moved to the host.

    A module marks blocks through an attribute `offload`, to which it assigns this function in its
    `__init__`. As long as nothing offloads, a block does nothing.

    Args:
        name: The name of the block, by which `packgraph.offload(modules=...)` chooses it.
        leave: Tensors, in any nesting, that stay on the device, since something else keeps them.

    Returns:
        A context manager for the code that saves tensors for backward.

    Examples:
        >>> class Block(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = torch.nn.Linear(8, 8)
        ...         self.offload = packgraph.offload_block
        ...
        ...     def forward(self, x):
        ...         with self.offload("activation"):
        ...             return torch.nn.functional.silu(self.linear(x))
    """
    return contextlib.nullcontext()
