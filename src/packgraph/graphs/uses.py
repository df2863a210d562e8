"""What a captured graph uses of the world outside its capture."""
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from packgraph.graphs.guard import PLAIN_TENSORS, CodeWatcher, shapes_only, uncounted_writes, written_tensors

Place = tuple[int, int]  # storage and address


class Uses(CodeWatcher):
    """Watches the operations of one captured graph.

    Attributes:
        reads: Tensors from outside that operations read or write, without their autograd graph, by storage and address.
        writes: Those that operations write to.
        uncounted: The places of those whose versions do not count that.
        storages: Of all that operations read or write, the window's own among them.
        addresses: Where all that is written begins.
        draws: Whether an operation draws random numbers.
    """

    def __init__(self, made: set[int]) -> None:
        """made: Storages that were made in the same window; those of this graph are added."""
        super().__init__()
        self._made = made
        self.reads: dict[Place, torch.Tensor] = {}
        self.writes: dict[Place, torch.Tensor] = {}
        self.uncounted: set[Place] = set()
        self.storages: set[int] = set()
        self.addresses: set[int] = set()
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if shapes_only(types):
            return func(*args, **kwargs)
        if any(t not in PLAIN_TENSORS for t in types):
            return NotImplemented
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*args, **kwargs)
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        if not _is_view(func):
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if _is_strided(leaf)]
            self.storages.update(leaf.untyped_storage()._cdata for leaf in leaves)
            self._note(self.reads, leaves)
        if written := written_tensors(func, args, kwargs):
            self._note(self.writes, written)
            self.uncounted.update((tensor.untyped_storage()._cdata, tensor.data_ptr())
                                  for tensor in uncounted_writes(func, args, kwargs))
            self.addresses.update(tensor.data_ptr() for tensor in written if _is_strided(tensor))
        result = func(*args, **kwargs)
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_strided(leaf)}
        self._made.update(cdata for leaf in tree_leaves(result) if _is_strided(leaf)
                          and (cdata := leaf.untyped_storage()._cdata) not in inputs)
        return result

    def _note(self, found: dict[Place, torch.Tensor], leaves: list[Any]) -> None:
        for leaf in leaves:
            if not _is_strided(leaf) or (cdata := leaf.untyped_storage()._cdata) in self._made:
                continue
            if (place := (cdata, leaf.data_ptr())) in found:
                continue
            found[place] = leaf
            if leaf.requires_grad:  # below autograd, so that it has a version of its own; parameters stand for those
                with torch._C._DisableTorchDispatch(), torch.no_grad():  # type: ignore[attr-defined]
                    found[place] = leaf.detach()


def _is_view(func: Any) -> bool:
    """Whether an operation reads no values: its results are other views of its inputs."""
    aliases = [result.alias_info for result in getattr(func._schema, "returns", ())]  # compiled code has none
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _is_strided(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
