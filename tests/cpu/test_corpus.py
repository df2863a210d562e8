"""The corpus of hostile modules on the recorder: each is bitwise, a counted fallback with a warning, or an error.

A failure names the entry, the loop and the first number that differs. `PACKGRAPH_CORPUS=fft` runs the entries whose
name contains `fft`, in all of their loops.
"""
import pytest
from corpus import families  # noqa: F401
from corpus.entry import ENTRIES, Entry, Own, one
from corpus.facts import SILENT
from corpus.loops import check, chosen, failures, numbers
from corpus.open_holes import OPEN

NAMES = list(ENTRIES)


@pytest.mark.parametrize("number", numbers(), ids=NAMES.__getitem__)
def test_entry_never_differs_silently(number, request):
    if NAMES[number] in OPEN:
        request.applymarker(pytest.mark.xfail(reason="an open hole: docs/LOG.md says what differs", strict=True))
    found = failures(chosen(number))
    assert not found, "\n".join(found)


def test_corpus_is_large_enough():
    assert len(ENTRIES) >= 300
    assert sum(not chosen(number).drive and len(chosen(number).loops) == 3 for number in range(len(ENTRIES))) >= 300


@pytest.mark.parametrize(("change", "silent"), [(0.0, False), (1e-3, True)])
def test_values_are_compared_bit_by_bit(change, silent):
    """Eager runs first, graphs second: what the second one adds is found, and nothing else is."""
    made = []
    entry = Entry("made", "made", lambda: (made.append(0), Own(lambda m, x: m.linear(x) + m.extra, extra=0.0))[1], one,
                  prepare=lambda m: setattr(m, "extra", change * (len(made) == 2)))
    assert (check(entry, "plain").kind == SILENT) == silent
