"""The corpus of hostile modules on the recorder: each is bitwise, a counted fallback with a
warning, or an error.

A failure names the entry, the loop and the first number that differs. `PACKGRAPH_CORPUS=fft` runs
the entries whose name contains `fft`.
"""

import pytest
from corpus import families  # noqa: F401
from corpus.entry import ENTRIES, Entry, Own, one
from corpus.facts import SILENT
from corpus.loops import check, failures, loops_of, numbers

NAMES = list(ENTRIES)
# The warning comes when a module goes; that nothing replays is judged before.
pytestmark = pytest.mark.filterwarnings("ignore:.*none of its calls was replayed")


@pytest.mark.parametrize("number", numbers(), ids=NAMES.__getitem__)
def test_entry_never_differs_silently(number):
    found = failures(ENTRIES[NAMES[number]])
    assert not found, "\n".join(found)


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
