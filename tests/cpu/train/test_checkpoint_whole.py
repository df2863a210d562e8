"""Checkpoints are whole when they are named, and what a resume reads of them is what was
written."""

import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from packgraph.train.checkpoint.reader import read_metadata_file
from packgraph.train.checkpoint.state_file import OLD_FORMAT, CheckpointError, write_state
from packgraph.train.checkpoint.writer import (
    LATEST,
    latest_checkpoint,
    load_state,
    load_tensors,
    newest_whole_checkpoint,
    remove_leftovers,
    save_checkpoint,
)

STATE = {"data": {"position": 7, "share": 0.1}, "graphs": {"captured": 3}}


def tensors(value: float = 1.0) -> dict[str, Tensor]:
    return {"model.weight": torch.full((6, 4), value), "optimizer.step": torch.tensor(value)}


def save(folder: Path, step: int = 1, keep: int = 3) -> Path:
    return save_checkpoint(folder, step, tensors(float(step)), STATE, keep)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any], *, resign: bool = True) -> None:
    """Change state.json; resign: as a hostile writer would, with a checksum that fits."""
    content = json.loads((path / "state.json").read_text())
    change(content)
    if resign:
        content.pop("checksum")
        write_state(path / "state.json", content)
    else:
        (path / "state.json").write_text(json.dumps(content))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_every_file_of_the_metadata_must_be_in_the_manifest(tmp_path: Path, name: str) -> None:
    path = save(tmp_path)
    rewrite(path, lambda content: content["files"].pop(name))
    with pytest.raises(
        CheckpointError, match=rf"state\.json: damaged: .*{name}".replace("__0", "__0")
    ):
        load_state(path)


def test_an_empty_manifest_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    rewrite(path, lambda content: content.update(files={}))
    flip(path / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"state\.json: damaged"):
        load_state(path)


def test_a_shard_that_is_missing_when_saving_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    from packgraph.train.checkpoint import writer as checkpoint

    whole = checkpoint._write_tensors

    def partly(folder: Path, *values: Any) -> None:
        whole(folder, *values)
        (folder / "__0_0.distcp").unlink()

    monkeypatch.setattr(checkpoint, "_write_tensors", partly)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp.*shared.*run\.folder"):
        save(tmp_path, 2)
    assert steps(tmp_path) == [1] and latest_checkpoint(tmp_path) == tmp_path / "step-00000001"
    assert not list(tmp_path.glob(".writing-*"))


def weight(found: metadata.Metadata) -> Any:
    return found.state_dict_metadata["model.weight"]


def no_chunks(found: metadata.Metadata) -> None:
    weight(found).chunks = []


def a_gap(found: metadata.Metadata) -> None:
    weight(found).chunks[0].sizes = torch.Size([5, 4])


def an_overlap(found: metadata.Metadata) -> None:
    first = weight(found).chunks[0]
    first.sizes = torch.Size([3, 4])
    weight(found).chunks.append(ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([3, 4])))
    place = next(
        value for index, value in found.storage_data.items() if index.fqn == "model.weight"
    )
    found.storage_data[metadata.MetadataIndex("model.weight", torch.Size([2, 0]))] = place


def outside(found: metadata.Metadata) -> None:
    weight(found).chunks[0].offsets = torch.Size([1, 0])


def negative(found: metadata.Metadata) -> None:
    weight(found).chunks[0].sizes = torch.Size([-6, -4])


def huge(found: metadata.Metadata) -> None:
    weight(found).size = weight(found).chunks[0].sizes = torch.Size([2**40, 2**40])


def of_another_rank(found: metadata.Metadata) -> None:
    weight(found).chunks[0].sizes = torch.Size([24])
    weight(found).chunks[0].offsets = torch.Size([0])


def nowhere(found: metadata.Metadata) -> None:
    found.storage_data = {
        index: place for index, place in found.storage_data.items() if index.fqn != "model.weight"
    }


def beyond_the_file(found: metadata.Metadata) -> None:
    next(iter(found.storage_data.values())).offset = 10**9


def before_the_file(found: metadata.Metadata) -> None:
    next(iter(found.storage_data.values())).offset = -5


def no_numbers(found: metadata.Metadata) -> None:
    weight(found).chunks = [None]


@pytest.mark.parametrize(
    "change",
    [
        no_chunks,
        a_gap,
        an_overlap,
        outside,
        negative,
        huge,
        of_another_rank,
        nowhere,
        beyond_the_file,
        before_the_file,
        no_numbers,
    ],
)
def test_metadata_that_do_not_cover_their_tensors_are_refused(tmp_path: Path, change: Any) -> None:
    path = save(tmp_path)
    found = pickle.loads((path / ".metadata").read_bytes())
    change(found)
    (path / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match=r"\.metadata: refused"):
        load_tensors(path, tensors(0.0))


def test_chunks_of_many_ranks_are_accepted(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, tensors() | {"model.empty": torch.zeros(0, 3)}, STATE, 1)
    found = read_metadata_file(path / ".metadata")
    assert set(found.state_dict_metadata) == {"model.weight", "optimizer.step", "model.empty"}


def test_a_size_that_no_number_holds_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path)
    (path / ".metadata").write_bytes(b"ctorch\nSize\n((I" + b"9" * 40 + b"\nttR.")
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        load_tensors(path, tensors(0.0))


def test_no_flipped_bit_of_the_state_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path)
    expected = load_state(path)
    original = (path / "state.json").read_bytes()
    loaded = 0
    for bit in random.Random(0).sample(range(8 * len(original)), 1000):
        content = bytearray(original)
        content[bit // 8] ^= 1 << bit % 8
        (path / "state.json").write_bytes(content)
        try:
            found = load_state(path)
        except CheckpointError:
            continue
        # A line break for a space, say: what the file says is the same.
        assert found == expected
        loaded += 1
    assert loaded < 100


@pytest.mark.parametrize("step", [-5, True, 1.0, "1", None, 2, 10**30])
def test_a_step_that_is_none_or_not_that_of_the_folder_is_refused(
    tmp_path: Path, step: Any
) -> None:
    path = save(tmp_path)
    rewrite(path, lambda content: content.update(step=step))
    with pytest.raises(CheckpointError, match=r"state\.json: damaged: .*step"):
        load_state(path)


@pytest.mark.parametrize(
    "entry", [[-1, "0" * 64], [1.5, "0" * 64], [True, "0" * 64], [1, "00"], [1, None], [1], 3]
)
def test_a_manifest_out_of_range_is_refused(tmp_path: Path, entry: Any) -> None:
    path = save(tmp_path)
    rewrite(path, lambda content: content["files"].update({".metadata": entry}))
    with pytest.raises(CheckpointError, match=r"state\.json: damaged: .*\.metadata"):
        load_state(path)


@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5000, '{"format": NaN}', '"\\ud800"', ""])
def test_a_state_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    path = save(tmp_path)
    (path / "state.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"state\.json: (damaged|not a checkpoint)"):
        load_state(path)


@pytest.mark.parametrize("name", ["state.json", "__0_0.distcp", ".metadata"])
def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path, name: str) -> None:
    path = save(tmp_path)
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_state(path)


def test_checkpoints_of_the_format_before_are_read_with_a_warning(tmp_path: Path) -> None:
    path = save(tmp_path)
    rewrite(
        path,
        lambda content: (content.pop("checksum"), content.update(format=OLD_FORMAT)),
        resign=False,
    )
    with pytest.warns(UserWarning, match="before state.json had a checksum"):
        assert load_state(path) == (1, STATE)
    rewrite(path, lambda content: content.update(files={}), resign=False)
    with pytest.raises(CheckpointError, match=r"state\.json: damaged"):
        load_state(path)


def test_a_new_state_is_not_read_as_an_old_one(tmp_path: Path) -> None:
    path = save(tmp_path)
    rewrite(path, lambda content: content.update(format=OLD_FORMAT, state={}), resign=False)
    with pytest.raises(CheckpointError, match="checksum"):
        load_state(path)


def test_kept_checkpoints_go_by_step_whatever_the_clock_says(tmp_path: Path) -> None:
    for number, step in enumerate((3, 6, 9, 12)):
        path = save(tmp_path, step, keep=10)
        os.utime(path, (1e9 - number, 1e9 - number))  # the clock was set back
    save(tmp_path, 30)
    assert steps(tmp_path) == [9, 12, 30]


def test_a_run_that_went_back_drops_the_steps_it_has_left(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    (tmp_path / LATEST).write_text("step-00000010\n")
    save(tmp_path, 15)
    assert steps(tmp_path) == [10, 15]
    (tmp_path / LATEST).write_text("garbage")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000015"


def test_the_newest_whole_checkpoint_is_found_behind_damaged_ones(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        path = save(tmp_path, step)
        os.utime(path, (1e9 - step, 1e9 - step))
    found = newest_whole_checkpoint(tmp_path)
    assert found is not None and (found.path, found.step, found.damaged) == (path, 6, ())
    flip(tmp_path / "step-00000006" / "state.json")
    flip(tmp_path / "step-00000004" / "__0_0.distcp")
    found = newest_whole_checkpoint(tmp_path)
    assert found is not None and found.step == 2 and found.state == STATE
    assert (
        len(found.damaged) == 2
        and "step-00000006" in found.damaged[0]
        and "step-00000004" in found.damaged[1]
    )
    (tmp_path / "step-00000002" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000006.*damaged.*\n?.*no other checkpoint"):
        newest_whole_checkpoint(tmp_path)
    assert newest_whole_checkpoint(tmp_path / "none") is None


def test_steps_of_nine_digits_come_after_those_of_eight(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step)
    (tmp_path / LATEST).unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-100000000"


def test_leftovers_are_removed_and_a_replaced_checkpoint_comes_back(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    (tmp_path / ".writing-step-00000003").mkdir()
    (tmp_path / ".writing-latest").write_text("")
    (tmp_path / ".replaced-step-00000002").mkdir()
    (path).rename(tmp_path / ".replaced-step-00000001")
    remove_leftovers(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        LATEST,
        "step-00000001",
        "step-00000002",
    ]
    remove_leftovers(tmp_path / "none")
