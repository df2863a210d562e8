"""Snapshots of containers: what they held, how to read it again, and where that is in the user's
words.

What torch's own layers call by name. Nobody walks their code, so all of it is compared.

`nn.Linear` reads `torch.nn.functional.linear` in every call, and every module and tensor looks up
its methods in a class of torch: who replaces one of them changes what layers compute.
"""

import dis
import functools
import gc
import importlib.abc
import logging
import operator
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple

import torch

from packgraph.graphs.checks.code_reads import function_of, is_library, reads_of
from packgraph.graphs.checks.state_kinds import Mark, Treatment, row_of, same_value, value_key

MISSING = object()
Pairs = list[tuple[Any, Any]]


class Place(NamedTuple):
    """Where a value is. prefix: words before the quoted path."""

    path: str
    prefix: str = ""

    def __str__(self) -> str:
        return f"{self.prefix}{self.path!r}" if self.path else "the module"

    def field(self, name: str) -> "Place":
        """An attribute."""
        return Place(f"{self.path}.{name}" if self.path else name, self.prefix)

    def entry(self, key: Any) -> "Place":
        """An entry of a container."""
        shown = repr(key) if value_key(key) else type(key).__name__
        return Place(f"{self.path}[{shown}]", self.prefix)


class Form(Enum):
    """How the entries of a container can be compared fast."""

    FIELDS = "attributes of an object with __dict__"
    DICT = "a plain dictionary, or what only changes with one"
    ITEMS = "a list, set or deque"
    FIXED = "cannot change"
    CALL = "by calling `quick`"


@dataclass(slots=True)
class Table:
    """What a container held.

    holder: the container, or the object of the attributes. read: its entries now. entries: as they
    were. place, word: where it is, and what an entry is called. mark: the attribute it belongs to;
    None, every entry is an attribute of its own, of `owner` (default `holder`). ordered: the order
    of entries counts. quick: the values now, as fast as possible. behind: the dictionary in whose
    version every change shows, of the form DICT.
    """

    holder: Any
    form: Form
    read: Callable[[], Pairs]
    entries: Pairs
    place: Place
    word: str
    mark: Mark | None
    ordered: bool
    quick: Callable[[], Iterable[Any]] | None = None
    by_field: bool = True
    owner: Any = None
    behind: dict[Any, Any] | None = None
    kind: type = object

    def __post_init__(self) -> None:
        self.kind = type(self.holder)

    def mark_of(self, key: Any) -> Mark:
        """The attribute that an entry belongs to."""
        if self.mark is not None:
            return self.mark
        return id(self.holder if self.owner is None else self.owner), key

    def place_of(self, key: Any) -> Place:
        """Where an entry is."""
        return self.place.field(str(key)) if self.by_field else self.place.entry(key)


def differing(now: Pairs, before: Pairs) -> list[Any]:
    """The keys whose values are other ones now, or that are there only now or only before."""
    if len(now) == len(before) and all(
        key is other and value is held
        for (key, value), (other, held) in zip(now, before, strict=True)
    ):
        return []
    new, old = dict(now), dict(before)
    return [
        key
        for key in old.keys() | new.keys()
        if key not in new
        or key not in old
        or (new[key] is not old[key] and not same_value(new[key], old[key]))
    ]


def fields_table(owner: Any, place: Place, skip: frozenset[str] = frozenset()) -> Table:
    """The attributes in an object's `__dict__`, but those called as in `skip`."""
    read = partial(_fields, owner, skip)
    return Table(owner, Form.FIELDS, read, read(), place, "an attribute of", None, ordered=False)


def _fields(owner: Any, skip: frozenset[str]) -> Pairs:
    return [(name, value) for name, value in vars(owner).items() if name not in skip]


def slot_names(kind: type) -> list[str]:
    """The names of `__slots__` of a class and its bases, as attributes are called."""
    names = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return names


def slots_table(owner: Any, names: Sequence[str], place: Place) -> Table:
    """The attributes in an object's slots."""
    read = partial(_slots, owner, names)
    entries = read()
    # In C where all are set: one that is not raises AttributeError.
    all_set = len(entries) == len(names) > 1
    return Table(
        owner,
        Form.CALL,
        read,
        entries,
        place,
        "an attribute of",
        None,
        ordered=False,
        quick=partial(operator.attrgetter(*names), owner) if all_set else partial(_values, read),
    )


def _slots(owner: Any, names: Sequence[str]) -> Pairs:
    return [
        (name, value) for name in names if (value := getattr(owner, name, MISSING)) is not MISSING
    ]


def _values(read: Callable[[], Pairs]) -> list[Any]:
    return [value for _, value in read()]


_ITERATE: dict[type, Callable[[Any], Iterable[Any]]] = {
    list: list.__iter__,
    set: set.__iter__,
    deque: deque.__iter__,
    tuple: tuple.__iter__,
    frozenset: frozenset.__iter__,
}


def contents_table(
    value: Any,
    place: Place,
    mark: Mark | None,
    word: str = "an entry of",
    by_field: bool = False,
    owner: Any = None,
) -> Table:
    """The entries of a built-in container, whatever a subclass makes of them."""
    if isinstance(value, dict | MappingProxyType):
        kinds = (OrderedDict, dict, MappingProxyType)
        items = next(kind.items for kind in kinds if isinstance(value, kind))
        read: Callable[[], Pairs] = partial(_items, items, value)
        table = Table(value, Form.DICT, read, read(), place, word, mark, ordered=True)
        table.by_field, table.owner = by_field, owner
        if type(value) is dict:
            table.behind = value
        else:
            table.form, table.quick = Form.CALL, partial(_flat, read)
        return table
    base = next(kind for kind in _ITERATE if isinstance(value, kind))
    read = partial(_enumerated, _ITERATE[base], value)
    exact = Form.ITEMS if type(value) is base else Form.CALL
    form = Form.FIXED if base in (tuple, frozenset) else exact
    table = Table(value, form, read, read(), place, word, mark, ordered=True)
    table.by_field, table.quick = False, partial(_ITERATE[base], value)
    return table


def _items(items: Callable[[Any], Iterable[tuple[Any, Any]]], value: Any) -> Pairs:
    return list(items(value))


def _flat(read: Callable[[], Pairs]) -> list[Any]:
    return [part for pair in read() for part in pair]


def _enumerated(iterate: Callable[[Any], Iterable[Any]], value: Any) -> Pairs:
    return list(enumerate(iterate(value)))


def class_table(kind: type, place: Place, methods_only: bool) -> Table:
    """The attributes of one class, without what Python itself keeps there. methods_only: of a
    library's class."""
    read = partial(_class_entries, kind, methods_only)
    # Of ctypes it is a subclass of dict.
    behind = next(
        (found for found in gc.get_referents(vars(kind)) if isinstance(found, dict)), None
    )
    form = Form.CALL if behind is None else Form.DICT
    return Table(
        kind,
        form,
        read,
        read(),
        place,
        "an attribute of",
        None,
        ordered=False,
        quick=partial(_flat, read),
        behind=behind,
    )


def _class_entries(kind: type, methods_only: bool) -> Pairs:
    return [
        (name, value)
        for name, value in vars(kind).items()
        if (isinstance(value, FunctionType) and not _is_of_compiler(kind, name, value))
        or not (
            methods_only
            or name.startswith("_abc_")
            or (name.startswith("__") and name.endswith("__"))
        )
    ]


# torch replaces these by others of its own when a process compiles something for the first time.
_REPLACED_BY_COMPILER = ("__init__", "__setstate__")


def _is_of_compiler(kind: type, name: str, value: FunctionType) -> bool:
    """Whether a value is torch's own, old or new, of what its compiler replaces in `nn.Module`."""
    return (
        kind is torch.nn.Module
        and name in _REPLACED_BY_COMPILER
        and value.__globals__.get("__name__", "").partition(".")[0] == "torch"
    )


_PARTS = ("__code__", "__defaults__", "__kwdefaults__")


def function_table(function: FunctionType, place: Place) -> Table:
    """The code and the defaults of a function."""
    read = partial(_named_parts, function)
    return Table(
        function,
        Form.CALL,
        read,
        read(),
        place,
        "an attribute of",
        None,
        ordered=False,
        quick=partial(operator.attrgetter(*_PARTS), function),
    )


def _named_parts(function: FunctionType) -> Pairs:
    return [(name, getattr(function, name)) for name in _PARTS]


def closure_table(function: FunctionType, place: Place) -> Table:
    """The variables of outer functions that a function reads."""
    read = partial(_cells, function)
    return Table(
        function,
        Form.CALL,
        read,
        read(),
        place,
        "a variable of",
        None,
        ordered=False,
        quick=partial(_values, read),
    )


def _cells(function: FunctionType) -> Pairs:
    pairs = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            pairs.append((name, cell.cell_contents))
        except ValueError:  # not assigned yet
            pairs.append((name, MISSING))
    return pairs


def names_table(
    namespace: dict[str, Any], names: Iterable[str], place: Place, settled: bool
) -> Table:
    """Chosen names of a module's globals, be they there or not. settled: its globals seldom
    change."""
    names = sorted(names)
    there = [name for name in names if name in namespace]
    absent = [name for name in names if name not in namespace]
    read = partial(_picked, namespace, names)
    if settled:
        return Table(
            namespace,
            Form.DICT,
            read,
            read(),
            place,
            "a global of",
            None,
            ordered=False,
            behind=namespace,
        )
    # With one name alone itemgetter returns no tuple.
    picked = partial(operator.itemgetter(*there, there[0]), namespace) if there else tuple
    quick = partial(_checked, namespace.keys(), absent, picked)
    return Table(
        namespace, Form.CALL, read, read(), place, "a global of", None, ordered=False, quick=quick
    )


def namespace_table(namespace: dict[str, Any], prefix: str, place: Place) -> Table:
    """All globals of a module whose names begin with `prefix`, without what Python keeps there."""
    read = partial(_beginning, namespace, prefix)
    return Table(
        namespace,
        Form.CALL,
        read,
        read(),
        place,
        "a global of",
        None,
        ordered=False,
        quick=partial(_flat, read),
    )


def _beginning(namespace: dict[str, Any], prefix: str) -> Pairs:
    return [
        (name, value)
        for name, value in list(namespace.items())
        if name.startswith(prefix) and not name.startswith(("__", "@"))
    ]


def _picked(namespace: dict[str, Any], names: Sequence[str]) -> Pairs:
    return [(name, namespace.get(name, MISSING)) for name in names]


def _checked(
    keys: Any, absent: Sequence[str], picked: Callable[[], Iterable[Any]]
) -> Iterable[Any]:
    return picked() if keys.isdisjoint(absent) else ()


def referent_table(read_it: Callable[[], Any], value: Any, place: Place, mark: Mark) -> Table:
    """What a reference refers to."""
    read = partial(_referred, read_it)
    return Table(
        value,
        Form.CALL,
        read,
        read(),
        place,
        "an attribute of",
        mark,
        ordered=False,
        quick=partial(_values, read),
    )


def _referred(read_it: Callable[[], Any]) -> Pairs:
    return [("()", read_it())]


def reader_of(value: Any) -> Callable[[], Any]:
    """What forward reads of a reference, a logger or an event, as a call that takes no argument."""
    if isinstance(value, ContextVar):
        return partial(value.get, MISSING)
    if isinstance(value, weakref.ReferenceType):
        return value
    if isinstance(value, logging.Logger):
        return partial(_level, value)
    if hasattr(type(value), "is_set"):
        return value.is_set  # type: ignore[no-any-return]
    return partial(getattr, value.__repr__, "__self__", MISSING)  # a proxy


def shown(value: Any) -> str:
    """What a counter shows, the same object while it shows the same."""
    return sys.intern(repr(value))


def _level(logger: logging.Logger) -> str:
    """What decides whether a logger lets a message through, the same object while it is the
    same."""
    return sys.intern(f"{logger.getEffectiveLevel()} {logger.manager.disable} {logger.disabled}")


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


def _has_no_state(owner: Any) -> bool:
    """Whether a C function of `owner`, a class or module, has nothing that could be walked."""
    return owner is None or isinstance(owner, type | types.ModuleType)


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
    if type(value) is types.BuiltinFunctionType and _has_no_state(value.__self__):
        return False
    if isinstance(value, types.FunctionType):
        return not is_library(value.__globals__.get("__name__", ""))
    return _is_function(value) and row_of(value).treatment is not Treatment.IDENTITY
