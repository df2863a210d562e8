"""Copies of a checkpoint's tensors in host memory, which is kept for the next checkpoint.

    device   [weights][moments][masters]  ──copy──▶  host   [weights][moments][masters]
                                                            one block, page-locked for CUDA

The main thread copies and waits for the copies; from there on training may change the tensors, and
whoever writes the copies asks nothing of the device, so that graphs may be captured meanwhile. The
invariant: a copy holds the bits, the shape and the place in its whole of what it is a copy of.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from packgraph.parallel.pieces import Pieces, parts_of

ALIGNMENT = 64  # bytes between the beginnings of copies are a multiple of it


class Staging:
    """Host memory for one checkpoint of a rank.

    Attributes:
        nbytes: Its size.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Take memory for copies of `tensors`, page-locked if they are on CUDA.

        Raises:
            RuntimeError: If there is not so much, or it cannot be locked.
        """
        self.nbytes = staged_bytes(tensors)
        # Not `pin_memory=True`: torch rounds pinned memory up to the next power of two.
        self._block = torch.empty(self.nbytes, dtype=torch.uint8)
        self._block.zero_()  # pages are there from now on, and not at the first copy
        self._locked = device.type == "cuda" and self.nbytes > 0
        if self._locked:
            address = self._block.data_ptr()
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, self.nbytes, 0))
        self._device = device

    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of `tensors`, of the same names, shapes and dtypes as before; waits for them. The
        memory is that of the last copies."""
        staged: dict[str, Tensor] = {}
        start = 0
        for name, tensor in tensors.items():
            pieces = []
            for offsets, part in parts_of(tensor):
                copy = _within(self._block, start, part)
                copy.copy_(part, non_blocking=self._locked)
                pieces.append((offsets, copy))
                start += _padded(part)
            staged[name] = Pieces(tensor.shape, tensor.dtype, pieces)
        if self._locked:
            torch.cuda.current_stream(self._device).synchronize()
        return staged

    def close(self) -> None:
        """Unlock the memory. Copies stay good, as long as somebody has them."""
        if self._locked:
            self._locked = False
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._block.data_ptr()))


def staged_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Size of the host memory that copies of `tensors` take."""
    return sum(_padded(part) for tensor in tensors.values() for _, part in parts_of(tensor))


def _padded(part: Tensor) -> int:
    return math.ceil(part.numel() * part.element_size() / ALIGNMENT) * ALIGNMENT


def _within(block: Tensor, start: int, part: Tensor) -> Tensor:
    """A tensor like `part` whose storage is some bytes of the block: torch writes a storage as a
    whole, and would first copy what is less than that."""
    stop = start + part.numel() * part.element_size()
    own = torch.from_numpy(block.numpy()[start:stop])
    return own.view(part.dtype).view(part.shape)
