"""What captured code changes in Python: globals, closures, plain objects, whatever the module can
reach.

    COUNTS.append(1)        self.config.step += 1        global last; last = 7

A replay does none of it. What can be reached is what is watched before every call (state_walk.py):
here it is looked at before and after captured code runs, and can be put back.
"""

from collections import OrderedDict, deque
from types import FunctionType
from typing import Any

import torch

from packgraph.graphs.checks.module_state import Mark, ModuleState
from packgraph.graphs.checks.state_kinds import same_value
from packgraph.graphs.checks.state_tables import MISSING, Form, Pairs, Table, differing, slot_names
from packgraph.graphs.checks.state_walk import SUBMODULE, Walk
from packgraph.graphs.errors import CaptureError

_RETURN = "return what changes from forward, or keep it in a buffer that is written in place"
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
            _RETURN,
        )


class Remembered:
    """What code of a module can change, as it is now."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._tables = [(table, table.entries) for table in Walk(module).tables]

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
            if not _same(table.read(), entries):
                _put_back(table, entries)


def _same(now: Pairs, before: Pairs) -> bool:
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
