"""A rank of `packgraph train` that fails in a chosen phase: python faulty_rank.py RANK FAULT PHASE
STAMP WORDS...

Every rank runs this file with the same words; rank RANK patches what marks the phase and fails
there. FAULT: kill (SIGKILL), stop (SIGSTOP), raise (an exception of this rank alone). STAMP: a file
that gets the time of the fault. The product knows nothing of it.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def fail(fault: str, stamp: Path) -> None:
    """Fail now. A short while passes first, in which other ranks get to where they wait for this
    one."""
    time.sleep(0.5)
    stamp.write_text(f"{os.getpid()} {time.time()}")
    if fault == "raise":
        raise OSError("injected fault")
    os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)


def on_call(owner: Any, name: str, number: int, act: Callable[[], None]) -> None:
    """Let call `number` of `owner.name` act first."""
    original, calls = getattr(owner, name), [0]

    def patched(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            act()
        return original(*args, **kwargs)

    setattr(owner, name, patched)


def capture_fails(original: Any, act: Callable[[], None]) -> Any:
    """A capture that fails as a user's would: by a CaptureError, before its exchanges."""
    from packgraph.graphs.errors import CaptureError

    def patched(*args: Any, **kwargs: Any) -> Any:
        try:
            act()
        except OSError as error:
            raise CaptureError(str(error), "model.py:1 in forward", "nothing to be done") from error
        return original(*args, **kwargs)

    return patched


def arrange(phase: str, act: Callable[[], None]) -> None:
    """Patch what marks `phase`: steps 1 and 2 are warm-up, 3 captures, 2 and 4 save (see
    `faultkit.WORDS`)."""
    from packgraph.graphs import capture
    from packgraph.train import launch
    from packgraph.train.checkpoint import writer as checkpoint
    from packgraph.train.data import DataError, microbatches
    from packgraph.train.optimizer import Optimizer

    if phase == "boot":  # data are open, the others may have met already
        on_call(launch, "check_memory", 1, act)
    elif phase == "meeting":
        on_call(launch, "begin_in", 1, act)
    elif phase == "warm-up":
        on_call(Optimizer, "_norm", 2, act)
    elif phase == "capture":
        capture.capture_variant = capture_fails(capture.capture_variant, act)
    elif phase == "replay":
        on_call(Optimizer, "_norm", 4, act)
    elif phase == "save":
        on_call(checkpoint, "_write_tensors", 2, act)
    elif phase == "data":

        def bad() -> None:
            try:
                act()
            except OSError as error:
                raise DataError("corpus.jsonl:7: injected fault") from error

        on_call(microbatches, "take_step", 4, bad)
    else:
        raise SystemExit(f"no phase {phase}")


def main() -> int:
    rank, fault, phase, stamp, *words = sys.argv[1:]
    Path(f"{stamp}-{os.environ['RANK']}").write_text(str(os.getpid()))
    if rank == os.environ["RANK"] and phase != "never":
        arrange(phase, lambda: fail(fault, Path(stamp)))
    from packgraph import cli

    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main())
