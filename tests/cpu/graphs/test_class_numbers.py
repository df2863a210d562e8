"""Numbers that classes hold, which torch 2.11 takes for fixed, are compared."""

import enum
from types import SimpleNamespace

import pytest

from packgraph.graphs.guards import Classes


class Base:
    factor = 1.0


class Settings(Base):
    scale, unread = 1.0, 1.0


class Mode(enum.Enum):
    SOFT = 1


Mode.SOFT.scale = 1.0


def forward(x):
    return x * Settings.scale * Settings.factor * Mode.SOFT.scale


@pytest.mark.parametrize(
    ("holder", "name", "value", "seen"),
    [
        (Settings, "scale", 2.0, True),
        (Settings, "scale", True, True),
        (Base, "factor", 2.0, True),
        (Mode.SOFT, "scale", 2.0, True),
        (Settings, "unread", 2.0, False),
    ],
)
@pytest.mark.parametrize("read", [Settings, Settings()])
def test_change_of_a_number_that_is_read_is_seen(monkeypatch, read, holder, name, value, seen):
    classes = Classes([forward.__code__])
    guard = SimpleNamespace(name="G['Settings']")
    classes.note(
        [
            SimpleNamespace(orig_guard=guard, value=each, has_value=True, guard_type="CLASS_MATCH")
            for each in (read, Mode)
        ]
    )
    assert classes.hold()
    monkeypatch.setattr(holder, name, value)
    assert classes.hold() is not seen
    monkeypatch.undo()
    assert classes.hold()
