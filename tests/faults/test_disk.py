"""A kill or a power loss at every file operation of a save: the last whole checkpoint is found,
bitwise."""

import dataclasses
import itertools
import pickle
import shutil
import sys
import time
from pathlib import Path
from unittest import mock

import diskkit
import pytest
import torch
from distkit import run_ranks
from trainkit import tiny, trainer

from packgraph.models.config import ExpertConfig
from packgraph.parallel.layout import Layout
from packgraph.train.checkpoint import background
from packgraph.train.checkpoint import writer as checkpoint
from packgraph.train.checkpoint.state_file import CheckpointError
from packgraph.train.checkpoint.writer import (
    load_tensors,
    newest_whole_checkpoint,
    remove_leftovers,
    save_checkpoint,
)
from packgraph.train.config.sections import ParallelConfig
from packgraph.train.signals import StopRequest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="open files are looked up in /proc")

EXPERTS = ExpertConfig(count=4, per_token=2, intermediate_size=16)


def tensors(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "model.weight": torch.randn(5, 3, generator=generator),
        "optimizer.step": torch.tensor(float(step)),
        "random.cpu": generator.get_state(),
    }


def saves(folder, steps=(1, 2, 3), keep=2):
    """Record these saves. Returns the operations, and how many were done when each save
    returned."""
    folder.mkdir()
    returned = {}
    with diskkit.Recording(folder) as recording:
        for step in steps:
            state = {"step": step, "data": {"position": step}}
            save_checkpoint(folder / "checkpoints", step, tensors(step), state, keep)
            returned[step] = len(recording.ops)
    return recording.ops, returned


def lost(ops, returned, scratch):
    """What is wrong after any of the operations: a checkpoint that had been saved is not found, or
    is another one."""
    found, last = [], max(returned)
    for number, (done, what, tree) in enumerate(diskkit.states(ops)):
        folder = scratch / str(number)
        diskkit.write(tree, folder)
        saved = max((step for step, after in returned.items() if after <= done), default=0)
        try:
            whole = newest_whole_checkpoint(folder / "checkpoints")
        except CheckpointError as error:
            found.append(f"{what}: {error}")
            continue
        step = whole.step if whole else 0
        if not saved <= step <= last:
            found.append(f"{what}: {step} for {saved}")
        if whole:
            loaded = {name: torch.zeros_like(value) for name, value in tensors(0).items()}
            load_tensors(whole.path, loaded)
            if not all(
                torch.equal(loaded[name], value) for name, value in tensors(step).items()
            ) or whole.state["data"] != {"position": step}:
                found.append(f"{what}: step {step} holds others")
        # and the run goes on
        remove_leftovers(folder / "checkpoints")
        save_checkpoint(
            folder / "checkpoints", step + 1, tensors(step + 1), {"step": step + 1, "data": {}}, 2
        )
        if newest_whole_checkpoint(folder / "checkpoints").step != step + 1:
            found.append(f"{what}: no way on")
        shutil.rmtree(folder)
    return found, number + 1


def test_nothing_is_lost_whenever_power_goes(tmp_path):
    ops, returned = saves(tmp_path / "run")
    assert {"content", "mkdir", "rename", "unlink", "rmdir", "sync-file", "sync-folder"} == {
        op.what for op in ops
    }
    (tmp_path / "scratch").mkdir()
    found, tried = lost(ops, returned, tmp_path / "scratch")
    assert not found
    assert tried > 100


def test_a_run_that_went_back_loses_nothing(tmp_path):
    ops, _returned = saves(tmp_path / "run", steps=(2, 4), keep=2)
    more, later = saves_again(tmp_path / "run", 3)
    (tmp_path / "scratch").mkdir()
    wrong = []
    for number, (done, what, tree) in enumerate(diskkit.states([*ops, *more])):
        if done <= len(ops):
            continue
        diskkit.write(tree, tmp_path / "scratch" / str(number))
        whole = newest_whole_checkpoint(tmp_path / "scratch" / str(number) / "checkpoints")
        if whole is None or whole.step not in ((3,) if done >= len(ops) + later else (3, 4)):
            wrong.append((what, whole and whole.step))
    assert not wrong


def saves_again(folder, step):
    with diskkit.Recording(folder) as recording:
        save_checkpoint(folder / "checkpoints", step, tensors(step), {"step": step, "data": {}}, 2)
        returned = len(recording.ops)
    return recording.ops, returned


def sync_nothing(path):
    pass


@pytest.mark.parametrize(
    ("module", "name", "without"),
    [
        (checkpoint, "sync_folder", sync_nothing),
        (checkpoint, "sync_file", sync_nothing),
        (checkpoint, "write_synced", Path.write_text),
    ],
)
@pytest.mark.few(2)
def test_a_save_that_does_not_sync_loses_checkpoints_and_the_test_sees_it(
    module, name, without, tmp_path, monkeypatch
):
    """Negative control. (torch's own syncs come before its buffers are written.)"""
    if name == "write_synced":
        monkeypatch.setattr(checkpoint, "sync_file", sync_nothing)
    monkeypatch.setattr(module, name, without)
    ops, returned = saves(tmp_path / "run", steps=(1, 2), keep=1)
    monkeypatch.undo()
    (tmp_path / "scratch").mkdir()
    assert lost(ops, returned, tmp_path / "scratch")[0]


def test_a_recording_builds_what_is_there(tmp_path):
    """The last state of a recording is the folder itself."""
    ops, _ = saves(tmp_path / "run")
    disk = diskkit.Disk()
    for op in ops:
        disk.apply(op)
    (_, tree), *_ = disk.killed()
    diskkit.write(tree, tmp_path / "again")
    for one, other in itertools.permutations((tmp_path / "run", tmp_path / "again")):
        for path in one.rglob("*"):
            twin = other / path.relative_to(one)
            assert twin.is_dir() if path.is_dir() else twin.read_bytes() == path.read_bytes()


LAYOUTS = {
    "dp2": Layout(dp=2),
    "tp2": Layout(dp=1, tp=2),
    "pp2": Layout(dp=1, pp=2),
    "dp2tp2": Layout(dp=2, tp=2),
    "ep2": Layout(dp=2, ep=2),
}


def config(layout):
    made = tiny(graph=True, steps=3, checkpoint_every=1, keep_checkpoints=3)
    model = dataclasses.replace(
        made.model,
        num_heads=4,
        num_kv_heads=2,
        num_layers=2 * layout.pp,
        experts=EXPERTS if layout.ep > 1 else made.model.experts,
    )
    parallel = ParallelConfig(dp=layout.dp, pp=layout.pp, tp=layout.tp, ep=layout.ep)
    return dataclasses.replace(made, model=model, parallel=parallel)


def recorded_run(mesh, folder, settings, out):
    """Train on this rank; its operations and the times when saves returned go to a file."""
    returned, save = {}, background.save_checkpoint

    def saving(folder, step, *arguments, **options):
        result = save(folder, step, *arguments, **options)
        returned[step] = time.monotonic_ns()
        return result

    with (
        mock.patch.object(background, "save_checkpoint", saving),
        diskkit.Recording(folder) as recording,
    ):
        run = trainer(folder / "run", settings, mesh=mesh)
        run.run(StopRequest())
        run.close()
    (out / str(mesh.rank)).write_bytes(pickle.dumps((recording.ops, returned)))


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_lost_whenever_power_goes_on_several_ranks(layout, tmp_path):
    layout = LAYOUTS[layout]
    for name in ("root", "out", "scratch"):
        (tmp_path / name).mkdir()
    run_ranks(
        recorded_run,
        layout.dp * layout.tp * layout.pp,
        tmp_path / "root",
        config(layout),
        tmp_path / "out",
        layout=layout,
    )
    found = [pickle.loads(path.read_bytes()) for path in sorted((tmp_path / "out").iterdir())]
    ops = sorted(
        (
            op
            for part, _ in found
            for op in part
            if Path("run/checkpoints") in (Path(op.path), *Path(op.path).parents)
        ),
        key=lambda op: op.when,
    )
    returned = found[0][1]
    assert len(returned) == 3
    ops = [diskkit.Op(0, "mkdir", "run"), *ops]
    final, wrong = tmp_path / "root/run/checkpoints", []
    for done, what, tree in diskkit.states(ops):
        folder = tmp_path / "scratch" / "one"
        diskkit.write(tree, folder)
        saved = max(
            (step for step, when in returned.items() if when <= ops[done - 1].when), default=0
        )
        there = (folder / "run/checkpoints").is_dir()
        whole = newest_whole_checkpoint(folder / "run/checkpoints") if there else None
        if (whole.step if whole else 0) < saved:
            wrong.append(f"{what}: {whole and whole.step} for {saved}")
        for path in whole.path.iterdir() if whole else ():
            if path.read_bytes() != (final / whole.path.name / path.name).read_bytes():
                wrong.append(f"{what}: {path.name} is another")
        shutil.rmtree(folder)
    assert not wrong
