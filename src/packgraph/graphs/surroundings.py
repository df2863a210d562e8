"""What is around a call, whatever module it is of: why nothing can be replayed here and now.

A replay launches the module's operations as one. Whoever wants to see each of them (a mode, a
tracer, anomaly detection, hooks of saved tensors, a transformation) sees nothing then, and the
result may lack what that adds to tensors. Looked at before every call, so each check is one call
into C.
"""

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from packgraph.graphs import fallback, saved_tensors


def is_traced() -> bool:
    """Whether torch.compile, torch.export or torch.jit reads the caller's code instead of running
    it."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def reason_around() -> str | None:
    """Why a call made here must run eagerly, or None. Whether it is traced has been asked
    before."""
    if torch.is_inference_mode_enabled():
        return fallback.INFERENCE
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return fallback.TRANSFORMED
    if forward_ad._current_level >= 0:
        return fallback.TANGENTS
    if saved_tensors.are_watched():
        return fallback.SAVED_TENSOR_HOOKS
    if torch.is_anomaly_enabled():
        return fallback.ANOMALY
    if torch._C._len_torch_dispatch_stack() or (
        torch._C._len_torch_function_stack() and _function_modes()
    ):
        return fallback.MODES
    if parametrize._cache_enabled:
        return fallback.CACHED
    return None


def _function_modes() -> bool:
    """Whether a function mode is active besides torch.set_default_device, which captured code has
    obeyed."""
    return any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
