"""The modes that a call was made under, for code of it that runs again later, in the backward."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

_SDP = ("flash", "mem_efficient", "math", "cudnn")


class CallModes(NamedTuple):
    """Modes of a call.

    Attributes:
        device_type: Of the module.
        autocast: Whether autocast is on for it, its dtype, and whether casts are cached.
        dtype: The default dtype.
        device: The default device, if the user has set one for this thread.
        attention: Which kernels `scaled_dot_product_attention` may choose, and in which order.
        cudnn: Whether cuDNN is used.
    """

    device_type: str
    autocast: tuple[bool, torch.dtype, bool]
    dtype: torch.dtype
    device: torch.device | None
    attention: tuple[tuple[bool, ...], tuple[int, ...]]
    cudnn: bool

    @classmethod
    def now(cls, device_type: str) -> "CallModes":
        """The modes of this thread."""
        found = [getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in _SDP]
        return cls(
            device_type,
            (
                torch.is_autocast_enabled(device_type),
                torch.get_autocast_dtype(device_type),
                torch.is_autocast_cache_enabled(),
            ),
            torch.get_default_dtype(),
            torch.get_default_device() if torch._C._len_torch_function_stack() else None,
            (tuple(found), tuple(torch._C._get_sdp_priority_order())),
            torch._C._get_cudnn_enabled(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block these are the modes. Default dtype and choice of kernels are those of
        the whole process, as where users set them."""
        before = CallModes.now(self.device_type)
        enabled, dtype, cache = self.autocast
        self._set(before)
        try:
            with (
                torch.autocast(self.device_type, dtype=dtype, enabled=enabled, cache_enabled=cache),
                torch.device(self.device or "cpu")
                if self.device != before.device
                else contextlib.nullcontext(),
            ):
                yield
        finally:
            before._set(self)

    def _set(self, now: "CallModes") -> None:
        if self.dtype != now.dtype:
            torch.set_default_dtype(self.dtype)
        if self.attention != now.attention:
            for name, enabled in zip(_SDP, self.attention[0], strict=True):
                getattr(torch._C, f"_set_sdp_use_{name}")(enabled)
            torch._C._set_sdp_priority_order(list(self.attention[1]))  # type: ignore[attr-defined]
        if self.cudnn != now.cudnn:
            torch._C._set_cudnn_enabled(self.cudnn)
