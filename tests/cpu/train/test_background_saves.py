"""Checkpoints written while training goes on: the same bits, one at a time, no error lost."""

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from trainkit import CPU, ended, equal, state_of, tiny, trainer

from packgraph.graphs.checks import random_state
from packgraph.parallel.heartbeat import Whereabouts, is_broken_connection
from packgraph.parallel.mesh import single_process
from packgraph.parallel.pieces import Pieces, parts_of
from packgraph.train.checkpoint import background
from packgraph.train.checkpoint.background import Saves, Staging
from packgraph.train.checkpoint.reader import tensor_entries
from packgraph.train.checkpoint.state_file import CheckpointError
from packgraph.train.checkpoint.writer import (
    checkpoints_by_step,
    latest_checkpoint,
    load_state,
    load_tensors,
    save_checkpoint,
)
from packgraph.train.config.sections import TrainConfig
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.node_folders import shared_folder
from packgraph.train.run_folder import CHECKPOINTS
from packgraph.train.signals import StopRequest
from packgraph.train.spikes import NonFiniteLossError
from packgraph.train.trainer import Trainer

STATE = {"seed": 1}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(2, 5, generator=generator)
    return {
        "model.weight": torch.randn(5, 3, generator=generator),
        "model.narrow": torch.randn(7, generator=generator).bfloat16(),
        "model.none": torch.zeros(0, 3),
        "optimizer.part": Pieces(torch.Size([2, 5]), torch.float32, [((0, 0), rows)]),
        "optimizer.step": torch.tensor(7.0),
        "random.cpu": generator.get_state(),
    }


def parts(found: dict[str, Tensor]) -> list[Tensor]:
    return [part for tensor in found.values() for _, part in parts_of(tensor)]


def saves(folder: Path, notes: list[str] | None = None, keep: int = 3) -> Saves:
    made = single_process()
    told = [] if notes is None else notes
    return Saves(folder, keep, made, shared_folder(made), Whereabouts(), told.append)


def files(path: Path) -> dict[str, bytes]:
    """What holds the tensors of a checkpoint; .metadata names each save by a random number."""
    return {shard.name: shard.read_bytes() for shard in path.glob("*.distcp")}


class Slow:
    """Lets `save_checkpoint` begin only when it may."""

    def __init__(self, patch: pytest.MonkeyPatch, seconds: float | None = None) -> None:
        self.may, self.begun, self.seconds = threading.Event(), [], seconds
        self.running = self.most = 0
        patch.setattr(background, "save_checkpoint", self)

    def __call__(self, folder: Path, step: int, *arguments: Any, **options: Any) -> Path:
        self.begun.append(step)
        self.running += 1
        self.most = max(self.most, self.running)
        assert self.may.wait(20 if self.seconds is None else self.seconds) or self.seconds
        path = save_checkpoint(folder, step, *arguments, **options)
        self.running -= 1
        return path


def test_copies_hold_the_same_bits_in_memory_that_is_kept() -> None:
    live = tensors() | {"model.turned": torch.randn(3, 4).t()}
    staging = Staging(live, CPU)
    first = staging.stage(live)
    for copy, part in zip(parts(first), parts(live), strict=True):
        assert torch.equal(copy, part) and copy.dtype == part.dtype
        assert copy.untyped_storage().nbytes() == part.numel() * part.element_size()
    places = [copy.data_ptr() for copy in parts(first)]
    live["model.weight"].fill_(5.0)
    second = staging.stage(live)
    assert [copy.data_ptr() for copy in parts(second)] == places
    assert bool((parts(second)[0] == 5.0).all())
    assert [tensor.shape for tensor in second.values()] == [t.shape for t in live.values()]


def save_while_training(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose tensors change before the thread writes them."""
    live, slow = tensors(), Slow(patch)
    made = saves(folder)
    made.prepare(live, CPU)
    state = {"seed": 1, "list": [1]}
    made.write(1, live, state, in_background=True)
    for part in parts(live):
        part.zero_()
    state["list"] = [2]  # type: ignore[assignment]
    slow.may.set()
    made.close()
    assert load_state(folder / "step-00000001")[1] == {"seed": 1, "list": [1]}
    return folder / "step-00000001"


def test_a_checkpoint_in_the_background_is_that_of_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = save_checkpoint(tmp_path / "at-once", 1, tensors(), STATE, 1)
    later = save_while_training(tmp_path / "later", monkeypatch)
    assert files(later) == files(at_once)
    one, other = (tensor_entries(path / ".metadata") for path in (at_once, later))
    assert one == other


def test_without_copies_it_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    at_once = save_checkpoint(tmp_path / "at-once", 1, tensors(), STATE, 1)
    monkeypatch.setattr(Staging, "stage", lambda self, found: dict(found))
    later = save_while_training(tmp_path / "later", monkeypatch)
    assert files(later) != files(at_once)


def go(folder: Path, config: TrainConfig, spoil: int = -1) -> Trainer:
    """Train to the end. spoil: the step after which a weight is no number."""
    run = trainer(folder, config)
    one_step = run._one_step

    def stepped() -> bool:
        going = one_step()
        if run.step == spoil:
            next(run.model.parameters()).data.fill_(float("nan"))
        return going

    run._one_step = stepped  # type: ignore[method-assign]
    return ended(run)[0]


def settings(background: bool = True, **more: Any) -> TrainConfig:
    options = {"steps": 8, "checkpoint_every": 2, "keep_checkpoints": 9} | more
    return tiny(async_checkpoints=background, **options)


@pytest.mark.parametrize("graph", [False, True])
def test_a_run_with_slow_saves_writes_what_a_run_that_waits_does(
    graph: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = go(tmp_path / "waiting", settings(False, graph=graph))
    slow = Slow(monkeypatch, seconds=0.15 if graph else 0.4)
    alone = []
    look = random_state.is_alone

    def looked() -> bool:
        alone.append((slow.running > 0, look()))
        return alone[-1][1]

    monkeypatch.setattr(random_state, "is_alone", looked)
    beside = go(tmp_path / "beside", settings(graph=graph))
    equal(state_of(beside), state_of(waiting))
    assert slow.begun == [2, 4, 6, 8] and slow.most == 1
    if graph:  # captures begin while a checkpoint is written, and take its thread for a quiet one
        assert (True, True) in alone and (True, False) not in alone
        assert beside.executor.totals()["captured"] == waiting.executor.totals()["captured"] > 0
    for name in ("step-00000002", "step-00000004", "step-00000006", "step-00000008"):
        one, other = (tmp_path / run / CHECKPOINTS / name for run in ("waiting", "beside"))
        assert files(one) == files(other)
        assert load_state(one)[1]["data"] == load_state(other)[1]["data"]
    rows = read_metrics(tmp_path / "beside" / METRICS)
    pauses = {row["step"]: row["checkpoint_pause"] for row in rows if "checkpoint_pause" in row}
    # A step is quick, so the second save waits for the first one; the pause is in the next row.
    assert list(pauses) == [3, 5, 7] and (graph or pauses[5] > 0.05)
    assert all(row["seconds"] >= row.get("checkpoint_pause", 0.0) for row in rows)


def test_a_run_goes_on_bitwise_from_a_checkpoint_of_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Slow(monkeypatch, seconds=0.05)
    whole = go(tmp_path / "run", settings())
    for path in checkpoints_by_step(tmp_path / "run" / CHECKPOINTS)[:2]:
        (path / "state.json").unlink()
    again = trainer(tmp_path / "run", settings())
    again.resume()
    assert again.step == 4
    again.run(StopRequest())
    equal(state_of(again), state_of(whole))


def full(step: int) -> Any:
    """A `save_checkpoint` that finds the disk full at that step."""

    def save(folder: Path, at: int, *arguments: Any, **options: Any) -> Path:
        if at != step:
            return save_checkpoint(folder, at, *arguments, **options)
        with pytest.MonkeyPatch.context() as patch:

            def write(*arguments: Any, **options: Any) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            patch.setattr("packgraph.train.checkpoint.writer._write_tensors", write)
            return save_checkpoint(folder, at, *arguments, **options)

    return save


@pytest.mark.parametrize("background_saves", [False, True])
def test_a_save_that_fails_ends_the_run_with_the_same_words(
    background_saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "save_checkpoint", full(4))
    with pytest.raises(
        CheckpointError,
        match=r"step-00000004: could not be written: No space left on device.*resum",
    ):
        go(tmp_path / "run", settings(background_saves, steps=1000, checkpoint_every=4))
    # It ends soon, and not at the save after that one.
    assert len(read_metrics(tmp_path / "run" / METRICS)) <= 8
    assert latest_checkpoint(tmp_path / "run" / CHECKPOINTS) is None
    assert not list((tmp_path / "run" / CHECKPOINTS).glob(".writing-*"))


def test_a_save_that_fails_while_another_error_ends_the_run_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fails = Slow(monkeypatch, seconds=0.5), full(2)

    def save(*arguments: Any, **options: Any) -> Path:
        time.sleep(slow.seconds or 0.0)
        return fails(*arguments, **options)

    monkeypatch.setattr(background, "save_checkpoint", save)
    monkeypatch.setattr(Trainer, "_must_stop", lambda self: False)
    with pytest.raises(NonFiniteLossError, match="there is no checkpoint yet"):
        go(tmp_path / "run", settings(steps=3), spoil=3)
    assert "step-00000002: could not be written: No space left" in (tmp_path / "log").read_text()


def test_an_error_of_the_run_names_the_checkpoint_that_was_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Slow(monkeypatch, seconds=0.5)
    with pytest.raises(NonFiniteLossError, match=r"the last good checkpoint is .*step-00000002"):
        go(tmp_path / "run", settings(steps=3), spoil=3)


def test_an_error_is_raised_once_and_by_close_at_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "save_checkpoint", full(1))
    for ends in (lambda made: made.write(2, tensors(), STATE), Saves.wait, Saves.close):
        made = saves(tmp_path)
        made.prepare(tensors(), CPU)
        made.write(1, tensors(), STATE, in_background=True)
        with pytest.raises(CheckpointError, match="No space left"):
            ends(made)
        made.close()
    assert latest_checkpoint(tmp_path) is None


def test_ctrl_c_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    made = saves(tmp_path)
    made.prepare(tensors(), CPU)
    made.write(1, tensors(), STATE, in_background=True)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        made.close()
    assert made.failed is False and latest_checkpoint(tmp_path) is None
    slow.may.set()
    made.close()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001"


def test_without_room_for_copies_a_save_waits_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "available_memory", lambda *arguments: 500)
    notes: list[str] = []
    made = saves(tmp_path, notes)
    made.prepare(tensors(), CPU)
    made.write(1, tensors(), STATE, in_background=True)
    assert latest_checkpoint(tmp_path) is not None
    assert len(notes) == 1 and "more than half of what is free" in notes[0]


def test_memory_that_cannot_be_locked_makes_saves_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("out of lockable memory")

    notes: list[str] = []
    made = saves(tmp_path, notes=notes)
    monkeypatch.setattr(background, "Staging", refuse)
    made.prepare(tensors(), CPU)
    made.write(1, tensors(), STATE, in_background=True)
    assert [path.name for path in checkpoints_by_step(tmp_path)] == ["step-00000001"]
    made.close()
    assert len(notes) == 1 and "cannot be locked (out of lockable memory)" in notes[0]


def test_the_newest_the_best_and_pinned_ones_are_kept(tmp_path: Path) -> None:
    made = saves(tmp_path, keep=2)
    made.prepare(tensors(), CPU)
    for step in (1, 2, 3, 4, 5, 6):
        made.write(step, tensors(), STATE, best=3, pinned=(1,), in_background=True)
    made.close()
    assert sorted(path.name[-1] for path in checkpoints_by_step(tmp_path)) == ["1", "3", "5", "6"]
    found = {
        name: torch.zeros_like(value) for name, value in tensors().items() if "part" not in name
    }
    load_tensors(tmp_path / "step-00000006", found, optional="optimizer.part")
    assert torch.equal(found["model.narrow"], tensors()["model.narrow"])


def test_a_way_back_waits_for_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = {}
    for way in (False, True):
        if way:
            Slow(monkeypatch, seconds=0.3)
        run = trainer(tmp_path / str(way), settings(way, on_spike="rollback", checkpoint_every=3))
        one_step, spoiled = run._one_step, []

        def stepped(run=run, one_step=one_step, spoiled=spoiled) -> bool:
            if run.step == 3 and not spoiled:
                spoiled.append(1)
                next(run.model.parameters()).data.fill_(float("nan"))
            return one_step()

        run._one_step = stepped  # type: ignore[method-assign]
        assert ended(run)[1]["spikes"]["rolled_back"] == 1
        assert "Back to" in (tmp_path / "log").read_text()
        assert "step-00000003 (" in (tmp_path / "log").read_text()
        ends[way] = state_of(run)
    equal(ends[True], ends[False])


def test_an_error_that_names_itself_as_its_cause_is_looked_at_once() -> None:
    """A save raises the failure that torch has collected, from torch's collection of failures."""
    for text, broken in (("No space left", False), ("Connection closed by peer", True)):
        failure = RuntimeError(text)
        failure.__cause__ = CheckpointException("write", {0: (failure, None)})  # type: ignore[dict-item]
        told = CheckpointError("could not be written")
        told.__cause__ = failure
        assert is_broken_connection(told) is broken
