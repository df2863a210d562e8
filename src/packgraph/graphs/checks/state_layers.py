"""What torch's own layers call by name. Nobody walks their code, so all of it is compared.

`nn.Linear` reads `torch.nn.functional.linear` in every call, and every module and tensor looks up
its methods in a class of torch: who replaces one of them changes what layers compute.
"""

import dis
import functools
import importlib.abc
import sys
import types
from typing import Any

import torch

from packgraph.graphs.checks.code_reads import function_of, is_library, reads_of
from packgraph.graphs.checks.state_kinds import Treatment, row_of
from packgraph.graphs.checks.state_tables import Place, Table, class_table, names_table

_GLOBAL, _CLASS = "the global ", "the class attribute "
_FILES = {
    torch.nn.Module: "torch.nn.modules.module",
    torch.Tensor: "torch._tensor",
}  # where their bodies are
_KNOWN: dict[int, Any] = {}  # by identity: what is not foreign, which stays so


def layer_tables() -> list[Table]:
    """Functions and methods that torch's layers find by name. Each is compared by the version of
    one dictionary."""
    found = [
        names_table(vars(module), names, Place(module.__name__, _GLOBAL), settled=True)
        for module, names in _functions_of_layers()
    ]
    found.append(class_table(torch.nn.Module, Place("torch.nn.Module", _CLASS), True))
    found.append(class_table(torch.Tensor, Place("torch.Tensor", _CLASS), False))
    return found


@functools.lru_cache
def _functions_of_layers() -> list[tuple[types.ModuleType, list[str]]]:
    """The functions of torch.nn.functional, and those of torch that they name: others torch itself
    may replace, such as `manual_seed` when it loads its compiler."""
    namespace = vars(torch.nn.functional)
    functions = [name for name, value in namespace.items() if _is_function(value)]
    codes = (function_of(namespace[name]) for name in functions)
    named = {
        name for code in codes if code is not None for name in reads_of(code.__code__).attributes
    }
    beneath = [name for name in named if _is_function(vars(torch).get(name))]
    return [(torch.nn.functional, functions), (torch, beneath)]


def is_of_torch(holder: Any, name: str) -> bool:
    """Whether torch itself has `name` in this class or module of its own. Nobody in torch calls
    what others have added, as transformers adds `torch.nn.Module.smart_apply`."""
    return not isinstance(holder, type) or name in _own_names(holder)


@functools.lru_cache
def _own_names(kind: type) -> frozenset[str]:
    """The names in the body of a class, as its file has them, and those of its bases."""
    file = _FILES[kind]
    loader = sys.modules[file].__loader__
    assert isinstance(loader, importlib.abc.InspectLoader)
    code = loader.get_code(file)
    assert code is not None
    bodies = [
        part
        for part in code.co_consts
        if isinstance(part, types.CodeType) and part.co_name == kind.__name__
    ]
    found = {
        step.argval
        for body in bodies
        for step in dis.get_instructions(body)
        if step.opname == "STORE_NAME"
    }
    return frozenset(found.union(*map(vars, kind.__mro__[1:])))


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def foreign(table: Table) -> list[tuple[str, Any]]:
    """What somebody else has put among torch's functions."""
    found = []
    for name, value in table.entries:
        if _KNOWN.get(id(value)) is value:
            continue
        if _is_foreign(value):
            found.append((name, value))
        else:
            _KNOWN[id(value)] = value
    return found


def _is_foreign(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        return not is_library(value.__globals__.get("__name__", ""))
    return _is_function(value) and row_of(value).treatment is not Treatment.IDENTITY
