"""What running a module for a capture does to Python: found, undone, and refused where a replay
would not do it.

A replay runs no Python. So a forward that counts its calls, keeps a loss on the module, or draws
from Python's random generator does that once, when it is captured, and never again. Captured stages
must not; stages that stay eager may, since they run at every replay. In all cases what the capture
did is undone: a capture changes nothing.

What captured code changes in Python: globals, closures, plain objects, whatever the module can
reach.

    COUNTS.append(1)        self.config.step += 1        global last; last = 7

A replay does none of it. What can be reached is what is watched before every call (state_walk.py):
here it is looked at before and after captured code runs, and can be put back.
"""

import contextlib
import dis
import operator
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import chain
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from packgraph.graphs.checks.host_calls import UnseenLoop
from packgraph.graphs.checks.host_sync import LEAVE_OUT
from packgraph.graphs.checks.module_state import PLAIN, Mark, ModuleState, owners
from packgraph.graphs.checks.random_state import Draws
from packgraph.graphs.checks.state_kinds import same_value
from packgraph.graphs.checks.state_tables import MISSING, Form, Pairs, Table, differing, slot_names
from packgraph.graphs.checks.state_walk import SUBMODULE
from packgraph.graphs.errors import CaptureError, user_line
from packgraph.graphs.program import Program
from packgraph.graphs.stages import Run, State

_TABLES = ("_parameters", "_buffers", "_modules")
_MISSING = object()
_CONTAINERS = (list, dict, set, deque)
# An RNN keeps its parameters in lists too, and makes them anew when it meets aliases. Undone like
# all else.
_LISTS_OF_RNN = ("_flat_weights", "_flat_weight_refs")
_RETURN = "return it from forward, or register a buffer and write to it in place"


class _Content(NamedTuple):
    """A container that `owner` (called `prefix`) holds as `attribute` (None: the attributes
    themselves), and a copy."""

    container: Any
    copy: Any
    prefix: str
    owner: torch.nn.Module
    attribute: str | None

    def changed(self) -> list[str]:
        """The attributes whose value or content is another one now."""
        if self.attribute in _LISTS_OF_RNN and isinstance(self.owner, torch.nn.RNNBase):
            return []
        entries = [
            entry
            for entry in _differences(self.container, self.copy)
            if entry not in _LISTS_OF_RNN or not isinstance(self.owner, torch.nn.RNNBase)
        ]
        if entries and self.attribute is not None and self.attribute not in _TABLES:
            return [self.attribute]
        return [str(entry) for entry in entries]

    def restore(self) -> None:
        """Put the old content back."""
        if not _differences(self.container, self.copy, exact=True):
            return
        if isinstance(self.container, list):
            self.container[:] = self.copy
        elif isinstance(self.container, dict):
            # Not the methods of a subclass: a Counter's update would add. An ordered one keeps its
            # order beside.
            kind = OrderedDict if isinstance(self.container, OrderedDict) else dict
            kind.clear(self.container)
            kind.update(self.container, self.copy)
        elif isinstance(self.container, set):
            self.container.clear()
            self.container.update(self.copy)
        else:
            self.container.clear()
            self.container.extend(self.copy)


class SideEffects:
    """The Python side of one capture of `module`.

    volatile: attributes assigned by eager stages are added to it. assigned: those refused, because
    captured code assigns them. state: of the module, up to date; made here without it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        volatile: set[Mark] | None = None,
        assigned: set[Mark] | None = None,
        state: ModuleState | None = None,
    ) -> None:
        self.module = module
        self.volatile: set[Mark] = set() if volatile is None else volatile
        self.assigned: set[Mark] = set() if assigned is None else assigned
        # What eager code may change beside the module's own attributes.
        self._state = ModuleState(module) if state is None else state

    def begin(self, generators: Sequence[torch.Generator]) -> None:
        """Remember everything. generators: those that captured code may draw from."""
        self._before = self._latest = _Looked(self.module)
        self.draws = Draws(generators)

    def buffers(self) -> list[torch.Tensor]:
        """The buffers of the module, and of modules that it holds without having them
        registered."""
        return [
            buffer
            for owner in self._state.owners
            for buffer in owner._buffers.values()
            if buffer is not None
        ]

    def undo(self) -> None:
        """Put back what Python code has changed."""
        if not self._before.is_same():
            for content in [*self._before.others, *self._before.parameters]:
                content.restore()
        self.draws.undo()

    def check(self, parameters_too: bool = True) -> None:
        """Raise CaptureError when captured code has changed something that a replay would not
        change.

        parameters_too: False while aliases stand in for the parameters.
        """
        with UnseenLoop():
            expected = [] if self._latest.is_same(parameters_too=False) else self._latest.others
            if parameters_too:
                expected = expected + self._before.parameters
            changes = [(content, names) for content in expected if (names := content.changed())]
        self.assigned.update(
            (id(content.owner), name) for content, names in changes for name in names
        )
        if changes:
            content, names = changes[0]
            what = f"{type(content.owner).__name__}.forward" + (
                f" ({content.prefix})" if content.prefix else ""
            )
            raise CaptureError(
                f"{what} assigns or changes self.{names[0]}: that would happen at capture only, "
                "never at a replay",
                _assignment_line(content.owner, names[0]),
                _RETURN,
            )
        self.draws.check(forward_line(self.module))

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Eager code runs in this block, at every replay too: it may do what it likes. Checks what
        went before."""
        with UnseenLoop():
            if self._latest.is_same():
                self.draws.check(forward_line(self.module))
            else:
                self.check(parameters_too=False)
                self._latest = _Looked(self.module)
            self._state.moved()
        with self.draws.allowed():
            yield
        with UnseenLoop():
            self.volatile |= self._state.moved()
            if not self._latest.is_same():
                for content in [*self._latest.others, *self._latest.parameters]:
                    self.volatile.update((id(content.owner), name) for name in content.changed())
                self._latest = _Looked(self.module)


class _Looked:
    """What the containers of a module's attributes hold now: tables of parameters, and all
    others."""

    def __init__(self, module: torch.nn.Module) -> None:
        found: dict[int, _Content] = {}
        for prefix, owner in owners(module):
            _note(found, vars(owner), prefix, owner, None)
        self.parameters = [
            content for content in found.values() if content.attribute == "_parameters"
        ]
        self.others = [content for content in found.values() if content.attribute != "_parameters"]
        self._held = [(held, held()) for held in map(_Holdings, (self.others, self.parameters))]

    def is_same(self, parameters_too: bool = True) -> bool:
        """Whether all of them hold the same objects as then. It errs on the safe side."""
        return all(
            len(now := held()) == len(before) and all(map(operator.is_, now, before))
            for held, before in self._held[: 2 if parameters_too else 1]
        )


class _Holdings:
    """All that is in containers, in order."""

    def __init__(self, contents: list[_Content]) -> None:
        self._containers = [content.container for content in contents]
        self._dicts = [held for held in self._containers if isinstance(held, dict)]

    def __call__(self) -> list[Any]:
        values = map(dict.values, self._dicts)
        return [
            *map(len, self._containers),
            *chain.from_iterable(self._containers),
            *chain.from_iterable(values),
        ]


def _note(
    found: dict[int, _Content],
    container: Any,
    prefix: str,
    owner: torch.nn.Module,
    attribute: str | None,
) -> None:
    """Add `container` and those in it. No function of a method: one that calls itself is a cycle,
    which would keep all that was found, parameters with it, until Python collects garbage."""
    if id(container) in found:
        return
    copy = _copy(container)
    found[id(container)] = _Content(container, copy, prefix, owner, attribute)
    if isinstance(container, dict):
        for name, value in copy.items():
            if isinstance(value, _CONTAINERS):
                _note(found, value, prefix, owner, name if attribute is None else attribute)
    else:
        for value in copy:
            if isinstance(value, _CONTAINERS):
                _note(found, value, prefix, owner, attribute)


class ObservedProgram(Program):
    """A program whose run for a capture is watched by `effects`; numbers that a graph would freeze
    are refused."""

    def __init__(self, program: Program, effects: SideEffects) -> None:
        self.__dict__.update(vars(program))
        self._effects = effects
        self._given: list[Any] = []

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> State:
        """The first state."""
        self._given = _numbers((args, kwargs))
        with self._allowed():
            return super().begin(args, kwargs)

    @contextlib.contextmanager
    def _allowed(self) -> Iterator[None]:
        """The module's own code for the ends of a call runs in the block, if it has any."""
        if self.staged:
            with self._effects.allowed():
                yield
        else:
            self._effects.check(parameters_too=False)
            yield

    def run(self, run: Run, state: State) -> State:
        """Run the stages of `run` on `state`."""
        if run.captured:
            return super().run(run, state)
        with self._effects.allowed():
            return super().run(run, state)

    def end(self, state: State) -> Any:
        """The call's outputs. Raises CaptureError for a number that captured code has made."""
        with self._allowed():
            result = super().end(state)
        if all(run.captured for run in self.runs):
            frozen = _numbers(state)
            for number in _numbers(result):
                if number in frozen and number not in self._given:
                    raise CaptureError(
                        f"the module returns the number {number[1]!r}: every replay would return "
                        "the "
                        "same",
                        forward_line(self.module),
                        "return a tensor instead. " + LEAVE_OUT,
                    )
        return result


def _numbers(tree: Any) -> list[tuple[type, Any]]:
    """The Python numbers in `tree`, with their type: True, 1 and 1.0 are equal in Python."""
    return [
        (type(leaf), leaf)
        for leaf in tree_leaves(tree)
        if isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)
    ]


def _copy(container: Any) -> Any:
    return (
        dict(container)
        if isinstance(container, dict)
        else set(container)
        if isinstance(container, set)
        else list(container)
    )


def _differences(now: Any, old: Any, exact: bool = False) -> list[Any]:
    """The keys (of a dict) or [True] (of others) where `now` differs from its copy `old`."""
    if isinstance(now, set):
        return [True] if now != old else []
    if not isinstance(now, dict):
        same = len(now) == len(old) and all(
            _same(a, b, exact) for a, b in zip(now, old, strict=True)
        )
        return [] if same else [True]
    changed = [
        key for key, value in old.items() if not _same(dict.get(now, key, _MISSING), value, exact)
    ]
    return changed + [key for key in now if key not in old]


def _same(now: Any, old: Any, exact: bool) -> bool:
    return now is old or (
        not exact and isinstance(now, PLAIN) and type(now) is type(old) and bool(now == old)
    )


def _assignment_line(module: torch.nn.Module, name: str) -> str:
    """The line in the methods of the module's class that assigns the attribute, or the one where
    forward begins."""
    for kind in type(module).__mro__[: type(module).__mro__.index(torch.nn.Module)]:
        for method, function in vars(kind).items():
            code = getattr(function, "__code__", None)
            if code is None or method == "__init__":
                continue
            for step in dis.get_instructions(code):
                if (
                    step.opname == "STORE_ATTR"
                    and step.argval == name
                    and step.positions is not None
                ):
                    return f"{code.co_filename}:{step.positions.lineno} in {code.co_name}"
    return forward_line(module)


def forward_line(module: torch.nn.Module) -> str:
    """`file.py:LINE in forward` of the module's class."""
    code = getattr(module.forward, "__code__", None)
    if code is None or code.co_filename == torch.nn.modules.module.__file__:
        return user_line()
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


_RETURN_CHANGES = (
    "return what changes from forward, or keep it in a buffer that is written in place"
)
_OF_RNN = (
    "_flat_weights",
    "_flat_weight_refs",
)  # made anew when a parameter is another one, as aliases are


def refuse_changes(module: torch.nn.Module, before: ModuleState, where: str) -> None:
    """Raise CaptureError if captured code has changed what the module can reach. where: the line of
    its forward."""
    lists: set[Mark] = {
        (id(owner), name)
        for owner in module.modules()
        if isinstance(owner, torch.nn.RNNBase)
        for name in _OF_RNN
    }
    change = before.changed(lists)
    if change is not None:
        raise CaptureError(
            f"{change} while forward or backward ran: that would happen at capture only, never at "
            "a "
            "replay",
            where,
            _RETURN_CHANGES,
        )


class Remembered:
    """What code of a module can change, as it is now. state: of the module, up to date."""

    def __init__(self, state: ModuleState) -> None:
        self._tables = [(table, table.entries) for table in state.tables]

    def moved(self) -> set[Mark]:
        """The attributes, variables and globals that are other ones now."""
        return {
            table.mark_of(key)
            for table, entries in self._tables
            for key in differing(table.read(), entries)
        } - {SUBMODULE}

    def restore(self) -> None:
        """Put back what was changed in containers, attributes, globals and closures."""
        for table, entries in self._tables:
            if not _same_pairs(table.read(), entries):
                _put_back(table, entries)


def _same_pairs(now: Pairs, before: Pairs) -> bool:
    return len(now) == len(before) and all(
        (key is other or same_value(key, other)) and (value is held or same_value(value, held))
        for (key, value), (other, held) in zip(now, before, strict=True)
    )


def _put_back(table: Table, entries: Pairs) -> None:
    holder, values = table.holder, [value for _, value in entries]
    if isinstance(holder, FunctionType):
        if table.word == "a variable of":
            _put_back_cells(holder, dict(entries))
    elif isinstance(holder, list):
        holder[:] = values
    elif isinstance(holder, set):
        holder.clear()
        holder.update(values)
    elif isinstance(holder, deque):
        holder.clear()
        holder.extend(values)
    elif isinstance(holder, dict):
        _put_back_entries(holder, [key for key, _ in table.read()], entries)
    elif isinstance(holder, type) or (table.form is Form.CALL and slot_names(type(holder))):
        _put_back_attributes(holder, table, entries)
    elif isinstance(getattr(holder, "__dict__", None), dict):
        _put_back_entries(vars(holder), [key for key, _ in table.read()], entries)


def _put_back_entries(holder: dict[Any, Any], now: list[Any], entries: Pairs) -> None:
    """Past the methods of a subclass: a Counter's update would add. An ordered one keeps its order
    beside."""
    before, kind = dict(entries), OrderedDict if isinstance(holder, OrderedDict) else dict
    for key in now:
        if key not in before:
            kind.pop(holder, key, None)
    for key, value in entries:
        if value is MISSING:
            kind.pop(holder, key, None)
        elif dict.get(holder, key, MISSING) is not value:
            kind.__setitem__(holder, key, value)


def _put_back_attributes(holder: Any, table: Table, entries: Pairs) -> None:
    """Of a class, or in the slots of an object."""
    now, before = dict(table.read()), dict(entries)
    for name in now.keys() - before.keys():
        delattr(holder, name)
    for name, value in before.items():
        if now.get(name, MISSING) is not value:
            setattr(holder, name, value)


def _put_back_cells(function: FunctionType, before: dict[str, Any]) -> None:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if before.get(name, MISSING) is not MISSING:
            cell.cell_contents = before[name]
