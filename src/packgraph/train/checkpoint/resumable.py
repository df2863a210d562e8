"""The checkpoint that a run goes on from: whole, of this program, on this kind of device."""

from pathlib import Path

from packgraph.train.checkpoint.reader import CheckpointError
from packgraph.train.checkpoint.writer import (
    STATE,
    FoundCheckpoint,
    best_checkpoint,
    load_state,
    newest_whole_checkpoint,
)

NEEDED = ("data", "random_device", "graphs")
COUNTS = {"captured", "replayed", "capture_seconds", "fallbacks"}  # of graphs, in a state


def checkpoint_to_resume(folder: Path, device_type: str, *, best: bool = False) -> FoundCheckpoint:
    """The newest whole checkpoint in the folder of all checkpoints of a run, or the best.

    device_type: of the run, `cpu` or `cuda`. best: that of the lowest loss; no other is taken where
    it is damaged. Raises CheckpointError.
    """
    found = _best(folder) if best else newest_whole_checkpoint(folder, NEEDED)
    if found is None:
        raise CheckpointError(f"{folder}: there is no checkpoint to resume from")
    wrong = [
        name
        for name in ("data", "graphs", "experts")
        if not isinstance(found.state.get(name, {}), dict)
    ]
    if wrong or not found.state["graphs"].keys() >= COUNTS:
        raise CheckpointError(
            f"{found.path}: damaged: its {wrong[0] if wrong else 'graphs'} are no counts and "
            "positions; go on from another checkpoint"
        )
    if found.state["random_device"] != device_type:
        raise CheckpointError(
            f"{found.path}: written on {found.state['random_device']}, this is {device_type}"
            "; a run goes on bitwise only on the same kind of device (run.device)"
        )
    return found


def _best(folder: Path) -> FoundCheckpoint | None:
    path = best_checkpoint(folder)
    if path is None:
        return None
    step, state = load_state(path)
    if missing := [key for key in NEEDED if key not in state]:
        raise CheckpointError(f"{path / STATE}: damaged: it has no {', '.join(missing)}")
    return FoundCheckpoint(path, step, state, ())
