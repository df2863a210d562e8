"""Ownership of the tensors that autograd saves for backward.

What autograd saves is not ours to move where a backward is running, which computes it again for
itself and needs it next, nor where somebody else has hooks around (a checkpoint drops what ours
would keep), nor in a transformation of torch.func, whose tensors stand for others.

What stands for a saved tensor, and brings it back, may be asked for it several times by one
backward. Autograd unpacks a tensor whenever somebody looks at it: `ctx.saved_tensors` read twice in
one backward is two times. The invariant: what was given goes when autograd lets go of its node,
which is when that has run, and where the graph is kept (`retain_graph`) when the backward ends. Who
looks outside of a backward (a debugger at `grad_fn._saved_self`) takes nothing from it.
"""

import weakref

import torch
from torch import Tensor

from packgraph.torch_internals import (
    at_end_of_backward,
    backward_task,
    below_modes,
    saved_tensor_hooks,
    transform,
    version_of,
)

_OURS = __name__.split(".")[0]


class Given:
    """Tensor that was given to the backward that is running."""

    def __init__(self) -> None:
        self.kept: tuple[int, Tensor] | None = None

    def again(self) -> Tensor | None:
        """Returns the tensor that this backward was given before, None if there was none."""
        return self.kept[1] if self.kept is not None and self.kept[0] == backward_task() else None

    def keep(self, tensor: Tensor) -> Tensor:
        """Remember `tensor` for this backward, if there is one."""
        if not in_backward():
            return tensor
        self.kept = backward_task(), tensor
        this = weakref.ref(self)

        def forget() -> None:
            living = this()
            if living is not None:
                living.kept = None

        at_end_of_backward(forget)
        return tensor


class Staying:
    """Stand-in that autograd holds for a tensor that stays where it is, in a block with hooks: of
    what passes hooks it counts no changes itself. A leaf is held itself, since `.data` may give it
    other memory; others without their graph, in which this may lie. owner: whose block that is, in
    words."""

    def __init__(self, tensor: Tensor, owner: str) -> None:
        if tensor.is_leaf:
            self._tensor = tensor
        else:
            with below_modes(), torch.no_grad():
                self._tensor = tensor.detach()
        self._version, self._owner = version_of(tensor), owner

    def back(self) -> Tensor:
        """The tensor. Raises RuntimeError when it was changed in place."""
        if version_of(self._tensor) != self._version:
            raise was_changed(tuple(self._tensor.shape), self._owner)
        return self._tensor


def staying(tensor: Tensor, owner: str) -> Staying | Tensor:
    """`tensor`, which stays where it is, so that its changes are counted; not those of what a
    subclass has computed, which might not let go of its graph."""
    return Staying(tensor, owner) if tensor.is_leaf or type(tensor) is Tensor else tensor


def was_changed(shape: tuple[int, ...], owner: str) -> RuntimeError:
    """Returns the error of a backward that wants a tensor which was changed since."""
    return RuntimeError(
        f"a tensor of shape {shape} that {owner} saved for backward was changed in place "
        "afterwards: "
        "write to a new tensor, and run every backward before the optimizer's step"
    )


def are_watched_by_others() -> bool:
    """Returns whether hooks that are not packgraph's get what autograd saves now."""
    hooks = saved_tensor_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "").split(".")[0] != _OURS


def in_backward() -> bool:
    """Returns whether the caller's code runs for a backward."""
    return backward_task() >= 0  # its number, negative outside of one


def are_others() -> bool:
    """Returns whether packgraph must not move what autograd saves now."""
    return in_backward() or transform() is not None or are_watched_by_others()
