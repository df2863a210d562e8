"""Checkpoints written beside training on several ranks: the same files, and errors on all."""

import contextlib
import errno
import os
import time

import pytest
from distkit import run_ranks
from trainkit import tiny, trainer

from packgraph.parallel.layout import Layout
from packgraph.parallel.pieces import parts_of
from packgraph.train.checkpoint import background
from packgraph.train.checkpoint import writer as checkpoint
from packgraph.train.checkpoint.state_file import CheckpointError
from packgraph.train.checkpoint.writer import latest_checkpoint, load_state
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.run_folder import CHECKPOINTS
from packgraph.train.signals import StopRequest

DP2 = Layout(dp=2)


def settings(in_background, graph=True, **run):
    options = {"steps": 6, "checkpoint_every": 2, "keep_checkpoints": 9} | run
    return tiny(graph, async_checkpoints=in_background, **options)


def held(run):
    """What this rank has of all tensors."""
    return {
        (name, number): part.clone()
        for name, tensor in run.tensors().items()
        for number, (_, part) in enumerate(parts_of(tensor))
    }


def slow_on(rank, mesh, seconds):
    """Let the saves of one rank take longer than steps."""
    save = checkpoint.save_checkpoint

    def saved(*arguments, **options):
        if mesh.rank == rank:
            time.sleep(seconds)
        return save(*arguments, **options)

    background.save_checkpoint = saved


def train(mesh, folder, in_background):
    slow_on(1, mesh, 0.2)
    run = trainer(folder / "run", settings(in_background, graph=in_background), mesh=mesh)
    run.run(StopRequest())
    run.close()
    return held(run)


def train_and_resume(mesh, folder):
    """Go on from the checkpoint of step 4, which was written in the background."""
    found = train(mesh, folder, True)
    if mesh.rank == 0:
        (folder / "run" / CHECKPOINTS / "step-00000006" / "state.json").unlink()
    again = trainer(folder / "run", settings(True), mesh=mesh)
    again.resume()
    assert again.step == 4
    again.run(StopRequest())
    again.close()
    return found, held(again)


def shards(path):
    return {file.name: file.read_bytes() for file in path.glob("*.distcp")}


def test_ranks_write_the_same_files_beside_training(tmp_path):
    for name in ("waiting", "beside"):
        (tmp_path / name).mkdir()
    waiting = run_ranks(train, 2, tmp_path / "waiting", False, layout=DP2)
    beside = run_ranks(train_and_resume, 2, tmp_path / "beside", layout=DP2)
    for expected, founds in zip(waiting, beside, strict=True):
        for found in founds:
            assert found.keys() == expected.keys()
            assert not [name for name in found if not found[name].equal(expected[name])]
    for step in (2, 4, 6):
        one, other = (
            tmp_path / way / "run" / CHECKPOINTS / f"step-0000000{step}"
            for way in ("waiting", "beside")
        )
        assert len(shards(one)) == 2 and shards(one) == shards(other)
        assert load_state(one)[1]["data"] == load_state(other)[1]["data"]
    rows = read_metrics(tmp_path / "beside" / "run" / METRICS)
    assert [row["step"] for row in rows if "checkpoint_pause" in row] == [3]  # step 5 was resumed


def train_on_a_full_disk(mesh, folder, rank, where):
    """Train with a save that fails on one rank; what this one is told, and how far it came."""
    original, calls = getattr(checkpoint, where), []

    def failing(*arguments, **options):
        calls.append(1)
        if mesh.rank == rank and len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments, **options)

    setattr(checkpoint, where, failing)
    options = settings(True, graph=False, steps=1000, checkpoint_every=4)
    with contextlib.closing(trainer(folder / "run", options, mesh=mesh)) as run:
        try:
            run.run(StopRequest())
        except CheckpointError as error:
            return str(error), run.step
    return "", run.step


@pytest.mark.core
def test_a_save_that_fails_beside_training_ends_all_ranks_at_one_step(tmp_path):
    told = run_ranks(train_on_a_full_disk, 2, tmp_path, 0, "describe", layout=DP2)
    assert told[0] == told[1]
    text, step = told[0]
    assert "step-00000008: could not be written: No space left on device" in text
    assert 8 < step <= 12
    latest = latest_checkpoint(tmp_path / "run" / CHECKPOINTS)
    assert latest is not None and latest.name == "step-00000004"
    assert load_state(latest)[0] == 4
