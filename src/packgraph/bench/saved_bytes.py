"""What a forward keeps for its backward: all memory that autograd's graph holds when the forward
has ended.

Offloading can move no more than that. A pool's size says more: gradients and other temporaries of
the backward lie in it, too, which are there whatever waits on the host.
"""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from packgraph.graphs.parameters import local_tensor


class _Saved:
    """What autograd's graph holds in place of a saved tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # without its graph, in which this is


def kept_for_backward(forward: Callable[[], object], before: Iterable[Tensor]) -> int:
    """Bytes that `forward` has saved and that are alive when it ends, every storage once. before:
    tensors that are there anyway, such as parameters, buffers and arguments, whose memory does not
    count."""
    there = {_storage(tensor)._cdata for tensor in before}
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        holder = _Saved(tensor)
        saved.add(holder)
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        result = forward()
    sizes = {
        storage._cdata: storage.nbytes()
        for storage in (_storage(holder.tensor) for holder in saved)
    }
    del result  # and with it the graph
    return sum(nbytes for storage, nbytes in sizes.items() if storage not in there)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return local_tensor(tensor.detach()).untyped_storage()
