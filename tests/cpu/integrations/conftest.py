"""Fixtures for loops of other libraries."""

import pytest


@pytest.fixture
def one_process():
    """Lets go of what Accelerate keeps for the whole process: precision and devices."""
    state = pytest.importorskip("accelerate.state", reason="the loop is of this library")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)
