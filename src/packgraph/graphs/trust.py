"""What is checked of a module that its user says is static, in place of traces and their guards.

    the same submodules, parameters and buffers     by identity, if a table of them was written to
    their training flags                            before every call

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

_TRAINING = operator.attrgetter("training")


class _Parts:
    """The parts of a module, by identity, and their training flags."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._modules = [*module.modules()]
        tables = [(each._parameters, each._buffers, each._modules) for each in self._modules]
        self._tables = [table for three in tables for table in three]
        self._held, self._training = self._held_now(), [*map(_TRAINING, self._modules)]
        self._versions = self._versions_now()
        self._kept = [value for table in self._tables for value in table.values()]

    def __eq__(self, other: object) -> bool:
        known = isinstance(other, _Parts) and (other._held, other._training)
        return known == (self._held, self._training)

    __hash__ = None  # type: ignore[assignment]

    def _versions_now(self) -> list[int]:
        return list(map(dict_version, self._tables))

    def _held_now(self) -> list[tuple[str, int]]:
        return [(name, id(value)) for table in self._tables for name, value in table.items()]

    def hold(self) -> bool:
        """Whether nothing has changed."""
        if list(map(_TRAINING, self._modules)) != self._training:
            return False
        now = self._versions_now()
        if now == self._versions:
            return True
        if self._held_now() != self._held:
            return False
        self._versions = now
        return True


class Trusted:
    """Stands for the trace of a module that nobody has read (`front.Trace`)."""

    code, recomputes = "", False
    names: tuple[str, ...] = ()

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    @functools.cached_property
    def classes(self) -> _Parts:
        """See Trace; of the module as it is when this is asked first, without stand-ins."""
        return _Parts(self._module)

    def does_as(self, other: "Trusted") -> bool:
        """See Trace."""
        return True

    def scope(self, owner: Any) -> dict[str, Any]:
        """See Trace."""
        return {}

    def fits(self, owner: Any, state: Any) -> bool:
        """See Trace."""
        return True

    def holds(self, scope: dict[str, Any], whole: bool = False) -> bool:
        """See Trace."""
        return True

    def read(self, owner: Any, scope: dict[str, Any] | None = None) -> tuple[Any, ...]:
        """See Trace."""
        return ()

    def tensors(self, owner: Any) -> list[torch.Tensor]:
        """See Trace."""
        return []

    def is_read_as(self, now: tuple[Any, ...]) -> bool:
        """See Trace."""
        return True

    def modules(self, owner: Any) -> tuple[torch.nn.Module, ...]:
        """See Trace."""
        return ()

    def difference(self, owner: Any, state: Any = None) -> str:
        """See Trace."""
        return "a submodule, parameter, buffer or training flag of the module was changed"


class TrustingReader:
    """Reads nothing (`front.Reader`)."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def read(self, piece: CompileUnit, state: State) -> Trusted:
        """See Reader."""
        found = Trusted(self._module)
        note_trace(found, self._module)
        return found
