"""The checkpoint that a run goes on from, and how it goes on after an error.

The invariant: what a run takes from it is there and of the kind it needs, or the run is refused
before anything was loaded.
"""

from pathlib import Path

from packgraph.train.checkpoint.reader import CheckpointError
from packgraph.train.checkpoint.writer import (
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
    named = best_checkpoint(folder) if best else None
    found = None if best else newest_whole_checkpoint(folder, NEEDED)
    if named is not None:
        found = FoundCheckpoint(named, *load_state(named, NEEDED), ())
    if found is None:
        raise CheckpointError(f"{folder}: there is no checkpoint to resume from")
    wrong = [
        name
        for name in ("data", "graphs", "experts")
        if not isinstance(found.state.get(name, {}), dict)
    ]
    graphs = {} if wrong else found.state["graphs"]
    kinds = {name: dict if name == "fallbacks" else int | float for name in COUNTS}
    if not all(isinstance(graphs.get(name), kind) for name, kind in kinds.items()):
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


def how_to_go_on(folder: Path, newest: str, learning_rate: float) -> str:
    """Advice on how to resume after training went wrong.

    Args:
        folder: Of all checkpoints.
        newest: Path of the newest one; empty = there is none.
        learning_rate: The peak that training went wrong with.
    """
    best = best_checkpoint(folder)
    lowest = "" if best is None or str(best) == newest else f", that of the lowest loss {best}"
    return (
        "Training stopped; "
        + (
            f"the last good checkpoint is {newest}{lowest}. Go on from it with a lower learning "
            "rate: --resume "
            if newest
            else "there is no checkpoint yet. Start again with a lower learning rate: "
        )
        + f"--optimizer.learning-rate {learning_rate / 3:.2g} (or a lower "
        "--optimizer.clip-norm), or look at the data of this step"
    )
