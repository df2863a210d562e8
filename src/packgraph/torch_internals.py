"""Parts of PyTorch that have no public name, or whose public name is too slow for every call.

They are gathered here so that a new version of PyTorch is checked in one place. Each is used as
PyTorch defines it; what several modules make of them stands beside it. The allocator of CUDA
graphs has its own place (graphs/cuda/backend.py), and so have the tracer's classes
(graphs/front.py, graphs/guards.py, graphs/unguarded.py).
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._C import _autograd, _functorch
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.autograd import forward_ad, profiler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch

_C: Any = torch._C

# ---- autograd
backward_task: Callable[[], int] = _C._current_graph_task_id  # -1 outside of a backward
keeps_graph: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]
will_run: Callable[[Any], bool] = _C._will_engine_execute_node  # in the running backward
saved_tensor_hooks: Callable[[], Any] = partial(_autograd._top_saved_tensors_default_hooks, True)  # type: ignore[attr-defined]
at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback  # of the running one
)
current_node: Callable[[], Any] = _C._current_autograd_node  # in a hook: the node that runs
version_of = operator.attrgetter("_version")  # counts changes in place of a tensor's memory
base_of = operator.attrgetter("_base")  # the tensor that a view is of, None without
hooks_of = operator.attrgetter("_backward_hooks")  # of a tensor's gradient, None without

# ---- modes
any_autocast: Callable[[], bool] = _C._is_any_autocast_enabled
set_grad_mode: Callable[[bool], None] = _C._set_grad_enabled
below_modes = _C._DisableTorchDispatch  # a context: no dispatch mode sees operations
function_modes: Callable[[], int] = _C._len_torch_function_stack
dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
transform: Callable[[], Any] = _functorch.peek_interpreter_stack  # of torch.func, None without
dispatch_mode: Callable[[], Any] = _python_dispatch._get_current_dispatch_mode
without_dispatch_mode = _python_dispatch._pop_mode_temporarily  # a context: of the innermost
tracing_state: Callable[[], Any] = _C._get_tracing_state  # of torch.jit, None without

# ---- asked at every call, so without a frame of Python
is_profiled = partial(getattr, profiler, "_is_profiler_enabled")
tangent_level = partial(getattr, forward_ad, "_current_level")  # -1 without forward mode
cached_parametrizations = partial(getattr, parametrize, "_cache_enabled")  # how deep, 0 = none
ddp_module = partial(getattr, DistributedDataParallel, "_active_ddp_module")  # that runs, or None

# ---- operations
gather_into, reduce_into = torch.ops.c10d._allgather_base_, torch.ops.c10d._reduce_scatter_base_
wait_tensor = torch.ops._c10d_functional.wait_tensor
schema_of = operator.attrgetter("_schema")
flash_forward = torch.ops.aten._flash_attention_forward
flash_backward = torch.ops.aten._flash_attention_backward
scaled_mm, scaled_grouped_mm = torch._scaled_mm, torch._scaled_grouped_mm
adamw_of_torch = torch._fused_adamw_
# On every tensor of a list, by few kernels.
add_each, copy_each, divide_each, multiply_each, negate_each, norm_each, zero_each = (
    torch._foreach_add_,
    torch._foreach_copy_,
    torch._foreach_div_,
    torch._foreach_mul_,
    torch._foreach_neg_,
    torch._foreach_norm,
    torch._foreach_zero_,
)
wrapper_of: Callable[..., Any] = torch.Tensor._make_wrapper_subclass  # a tensor without memory


def raw_stream(index: int) -> int:
    """Returns the number of the current stream of a CUDA device."""
    number: int = _C._cuda_getCurrentRawStream(index)
    return number


# ---- memory
def empty_host_cache() -> None:
    """Gives pinned memory that nobody uses back to the system."""
    _C._host_emptyCache()


def clear_cublas_workspaces() -> None:
    """Lets cuBLAS's workspaces go, of all handles and streams."""
    _C._cuda_clearCublasWorkspaces()


# ---- modules
parameters_of = operator.attrgetter("_parameters")  # tables, by the names of attributes
submodules_of = operator.attrgetter("_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_module_hooks(module: torch.nn.Module) -> bool:
    """Returns whether a call of the module runs hooks of its own."""
    return any(len(getattr(module, table)) for table in HOOKS)


# ---- identity: Python objects of one storage or generator come and go
identity = operator.attrgetter("_cdata")
storage_uses: Callable[[int], int] = _C._storage_Use_Count


def storage_id(tensor: torch.Tensor) -> int:
    """Returns a number for the storage of a strided tensor, the same for as long as it lives."""
    number: int = tensor.untyped_storage()._cdata
    return number


# ---- global settings, each read in C
def _precisions(backend: str) -> tuple[Callable[[], Any], ...]:
    """Getters of precisions. torch.get_float32_matmul_precision raises an error where a user has
    set the precision of one backend."""
    return tuple(
        partial(_C._get_fp32_precision_getter, backend, operation)
        for operation in ("matmul", "conv", "rnn")
    )


# By which kernels compute otherwise, by type of device.
KERNEL_SETTINGS: dict[str, tuple[Callable[[], Any], ...]] = {
    "cpu": (
        _C._get_deterministic_algorithms,
        *_precisions("mkldnn"),
        _C._get_mkldnn_enabled,
    ),
    "cuda": (
        _C._get_deterministic_algorithms,
        *_precisions("cuda"),
        _C._get_cudnn_benchmark,
        _C._get_cudnn_deterministic,
        _C._get_cublas_allow_fp16_reduced_precision_reduction,
        _C._get_cublas_allow_bf16_reduced_precision_reduction,
        _C._get_cublas_allow_fp16_accumulation,
        _C._get_blas_preferred_backend,
        _C._get_linalg_preferred_backend,
    ),
}
cudnn_enabled: Callable[[], bool] = _C._get_cudnn_enabled
set_cudnn_enabled: Callable[[bool], None] = _C._set_cudnn_enabled
attention_order: Callable[[], list[int]] = _C._get_sdp_priority_order
set_attention_order: Callable[[list[int]], None] = _C._set_sdp_priority_order
# Whether scaled_dot_product_attention may choose a kernel, and the setter, by the kernel's name.
ATTENTION: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    name: (getattr(_C, f"_get_{name}_sdp_enabled"), getattr(_C, f"_set_sdp_use_{name}"))
    for name in ("flash", "mem_efficient", "math", "cudnn")
}
attention_reduces: Callable[[], bool] = _C._get_math_sdp_allow_fp16_bf16_reduction
