"""Names that code reads: globals, attributes and imports, nested functions included."""

import dis
import functools
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import packgraph
from packgraph.graphs.computed_reads import ByString, by_string
from packgraph.graphs.errors import is_user_file

_PACKGRAPH = str(Path(packgraph.__file__).parent)
_MADE_BY_CODE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_LIBRARIES = ("torch", "numpy", "triton")

_OF_GLOBALS = frozenset(
    {
        "LOAD_GLOBAL",
        "LOAD_NAME",
        "LOAD_FROM_DICT_OR_GLOBALS",
        "STORE_GLOBAL",
        "DELETE_GLOBAL",
    }
)


class Reads(NamedTuple):
    """names: globals. attributes: of anything, and strings that may be names of attributes.
    imports: (level, name). strings: what is read by names in strings."""

    names: frozenset[str]
    attributes: frozenset[str]
    imports: frozenset[tuple[int, str]]
    strings: tuple[ByString, ...]


@functools.lru_cache(maxsize=8192)
def reads_of(code: types.CodeType) -> Reads:
    """What `code` reads by name, and globals that it sets: a replay would not set them again."""
    names, imports, constants = set[str](), set[tuple[int, str]](), list[Any]()
    for step in dis.get_instructions(code):
        if step.opname in _OF_GLOBALS:
            names.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            level = constants[-2] if len(constants) > 1 and isinstance(constants[-2], int) else 0
            imports.add((level, step.argval))
        elif step.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT", "RETURN_CONST")):
            constants.append(step.argval)
    attributes = {
        *code.co_names,
        *(value for value in code.co_consts if isinstance(value, str) and len(value) < 64),
    }
    own = by_string(code)
    names |= own.names
    imports |= own.imports
    strings: tuple[ByString, ...] = (own,) if any(own) else ()
    evaluated = (found for found in map(_compiled, own.sources) if found is not None)
    for inner in (*code.co_consts, *evaluated):
        if isinstance(inner, types.CodeType):
            more = reads_of(inner)
            names |= more.names
            attributes |= more.attributes
            imports |= more.imports
            strings += more.strings
    # No name that anybody has written begins so: assertions that a test tool has rewritten.
    names = {name for name in names if not name.startswith("@")}
    return Reads(frozenset(names), frozenset(attributes), frozenset(imports), strings)


def _compiled(source: str) -> types.CodeType | None:
    try:
        return compile(source.strip(), "<evaluated>", "exec")
    except (SyntaxError, ValueError):  # evaluating it raises, too
        return None


def imported(level: int, name: str, package: str | None) -> list[types.ModuleType]:
    """The loaded modules that an import statement makes readable: `a.b` binds `a`, or what `from
    a.b` names."""
    full = importlib.util.resolve_name("." * level + name, package) if level and package else name
    found = (sys.modules.get(part) for part in {full, full.partition(".")[0]})
    return [module for module in found if module is not None]


@functools.lru_cache(maxsize=8192)
def is_library(name: object) -> bool:
    """Whether the Python module `name` belongs to torch, numpy, packgraph or the standard
    library: what it holds is taken as it is. Some classes say something else than a name."""
    if not isinstance(name, str):
        return False
    if name in sys.builtin_module_names or name.partition(".")[0] in _LIBRARIES:
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and (file.startswith(_PACKGRAPH) or not is_user_file(file))


@functools.lru_cache(maxsize=8192)
def is_installed(name: str) -> bool:
    """Whether the Python module `name` is a library's or comes from an installed package: nobody
    rewrites its functions in place, and its globals seldom change."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return is_library(name) or "site-packages" in file or "dist-packages" in file


def is_library_class(kind: type) -> bool:
    """Whether a class comes from a library or from C. One that code without a `__name__` has made
    says that it is built in."""
    return is_library(kind.__module__) and not (
        kind.__module__ == "builtins" and kind.__flags__ & _MADE_BY_CODE
    )


CALLED_BY_MACHINERY = frozenset({"forward", "backward", "setup_context", "begin", "stages", "end"})
_NOT_IN_CALLS = frozenset({
    "__repr__", "__str__", "__del__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
    "__init_subclass__", "__class_getitem__", "__copy__", "__deepcopy__", "__setattr__",
    "__delattr__", "__dir__", "__sizeof__",
})  # fmt: skip
_MAKING = frozenset({"__init__", "__new__", "__post_init__"})


def is_implicit(name: str, made: bool) -> bool:
    """Whether code may call a method of this name without naming it. made: code makes instances."""
    return name.startswith("__") and name not in _NOT_IN_CALLS and (made or name not in _MAKING)


_NO_FUNCTIONS = {types.NoneType, bool, int, float, str, tuple, list, dict, set, frozenset}


def function_of(value: Any) -> types.FunctionType | None:
    """The Python function behind a method, a property, a cache and so on."""
    for _ in range(8):
        if isinstance(value, types.FunctionType):
            return value
        if type(value) in _NO_FUNCTIONS:
            return None
        for name in ("__func__", "fget", "func", "__wrapped__"):
            inner = getattr(value, name, None)
            if inner is not None:
                break
        value = inner
    return None
