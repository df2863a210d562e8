"""The corpus of hostile modules on the recorder: each is bitwise, a counted fallback with a warning, or an error.

A failure names the entry, the loop and the first number that differs. `PACKGRAPH_CORPUS=fft` runs only the entries
whose name contains `fft`.
"""
import os

import pytest
from corpus import families  # noqa: F401
from corpus.entry import ENTRIES
from corpus.loops import failures

CHOSEN = [name for name in ENTRIES if os.environ.get("PACKGRAPH_CORPUS", "") in name]


@pytest.mark.parametrize("name", CHOSEN)
def test_entry_never_differs_silently(name):
    found = failures(ENTRIES[name])
    assert not found, "\n".join(found)


def test_corpus_is_large_enough():
    assert len(ENTRIES) >= 300
