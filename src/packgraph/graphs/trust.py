"""Checks of a module that its user says is static, in place of traces and their guards.

    submodules, parameters, buffers, hooks    by identity, where a table of them was written to
    where parameters and buffers lie          before every call, and their forms
    training flags                            before every call

Everything else that forward reads is taken for what it was at capture, and what it does beside
computing is not done again. The comparison of first replays stays (`reference.py`).
"""

import functools
import operator
from typing import Any

import torch
from torch._C._dynamo.guards import dict_version

from packgraph.graphs.program import note_trace
from packgraph.graphs.stages import CompileUnit, State
from packgraph.torch_internals import HOOKS

_TRAINING = operator.attrgetter("training")
_TABLES = ("_parameters", "_buffers", "_modules", *HOOKS)


class _Parts:
    """The parts of a module and their hooks, by identity, and their training flags."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._modules = [*module.modules()]
        self.look()

    def look(self) -> None:
        """Takes what there is now for what there should be."""
        self._own = [*map(vars, self._modules)]
        self._tables = [own[name] for own in self._own for name in _TABLES]
        self.held, self.training = self._held_now(), [*map(_TRAINING, self._modules)]
        self._versions = self._versions_now()
        self._kept = [value for table in self._tables for value in table.values()]

    def __eq__(self, other: object) -> bool:
        known = isinstance(other, _Parts) and (other.held, other.training)
        return known == (self.held, self.training)

    __hash__ = None  # type: ignore[assignment]

    def _versions_now(self) -> list[int]:
        return [*map(dict_version, self._own), *map(dict_version, self._tables)]

    def _held_now(self) -> list[tuple[str, int]]:
        tables = [own[name] for own in self._own for name in _TABLES]
        return [(name, id(value)) for table in tables for name, value in table.items()]

    def hold(self) -> bool:
        """Tells whether nothing has changed."""
        if list(map(_TRAINING, self._modules)) != self.training:
            return False
        if self._versions_now() == self._versions:
            return True
        # Tables of attributes hold tensors, which == would compare by their numbers.
        if not all(map(operator.is_, map(vars, self._modules), self._own)) or (
            self._held_now() != self.held
        ):
            return False
        self.look()
        return True


class Trusted:
    """Stands for the trace of a module that nobody has read (`traces.Trace`)."""

    code, recomputes, are_fixed = "", True, True  # a backward may run any of its code
    kept = ()

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.names = [f"buffer {name!r}" for name, _ in module.named_buffers()]

    @functools.cached_property
    def classes(self) -> _Parts:
        """See Trace; of the module as it is when this is asked first, without stand-ins."""
        return _Parts(self._module)

    def _is_taken_so(self, *_: Any) -> bool:
        """See Trace: nothing of it is compared."""
        return True

    does_as = fits = is_read_as = holds = holds_of = holds_around = _is_taken_so

    def scope(self, owner: Any) -> dict[str, Any]:
        """See Trace."""
        return {}

    def read(self, owner: Any, scope: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """See Trace; the buffers."""
        return tuple(self._module.buffers())

    def tensors(self, owner: Any) -> tuple[Any, ...]:
        """See Trace."""
        return ()

    modules = tensors

    def difference(self, owner: Any, state: Any = None) -> str:
        """See Trace."""
        return "a submodule, parameter, buffer, hook or training flag of the module was changed"


class TrustingReader:
    """Reads nothing (`front.Reader`)."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def read(self, piece: CompileUnit, state: State) -> Trusted:
        """See Reader."""
        found = Trusted(self._module)
        note_trace(found, self._module)
        return found
