"""Every test starts from the same seeds and uses one torch thread, so that test workers do not
fight for the cores."""

import gc
import importlib.util
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from packgraph.graphs.checks import random_state

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a network
WARNED: list[str] = []  # tests that warned of what pyproject.toml does not name

if importlib.util.find_spec("hypothesis") is not None:
    import hypothesis

    # No deadline: how long an example takes depends on what else the machine does.
    hypothesis.settings.register_profile("packgraph", deadline=None, print_blob=True)
    hypothesis.settings.register_profile(
        "quick", hypothesis.settings.get_profile("packgraph"), max_examples=25
    )
    hypothesis.settings.load_profile("packgraph")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    if "not slow" in config.option.markexpr and importlib.util.find_spec("hypothesis"):
        hypothesis.settings.load_profile("quick")
    # Who starts the tests by nohup, or by `&` in a script, hands down that these are ignored, and
    # so to runs of tests.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = Counter[str]()
    for item in items:
        if (few := item.get_closest_marker("few")) is not None:
            if seen[name := item.nodeid.partition("[")[0]] % few.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[name] += 1
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_warning_recorded(nodeid: str) -> None:
    WARNED.append(nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A warning that pyproject.toml does not name fails the run, where there is no GPU, whose
    libraries warn by their version. Raised as errors they would change what they come from."""
    if WARNED and not exitstatus and not torch.cuda.is_available():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if WARNED and not torch.cuda.is_available():
        line = "filterwarnings in pyproject.toml names no such warning: mend what it comes from"
        terminalreporter.write_line(line, red=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What imports and collection have made stays; collectors of garbage, which many tests wait
    for, skip it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """So does what a file has left: libraries that it has imported, code that it has compiled."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def same_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_global_settings() -> Iterator[None]:
    """A test that asks for deterministic kernels (runs of the trainer do) does so for itself
    alone."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Python collects no garbage meanwhile: what goes, goes with its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Deterministic kernels, on CUDA too."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Lets go of what torch.compile keeps for the whole process."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """A test that leaves a thread behind fails: captures of later tests in this process could not
    tell its draws from random generators from those of their own code."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    while left := [thread for thread in threading.enumerate() if thread not in before]:
        frames = sys._current_frames()
        left = [t for t in left if not random_state.is_quiet(t, frames.get(t.ident or 0))]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    assert not left, f"threads are left: {left}"


@pytest.fixture
def one_process() -> Iterator[None]:
    """Lets go of what Accelerate keeps for the whole process: precision and devices."""
    state = pytest.importorskip("accelerate.state", reason="the loop is of this library")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)
