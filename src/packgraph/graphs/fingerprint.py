"""The facts that graphs bake about a module, checked before every call.

A replay reads the storages it was captured with and runs no Python of the module. So a storage that was replaced, a
parameter that was frozen or given a hook, a submodule that was exchanged or switched to evaluation, a number that the
forward reads would be ignored by a replay. The check walks lists made at capture; it must stay cheap, since it is
paid by every microbatch.

Looked at: parameters and buffers (also those that are None), and of every attribute: tensors, random generators,
numbers, strings and other plain values, functions; inside lists, tuples and dicts too. Other objects are not: a
module that reads a number out of an object of its own must be told with `packgraph.eager`, or get it as an argument.
"""
from collections.abc import Callable, Set
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as torch_module

from packgraph.graphs.parameters import has_hooks, local_tensor
from packgraph.graphs.wrapper import Wrapper, wrapped

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
Mark = tuple[int, str]  # an attribute: id of the module that has it, name
_PLACING = "torch.distributed.tensor."
_INTERNAL = frozenset(vars(torch.nn.Module()))
_LONGEST = 64  # plain values are watched in containers of up to so many entries, tensors in all

_IN_PLACE = "change parameters and other tensors in place (copy_, load_state_dict) to keep the graphs"
_AT_FIRST = "do it before the first captured call, or live with one more capture per change"
_ARGUMENT = "pass what changes often to forward as an argument, as a tensor if it may have any value"


class Change(NamedTuple):
    """A fact that no longer holds, in words, and what to do about it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return self.what


class _TensorFact(NamedTuple):
    """A tensor as it was (a sparse one is a value, known by identity). get: of what holds it under `key`."""

    get: Callable[[Any], Any]
    key: Any
    tensor: torch.Tensor
    local: torch.Tensor
    pointer: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    trains: bool
    hooked: bool
    name: str
    mark: Mark


class _ValueFact(NamedTuple):
    """A plain value, compared by value, or an object, compared by identity."""

    get: Callable[[Any], Any]
    key: Any
    value: Any
    plain: bool
    name: str
    mark: Mark


class Fingerprint:
    """The facts about `module` as they are now.

    volatile: attributes that eager stages assign; they may change, since captured stages are not to read them.
    """

    def __init__(self, module: torch.nn.Module, volatile: Set[Mark] = frozenset()) -> None:
        self._volatile = volatile
        self._tensors: list[_TensorFact] = []
        self._values: list[_ValueFact] = []
        self._sizes: list[tuple[Any, int, str, Mark]] = []
        self._children: list[tuple[dict[str, Any], str, Any]] = []
        self._flags: list[tuple[torch.nn.Module, bool]] = []
        self._hooks = [(table, len(table)) for table in _global_hooks()]
        for prefix, owner in owners(module):
            self._note(prefix, owner)
        self._hooks += [(table, len(table)) for _, owner in module.named_modules() if isinstance(owner, Wrapper)
                        for table in (getattr(owner, kind) for kind in HOOKS)]

    def _note(self, prefix: str, owner: torch.nn.Module) -> None:
        where, dotted = repr(prefix) if prefix else "the module", f"{prefix}." if prefix else ""
        self._flags.append((owner, owner.training))
        self._hooks += [(table, len(table)) for table in (getattr(owner, kind) for kind in HOOKS)]
        self._children += [(owner._modules, name, child) for name, child in owner._modules.items()]
        self._sizes.append((owner._modules, len(owner._modules), f"a submodule of {where}", (0, "")))
        attributes = {name: value for name, value in vars(owner).items() if name not in _INTERNAL}
        self._sizes.append((vars(owner), len(vars(owner)), f"an attribute of {where}", (0, "")))
        for table, values in ((owner._parameters, owner._parameters), (owner._buffers, owner._buffers),
                              (vars(owner), attributes)):
            if table is not vars(owner):
                self._sizes.append((table, len(table), f"a parameter or buffer of {where}", (0, "")))
            for name, value in values.items():
                self._note_value(table.get, name, value, dotted + name, (id(owner), name), set())

    def _note_value(self, get: Callable[[Any], Any], key: Any, value: Any, name: str, mark: Mark,
                    above: set[int], plain_too: bool = True) -> None:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            local = local_tensor(value)
            trains = value.requires_grad
            self._tensors.append(_TensorFact(get, key, value, local, local.data_ptr(), local.shape, local.stride(),
                                             local.dtype, trains, trains and has_hooks(value), name, mark))
        elif _is_plain(value):
            if plain_too:
                self._values.append(_ValueFact(get, key, value, True, name, mark))
        elif isinstance(value, torch.Tensor | torch.Generator) or callable(value):
            self._values.append(_ValueFact(get, key, value, False, name, mark))
        elif isinstance(value, list | tuple | dict) and id(value) not in above:
            self._values.append(_ValueFact(get, key, value, False, name, mark))
            self._sizes.append((value, len(value), f"an entry of {name!r}", mark))
            inner = value.get if isinstance(value, dict) else partial(_entry, value)
            for inside, entry in value.items() if isinstance(value, dict) else enumerate(value):
                self._note_value(inner, inside, entry, f"{name}[{inside!r}]", mark, above | {id(value)},
                                 len(value) <= _LONGEST)

    def changed(self, but: Set[Mark] = frozenset()) -> Change | None:
        """What no longer holds, or None. but: attributes that are not looked at, besides the volatile ones."""
        skip = self._volatile | but
        return self._submodules_changed(skip) or self._tensors_changed(skip) or self._values_changed(skip)

    def _submodules_changed(self, skip: Set[Mark]) -> Change | None:
        for owner, training in self._flags:
            if owner.training is not training:
                return Change(f"the training mode of a {type(owner).__name__} inside the module changed", _AT_FIRST)
        for table, name, child in self._children:
            if table.get(name) is not child:
                return Change(f"the submodule {name!r} was replaced", _AT_FIRST)
        for table, size, name, mark in self._sizes:
            if len(table) != size and mark not in skip:
                return Change(f"{name} was added or removed", _AT_FIRST)
        if self.hooked():
            return Change("the hooks of a submodule changed", _AT_FIRST)
        return None

    def _tensors_changed(self, skip: Set[Mark]) -> Change | None:
        for get, key, tensor, local, pointer, shape, stride, dtype, trains, hooks, name, mark in self._tensors:
            if get(key) is not tensor or local.data_ptr() != pointer \
                    or (local is not tensor and local_tensor(tensor) is not local):
                if mark not in skip:
                    return Change(f"the storage of {name!r} was replaced", _IN_PLACE)
            elif local.stride() != stride or local.shape != shape or local.dtype != dtype:
                return Change(f"shape, strides or dtype of {name!r} changed", _IN_PLACE)
            elif tensor.requires_grad != trains:
                return Change(f"requires_grad of {name!r} changed", _AT_FIRST)
            elif trains and has_hooks(tensor) != hooks:
                return Change(f"{name!r} got its first hook or lost its last", _AT_FIRST)
        return None

    def _values_changed(self, skip: Set[Mark]) -> Change | None:
        for get, key, value, plain, name, mark in self._values:
            now = get(key)
            if now is value or (plain and type(now) is type(value) and now == value) or mark in skip:
                continue
            return Change(f"{name!r} changed", _AT_FIRST if isinstance(now, torch.Tensor) else _ARGUMENT)
        return None

    def hooked(self) -> bool:
        """Whether a submodule, or all modules, have got a hook or lost one since."""
        return any(len(table) != size for table, size in self._hooks)


def owners(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The module and its submodules by name; a wrapper is seen as what it wraps."""
    return [(name, wrapped(owner) if isinstance(owner, Wrapper) else owner) for name, owner in module.named_modules()]


def _entry(sequence: Any, position: int) -> Any:
    return sequence[position] if position < len(sequence) else None


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _global_hooks() -> list[dict[int, Any]]:
    """The tables of the hooks that run for every module of the process."""
    return [getattr(torch_module, f"_global{kind}") for kind in HOOKS]


def module_hooks(module: torch.nn.Module) -> str | None:
    """The first submodule with hooks that a replay would skip, in words, or None.

    The hooks of DTensor's parallel styles only place tensors on the mesh: what they launch is captured with the
    module, so they are fine.
    """
    for name, owner in [*owners(module), *module.named_modules()]:  # a wrapper has hooks of its own
        for kind in HOOKS:
            if any(not hook.__module__.startswith(_PLACING) for hook in getattr(owner, kind).values()):
                where = f"submodule {name!r}" if name else "the module"
                return f"{where} ({type(owner).__name__}) has {_words(kind)}"
    for kind, table in zip(HOOKS, _global_hooks(), strict=True):
        if table:
            return f"every module has {_words(kind)} (register_module_..._hook)"
    return None


def _words(kind: str) -> str:
    return kind.strip("_").replace("_", " ")
