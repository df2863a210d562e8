"""The corpus of hostile modules on the recorder: each is bitwise, a counted fallback with a
warning, or an error.

A failure names the entry, the loop and the first number that differs. `PACKGRAPH_CORPUS=fft` runs
the entries whose name contains `fft`. `make test` runs one loop of an entry, of all kinds by
turns, of every fifth entry, and of sweeps fewer; `make test-all` runs the others, too, which who
changes what graphs assume has to do.
"""

import pytest
from corpus import families  # noqa: F401
from corpus.entry import ENTRIES, Entry, Own, one
from corpus.facts import SILENT
from corpus.loops import check, failures, loops_of, numbers

NAMES = list(ENTRIES)
# Groups that try one thing after another (layers, models, names), and of how many entries one is
# quick; of other groups one of five is.
SWEEPS = dict.fromkeys(("names", "complex", "layers", "outputs", "transformers", "vision"), 10)
OTHERS = 5
# The warning comes when a module goes; that nothing replays is judged before.
pytestmark = pytest.mark.filterwarnings("ignore:.*none of its calls was replayed")


def is_quick(number):
    """Whether `make test` runs the entry; of n neighbours another one each time, since families
    add variants of several things by turns."""
    stride = SWEEPS.get(ENTRIES[NAMES[number]].group, OTHERS)
    return number % stride == number // stride % stride


def cases():
    for number in numbers():
        name = NAMES[number]
        loops = loops_of(ENTRIES[name])
        first = loops.pop(number % len(loops))
        slow = [] if is_quick(number) else [pytest.mark.slow]
        yield pytest.param(name, [first], id=name, marks=slow)
        if loops:
            yield pytest.param(name, loops, id=f"{name} (others)", marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "loops"), list(cases()))
def test_entry_never_differs_silently(name, loops):
    found = failures(ENTRIES[name], loops=loops)
    assert not found, "\n".join(found)


def test_every_loop_of_every_entry_is_run():
    run = [(name, loop) for name, loops in (case.values for case in cases()) for loop in loops]
    assert sorted(run) == sorted(
        (NAMES[number], loop) for number in numbers() for loop in loops_of(ENTRIES[NAMES[number]])
    )


def test_corpus_is_large_enough():
    assert sum(len(loops_of(entry)) == 3 for entry in ENTRIES.values()) >= 300


@pytest.mark.parametrize(("change", "silent"), [(0.0, False), (1e-3, True)])
def test_values_are_compared_bit_by_bit(change, silent):
    """Eager runs first, graphs second: what the second one adds is found, and nothing else is."""
    made = []
    entry = Entry(
        "made",
        "made",
        lambda: (made.append(0), Own(lambda m, x: m.linear(x) + m.extra, extra=0.0))[1],
        one,
        prepare=lambda m: setattr(m, "extra", change * (len(made) == 2)),
    )
    assert (check(entry, "plain").kind == SILENT) == silent
