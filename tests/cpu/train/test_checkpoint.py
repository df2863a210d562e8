"""Checkpoints: whole or not there, and nothing read from one can act."""

import builtins
import errno
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import packgraph.train
from packgraph.train.checkpoint.state_file import CheckpointError
from packgraph.train.checkpoint.writer import (
    LATEST,
    latest_checkpoint,
    load_state,
    load_tensors,
    save_checkpoint,
)

SOURCE = Path(packgraph.train.__file__).parents[2]


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(5, 3, generator=generator),
        "model.narrow": torch.randn(4, generator=generator).bfloat16(),
        "optimizer.step": torch.tensor(float(seed)),
        "random.cpu": generator.get_state(),
    }


def empty() -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in tensors(0).items()}


def assert_holds(path: Path, seed: int) -> None:
    step, state = load_state(path)
    assert (step, state) == (seed, {"seed": seed})
    found = empty()
    load_tensors(path, found)
    assert all(torch.equal(found[name], value) for name, value in tensors(seed).items())


def save(folder: Path, seed: int, keep: int = 2) -> Path:
    return save_checkpoint(folder, seed, tensors(seed), {"seed": seed}, keep)


def test_round_trip_and_the_last_ones_are_kept(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    for step in (1, 2, 3):
        path = save(tmp_path, step)
        assert latest_checkpoint(tmp_path) == path
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        LATEST,
        "step-00000002",
        "step-00000003",
    ]
    assert_holds(tmp_path / "step-00000002", 2)
    assert_holds(path, 3)


def test_going_back_by_latest_and_saving_over_a_step(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / LATEST).write_text("step-00000001\n")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001"
    assert_holds(save(tmp_path, 2), 2)
    assert_holds(save(tmp_path, 1, keep=1), 1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [LATEST, "step-00000001"]


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Let the `number`-th file operation that writes raise `No space left on device`; returns those
    begun."""
    done: list[str] = []

    def counted(name: str, original: Any, writes: Any = lambda *args: True) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if writes(*args):
                done.append(name)
                if len(done) == number:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "replace", "mkdir"):
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    path_open = Path.open
    is_write = lambda path, mode="r", *rest: "w" in mode  # noqa: E731
    monkeypatch.setattr(Path, "open", counted("open", path_open, is_write))
    monkeypatch.setattr(builtins, "open", counted("open", builtins.open, is_write))
    return done


def error_of_save(folder: Path, seed: int) -> str:
    try:
        save(folder, seed)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_full_disk_at_any_point_keeps_the_last_whole_checkpoint(tmp_path: Path) -> None:
    failures = 0
    for number in range(1, 40):
        folder = tmp_path / str(number)
        save(folder, 1)
        with pytest.MonkeyPatch.context() as patch:
            done = fail_at(patch, number)
            problem = error_of_save(folder, 2)
        if problem:
            failures += 1
            assert "No space left on device" in problem and "--resume" in problem
        if len(done) < number:
            break
        newest = latest_checkpoint(folder)
        assert newest is not None
        assert_holds(newest, load_state(newest)[0])
        assert_holds(save(folder, 3), 3)
        assert not [entry for entry in folder.iterdir() if entry.name.startswith(".")]
    assert failures >= 8


def test_bytes_that_do_not_fit_are_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        CheckpointError, match="step-00000002: could not be written: No space left on device"
    ):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert_holds(tmp_path / "step-00000001", 1)


ENDLESS = """
import sys
from pathlib import Path
import torch
from packgraph.train.checkpoint.writer import save_checkpoint
step = 0
while True:
    step += 1
    tensors = {f"model.{i}": torch.full((200, 200), float(step)) for i in range(20)}
    save_checkpoint(Path(sys.argv[1]), step, tensors, {"seed": step}, 2)
"""


def test_what_torchs_own_writer_says_becomes_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def full(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0\nframe #0: ..."
        )

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 2)
    assert re.search(
        r"step-00000002: could not be written: .*full disk.*MiB are free.*unexpected pos 64 vs 0; "
        r"earlier "
        r"checkpoints are untouched",
        str(caught.value),
    )
    assert "frame" not in str(caught.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [LATEST, "step-00000001"]


def test_a_kill_while_saving_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], env=environment)
    deadline = time.monotonic() + 60
    # Wait for a save that has begun after another was whole, so that the kill hits a save.
    while not ((tmp_path / LATEST).exists() and list(tmp_path.glob(".writing-step*"))):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    path = latest_checkpoint(tmp_path)
    assert path is not None
    step, _ = load_state(path)
    found = {f"model.{i}": torch.zeros(200, 200) for i in range(20)}
    load_tensors(path, found)
    assert all(bool((value == step).all()) for value in found.values())
    save(tmp_path, 9999)
    assert not list(tmp_path.glob(".writing*"))


def damage(path: Path, kind: str) -> None:
    content = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_bytes(content[:-20] + bytes(byte ^ 255 for byte in content[-20:]))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json"])
@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str, kind: str) -> None:
    path = save(tmp_path, 1)
    damage(path / name, kind)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_state(path)


@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped"])
def test_damaged_metadata_is_refused_even_without_the_manifest(tmp_path: Path, kind: str) -> None:
    path = save(tmp_path, 1)
    damage(path / ".metadata", kind)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        load_tensors(path, empty())


def test_a_foreign_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\.json"):
        load_state(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(CheckpointError, match="not a checkpoint of this program"):
        load_state(tmp_path)


class Attack:
    """Unpickling this would create a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_a_malicious_pickle_never_runs(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 1)
    target = tmp_path / "owned"
    (path / ".metadata").write_bytes(pickle.dumps(Attack(target)))
    with pytest.raises(CheckpointError, match=r"\.metadata: refused.*mkdir"):
        load_tensors(path, empty())
    assert not target.exists()


@pytest.mark.parametrize(
    "callee", ["builtins.eval", "builtins.getattr", "torch.load", "torch.hub.load", "os.system"]
)
def test_no_callable_is_admitted(tmp_path: Path, callee: str) -> None:
    path = save(tmp_path, 1)
    module, _, name = callee.rpartition(".")
    (path / ".metadata").write_bytes(b"c" + module.encode() + b"\n" + name.encode() + b"\n.")
    with pytest.raises(CheckpointError, match="refused"):
        load_tensors(path, empty())


def test_entries_that_are_not_tensors_and_foreign_paths_are_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    path = save(tmp_path, 1)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.bytes"] = BytesStorageMetadata()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="no tensors"):
        load_tensors(path, empty())
    del metadata.state_dict_metadata["model.bytes"]
    next(iter(metadata.storage_data.values())).relative_path = "../../secret"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="outside its folder"):
        load_tensors(path, empty())


def test_tensors_that_do_not_fit_are_all_named_and_nothing_changes(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    target = empty()
    del target["random.cpu"]
    target["model.weight"] = torch.zeros(2, 2)
    target["model.other"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as caught:
        load_tensors(path, target)
    text = str(caught.value)
    assert "model.other is missing" in text and "random.cpu is not part of this run" in text
    assert "model.weight is torch.float32 [5, 3], this run needs torch.float32 [2, 2]" in text
    assert not target["model.narrow"].any()
