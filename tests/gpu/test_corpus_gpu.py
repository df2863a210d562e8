"""Hostile modules and random programs on CUDA: bitwise, a counted fallback with a warning, or an
error."""

import pytest
import torch
from corpus import families  # noqa: F401
from corpus.entry import ENTRIES
from corpus.loops import failures, numbers
from corpus.programs import generate, judged

# The warning comes when a module goes; that nothing replays is judged before.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*none of its calls was replayed"),
]
NAMES = list(ENTRIES)


@pytest.fixture(autouse=True)
def repeatable_kernels(monkeypatch):
    """Sums by atomics differ from run to run without graphs, too."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.mark.parametrize("number", numbers(), ids=NAMES.__getitem__)
def test_entry_never_differs_silently(number):
    found = failures(ENTRIES[NAMES[number]], "cuda")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("start", range(0, 500, 100))
def test_programs_never_differ_silently(start):
    verdicts = {seed: judged(generate(seed), "cuda") for seed in range(start, start + 100)}
    assert not {seed: verdict for seed, verdict in verdicts.items() if not verdict.good}
