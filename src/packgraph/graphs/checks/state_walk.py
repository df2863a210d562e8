"""The walk over all Python state that a module's forward can read.

It begins at the module and follows attributes, containers, objects, modules held anywhere, and the
names that the code of forward reads: globals, closures, class attributes. Of classes it walks the
methods whose name occurs in code that was walked before, so what nothing calls is left out.
"""

import contextlib
import functools
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from packgraph.graphs.checks.code_reads import (
    CALLED_BY_MACHINERY,
    OWN_NAME,
    ByString,
    function_of,
    imported,
    is_implicit,
    is_installed,
    is_library,
    is_library_class,
    reads_of,
)
from packgraph.graphs.checks.state_kinds import (
    ASSUMED,
    DEPTH,
    LARGEST_BYTES,
    MOST_CONTAINERS,
    OF_TORCH,
    VIEWS,
    Mark,
    Treatment,
    contents,
    global_generators,
    row_of,
    value_key,
)
from packgraph.graphs.checks.state_tables import (
    MISSING,
    Place,
    Table,
    class_table,
    closure_table,
    contents_table,
    fields_table,
    foreign,
    function_table,
    is_of_torch,
    layer_tables,
    names_table,
    namespace_table,
    reader_of,
    referent_table,
    shown,
    slot_names,
    slots_table,
)
from packgraph.graphs.checks.unsupported import module_hooks, owners
from packgraph.graphs.wrapper import Wrapper, wrapped

if TYPE_CHECKING:
    from packgraph.graphs.checks.module_state import TensorState

INTERNAL = frozenset(vars(torch.nn.Module()))
SUBMODULE: Mark = (
    0,
    "",
)  # entries in tables of submodules: no attribute that an eager stage may assign
_READ_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb"})
_OPERATORS: Mapping[str, Any] = getattr(
    torch._library.custom_ops, "OPDEFS", {}
)  # no public interface
_GLOBAL, _VARIABLE, _CLASS = "the global ", "the closure variable ", "the class attribute "


class Refused(NamedTuple):
    """State that cannot be watched, in words, and what to do about it."""

    what: str
    remedy: str


class Walk:
    """Everything about `module` that graphs bake, as it is now.

    tables: containers and what they hold. tensors: gets their facts. owners: modules. arrays: with
    their place, attribute and contents. refused: why the module cannot be watched.
    """

    def __init__(self, module: torch.nn.Module, tensors: "TensorState") -> None:
        self.tables: list[Table] = []
        self.tensors = tensors
        self.owners: list[torch.nn.Module] = []
        self.arrays: list[tuple[Any, Place, Mark, tuple[Any, ...]]] = []
        self.refused: Refused | None = None
        self._seen: dict[int, int] = {}
        self._functions: dict[int, types.FunctionType] = {}
        self._pending: list[types.FunctionType] = []
        self._classes: dict[type, bool] = {}
        self._unread: dict[
            type, dict[str, Any]
        ] = {}  # attributes of classes that no code has named yet
        self._names = set(CALLED_BY_MACHINERY)
        self._prefixes = set[str]()  # how names begin that code computes
        self._whole = set[tuple[int, str]]()
        self._globals: dict[int, tuple[dict[str, Any], str, set[str]]] = {}
        self._own_generators = {id(generator) for generator in global_generators()}
        self._held_namespaces: dict[int, types.ModuleType] = {}
        self._reached: dict[int, types.ModuleType] = {}  # from those
        self._looked_for: frozenset[str] = frozenset()  # in those that are reached
        self._added: list[tuple[str, Any, Table]] = []  # what others have put into classes of torch
        self._note_module(module, Place(""))
        self._note_layers()
        self._walk_code()
        self.tables += [
            names_table(namespace, names, Place(name, _GLOBAL), is_installed(name))
            for namespace, name, names in self._globals.values()
        ]
        self.tables += [
            names_table(vars(module), self._names, Place(name), settled=True)
            for name, module in self._namespaces()
        ]

    # ---- modules

    def _note_module(self, module: torch.nn.Module, place: Place) -> None:
        left_out = {
            id(child) for owner in module.modules() if owner in ASSUMED for child in owner.modules()
        }
        for name, owner in owners(module):
            if id(owner) not in left_out and id(owner) not in self._seen:
                self._seen[id(owner)] = 0
                where = place.field(name) if name else place
                if isinstance(owner, torch.jit.ScriptModule):
                    self._refuse_script(where)
                    continue
                self.owners.append(owner)
                self._note_owner(owner, where)

    def _refuse_script(self, place: Place) -> None:
        if self.refused is None:
            self.refused = Refused(
                f"{place} is a module of torch.jit: Python sees neither its code nor when its "
                "attributes change",
                "hold the plain module, or call packgraph.assume_constant(it) if its attributes "
                "never change",
            )

    def _note_owner(self, owner: torch.nn.Module, place: Place) -> None:
        self._note_class(type(owner))
        children = contents_table(owner._modules, place, SUBMODULE, "a submodule of", by_field=True)
        self.tables.append(children)
        fields = fields_table(owner, place, INTERNAL)
        self.tables.append(fields)
        self._note_entries(fields, 0)
        for values in (owner._parameters, owner._buffers):
            table = contents_table(
                values, place, None, "a parameter or buffer of", by_field=True, owner=owner
            )
            self.tables.append(table)
            self._note_entries(table, 0)

    def _note_held(self, module: torch.nn.Module, place: Place) -> None:
        """A module that is no registered submodule."""
        module = wrapped(module) if isinstance(module, Wrapper) else module
        if id(module) in self._seen:
            return
        hooks = module_hooks(module)
        if hooks is not None and self.refused is None:
            self.refused = Refused(
                f"{place} is a module with hooks ({hooks}): they would run at capture only",
                "remove the hooks, or do their work in forward",
            )
        self._note_module(module, place)

    # ---- values

    def _note_entries(self, table: Table, depth: int) -> None:
        for key, value in table.entries:
            self._note(value, table.place_of(key), table.mark_of(key), depth)
            if table.ordered and type(key) is not int and value_key(key) is None:
                self._note(key, table.place_of(key), table.mark_of(key), depth)

    def _note(self, value: Any, place: Place, mark: Mark, depth: int) -> None:
        row = row_of(value)
        how = row.treatment
        if how is Treatment.IDENTITY or value is MISSING or value in ASSUMED:
            return
        if how is Treatment.VALUE:
            # A class derived from int, say, has attributes, too, and so has a member of an Enum.
            kind = type(value)
            if kind.__dictoffset__ and not is_library_class(kind) and self._is_new(value, depth):
                self._note_attributes(value, place, mark, depth)
        elif how is Treatment.TENSOR:
            if self.tensors.note(value, place, mark) and not self.tensors.is_bare(value):
                attributes = fields_table(value, place, OF_TORCH)
                self.tables.append(attributes)
                self._note_entries(attributes, depth + 1)
        elif how is Treatment.MODULE:
            self._note_held(value, place)
        elif how is Treatment.REFUSED:
            self._refuse(value, place, row.reason)
        elif self._is_new(value, depth):
            _NOTE[how](self, value, place, mark, depth)
        if len(self.tables) > MOST_CONTAINERS and self.refused is None:
            self.refused = Refused(
                f"{place} leads to more than {MOST_CONTAINERS:,} objects and containers: too many "
                "to be compared before every call",
                _way_out(),
            )

    def _is_new(self, value: Any, depth: int) -> bool:
        """Whether `value` was not met before, or deeper only."""
        if self._seen.get(id(value), DEPTH + 1) <= depth:
            return False
        self._seen[id(value)] = depth
        return True

    def _refuse(self, value: Any, place: Place, reason: str) -> None:
        if self.refused is None and id(value) not in self._own_generators:
            kind = type(value)
            name = (
                kind.__qualname__
                if kind.__module__ == "builtins"
                else f"{kind.__module__}.{kind.__qualname__}"
            )
            self.refused = Refused(f"{place} is of type {name}: {reason}", _way_out())

    def _note_contents(self, value: Any, place: Place, mark: Mark, depth: int) -> None:
        if isinstance(value, tuple | frozenset) and value_key(value) is not None:
            return
        if isinstance(value, VIEWS):
            value = value.mapping
        table = contents_table(value, place, mark)
        self.tables.append(table)
        if (
            len(table.entries) > MOST_CONTAINERS
            and not isinstance(value, dict | tuple)
            and self.refused is None
        ):
            self.refused = Refused(
                f"{place} has {len(table.entries):,} entries: too many to be compared before every "
                "call",
                "make it a tuple, or " + _way_out(),
            )
        self._note_entries(table, depth)
        if type(value).__module__ != "builtins":
            self._note_attributes(value, place, mark, depth)

    def _note_bytes(self, value: Any, place: Place, mark: Mark, depth: int) -> None:
        found = contents(value)
        if found is not None:
            self.arrays.append((value, place, mark, found))
        elif self.refused is None:
            self.refused = Refused(
                f"{place} is an array of more than {LARGEST_BYTES:,} bytes: too many to be "
                "compared before every call",
                "make it a buffer of the module, make it read-only "
                "(setflags(write=False)), or " + _way_out(),
            )

    def _note_attributes(self, value: Any, place: Place, mark: Mark, depth: int) -> None:
        """What is in an object's `__dict__` and slots."""
        if depth >= DEPTH:
            return
        found = []
        if isinstance(getattr(value, "__dict__", None), dict):
            found.append(fields_table(value, place))
        names = slot_names(type(value))
        if names:
            found.append(slots_table(value, names, place))
        self.tables += found
        self._note_class(type(value))
        for table in found:
            self._note_entries(table, depth + 1)

    def _note_referent(self, value: Any, place: Place, mark: Mark, depth: int) -> None:
        table = referent_table(reader_of(value), value, place, mark)
        self.tables.append(table)
        self._note_entries(table, depth)

    # ---- code

    def _note_function(self, value: Any, place: Place, mark: Mark, depth: int) -> None:
        if isinstance(value, functools.partial | contextlib.ContextDecorator):
            for name in ("func", "args", "keywords", "kwds"):
                self._note(getattr(value, name, MISSING), place.field(name), mark, depth)
            return
        bound = getattr(value, "__self__", None)
        if bound is not None and not isinstance(bound, type | types.ModuleType):
            self._note(bound, place, mark, depth)
        function = function_of(value)
        if function is not None:
            self._add_function(function)

    def _add_function(self, function: types.FunctionType) -> None:
        if function in (os.getenv, os.getenvb):
            self._note_environment()
        if id(function) not in self._functions and function not in ASSUMED:
            self._functions[id(function)] = function
            self._pending.append(function)

    def _walk_function(self, function: types.FunctionType) -> None:
        origin = function.__globals__.get("__name__", "")
        library = is_library(origin)
        closure = closure_table(function, Place("", _VARIABLE))
        tables = [closure] if closure.entries else []
        if not is_installed(origin):
            tables.append(function_table(function, Place(function.__qualname__)))
            tables.append(fields_table(function, Place(function.__qualname__)))
        self.tables += tables
        for table in tables:
            self._note_entries(table, 0)
        reads = reads_of(function.__code__)
        if not library:
            self._names |= reads.attributes
            self._follow(self._note_names(function.__globals__, reads.names), reads.attributes)
            for level, name in reads.imports:
                found = imported(level, name, function.__globals__.get("__package__"))
                self._follow(found, reads.attributes | reads.names)
        if not is_installed(origin):
            for strings in reads.strings:
                self._note_strings(strings, function, reads.attributes)
        held = [value for _, value in closure.entries if isinstance(value, types.ModuleType)]
        self._follow(held, reads.attributes)

    def _note_names(
        self, namespace: dict[str, Any], names: Iterable[str]
    ) -> list[types.ModuleType]:
        """Globals that code reads; returned are the Python modules among them."""
        label, modules = namespace.get("__name__", ""), []
        known = self._globals.setdefault(id(namespace), (namespace, label, set()))[2]
        for name in names:
            value = namespace.get(name, MISSING)
            if isinstance(value, types.ModuleType):
                modules.append(value)
            if name in known:
                continue
            known.add(name)
            if isinstance(value, type):
                self._note_class(value, made=True)
            elif isinstance(value, itertools.count) and is_installed(label):
                # Such as a lock's, which forward can reach but never calls: refused if a dry run
                # moves it.
                place = Place(f"{label}.{name}", _GLOBAL)
                read = functools.partial(shown, value)
                self.tables.append(referent_table(read, value, place, (id(namespace), name)))
            elif not isinstance(value, types.ModuleType):
                self._note(value, Place(f"{label}.{name}", _GLOBAL), (id(namespace), name), 0)
        return modules

    def _note_namespace(
        self, module: types.ModuleType, names: frozenset[str]
    ) -> list[types.ModuleType]:
        """What code that knows `module` may read of it, of libraries name by name; returned are the
        Python modules among it."""
        namespace = vars(module)
        shorter, longer = sorted((names, namespace.keys()), key=len)
        read = [name for name in shorter if name in longer]
        if not is_library(module.__name__):
            return self._note_names(namespace, read)
        self._globals.setdefault(id(namespace), (namespace, module.__name__, set()))[2].update(read)
        if module is os and not _READ_ENVIRONMENT.isdisjoint(read):
            self._note_environment()
        values = [namespace[name] for name in read]
        return [value for value in values if isinstance(value, types.ModuleType)]

    def _follow(self, modules: Iterable[types.ModuleType], names: frozenset[str]) -> None:
        """What code that knows `modules` may read of them, and of the modules in those."""
        done, pending = set[int](), list(modules)
        while pending:
            module = pending.pop()
            if id(module) not in done and module not in ASSUMED:
                done.add(id(module))
                pending += self._note_namespace(module, names)

    def _note_held_namespaces(self) -> None:
        """What any code may read of the modules that objects hold, and of those in them: each name
        once."""
        names = frozenset(self._names)
        new, self._looked_for = names - self._looked_for, names
        pending = [(module, new) for module in self._reached.values()] if new else []
        found = [module for _, module in self._namespaces()]
        while found or pending:
            for module in found:
                if id(module) not in self._reached and module not in ASSUMED:
                    self._reached[id(module)] = module
                    pending.append((module, names))
            found = self._note_namespace(*pending.pop()) if pending else []

    def _note_strings(
        self, strings: ByString, function: types.FunctionType, attributes: frozenset[str]
    ) -> None:
        """What code reads by names in strings, of modules that are nobody's installed package."""
        namespace = function.__globals__
        package, label = namespace.get("__package__"), namespace.get("__name__", "")
        found = [
            module
            for level, name in strings.imports
            for module in imported(level, label if name == OWN_NAME else name, package)
        ]
        if strings.any_module:
            found += [
                module
                for name, module in list(sys.modules.items())
                if isinstance(module, types.ModuleType) and not is_installed(name)
            ]
        self._held_namespaces.update((id(module), module) for module in found)
        for prefix in strings.own:
            self._note_whole(namespace, prefix, attributes)
        if strings.anything:
            modules = [value for value in namespace.values() if isinstance(value, types.ModuleType)]
            for whole in (namespace, *map(vars, modules)):
                self._note_whole(whole, "", attributes)
        for path, prefix in strings.computed:
            target = _resolved(namespace, path) if path else None
            if isinstance(target, types.ModuleType):
                self._note_whole(vars(target), prefix, attributes)
                continue
            self._prefixes.add(prefix)
            unknown = target is None or isinstance(target, types.FunctionType)  # what it returns
            if unknown and strings.any_module and not prefix:
                self._refuse_any_global(function)
                continue
            for module in found if unknown else ():
                self._note_whole(vars(module), prefix, attributes)

    def _refuse_any_global(self, function: types.FunctionType) -> None:
        if self.refused is None:
            self.refused = Refused(
                f"{function.__qualname__} computes the name of a Python module and of what it "
                "reads "
                "there: any global of the program",
                "import the module by its name, or look the value up before the call",
            )

    def _note_whole(
        self, namespace: dict[str, Any], prefix: str, attributes: frozenset[str]
    ) -> None:
        """All globals of a module whose names begin with `prefix`."""
        label = namespace.get("__name__", "")
        if is_installed(label) or (id(namespace), prefix) in self._whole:
            return
        self._whole.add((id(namespace), prefix))
        table = namespace_table(namespace, prefix, Place(label, _GLOBAL))
        self.tables.append(table)
        self._follow(self._note_names(namespace, [name for name, _ in table.entries]), attributes)

    def _note_environment(self) -> None:
        if id(os.environ) not in self._seen:
            self._seen[id(os.environ)] = 0
            # What its methods decode and encode, which would take far longer to compare.
            variables = vars(os.environ)["_data"]
            place = Place("os.environ", "the environment ")
            self.tables.append(contents_table(variables, place, (id(os.environ), "environ")))

    def _note_class(self, kind: type, made: bool = False) -> None:
        """A class and its bases. made: code may make instances of it."""
        if self._classes.get(kind) or (kind in self._classes and not made):
            return
        stop = torch.nn.Module if torch.nn.Module in kind.__mro__ else object
        for base in kind.__mro__[: kind.__mro__.index(stop)]:
            library, known = is_library_class(base), base in self._classes
            self._classes[base] = self._classes.get(base, False) or (made and not library)
            if known or (library and not issubclass(base, torch.nn.Module)):
                continue
            table = class_table(base, Place(base.__qualname__, _CLASS), library)
            self.tables.append(table)
            for name, value in () if library else table.entries:
                if row_of(value).treatment is not Treatment.FUNCTION:
                    self._note(value, table.place_of(name), table.mark_of(name), 0)
        if not is_library_class(type(kind)):  # at last: a class may be its own metaclass
            self._note_class(type(kind))

    def _note_layers(self) -> None:
        """What torch's own layers call by name: nobody walks their code."""
        found = layer_tables()
        self.tables += found
        for table in found:
            for name, value in foreign(table):
                if is_of_torch(table.holder, name):
                    self._note(value, table.place_of(name), table.mark_of(name), 0)
                else:
                    self._added.append((name, value, table))

    def _note_added(self) -> None:
        """What installed packages have put into classes of torch under names that torch does not
        use: walked where code names it or computes such a name, and where Python calls it without
        one (`len(module)`)."""
        begun = tuple(self._prefixes)
        for name, value, table in self._added:
            named = (
                name in self._names
                or (begun and name.startswith(begun))
                or name[:2] == name[-2:] == "__"
            )
            if named or not is_installed(_module_of(value)):
                self._note(value, table.place_of(name), table.mark_of(name), 0)

    def _namespaces(self) -> list[tuple[str, types.ModuleType]]:
        """Python modules that objects hold: code may read any name of them that it mentions at
        all."""
        return [
            (module.__name__, module)
            for module in self._held_namespaces.values()
            if not is_library(module.__name__)
        ]

    def _walk_code(self) -> None:
        """Walk the functions that were met, then the methods that they may call, until no more
        come, or the module is refused: it runs eagerly then, whatever else is found."""
        before = -1
        while self.refused is None and (self._pending or before != self._known()):
            while self._pending and self.refused is None:
                self._walk_function(self._pending.pop())
            before = self._known()
            self._note_held_namespaces()
            for kind, made in list(self._classes.items()):
                if not is_library_class(kind):
                    self._walk_methods(kind, made)
            self._note_operators()
            self._note_added()

    def _note_operators(self) -> None:
        """Custom operators that code calls by their names, `torch.ops.package.name`."""
        for name, operator in list(_OPERATORS.items()):
            package, _, short = name.partition("::")
            if package in self._names and short in self._names:
                self._note(operator, Place(f"torch.ops.{package}.{short}"), (id(operator), name), 0)

    def _known(self) -> int:
        return len(self._names) + len(self._prefixes) + len(self._classes)

    def _walk_methods(self, kind: type, made: bool) -> None:
        """Add the methods of a class that code may call, as far as is known now."""
        unread = self._unread.get(kind)
        if unread is None:
            unread = self._unread[kind] = dict(vars(kind))
        named = unread.keys() & self._names
        named.update(name for name in unread if name[:2] == "__" and is_implicit(name, made))
        if self._prefixes and not is_installed(kind.__module__):
            found = [name for name in unread if name.startswith(tuple(self._prefixes))]
            # Those of Python itself are called without their names, see `is_implicit`.
            named.update(name for name in found if not (name[:2] == name[-2:] == "__"))
        for name in [name for name in unread if name in named]:
            function = function_of(unread.pop(name))
            if function is not None:
                self._add_function(function)


def _module_of(value: Any) -> str:
    found = getattr(value, "__module__", None)
    return found if isinstance(found, str) else ""


def _resolved(namespace: dict[str, Any], path: Sequence[str]) -> Any:
    """What a global and attributes of it are, as far as those are Python modules."""
    value = namespace.get(path[0], sys.modules.get(path[0]))
    for name in path[1:]:
        value = vars(value).get(name) if isinstance(value, types.ModuleType) else None
    return value


def _way_out() -> str:
    return (
        "pass its values to forward as tensors, draw random numbers with torch, or call "
        "packgraph.assume_constant(object) if forward does not use it"
    )


_NOTE: dict[Treatment, Callable[[Walk, Any, Place, Mark, int], None]] = {
    Treatment.CONTENTS: Walk._note_contents,
    Treatment.BYTES: Walk._note_bytes,
    Treatment.ATTRIBUTES: Walk._note_attributes,
    Treatment.REFERENT: Walk._note_referent,
    Treatment.FUNCTION: Walk._note_function,
    Treatment.CLASS: lambda walk, value, place, mark, depth: walk._note_class(value),
    Treatment.NAMESPACE: lambda walk, value, place, mark, depth: walk._held_namespaces.update(
        {id(value): value}
    ),
}
