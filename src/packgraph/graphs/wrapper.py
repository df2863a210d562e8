"""A module that stands for another one: the same parameters, buffers, names, state and attributes.

The tables of `nn.Module` are shared, so that names carry no prefix and a registration on either side is seen by
both. What is a method of `nn.Module` over those tables and may be overridden by the module is delegated.
"""
import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks",
           "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


@contextlib.contextmanager
def as_in_training(module: torch.nn.Module) -> Iterator[None]:
    """Gradients are on, and a module in evaluation mode is in training mode for the block.

    In a module that is in training mode already, submodules that somebody left in evaluation mode stay so.
    """
    flags = [(owner, owner.training) for owner in module.modules()]
    if not module.training:
        module.train()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for owner, mode in flags:
            owner.training = mode


class Wrapper(torch.nn.Module):
    """Behaves as `module`, except for `forward`, forward and backward hooks, and the names that the subclass sets.

    A subclass sets all its own attributes in `__init__` and then calls `_seal`: from there on every other attribute
    that is set or deleted is the module's.
    """

    module: torch.nn.Module

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__.update({table: vars(module)[table] for table in _SHARED}, module=module, _sealed=False)

    def _seal(self) -> None:
        self.__dict__["_sealed"] = True

    def _is_own(self, name: str) -> bool:
        own = vars(self)
        return not own.get("_sealed") or name in own or hasattr(type(self), name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return "module" not in vars(self) or self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in vars(self):
            self.module.training = mode

    def train(self, mode: bool = True) -> Self:
        """Set training mode of the wrapped module."""
        self.module.train(mode)
        return self

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Self:
        """Apply `fn` to the wrapped module and everything in it."""
        self.module.apply(fn)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self.module._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's state."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the wrapped module's state."""
        return self.module.load_state_dict(*args, **kwargs)

    def get_extra_state(self) -> Any:
        """The wrapped module's extra state."""
        return self.module.get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        """Set the wrapped module's extra state."""
        self.module.set_extra_state(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """A copy of the wrapped module alone: what wraps it belongs to one set of storages."""
        return copy.deepcopy(self.module, memo)

    def __reduce__(self) -> Any:
        """Pickled as the wrapped module."""
        return _unwrapped, (self.module,)

    def _save_to_state_dict(self, *args: Any) -> None:
        self.module._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.module._load_from_state_dict(*args)


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    return module
