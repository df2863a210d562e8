"""Parameters, buffers and gradients of a module that wait in host memory, their device memory given
back.

    there       parameter -> storage [device memory]
    released    parameter -> host memory; the storage stays, with no memory
    restored    parameter -> the same storage, with new device memory and what the host had

Storages stay the same objects, so whoever else has views of them (a flat buffer of an optimizer,
tied weights) sees the values again when they are back. Until then the module's tensors are ordinary
ones of the host: a checkpoint may be saved or loaded, a forward raises torch's own error about
devices.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Module

from packgraph.graphs.parameters import is_sharded
from packgraph.torch_internals import identity, storage_id


class _Storage(NamedTuple):
    """A storage on the device, how many bytes it has, and their copy on the host."""

    there: torch.UntypedStorage
    nbytes: int
    host: torch.Tensor


class HostWeights:
    """The tensors of a module, moved to the host when this is made.

    Raises ValueError, and moves nothing, where a tensor is distributed, or is in memory that torch
    cannot give back (mapped files, memory of other libraries).
    """

    def __init__(self, module: Module) -> None:
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []  # and as it was on the device
        self._storages: dict[int, _Storage] = {}
        for name, tensor in _named_tensors(module):
            _refuse(name, tensor)
            self._tensors.append((tensor, tensor.detach()))
        for _, there in self._tensors:
            storage = there.untyped_storage()
            if identity(storage) not in self._storages:
                host = torch.empty(
                    storage.nbytes(), dtype=torch.uint8, pin_memory=there.device.type == "cuda"
                )
                host.copy_(_bytes(storage))
                self._storages[identity(storage)] = _Storage(storage, storage.nbytes(), host)
        for tensor, there in self._tensors:
            tensor.data = _view(self._storages[storage_id(there)].host, there)
        for kept in self._storages.values():
            kept.there.resize_(0)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that were given back."""
        return sum(kept.nbytes for kept in self._storages.values())

    def put_back(self) -> None:
        """Give the tensors device memory, and the values that they have on the host now.

        Raises torch.OutOfMemoryError where there is none; another try may follow.
        """
        for kept in self._storages.values():
            kept.there.resize_(kept.nbytes)
        for kept in self._storages.values():
            _bytes(kept.there).copy_(kept.host)
        for tensor, there in self._tensors:
            host = self._storages[storage_id(there)].host.untyped_storage()
            if storage_id(tensor) != identity(host):  # `.data` was replaced meanwhile
                there.copy_(tensor.detach())
            tensor.data = there
        self._tensors, self._storages = [], {}


def _named_tensors(module: Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers and gradients, each once."""
    seen = set[int]()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        for what, found in ((name, tensor), (f"the gradient of {name}", tensor.grad)):
            if found is not None and id(found) not in seen:
                seen.add(id(found))
                yield what, found


def _refuse(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor) or tensor.layout is not torch.strided:
        raise ValueError(
            f"{name} is distributed or sparse: release() moves plain tensors of one device only"
        )
    if is_sharded(tensor):
        raise ValueError(
            f"{name} is sharded: what the ranks keep of it is not memory of the module, so "
            "release() cannot move it"
        )
    if not tensor.untyped_storage().resizable():
        raise ValueError(
            f"the memory of {name} is not torch's to give back (a mapped file, or memory of "
            "another library): clone it before packgraph.graph"
        )


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(host: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """The memory of `host` in the form of a tensor on the device."""
    view = torch.empty(0, dtype=there.dtype)
    view.set_(host.untyped_storage(), there.storage_offset(), there.shape, there.stride())
    return view
