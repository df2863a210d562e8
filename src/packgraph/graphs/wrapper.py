"""A module that stands for another one: the same parameters, buffers, names, state and attributes.

The tables of `nn.Module` are shared, so that names carry no prefix and a registration on either
side is seen by both. The wrapped module's own names win: what wraps it keeps its state in an object
of its own, the control, and is asked for a name only where the module has none.
"""

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Self, cast

import torch
from torch.nn.modules import module as torch_module

from packgraph.torch_internals import HOOKS

_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
# Tables of the hooks of all modules of the process, which torch keeps.
HOOKS_OF_ALL = [getattr(torch_module, f"_global{kind}") for kind in HOOKS]
_OWN = frozenset({*vars(torch.nn.Module()), "_compiled_call_impl"}) - {*_SHARED, "training"}
_MODULE, CONTROL = "_packgraph_module", "_packgraph_control"  # where a wrapper keeps the two
_CALLED: ContextVar["Wrapper | None"] = ContextVar("packgraph_called_wrapper", default=None)


@contextlib.contextmanager
def as_in_training(module: torch.nn.Module) -> Iterator[None]:
    """Gradients are on, anomaly detection is off, and a module in evaluation mode is in training
    mode for the block.

    In a module that is in training mode already, submodules that somebody left in evaluation mode
    stay so.
    """
    flags = [(owner, owner.training) for owner in module.modules()]
    if not module.training:
        module.train()
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autograd.set_detect_anomaly(False),
        ):
            yield
    finally:
        for owner, mode in flags:
            owner.training = mode


class _Forward:
    """`forward` of a wrapper: the wrapped module's own, so that a replacement takes effect and may
    call what it has replaced. Only the call that `nn.Module.__call__` makes after its hooks goes to
    what wraps the module."""

    def __get__(self, wrapper: "Wrapper | None", owner: type) -> Any:
        if wrapper is None:  # some trainers read names of arguments off the class
            return _forward
        if _CALLED.get() is wrapper:
            _CALLED.set(None)
            return vars(wrapper)[CONTROL]
        return wrapped(wrapper).forward

    def __set__(self, wrapper: "Wrapper", value: Any) -> None:
        wrapped(wrapper).forward = value

    def __delete__(self, wrapper: "Wrapper") -> None:
        del wrapped(wrapper).forward


def _forward(self: "Wrapper", *args: Any, **kwargs: Any) -> Any:
    """Run the wrapped module's forward: eagerly, without its hooks."""
    return wrapped(self).forward(*args, **kwargs)


class Wrapper(torch.nn.Module):
    """Behaves as `module`, except for calls, and for forward and backward hooks, of which it has
    its own.

    Every name that the module has is the module's: to read, to set and to delete. A method of
    `nn.Module` that the module overrides is the module's, too. Other names are looked up in
    `control`, which also makes the calls.
    """

    forward: Any = _Forward()

    def __init__(self, module: torch.nn.Module, control: Callable[..., Any]) -> None:
        super().__init__()
        shared = {table: vars(module)[table] for table in _SHARED}
        self.__dict__.update(shared | {_MODULE: module, CONTROL: control})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module: by replay where possible, eagerly otherwise; hooks of the wrapper
        run around it."""
        own = vars(self)
        if "forward" in own:  # put there past `__setattr__`
            self.forward = own.pop("forward")
        if not (
            len(self._forward_hooks)  # as attributes: the tracer has no guards of `vars`
            or len(self._forward_pre_hooks)
            or len(self._backward_hooks)
            or len(self._backward_pre_hooks)
            or any(HOOKS_OF_ALL)
            or own.get("_compiled_call_impl")
        ):
            return own[CONTROL](*args, **kwargs)
        token = _CALLED.set(self)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            _CALLED.reset(token)

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        if _MODULE not in own:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r} yet")
        module = own[_MODULE]
        try:
            return getattr(module, name)
        except AttributeError:  # of the module's own property, perhaps
            if (
                hasattr(type(module), name)
                or (name[:2] == name[-2:] == "__")
                or not hasattr(own[CONTROL], name)
            ):
                raise
        return getattr(own[CONTROL], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if (
            isinstance(value, types.MethodType) and value.__self__ is self
        ):  # as if it had been made for the module
            value = types.MethodType(value.__func__, wrapped(self))
        if name in _OWN or name[:2] == name[-2:] == "__":
            object.__setattr__(self, name, value)
            return
        setattr(wrapped(self), name, value)
        if name in _SHARED:
            vars(self)[name] = value

    def __delattr__(self, name: str) -> None:
        delattr(wrapped(self), name)

    def __dir__(self) -> list[str]:
        public = (name for name in dir(vars(self)[CONTROL]) if not name.startswith("_"))
        return sorted({*dir(wrapped(self)), *public})

    @property
    def training(self) -> bool:
        """True if the module is in training mode."""
        return _MODULE not in vars(self) or wrapped(self).training

    @training.setter
    def training(self, mode: bool) -> None:
        if _MODULE in vars(self):
            wrapped(self).training = mode

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Self:
        """Apply `fn` to the wrapped module and everything in it."""
        wrapped(self).apply(fn)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        wrapped(self)._apply(fn, recurse)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """A copy of the wrapped module alone: what wraps it belongs to one set of storages."""
        return copy.deepcopy(wrapped(self), memo)

    def __reduce__(self) -> Any:
        """Pickled as the wrapped module."""
        return _unwrapped, (wrapped(self),)


class _Overridable:
    """A method of every module: the wrapped module's where that has one of its own, or some value
    of that name."""

    def __init__(self, name: str, own: Callable[..., Any]) -> None:
        self._name, self._own = name, own

    def __get__(self, wrapper: Wrapper | None, owner: type) -> Any:
        if wrapper is None:
            return self._own
        module = wrapped(wrapper)
        theirs = getattr(module, self._name)
        if getattr(theirs, "__func__", None) is self._own:
            return types.MethodType(self._own, wrapper)
        if not callable(theirs):
            return theirs

        @functools.wraps(theirs)
        def method(*args: Any, **kwargs: Any) -> Any:
            result = theirs(*args, **kwargs)
            return wrapper if result is module else result

        return method


def _forwarding(name: str) -> Any:
    @functools.wraps(getattr(torch.nn.Module, name))
    def method(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(wrapped(self), name)(*args, **kwargs)

    return method


for _name in (
    "state_dict",
    "load_state_dict",
    "get_extra_state",
    "set_extra_state",
    "_save_to_state_dict",
    "_load_from_state_dict",
):
    setattr(Wrapper, _name, _forwarding(_name))

for _name, _method in vars(torch.nn.Module).items():
    if (
        not _name.startswith("_")
        and _name not in vars(Wrapper)
        and isinstance(_method, types.FunctionType)
    ):
        setattr(Wrapper, _name, _Overridable(_name, _method))


def wrapped(wrapper: Wrapper) -> torch.nn.Module:
    """The module that `wrapper` stands for, whatever names that has."""
    return cast(torch.nn.Module, vars(wrapper)[_MODULE])


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    return module
