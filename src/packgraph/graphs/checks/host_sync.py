"""Refusal of what a captured region must not do, while its code runs.

Two modes watch the code of a region. The dispatch mode sees every tensor operation: those whose
result or shape depends on data (they wait for the device), boolean masks, resized storages. The
function mode of recordings sees host reads that never reach the dispatcher for CPU tensors
(`t.tolist()`). Both raise at the user's line, before the operation runs. The dispatch mode
also keeps a journal: the old contents of every tensor that existed before and is written to, so
that running a region for capture can be undone. Random generators are a fact of the capture too:
those that it knows are advanced by replays; drawing from any other is refused.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.decorators import skip
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from packgraph.graphs.checks.operations import (
    PLAIN_TENSORS,
    Operation,
    flat,
    operands_of,
    operation_of,
    storages,
    tensors_of,
)
from packgraph.graphs.checks.random_state import Draws
from packgraph.graphs.errors import CaptureError, user_line
from packgraph.graphs.fallback import within
from packgraph.graphs.memory.allocator import most_allocated
from packgraph.torch_internals import identity, storage_id

_BOOLEAN = (torch.bool, torch.uint8)


def shapes_only(types: Iterable[type]) -> bool:
    """Returns whether an operation on tensors of these types computes only shapes, so that nobody
    need see it.

    DTensor runs an operation that is new to it on fake tensors once, to learn the shape of the
    result.
    """
    for kind in types:  # noqa: SIM110  # no generator: this is asked twice for every operation
        if kind not in PLAIN_TENSORS and issubclass(kind, FakeTensor):
            return True
    return False


_KEEP = "keep the value on the device, or read it after the step"
_PRINT = "print it after the step, or run the call under packgraph.eager(...)"
_SHAPE = "use a static shape: torch.where or masked_fill instead of selecting rows"
HOST_READS = {
    "__bool__": (
        "a Python branch on a tensor",
        "use torch.where, or take the branch outside the captured stage",
    ),
    "item": ("Tensor.item()", _KEEP),
    "tolist": ("Tensor.tolist()", _KEEP),
    "numpy": ("Tensor.numpy()", _KEEP),
    "cpu": ("Tensor.cpu()", _KEEP),
    "__int__": ("int(tensor)", _KEEP),
    "__float__": ("float(tensor)", _KEEP),
    "__complex__": ("complex(tensor)", _KEEP),
    "__index__": (
        "a tensor used as a Python index",
        "index with the tensor itself (index_select, gather)",
    ),
    "__array__": ("numpy reading a tensor", _KEEP),
    "__repr__": ("printing a tensor", _PRINT),
    "__format__": ("a tensor in a formatted string", _PRINT),
    "__contains__": ("`in` on a tensor", "compare on the device: (tensor == value).any()"),
}
# transformers looks at a mask's values to see whether it can go without, but not at those of a
# complete mask.
_MASKS_OF = os.path.join("transformers", "masking_utils.py")
_MASKS = (
    "pass a complete attention_mask, boolean and of shape [batch, 1, queries, keys]: its values "
    "are not looked at"
)
_REPEAT = "pass output_size= (a static number) to repeat_interleave"
# Advice on operations that wait for the device.
WAYS_OUT = {
    "nonzero": _SHAPE,
    "masked_select": _SHAPE,
    "index": _SHAPE,
    "_unique2": _SHAPE,
    "unique_consecutive": _SHAPE,
    "unique_dim": _SHAPE,
    "bincount": "use zeros(n).scatter_add_(0, index, ones): its shape is static",
    "repeat_interleave": _REPEAT,
    "_local_scalar_dense": _KEEP,
    "equal": "compare on the device: (a == b).all()",
    "is_nonzero": _KEEP,
}
_FIXED: ContextVar[bool] = ContextVar("packgraph_compiled_before", default=False)
_COMPILED: ContextVar[bool] = ContextVar("packgraph_compiled_stages", default=False)
_KNOWN: ContextVar[frozenset[int] | None] = ContextVar("packgraph_known_generators", default=None)
SLACK = 1.5  # a pool does not take the very blocks that eager code has left
COPIES = 1 / 8  # of free memory, for all copies together
LARGE = 2**26  # bytes of memory whose old contents may have to wait on the host
LEAVE_OUT = "leave this stage out of the scope, or run the call under packgraph.eager(...)"


class Journal:
    """Old contents of tensors that were written to, restored on request. They wait on the host
    where the device has no memory for them: a step's graph writes to all gradients, which may be
    more than is free.

    draws: what the same capture does to random generators, if it is watched. has_drawn: whether an
    operation may have drawn from one.
    """

    def __init__(self) -> None:
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._beside = 0  # bytes of copies on the device
        self.draws: Draws | None = None
        self.has_drawn = False

    def before_write(self, tensor: torch.Tensor) -> None:
        """Save the whole storage behind `tensor` unless it is saved already."""
        key = storage_id(tensor)
        if key not in self._saved:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
                tensor.untyped_storage()
            )
            copy = copied(whole, self._beside)
            self._beside += copy.numel() if copy.device.type == "cuda" else 0
            self._saved[key] = (whole, copy)

    def call(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation of the capture's code that may draw, with random numbers that nobody
        else gets."""
        self.has_drawn = True
        return (
            operation.function(*args, **kwargs)
            if self.draws is None
            else self.draws.call(operation, args, kwargs)
        )

    def restore(self) -> None:
        """Put the saved contents back, unseen by autograd, and forget them."""
        for whole, old in self._saved.values():
            if whole.untyped_storage().nbytes() == old.numel():
                whole.copy_(old)
        self._saved.clear()
        self._beside = 0


def copied(whole: torch.Tensor, beside: int) -> torch.Tensor:
    """A copy of bytes, on the device if there is room for it. beside: see `_has_room`."""
    if _has_room(whole, beside):
        with contextlib.suppress(torch.OutOfMemoryError):
            return whole.clone()
    return torch.empty_like(whole, device="cpu").copy_(whole)


def _has_room(whole: torch.Tensor, beside: int) -> bool:
    """Returns whether a copy may stay on the device while the rest of a step is dry-run and
    captured. Small ones do anyway.

    It leaves what the process has needed beyond what it holds now, and SLACK. Where no step has run
    yet, compiled code being tried out, nobody knows how much that is: so all copies take COPIES of
    free memory at most. beside: bytes that are held for earlier ones alone.
    """
    device = whole.device
    if device.type != "cuda" or whole.numel() < LARGE:
        return True
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_allocated(device)
    free += torch.cuda.memory_reserved(device) - held
    allowed = torch.cuda.memory.get_per_process_memory_fraction(device) * total - held
    needed = most_allocated(device) - (held - beside)
    room = min(free, allowed)
    few = whole.numel() + beside <= COPIES * (room + beside)
    return few and room - whole.numel() >= SLACK * needed


def known_generators(generators: Sequence[torch.Generator]) -> AbstractContextManager[None]:
    """Within the block captured code may draw from these generators only."""
    return within(_KNOWN, frozenset(map(identity, generators)))


def capturing() -> bool:
    """Returns whether the caller is run for a capture (or its dry run)."""
    return _KNOWN.get() is not None


class FunctionWatcher(TorchFunctionMode):
    """A function mode that is not shown to torch.compile, which would take its Python for the
    user's."""


@contextlib.contextmanager
def without_watchers() -> Iterator[None]:
    """Within the block no function mode of ours is there: torch.compile would take its Python for
    the user's."""
    with contextlib.ExitStack() as stack:
        while isinstance(_get_current_function_mode(), FunctionWatcher):
            stack.enter_context(_pop_mode_temporarily())
        yield


class HostReads(FunctionWatcher):
    """Refuses reads of tensors by the host that the CPU's dispatcher does not see."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST_READS and args and isinstance(args[0], torch.Tensor):
            raise host_read(name, user_line())
        return func(*args, **(kwargs or {}))


def host_read(name: str, where: str) -> CaptureError:
    """The error for a read of a tensor by this method, at a line."""
    what, remedy = HOST_READS[name]
    return CaptureError(
        f"{what} waits for the device inside a captured stage",
        where,
        _MASKS if _MASKS_OF in where else remedy,
    )


@contextlib.contextmanager
def compiled_stages(there: bool = True, fixed: bool = False) -> Iterator[None]:
    """Within the block torch.compile works under the modes that watch captured code. fixed: see
    `all_is_compiled`.

    Otherwise it gives way to them, and a function that the user has compiled runs operation by
    operation: its kernels would be no operations that a watcher sees. Our own compiled code tells
    the watchers itself (graphs/compiled/compiler.py).
    """
    with within(_COMPILED, there), within(_FIXED, fixed):
        yield


def all_is_compiled() -> bool:
    """Returns whether this thread captures compiled code, all of which was compiled before: a
    capture cannot hold compiling."""
    return _FIXED.get()


class CodeWatcher(TorchDispatchMode):
    """A dispatch mode that is told of compiled code as of one operation."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        own = cls.__dict__.get("__torch_dispatch__")
        super().__init_subclass__(**kwargs)
        if own is not None:
            cls.__torch_dispatch__ = _hidden_from_compiler(own, cls.__torch_dispatch__)  # type: ignore[method-assign]

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """Tells torch, when the mode begins, whether torch.compile may work under it."""
        return _COMPILED.get()


def _hidden_from_compiler(
    own: Callable[..., Any], disabled: Callable[..., Any]
) -> Callable[..., Any]:
    """A dispatch mode's `__torch_dispatch__` that torch.compile does not trace.

    torch wraps it to that end (`disabled`), in ten calls for every operation. Where no compiler
    waits for frames there is nothing to hide.
    """

    @skip
    @functools.wraps(own)
    def dispatch(
        self: TorchDispatchMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if get_eval_frame_callback() is None:
            return own(self, func, types, args, kwargs)
        return disabled(self, func, types, args, kwargs)

    return dispatch


class CaptureChecker(CodeWatcher):
    """Runs code for a capture: journals writes to what existed before, and refuses what a graph
    cannot hold.

    refuse: False only journals (stages that stay eager may do what they like). device: type
        of the device that operations may wait for; None = any.
    external, written: the tensors from outside that the code has read and written to, by storage.
    made: storages that it has made.
    """

    def __init__(self, journal: Journal, *, refuse: bool, device: str | None) -> None:
        super().__init__()
        self.journal, self.refuse, self.device = journal, refuse, device
        self.external: dict[int, torch.Tensor] = {}
        self.written: dict[int, torch.Tensor] = {}
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and not PLAIN_TENSORS.issuperset(types):
            return func(*args, **kwargs) if shapes_only(types) else NotImplemented
        operation = operation_of(func)
        if operation is None:
            return func(*args, **kwargs)
        inputs = self._before(operation, args, kwargs)
        result = (
            self.journal.call(operation, args, kwargs)
            if operation.may_draw
            else func(*args, **kwargs)
        )
        results = [result] if type(result) in PLAIN_TENSORS else flat((result,))
        self.made.update(storages(results).keys() - inputs)
        return result

    def _before(
        self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Set[int]:
        """Looks at an operation that is about to run: the storages that it is given."""
        operands = operands_of(args, kwargs)
        if self.refuse:
            refuse_unsafe(operation, args, kwargs, operands, self.device)
        inputs, written = storages(operands), storages(operation.written_of(args, kwargs))
        for key, tensor in written.items():
            if key not in self.made:
                self.journal.before_write(tensor)
                self.written[key] = tensor
        for key, tensor in inputs.items():
            if key not in self.made:
                self.external[key] = tensor
        return inputs.keys()

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Returns whether the code has made the tensor's memory."""
        return tensor.layout is torch.strided and storage_id(tensor) in self.made


def refuse_unsafe(
    operation: Operation,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[Any],
    device: str | None,
) -> None:
    """Raise CaptureError when an operation does what a graph cannot: wait for the device, change a
    storage's size, make a sparse tensor, draw from a random generator that replays would not
    advance, or compute otherwise than eager calls.
    """
    name, tensors = operation.name, tensors_of(operands)
    sparse = operation.makes_sparse
    for tensor in tensors:
        sparse = sparse or tensor.layout is not torch.strided
    if sparse:
        raise CaptureError(
            f"a sparse tensor ({name}) inside a captured stage: its size depends on data",
            user_line(),
            "use dense gradients: nn.Embedding(sparse=False). " + LEAVE_OUT,
        )
    if operation.is_harmless:
        return
    _refuse_random(operation, operands, tensors, kwargs.get("device"), device)
    if operation.is_product and args[0].requires_grad and torch.is_grad_enabled():
        raise CaptureError(
            "the backward of torch.prod looks for zeros on the host, and computes otherwise inside "
            "of a "
            "capture",
            user_line(),
            "multiply slices of the tensor instead. " + LEAVE_OUT,
        )
    if operation.resizes:
        raise CaptureError(
            f"{name} changes a tensor's storage inside a captured stage", user_line(), LEAVE_OUT
        )
    if device is not None and not any(t.device.type == device for t in tensors):
        return
    if operation.maskable:
        masks = [i for i in args[1] if isinstance(i, torch.Tensor) and i.dtype in _BOOLEAN]
        if masks and not _is_fill(*args):
            raise CaptureError(
                "indexing with a boolean mask waits for the device: its size depends on data",
                user_line(),
                _SHAPE,
            )
        return
    if operation.copies and device is not None:
        _refuse_transfer(args[0], kwargs)
    if operation.waits and kwargs.get("output_size") is None:
        shown = (
            "reading a number out of a tensor (Tensor.item())"
            if name == "_local_scalar_dense"
            else f"torch.{name}"
        )
        raise CaptureError(
            f"{shown} waits for the device: its result is needed on the host",
            user_line(),
            WAYS_OUT.get(name, LEAVE_OUT),
        )


def _is_fill(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    value: torch.Tensor | None = None,
    accumulate: bool = False,
    unsafe: bool = False,
) -> bool:
    """Returns whether torch takes `tensor[mask] = number` for `masked_fill_`: one mask, and a value
    on the host."""
    number = value is not None and value.numel() == 1 and value.device.type == "cpu"
    return number and not accumulate and len([i for i in indices if i is not None]) == 1


def _refuse_random(
    operation: Operation,
    operands: Sequence[Any],
    tensors: list[torch.Tensor],
    target: torch.device | None,
    device: str | None,
) -> None:
    """Refuse an operation whose random numbers would be frozen."""
    known = (
        _KNOWN.get()
    )  # by address: the dispatcher makes a new Python object for the same generator
    for operand in operands if known is not None and operation.takes_generator else ():
        if isinstance(operand, torch.Generator) and identity(operand) not in known:  # type: ignore[attr-defined,operator]
            raise CaptureError(
                "a random generator that the module does not hold is used inside a captured stage: "
                "graphs advance only those they know",
                user_line(),
                "make it an attribute of the module, or use the default generator",
            )
    if device is None or not operation.draws:
        return
    place = target or (tensors[0].device if tensors else torch.device("cpu"))
    if place.type != device:
        raise CaptureError(
            f"random numbers are drawn on the {place.type} inside a captured stage on {device}: a "
            "graph "
            "would freeze them",
            user_line(),
            f"draw them on the device: pass device={device!r}",
        )


def _refuse_transfer(source: torch.Tensor, kwargs: dict[str, Any]) -> None:
    target = kwargs.get("device")
    if target is None or target.type == source.device.type:
        return
    if target.type == "cpu" or not source.is_pinned():
        raise CaptureError(
            f"a copy from {source.device.type} to {target.type} waits for the device",
            user_line(),
            "make the tensor on the device, or copy it before the captured stage",
        )
