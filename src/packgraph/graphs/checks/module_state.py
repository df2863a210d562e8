"""The Python state that graphs bake about a module, checked before every call.

A replay reads the storages it was captured with and runs no Python of the module. So whatever
forward reads and a replay does not must be as it was at the capture: `state_kinds.WATCHED` says of
every kind of value how that is seen.

    Walk ─▶ tables of what was where ─▶ Seal: nothing can have changed      in every call
                     └────────────────▶ comparison: what changed, in words  if the seal is broken

A seal may break without a change: an equal value was set again, or an eager stage has assigned an
attribute. It is then made anew.

Of tensors graphs bake identity, which is watched where they are held, and memory and form
(`TensorState`).
"""

import gc
import operator
from collections.abc import Callable, Iterable, Set
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from packgraph.graphs import parameters
from packgraph.graphs.checks.state_kinds import (
    ASSUMED,
    OF_TORCH,
    PLAIN,
    Mark,
    Treatment,
    contents,
    row_of,
    same_value,
)
from packgraph.graphs.checks.state_tables import Form, Place, Table, differing
from packgraph.graphs.checks.state_walk import SUBMODULE, Refused, Walk
from packgraph.graphs.checks.unsupported import HOOKS, global_hooks, owners
from packgraph.graphs.parameters import has_hooks, hooks_made, local_tensor
from packgraph.graphs.wrapper import Wrapper

guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)  # no public interface
_MOST_GUARDS = 4
_requires_grad = operator.attrgetter("requires_grad")
_backward_hooks = operator.attrgetter("_backward_hooks")
_post_hooks = operator.attrgetter("_post_accumulate_grad_hooks")


class Problem(NamedTuple):
    """What changed of a tensor, in words. in_place: a change in place would have been none."""

    what: str
    in_place: bool


class TensorFact(NamedTuple):
    """A tensor as it was. local: its memory on this rank; None for a sparse tensor, which is a
    value."""

    tensor: torch.Tensor
    local: torch.Tensor | None
    pointer: int
    form: tuple[Any, ...]
    trains: bool
    hooked: bool
    bare: bool
    place: Place
    mark: Mark


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.stride(), tensor.shape, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _is_bare(tensor: torch.Tensor) -> bool:
    """Whether nobody has given `tensor` a Python attribute."""
    return OF_TORCH.issuperset(vars(tensor))


def _make_guards(tensors: list[torch.Tensor]) -> Callable[..., bool]:
    """A fast test of type, dtype, shape, strides, requires_grad and dispatch keys of all
    `tensors`, by torch's own guards. What they take for requires_grad depends on the mode, so
    they are made and used with gradients on."""
    with torch.enable_grad():
        made = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return made.check  # type: ignore[no-any-return]


def _guards_work() -> bool:
    """Whether torch's guards (no public interface) see what they are used for."""
    changes: list[Callable[[torch.Tensor], Any]] = [
        lambda t: setattr(t, "data", t.data.t()),
        lambda t: setattr(t, "data", torch.zeros(3, 3)),
        lambda t: setattr(t, "data", t.data.double()),
        lambda t: t.requires_grad_(not t.requires_grad),
    ]
    try:
        for change in changes:
            tensor = torch.zeros(2, 3)
            with torch.enable_grad():
                check = _make_guards([tensor])
                if not check(tensor):
                    return False
                change(tensor)
                if check(tensor):
                    return False
    except (AttributeError, TypeError, RuntimeError):
        return False
    return True


USE_GUARDS = _guards_work()


class TensorState:
    """The facts about all tensors that were noted."""

    def __init__(self) -> None:
        self._facts: dict[int, TensorFact] = {}

    def is_bare(self, tensor: torch.Tensor) -> bool:
        """Whether nobody had given the noted `tensor` a Python attribute."""
        return self._facts[id(tensor)].bare

    def note(self, tensor: torch.Tensor, place: Place, mark: Mark) -> bool:
        """Remember `tensor` as it is now; False if that was done."""
        if id(tensor) in self._facts:
            return False
        local = local_tensor(tensor) if tensor.layout is torch.strided else None
        pointer = 0 if local is None else local.data_ptr()
        form = () if local is None else _form(local)
        self._facts[id(tensor)] = TensorFact(
            tensor,
            local,
            pointer,
            form,
            tensor.requires_grad,
            has_hooks(tensor),
            _is_bare(tensor),
            place,
            mark,
        )
        return True

    def seal(self, skip: Set[Mark]) -> None:
        """Make the fast test, of all tensors but those of attributes in `skip`."""
        facts = [fact for fact in self._facts.values() if fact.mark not in skip]
        self._tensors = [fact.tensor for fact in facts]
        self._trains = [fact.trains for fact in facts]
        self._locals = [fact.local for fact in facts if fact.local is not None]
        self._pointers = [fact.pointer for fact in facts if fact.local is not None]
        self._forms = [fact.form for fact in facts if fact.local is not None]
        # The guards see requires_grad of what they are made of: of a parameter, but of a DTensor
        # that of its local part.
        self._others = [fact for fact in facts if fact.local is not fact.tensor]
        self._free = [fact.tensor for fact in facts if not fact.hooked]
        self._hooked = [fact.tensor for fact in facts if fact.hooked]
        self._hooks_made = hooks_made()
        self._checks = [_make_guards(self._locals)] if USE_GUARDS and self._locals else []
        self._empty = [fact.tensor for fact in facts if not vars(fact.tensor)]
        self._bare = [fact.tensor for fact in facts if fact.bare and vars(fact.tensor)]

    def widen(self) -> bool:
        """Nothing has changed. Whether torch's guards thought so, since autocast and the like
        count for them: then what they see now is fine, too."""
        if not self._checks or len(self._checks) == _MOST_GUARDS or self._forms_hold():
            return False
        self._checks.append(_make_guards(self._locals))
        return True

    def _forms_hold(self) -> bool:
        if self._checks and torch.is_grad_enabled():
            return any(check(*self._locals) for check in self._checks)
        if self._checks:
            with torch.enable_grad():
                return any(check(*self._locals) for check in self._checks)
        return (
            list(map(_form, self._locals)) == self._forms
            and list(map(_requires_grad, self._tensors)) == self._trains
        )

    def _hooks_hold(self) -> bool:
        made = hooks_made()
        if parameters.COUNT_HOOKS and self._hooks_made == made:  # there are no more than there were
            return not self._hooked or all(map(has_hooks, self._hooked))
        holds = (
            not any(map(_backward_hooks, self._free))
            and not any(map(_post_hooks, self._free))
            and all(map(has_hooks, self._hooked))
        )
        if holds:
            self._hooks_made = made
        return holds

    def holds(self) -> bool:
        """Whether nothing has changed for sure."""
        return (
            list(map(torch.Tensor.data_ptr, self._locals)) == self._pointers
            and self._forms_hold()
            and self._hooks_hold()
            and not any(map(vars, self._empty))
            and (not self._bare or all(map(_is_bare, self._bare)))
            and (
                not self._others
                or all(
                    fact.tensor.requires_grad == fact.trains
                    and (fact.local is None or local_tensor(fact.tensor) is fact.local)
                    for fact in self._others
                )
            )
        )

    def problem(self, skip: Set[Mark]) -> Problem | None:
        """What has changed, or None."""
        for tensor, local, pointer, form, trains, hooked, bare, place, mark in self._facts.values():
            if mark in skip:
                continue
            if local is not None and (
                local.data_ptr() != pointer or local_tensor(tensor) is not local
            ):
                return Problem(f"the storage of {place} was replaced", True)
            if local is not None and _form(local) != form:
                return Problem(f"shape, strides or dtype of {place} changed", True)
            if tensor.requires_grad != trains:
                return Problem(f"requires_grad of {place} changed", False)
            if has_hooks(tensor) != hooked:
                return Problem(f"{place} got its first hook or lost its last", False)
            if bare and not _is_bare(tensor):
                return Problem(f"an attribute of {place} was added", False)
        return None


__all__ = ["PLAIN", "Change", "Mark", "ModuleState", "owners"]

_IN_PLACE = (
    "change parameters and other tensors in place (copy_, load_state_dict) to keep the graphs"
)
_AT_FIRST = "do it before the first captured call, or live with one more capture per change"
_ARGUMENT = (
    "pass what changes often to forward as an argument, as a tensor if it may have any value; "
    "if forward does "
    "not read it, packgraph.assume_constant(the object that has it)"
)


_LEAVES = (Treatment.VALUE, Treatment.TENSOR, Treatment.IDENTITY)  # nothing in them is to be found


class Change(NamedTuple):
    """A fact that no longer holds, in words, and what to do about it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return self.what


def _versions_work() -> bool:
    """Whether torch's versions of dictionaries (no public interface) tell every change that is
    looked for."""

    class Holder:
        value = 0

    changes: list[Callable[[Any], Any]] = [
        lambda h: setattr(h, "value", 2),
        lambda h: setattr(h, "new", 1),
        lambda h: delattr(h, "value"),
        lambda h: vars(h).update(value=3),
        lambda h: setattr(h, "__dict__", {"value": 1}),
        lambda h: vars(h).clear(),
        lambda h: setattr(Holder, "value", -1),
        lambda h: setattr(Holder, "late", -1),
    ]
    of_class = next(found for found in gc.get_referents(vars(Holder)) if type(found) is dict)
    try:
        for change in changes:
            holder = Holder()
            holder.value = 1
            before = [guards.dict_version(table) for table in (vars(holder), of_class)]
            if before != [guards.dict_version(table) for table in (vars(holder), of_class)]:
                return False
            change(holder)
            if before == [guards.dict_version(table) for table in (vars(holder), of_class)]:
                return False
    except (AttributeError, TypeError, RuntimeError):
        return False
    return True


USE_VERSIONS = _versions_work()


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


class Seal:
    """A test that nothing noted by `walk` can have changed, but attributes in `skip`. It errs on
    the safe side."""

    def __init__(self, walk: Walk, skip: Set[Mark]) -> None:
        self._objects: list[Any] = []
        self._dicts: list[dict[Any, Any]] = []
        self._empty: list[Any] = []
        self._items: list[Any] = []
        self._calls: list[Callable[[], Any]] = []
        self._typed: list[Any] = []
        for table in walk.tables:
            if table.mark is None or table.mark not in skip:
                self._add(table, skip)
        self._types = [type(holder) for holder in self._typed]
        self._versions = self._versions_now()
        self._sizes, self._entries = (
            list(map(len, self._items)),
            list(chain.from_iterable(self._items)),
        )
        self._called = list(chain.from_iterable(map(operator.call, self._calls)))
        self._arrays = [(array, found) for array, _, mark, found in walk.arrays if mark not in skip]
        self._assumed = ASSUMED.version
        self._tensors = walk.tensors
        walk.tensors.seal(skip)

    def _add(self, table: Table, skip: Set[Mark]) -> None:
        holder = table.holder
        if (
            skip
            and table.mark is None
            and any(table.mark_of(key) in skip for key, _ in table.read())
        ):
            self._calls.append(partial(_without, table, skip))
        elif table.form is Form.FIELDS:
            self._objects.append(holder)
            self._typed.append(holder)
        elif table.form is Form.DICT and table.behind is not None:
            (self._dicts if table.behind else self._empty).append(table.behind)
        elif table.form is Form.ITEMS:
            (self._items if holder else self._empty).append(holder)
        elif table.form is Form.CALL and table.quick is not None:
            self._calls.append(table.quick)
            self._typed.append(holder)

    def _versions_now(self) -> list[Any]:
        tables: Iterable[dict[Any, Any]] = chain(map(vars, self._objects), self._dicts)
        if USE_VERSIONS:
            return list(map(guards.dict_version, tables))
        return [part for table in tables for part in (table, *table, *table.values())]

    def holds(self) -> bool:
        """Whether nothing has changed for sure."""
        try:
            versions = self._versions_now()
            return (
                (versions == self._versions if USE_VERSIONS else _same(versions, self._versions))
                and not any(self._empty)
                and list(map(type, self._typed)) == self._types
                and self._assumed == ASSUMED.version
                and self._tensors.holds()
                and list(map(len, self._items)) == self._sizes
                and all(map(operator.is_, chain.from_iterable(self._items), self._entries))
                and _same(list(chain.from_iterable(map(operator.call, self._calls))), self._called)
                and (
                    not self._arrays
                    or all(contents(array) == found for array, found in self._arrays)
                )
            )
        except (
            AttributeError,
            KeyError,
            RuntimeError,
        ):  # a name is gone, or another thread is changing a container
            return False


def _without(table: Table, skip: Set[Mark]) -> list[Any]:
    return [
        part
        for key, value in table.read()
        if table.mark_of(key) not in skip
        for part in (key, value)
    ]


class ModuleState:
    """The state of `module` as it is now.

    volatile: attributes that eager stages assign; they may change, since captured stages are not to
    read them. refused: why the state cannot be watched, or None. broken: a capture has changed it,
    so that it does not hold, whatever is found.
    """

    def __init__(self, module: torch.nn.Module, volatile: Set[Mark] = frozenset()) -> None:
        self._module, self._volatile, self.broken = module, volatile, False
        self._look()

    def _look(self) -> None:
        walk = self._walk = Walk(self._module, TensorState())
        self.refused: Refused | None = walk.refused
        self._assumed = ASSUMED.version
        self._flags = [(owner, owner.training) for owner in walk.owners]
        wrappers = [owner for owner in self._module.modules() if isinstance(owner, Wrapper)]
        hooks = [
            *global_hooks(),
            *(getattr(owner, kind) for owner in [*walk.owners, *wrappers] for kind in HOOKS),
        ]
        self._hooks = [(table, list(table.values())) for table in hooks if table]
        self._no_hooks = [table for table in hooks if not table]
        self._tables_of = {id(table.holder): table for table in walk.tables}
        self._seal = Seal(walk, self._volatile)

    @property
    def owners(self) -> list[torch.nn.Module]:
        """The module, its submodules, and those that any of them holds elsewhere."""
        return self._walk.owners

    @property
    def tables(self) -> list[Table]:
        """All containers whose contents are watched."""
        return self._walk.tables

    def holds(self) -> bool:
        """Whether nothing has changed for sure, and all can be watched: asked before every call."""
        return self.refused is None and not self.broken and not self.hooked() and self._seal.holds()

    def changed(self, but: Set[Mark] = frozenset()) -> Change | None:
        """What no longer holds, or None. but: attributes that are not looked at, besides the
        volatile ones."""
        if not self.hooked() and self._seal.holds():
            return None
        self._moved, self._partly = self._assumed != ASSUMED.version, bool(but)
        skip = self._volatile | but
        change = (
            self._submodules_changed() or self._tensors_changed(skip) or self._values_changed(skip)
        )
        if change is None and not but:
            if self._moved:
                self._look()
            elif not self._walk.tensors.widen():
                self._seal = Seal(self._walk, self._volatile)
        return change

    def moved(self) -> set[Mark]:
        """The attributes, variables and globals that are not as they were when this was asked
        last. They count as they are from here on."""
        if self._seal.holds():
            return set()
        found, again = set[Mark](), self._assumed != ASSUMED.version
        for table in self._walk.tables:
            now = table.read()
            keys = differing(now, table.entries)
            if keys:
                values = dict(now)
                again = again or any(
                    row_of(values[key]).treatment not in _LEAVES for key in keys if key in values
                )
                found.update(map(table.mark_of, keys))
            table.entries = now
        if again:
            self._look()
        else:
            self._seal = Seal(self._walk, self._volatile)
        return found - {SUBMODULE}

    def hooked(self) -> bool:
        """Whether a submodule, or all modules, have got a hook or lost one since."""
        return any(self._no_hooks) or (
            bool(self._hooks)
            and any(not _same(list(table.values()), hooks) for table, hooks in self._hooks)
        )

    def _submodules_changed(self) -> Change | None:
        for owner, training in self._flags:
            if owner.training is not training:
                return Change(
                    f"the training mode of a {type(owner).__name__} inside the module changed",
                    _AT_FIRST,
                )
        for table in self._walk.tables:
            if table.mark == SUBMODULE:
                change = self._table_changed(table, frozenset())
                if change is not None:
                    return change
        return Change("the hooks of a submodule changed", _AT_FIRST) if self.hooked() else None

    def _tensors_changed(self, skip: Set[Mark]) -> Change | None:
        problem = self._walk.tensors.problem(skip)
        return (
            None
            if problem is None
            else Change(problem.what, _IN_PLACE if problem.in_place else _AT_FIRST)
        )

    def _values_changed(self, skip: Set[Mark]) -> Change | None:
        for table in self._walk.tables:
            change = self._table_changed(table, skip)
            if change is not None:
                return change
        for array, place, mark, found in self._walk.arrays:
            if mark not in skip and contents(array) != found:
                return Change(f"the contents of {place} changed", _ARGUMENT)
        return None

    def _table_changed(self, table: Table, skip: Set[Mark]) -> Change | None:
        """Compare a container with what it held; equal values are taken over."""
        if table.mark is not None and table.mark in skip:
            return None
        if type(table.holder) is not table.kind:
            return Change(f"the class of {table.place} changed", _AT_FIRST)
        now, before = table.read(), table.entries
        if table.mark is None and skip:
            now = [pair for pair in now if table.mark_of(pair[0]) not in skip]
            before = [pair for pair in before if table.mark_of(pair[0]) not in skip]
        if len(now) != len(before):
            return Change(f"{table.word} {table.place} was added or removed", _AT_FIRST)
        found = now if table.ordered else list(dict(now).items())
        keyed = None if table.ordered else dict(now)
        for position, (key, value) in enumerate(before):
            if keyed is not None and key not in keyed:
                return Change(f"{table.word} {table.place} was added or removed", _AT_FIRST)
            other, current = found[position] if keyed is None else (key, keyed[key])
            if other is not key and not same_value(other, key):
                return Change(f"the order or a key of {table.place} changed", _ARGUMENT)
            if current is not value and not self._equal(value, current):
                return self._in_words(table, key, value, current)
        if not self._partly:
            table.entries = now
        return None

    def _in_words(self, table: Table, key: Any, before: Any, now: Any) -> Change:
        place = table.place_of(key)
        if table.mark == SUBMODULE:
            return Change(f"the submodule {place} was replaced", _AT_FIRST)
        if isinstance(before, torch.Tensor):
            return Change(f"the storage of {place} was replaced", _IN_PLACE)
        return Change(f"{place} changed", _AT_FIRST if isinstance(now, torch.Tensor) else _ARGUMENT)

    def _equal(self, before: Any, now: Any) -> bool:
        """Whether another object has the same value: plain, or a built-in container of the same
        things."""
        if same_value(before, now):
            return True
        table = self._tables_of.get(id(before))
        if (
            table is None
            or type(now) is not type(before)
            or type(now) not in (list, tuple, set, frozenset, dict)
        ):
            return False
        self._moved = True
        entries = list(now.items()) if isinstance(now, dict) else list(enumerate(now))
        return len(entries) == len(table.entries) and all(
            (key is other or same_value(key, other)) and (value is held or self._equal(held, value))
            for (other, held), (key, value) in zip(table.entries, entries, strict=True)
        )
