"""The corpus of hostile modules on CUDA: each is bitwise, a counted fallback with a warning, or an error."""
import os

import pytest
from corpus import families  # noqa: F401
from corpus.entry import ENTRIES
from corpus.loops import failures

pytestmark = pytest.mark.gpu
CHOSEN = [name for name in ENTRIES if os.environ.get("PACKGRAPH_CORPUS", "") in name]


@pytest.mark.parametrize("name", CHOSEN)
def test_entry_never_differs_silently(name):
    found = failures(ENTRIES[name], "cuda")
    assert not found, "\n".join(found)
