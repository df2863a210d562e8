"""Refusal of calls to autograd, and of changes to tensors from outside, in captured forwards.

A forward graph holds kernels. A hook that forward registers, a `backward()` that it runs, a
parameter that it gives other memory would each be there once, at capture, and on tensors that stand
for the user's. Most of it is seen as it is called, at the user's line; what torch does not show is
seen on the tensors when the forward has ended.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from packgraph.graphs.checks.host_sync import LEAVE_OUT, FunctionWatcher
from packgraph.graphs.errors import CaptureError, is_user_file, user_line
from packgraph.graphs.parameters import local_tensor

_HOOK = (
    "a replay would not register it",
    "register hooks outside of forward, on parameters or outputs, or write a "
    "torch.autograd.Function",
)
_BACKWARD = (
    "it adds to .grad at capture only, never at a replay",
    "use torch.autograd.grad(..., create_graph=True) and let what it returns flow into an output",
)
_GRADIENT = (
    "a graph would not read or write the parameter's .grad",
    "read or change gradients between backward and the optimizer's step",
)
_TENSOR: Any = torch.Tensor  # its descriptors, which type checkers take for attributes
_DATA = _TENSOR.data.__set__
_REFUSED = {
    torch.Tensor.register_hook: ("Tensor.register_hook", *_HOOK),
    torch.Tensor.register_post_accumulate_grad_hook: (
        "Tensor.register_post_accumulate_grad_hook",
        *_HOOK,
    ),
    torch.Tensor.retain_grad: (
        "Tensor.retain_grad",
        "a replay would not keep the gradient",
        "call it on what forward returns, outside of forward",
    ),
    torch.Tensor.backward: ("Tensor.backward", *_BACKWARD),
    torch.autograd.backward: ("torch.autograd.backward", *_BACKWARD),
    _DATA: (
        "an assignment to Tensor.data",
        "a replay would not do it",
        "write in place under torch.no_grad(): tensor.copy_(...)",
    ),
    _TENSOR.grad.__get__: ("Tensor.grad", *_GRADIENT),
    _TENSOR.grad.__set__: ("an assignment to Tensor.grad", *_GRADIENT),
    _TENSOR.grad.__delete__: ("a deletion of Tensor.grad", *_GRADIENT),
}
_MARK = "_dynamo_"  # of attributes by which torch.compile marks tensors
_COMPILERS = tuple(
    str(Path(torch.__file__).parent / part) for part in ("_dynamo", "_functorch", "_inductor")
)
_ORIGINS = {_TENSOR.is_leaf.__get__: "Tensor.is_leaf", _TENSOR.grad_fn.__get__: "Tensor.grad_fn"}
_SWITCHES = (torch.Tensor.requires_grad_, _TENSOR.requires_grad.__set__)
_LOOKED_AT = {*_REFUSED, *_ORIGINS, *_SWITCHES}


class _Facts(NamedTuple):
    """Properties of a tensor from outside that forward must not change."""

    pointer: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    gradient: int | None
    attributes: dict[str, int]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Facts":
        """Those of `tensor`."""
        local = local_tensor(tensor)
        pointer = local.data_ptr() if local.layout is torch.strided else 0
        strides = tuple(local.stride()) if local.layout is torch.strided else ()
        grad = tensor.grad if tensor.is_leaf else None
        return cls(
            pointer,
            local.shape,
            strides,
            local.dtype,
            tensor.requires_grad,
            None if grad is None else id(grad),
            {name: id(value) for name, value in vars(tensor).items() if not name.startswith(_MARK)},
        )


@contextlib.contextmanager
def only_forward(
    outside: Iterable[torch.Tensor], where: str, assigned: Callable[[torch.Tensor], None]
) -> Iterator[None]:
    """Run the forward of captured code in this block. Raises CaptureError for what a replay would
    not do.

    outside: parameters, buffers and inputs. where: the line to name if no better one is known.
    assigned: is told of a tensor whose memory is replaced.
    """
    tensors = {id(tensor): tensor for tensor in outside}
    before = _facts_of(tensors.values())
    with _ForwardCalls(tensors, assigned):
        yield
    for tensor, old, new in zip(tensors.values(), before, _facts_of(tensors.values()), strict=True):
        _compare(tensor, old, new, where)


def _facts_of(tensors: Iterable[torch.Tensor]) -> list[_Facts]:
    with torch._C.DisableTorchFunction():  # what is looked at here is nobody's call
        return [_Facts.of(tensor) for tensor in tensors]


def _compare(tensor: torch.Tensor, old: _Facts, new: _Facts, where: str) -> None:
    """Raise CaptureError when `tensor` is another one now."""
    if new == old:
        return
    what = f"a {type(tensor).__name__} of shape {list(old.shape)} from outside"
    if new.gradient != old.gradient:
        raise CaptureError(
            f"a backward inside forward gives {what} a gradient: {_BACKWARD[0]}",
            where,
            _BACKWARD[1],
        )
    if new.attributes != old.attributes:
        name = next(
            n
            for n in [*new.attributes, *old.attributes]
            if new.attributes.get(n) != old.attributes.get(n)
        )
        raise CaptureError(
            f"forward assigns the attribute {name!r} of {what}: a replay would not do it",
            where,
            "return the value from forward",
        )
    raise CaptureError(
        f"forward gives {what} other memory, another form or another requires_grad: a replay would "
        "not "
        "do it",
        where,
        "do it outside of forward, or write to the tensor in place. " + LEAVE_OUT,
    )


def _is_asked_for(frame: FrameType | None) -> bool:
    """Returns whether the user's code makes the call, and not a compiler for graphs of its own."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_COMPILERS):
            return False
        frame = frame.f_back
    return True


class _ForwardCalls(FunctionWatcher):
    """Refuses calls at their line. outside: tensors from outside, by identity, inputs that need
    gradients as well."""

    def __init__(
        self, outside: dict[int, torch.Tensor], assigned: Callable[[torch.Tensor], None]
    ) -> None:
        super().__init__()
        self._outside, self._assigned = outside, assigned
        self._inputs = {
            key
            for key, tensor in outside.items()
            if tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter)
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _LOOKED_AT:
            return func(*args, **kwargs)
        refused = _REFUSED.get(func)
        if refused is not None:
            if func == _DATA:
                self._assigned(args[0])
            what, why, remedy = refused
            raise CaptureError(f"{what} inside a captured stage: {why}", user_line(), remedy)
        if func in _ORIGINS and id(args[0]) in self._inputs and _is_asked_for(sys._getframe(1)):
            raise CaptureError(
                f"{_ORIGINS[func]} of an argument inside a captured stage: a graph has copies of "
                "its "
                "arguments, which nothing was computed from",
                user_line(),
                "ask outside of the call, and pass the answer as an argument",
            )
        if func in _SWITCHES and id(args[0]) in self._outside:
            wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            if args[0].requires_grad != wanted:
                raise CaptureError(
                    "requires_grad of a tensor from outside is changed inside a captured stage: a "
                    "replay would not do it",
                    user_line(),
                    "do it before the call, or on a detached tensor",
                )
        return func(*args, **kwargs)
