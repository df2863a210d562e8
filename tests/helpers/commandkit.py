"""The command in processes of its own."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

import packgraph
from packgraph import cli


def command(*words: str, **options: Any) -> "subprocess.Popen[str]":
    source = Path(packgraph.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "packgraph.cli", *words],
        env=environment,
        text=True,
        **({"stderr": subprocess.PIPE} | options),
    )


class Forked:
    """The command in a process of its own, forked from this one: nothing is imported again. Where
    there is CUDA, whose driver a fork would break, it is started afresh.

    limit: called in the process first.
    """

    def __init__(self, folder: Path, words: list[str], limit: Callable[[], object] = bool) -> None:
        self.errors = folder / "errors.txt"
        self.errors.touch()
        self._words, self._limit = words, limit
        gc.collect()
        if torch.cuda.is_available():
            self.pid = command(
                *words,
                stderr=os.open(self.errors, os.O_WRONLY),
                stdout=subprocess.DEVNULL,
                preexec_fn=limit,
            ).pid
        elif not (pid := os.fork()):
            self._run()
        else:
            self.pid = pid
        self.code: int | None = None

    def _run(self) -> NoReturn:
        code = 70
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(self.errors, os.O_WRONLY), 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            self._limit()
            code = cli.main(self._words)
            sys.stderr.flush()
        finally:
            os._exit(code)

    def is_running(self) -> bool:
        if self.code is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.code = os.waitstatus_to_exitcode(ended[1])
        return self.code is None

    def ended(self, seconds: float) -> tuple[int | None, str]:
        """Its exit code and what it has said on stderr."""
        deadline = time.monotonic() + seconds
        while self.is_running():
            assert time.monotonic() < deadline, "it goes on and on"
            time.sleep(0.01)
        return self.code, self.errors.read_text()
