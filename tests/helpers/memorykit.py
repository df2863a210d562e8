"""Bytes of tensors that live at the same time, whatever device they are on."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from packgraph.models import values
from packgraph.parallel import deferred


class LiveBytes(TorchDispatchMode):
    """Counts storages that operations of this thread make within the block; not those of files that
    are mapped, nor of the meta device.

    Attributes:
        now, peak: Bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakSet[Any]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._add(leaf.untyped_storage())
        return found

    def _add(self, storage: Any) -> None:
        if storage in self._known or storage.filename is not None:
            return
        self._known.add(storage)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._subtract, storage.nbytes())

    def _subtract(self, count: int) -> None:
        self.now -= count


@contextlib.contextmanager
def counting() -> Iterator[LiveBytes]:
    """Counts within the block, in which values are drawn and read by this thread alone."""

    def one_after_another(function: Any, arguments: Any) -> None:
        for argument in arguments:
            function(argument)

    with contextlib.ExitStack() as stack:
        for owner in (deferred, values):
            stack.enter_context(mock.patch.object(owner, "in_threads", one_after_another))
        yield stack.enter_context(LiveBytes())
