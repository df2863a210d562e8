"""Names that code reads: globals, attributes and imports, nested functions included.

Names in strings count, too: what code reads through `globals`, `eval`, `getattr`, `sys.modules` and
the like. Of a name that is computed, as in `getattr(settings, f"scale_{i}")`, the beginning is
known at most: all that begins so may be read.
"""

import dis
import functools
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import packgraph
from packgraph.graphs.errors import is_user_file

_SKIPPED = frozenset(
    {"PUSH_NULL", "PRECALL", "CACHE", "EXTENDED_ARG", "RESUME", "KW_NAMES", "NOT_TAKEN"}
)
_OF_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_OF_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_LOOK_UPS = frozenset({"get", "__getitem__", "setdefault", "pop"})
_PER_ENTRY = {"BUILD_LIST": 1, "BUILD_TUPLE": 1, "BUILD_SET": 1, "BUILD_MAP": 2}
OWN_NAME = "__name__"  # among imports: the Python module of the code itself
# Further ways to an attribute whose name is computed: of `operator`, `inspect`, `object`, and of
# `builtins`.
_OF_OBJECTS = frozenset(
    {
        "attrgetter",
        "methodcaller",
        "getattr_static",
        "getmembers",
        "getmembers_static",
        "__getattribute__",
        "getattr",
    }
)
_SUBSCRIPTS = ("BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR")


class Target(NamedTuple):
    """What a computed name is looked up in. path: a global and attributes of it, empty if it is
    something else. prefix: how the name begins."""

    path: tuple[str, ...]
    prefix: str


class ByString(NamedTuple):
    """names: globals. sources: what is evaluated. imports: (level, name) of Python modules.
    computed: where computed names are looked up. anything: code that is not known is evaluated.
    any_module: Python modules are found by computed names. own: how computed names of globals
    begin."""

    names: frozenset[str]
    sources: frozenset[str]
    imports: frozenset[tuple[int, str]]
    computed: frozenset[Target]
    anything: bool
    any_module: bool
    own: frozenset[str]


def by_string(code: types.CodeType) -> ByString:
    """What `code` itself reads through strings, without the functions inside."""
    return _Reader(code).read()


class _Step(NamedTuple):
    name: str
    value: Any
    number: int


def _parts(step: dis.Instruction) -> list[_Step]:
    """The step as one or two that do a single thing each; none that only prepare a call."""
    name, number = step.opname, step.arg or 0
    if name in _SKIPPED:
        return []
    if "_LOAD_FAST" in name and isinstance(step.argval, tuple):
        first, second = step.argval
        return [
            _Step(name.partition("_FAST")[0] + "_FAST", first, number),
            _Step("LOAD_FAST", second, number),
        ]
    if name == "BINARY_OP" and step.argrepr == "[]":
        name = "BINARY_SUBSCR"
    return [_Step(name, step.argval, number)]


class _Reader:
    def __init__(self, code: types.CodeType) -> None:
        self._steps = [part for step in dis.get_instructions(code) for part in _parts(step)]
        self._imported = {step.value for step in self._steps if step.name == "IMPORT_NAME"}
        self._names = set[str]()
        self._sources = set[str]()
        self._imports = set[tuple[int, str]]()
        self._computed = set[Target]()
        self._own = set[str]()
        self._anything = self._any_module = False
        self._end = self._evaluated = 0  # the call of the last argument, and of what is evaluated

    def read(self) -> ByString:
        for at in range(len(self._steps)):
            name = self._loaded(at)
            if self._is_global(at) and name in _READERS:
                _READERS[name](self, at)
            elif name == "import_module":
                self._import(at)
            elif name == "modules" and at and (self._loaded(at - 1) or "").strip("_") == "sys":
                self._modules(at)
            elif name == "__dict__" and self._opname(at) in _OF_ATTRIBUTE:
                self._attributes(self._path_before(at), at + 1)
            elif name in _OF_OBJECTS and self._argument(at + 1) is None:
                self._computed.add(Target((), ""))
        return ByString(
            frozenset(self._names),
            frozenset(self._sources),
            frozenset(self._imports),
            frozenset(self._computed),
            self._anything,
            self._any_module,
            frozenset(self._own),
        )

    # ---- steps

    def _opname(self, at: int) -> str:
        return self._steps[at].name if at < len(self._steps) else ""

    def _loaded(self, at: int) -> str | None:
        """The name that a step loads."""
        if not self._opname(at).startswith("LOAD_") or self._opname(at) == "LOAD_CONST":
            return None
        value = self._steps[at].value
        return value if isinstance(value, str) else None

    def _is_global(self, at: int) -> bool:
        return self._opname(at) in _OF_GLOBAL

    def _string(self, at: int) -> str | None:
        value = self._steps[at].value if self._opname(at) == "LOAD_CONST" else None
        return value if isinstance(value, str) else None

    def _prefix(self, at: int) -> str:
        """How a string begins that is computed from here on."""
        found = self._string(at) or ""
        formats = "%" in found or "{" in found or self._opname(at + 1) in _OF_ATTRIBUTE
        return "" if formats else found

    def _argument(self, at: int, before: int = 0) -> str | None:
        """The string that is an argument of a call as it stands, after `before` others."""
        found = self._string(at)
        size = before + 1
        for later in range(at + 1, len(self._steps)) if found is not None else ():
            name = self._opname(later)
            if name in ("CALL", "CALL_KW"):
                # The names of keyword arguments are on the stack, too.
                count = self._steps[later].number + (name == "CALL_KW")
                if size == count:
                    self._end = later
                    return found
                if size < before + 2 + count:
                    return None
                size -= count
            elif name in _OF_ATTRIBUTE:
                if size == before + 1:
                    return None
            elif name in _PER_ENTRY:
                entries = _PER_ENTRY[name] * self._steps[later].number
                if size < before + 1 + entries:
                    return None
                size += 1 - entries
            elif name.startswith("LOAD_"):
                size += 1
            else:
                return None
        return None

    def _key(self, at: int) -> tuple[str | None, str]:
        """The key that a dictionary is asked for, or how it begins."""
        if self._opname(at) in _OF_ATTRIBUTE:
            if self._loaded(at) not in _LOOK_UPS:
                return None, ""
            return self._argument(at + 1), self._prefix(at + 1)
        return (self._string(at) if self._opname(at + 1) in _SUBSCRIPTS else None), self._prefix(at)

    def _path(self, at: int) -> tuple[tuple[str, ...], int]:
        """A global and its attributes, and the first step after; an empty path if it is something
        else."""
        root, end = self._loaded(at), at + 1
        while self._opname(end) == "LOAD_ATTR":
            end += 1
        names = [self._loaded(step) or "" for step in range(at + 1, end)]
        known = self._is_global(at) or root in self._imported
        return ((root, *names) if root and known else ()), end

    def _path_before(self, at: int) -> tuple[str, ...]:
        start = at - 1
        while start > 0 and self._opname(start) in _OF_ATTRIBUTE:
            start -= 1
        return self._path(start)[0][: at - start] if start >= 0 else ()

    # ---- ways to read by a string

    def _globals(self, at: int) -> None:
        key, prefix = self._key(at + 2)
        if at < self._evaluated:
            return  # the namespace of an evaluation
        if not self._opname(at + 1).startswith("CALL"):
            self._own.add("")
        elif key is not None:
            self._names.add(key)
        elif self._opname(at + 2) == "CONTAINS_OP" and self._string(at - 1) is not None:
            self._names.add(self._string(at - 1) or "")
        else:
            self._own.add(prefix)

    def _evaluate(self, at: int) -> None:
        source = self._argument(at + 1)
        if source is None:
            self._anything = True
        else:
            self._sources.add(source)
            self._evaluated = self._end

    def _import(self, at: int) -> None:
        name = self._argument(at + 1)
        if name is None:
            self._any_module = True
        else:
            self._imports.add((len(name) - len(name.lstrip(".")), name.lstrip(".")))

    def _modules(self, at: int) -> None:
        key, _ = self._key(at + 1)
        if key is not None:
            self._imports.add((0, key))
        elif self._loaded(at + 1) == OWN_NAME and self._opname(at + 2) in _SUBSCRIPTS:
            self._imports.add((0, OWN_NAME))
        elif self._opname(at + 1) != "CONTAINS_OP":
            self._any_module = True

    def _getattr(self, at: int) -> None:
        path, end = self._path(at + 1)
        if self._argument(end, before=1) is None:
            self._computed.add(Target(path, self._prefix(end)))

    def _vars(self, at: int) -> None:
        path, end = self._path(at + 1)
        if path and self._opname(end).startswith("CALL"):
            self._attributes(path, end + 1)
        elif path == ("type",):
            self._computed.add(Target((), ""))

    def _attributes(self, path: tuple[str, ...], at: int) -> None:
        key, prefix = self._key(at)
        if key is None:
            self._computed.add(Target(path, prefix))


_READERS = {
    "globals": _Reader._globals,
    "eval": _Reader._evaluate,
    "exec": _Reader._evaluate,
    "__import__": _Reader._import,
    "getattr": _Reader._getattr,
    "vars": _Reader._vars,
}


_PACKGRAPH = str(Path(packgraph.__file__).parent)
_MADE_BY_CODE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_LIBRARIES = frozenset({"torch", "numpy"})
# Languages of kernels, their compilers, and kernels written in them: what they hold is what they
# have compiled.
KERNELS = frozenset({"cutlass", "flash_attn", "quack", "triton", "tvm_ffi"})
# They move bytes, files and text: no tensor is computed from what they hold.
TOOLS = frozenset({
    "anyio", "certifi", "click", "filelock", "fsspec", "h11", "httpcore", "httpcore2", "httpx",
    "httpx2", "huggingface_hub", "idna", "jinja2", "packaging", "psutil", "regex", "requests",
    "rich", "safetensors", "tokenizers", "tqdm", "truststore", "typer", "urllib3", "yaml",
})  # fmt: skip
# Parts of libraries around a model: loading, saving, converting, generating, training loops. A
# layer's code comes upon them by names that it shares with them.
AROUND_MODELS = (
    "accelerate",
    "peft.utils.hotswap",
    "peft.utils.save_and_load",
    "peft.utils.transformers_weight_conversion",
    "transformers.conversion_mapping",
    "transformers.convert_slow_tokenizer",
    "transformers.core_model_loading",
    "transformers.data",
    "transformers.dynamic_module_utils",
    "transformers.generation",
    "transformers.integrations.gguf",
    "transformers.models.auto",
    "transformers.pipelines",
    "transformers.quantizers",
    "transformers.safetensors_conversion",
    "transformers.tokenization_utils_base",
    "transformers.trainer",
    "transformers.utils.hub",
    "transformers.utils.loading_report",
    "transformers.utils.logging",
    "transformers.utils.quantization_config",
)
_MANY = 2**16  # entries of caches: functions that walks meet, and names of their modules

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


@functools.lru_cache(maxsize=_MANY)
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


@functools.lru_cache(maxsize=_MANY)
def is_library(name: object) -> bool:
    """Whether the Python module `name` belongs to torch, numpy, packgraph, the standard library or
    a tool: what it holds is taken as it is. Some classes say something else than a name."""
    if not isinstance(name, str):
        return False
    first = name.partition(".")[0]
    if name in sys.builtin_module_names or first in _LIBRARIES | KERNELS | TOOLS:
        return True
    if any(name == part or name.startswith(f"{part}.") for part in AROUND_MODELS):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and (file.startswith(_PACKGRAPH) or not is_user_file(file))


@functools.lru_cache(maxsize=_MANY)
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
