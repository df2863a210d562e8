"""Tests of Triton kernels without a GPU: those marked `inside` run in Triton's interpreter, in a
process that their file's `test_in_the_interpreter` starts, since the interpreter must be asked for
before Triton is imported."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from packgraph.ops.kernels import HAS_TRITON

INSIDE = "TRITON_INTERPRET"
needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason="Triton is not installed (it comes with torch for CUDA)"
)
inside = pytest.mark.skipif(
    INSIDE not in os.environ, reason="started by test_in_the_interpreter, in its own process"
)
outside = pytest.mark.skipif(INSIDE in os.environ, reason="needs no interpreter, or starts it")
bounds_from_memory = pytest.mark.skipif(
    HAS_TRITON
    and version("triton").startswith("3.6.")
    and tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4),
    reason="the interpreter of Triton 3.6 makes an error of loop bounds that were loaded, "
    "with NumPy 2.4 or newer",
)


def run_in_interpreter(file: str) -> None:
    """Run the tests of `file` in a process with the interpreter; an AssertionError with their
    output when one fails."""
    environment = os.environ | {INSIDE: "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
