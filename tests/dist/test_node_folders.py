"""Runs whose folder is each node's own: shards are gathered, and all ranks go on from them."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import faultkit
import pytest
import torch
from distkit import run_ranks

from packgraph.parallel.heartbeat import LOST
from packgraph.parallel.layout import Layout
from packgraph.parallel.pieces import Pieces
from packgraph.train import node_folders
from packgraph.train.checkpoint.reader import tensor_entries
from packgraph.train.checkpoint.state_file import CheckpointError
from packgraph.train.checkpoint.writer import (
    latest_checkpoint,
    load_state,
    load_tensors,
    save_checkpoint,
)
from packgraph.train.config.reading import ConfigError
from packgraph.train.node_folders import checkpoint_here, find_nodes
from packgraph.train.run_files import RunFileError
from packgraph.train.run_folder import begin_in, check_shared


def node(folder, rank):
    """Ranks 0 and 2 share a folder, and so do 1 and 3."""
    return Path(folder) / f"node{rank % 2}" / "run"


def found(mesh, folder):
    return find_nodes(node(folder, mesh.rank), mesh, patience=0.5).leaders


def test_ranks_find_out_who_sees_the_same_folder(tmp_path):
    assert run_ranks(found, 4, str(tmp_path)) == [(0, 1, 0, 1)] * 4
    assert not list(tmp_path.rglob("shared-*"))


def rows(rank, step):
    """A tensor of which each rank has a row, that of others is not there."""
    row = torch.full((1, 1000), float(10 * step + rank))
    return {
        "model.weight": Pieces(torch.Size([4, 1000]), torch.float32, [((rank, 0), row)]),
    }


def save_and_load(mesh, folder, broken=""):
    """Two checkpoints, the second with something broken; what this rank reads of the newest."""
    node_folders.PIECE = 1000  # bytes; shards have more
    node_folders.PIECES_BETWEEN = 3
    place = node(folder, mesh.rank) / "checkpoints"
    nodes = find_nodes(place.parent, mesh, patience=0.5)
    save_checkpoint(place, 1, rows(mesh.rank, 1), {}, 2, mesh, nodes=nodes)
    write, read, said = node_folders._write_piece, node_folders._read_piece, ""

    def failing(path, start, piece):
        raise OSError(28, "No space left on device")

    def flipped(path, start, piece):
        if start:
            piece[0] ^= 1
        write(path, start, piece)

    if broken == "the disk of rank 0" and mesh.rank == 0:
        node_folders._write_piece = failing
    if broken == "a bit on the way" and mesh.rank == 0:
        node_folders._write_piece = flipped
    if broken == "the disk of rank 3" and mesh.rank == 3:
        node_folders._read_piece = failing
    try:
        save_checkpoint(place, 2, rows(mesh.rank, 2), {}, 2, mesh, nodes=nodes)
    except CheckpointError as error:
        said = str(error)
    node_folders._write_piece, node_folders._read_piece = write, read
    weight = torch.zeros(4, 1000)
    newest = node(folder, 0) / "checkpoints" / ("step-00000001" if said else "step-00000002")
    path = newest if mesh.rank % 2 == 0 else place / newest.name
    with checkpoint_here(path, mesh, nodes) as here:
        assert here.is_relative_to(place)
        load_tensors(here, {"model.weight": weight}, mesh=mesh)
    return said, weight[:, 0].tolist(), sorted(str(path.name) for path in place.iterdir())


@pytest.mark.core
def test_shards_of_all_nodes_are_gathered_and_come_back(tmp_path):
    done = run_ranks(save_and_load, 4, str(tmp_path), layout=Layout(dp=4))
    assert [weight for _, weight, _ in done] == [[20.0, 21.0, 22.0, 23.0]] * 4
    # The node of rank 0 has whole checkpoints, the other one has nothing.
    assert done[0][2] == ["latest", "step-00000001", "step-00000002"] and done[1][2] == []
    path = latest_checkpoint(node(tmp_path, 0) / "checkpoints")
    assert path.name == "step-00000002" and load_state(path) == (2, {})
    assert {f"__{rank}_0.distcp" for rank in range(4)} <= {file.name for file in path.iterdir()}
    (path / "__3_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__3_0.distcp: missing"):
        load_state(path)


@pytest.mark.core
@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("the disk of rank 0", "No space left on device"),
        ("the disk of rank 3", "No space left on device"),
        ("a bit on the way", "is not what its rank has sent"),
    ],
)
def test_a_gather_that_fails_leaves_the_checkpoint_before(tmp_path, broken, words):
    done = run_ranks(save_and_load, 4, str(tmp_path), broken, layout=Layout(dp=4))
    assert all(words in said for said, _, _ in done)
    assert [weight for _, weight, _ in done] == [[10.0, 11.0, 12.0, 13.0]] * 4
    assert done[0][2] == ["latest", "step-00000001"] and done[1][2] == []


def begin(mesh, folder):
    with ExitStack() as held:
        try:
            begin_in(node(folder, mesh.rank), mesh, True, held)
        except ConfigError as error:
            return str(error)
    return ""


def test_another_run_on_another_node_is_not_overwritten(tmp_path):
    node(tmp_path, 0).mkdir(parents=True)
    assert run_ranks(begin, 2, str(tmp_path)) == ["", ""]
    kept = node(tmp_path, 1) / "checkpoints" / "step-00000004"
    kept.mkdir(parents=True)
    said = run_ranks(begin, 2, str(tmp_path))
    assert kept.is_dir() and all("(rank 1) holds another run" in text for text in said), said


SCRIPT = """
import os, signal, sys
from pathlib import Path
from packgraph import cli
from packgraph.train import node_folders, run_folder
kill, saves = sys.argv[2], []
rank = int(os.environ["RANK"])
os.chdir(Path(sys.argv[1]) / f"node{(rank + int(os.environ.get('TURN', '0'))) % 2}")
run_folder.PATIENCE_SECONDS, node_folders.PIECE = 0.5, 10000
carry, write, read = node_folders._carry, node_folders._write_piece, node_folders._read_piece
def counted(*arguments):
    saves.append(1)
    return carry(*arguments)
def struck(action):
    def act(path, start, piece):
        if len(saves) == 2 and start:
            os.kill(os.getpid(), signal.SIGKILL)
        action(path, start, piece)
    return act
node_folders._carry = counted
if kill == str(rank):
    node_folders._write_piece, node_folders._read_piece = struck(write), struck(read)
sys.exit(cli.main(sys.argv[3:]))
"""
WORDS = (
    "train qwen3-tiny --parallel.dp 2 --run.device cpu --run.steps 6 --run.tokens-per-step 512 "
    "--run.checkpoint-every 2 --run.deterministic --graph.capacities 256x8 --graph.autotune false "
    "--run.name x"
)


def train(folder, *more, kill="none", turn=0, shared=False):
    """Two ranks, each in a folder of its own. Returns exit codes and what they said."""
    for number in range(2):
        (folder / f"node{number}").mkdir(parents=True, exist_ok=True)
    place = ["--run.folder", str(folder / "all")] if shared else ["--run.per-node-folder"]
    environment = os.environ | {
        "PYTHONPATH": str(faultkit.SOURCE),
        "OMP_NUM_THREADS": "1",
        "TURN": str(turn),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(faultkit.free_port()),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), kill, *WORDS.split(), *place, *more],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=150)[1] for rank in ranks]
    return [rank.returncode for rank in ranks], said


def tensors(path):
    entries = tensor_entries(path / ".metadata")
    held = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
    }
    load_tensors(path, held)
    return held


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run whose ranks share a folder."""
    folder = tmp_path_factory.mktemp("whole")
    codes, said = train(folder, shared=True)
    assert codes == [0, 0], said
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["1", "0"])
def test_a_run_that_is_killed_while_it_gathers_goes_on_bitwise(tmp_path, whole, kill):
    codes, said = train(tmp_path / "parts", "--resume", "auto", kill=kill)
    assert codes[int(kill)] == -9 and codes[1 - int(kill)] == LOST, said
    runs = [tmp_path / "parts" / f"node{number}" / "runs" / "x" for number in range(2)]
    checkpoints = runs[0] / "checkpoints"
    assert latest_checkpoint(checkpoints).name == "step-00000002"
    assert load_state(latest_checkpoint(checkpoints))[0] == 2
    if kill == "1":  # The ranks have changed places: nobody starts afresh over what is there.
        codes, said = train(tmp_path / "parts", "--resume", "auto", turn=1)
        assert codes == [2, 2] and all("holds another run, or checkpoints" in told for told in said)
    codes, said = train(tmp_path / "parts", "--resume", "auto")
    assert codes == [0, 0] and "step-00000002" in said[0] and "Traceback" not in "".join(said), said
    one, other = (
        tensors(latest_checkpoint(folder))
        for folder in (whole / "all" / "x" / "checkpoints", checkpoints)
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert faultkit.losses(whole, "all") == faultkit.losses(tmp_path / "parts/node0")
    assert not list((runs[1] / "checkpoints").iterdir())
    if kill == "0":  # A finished run is one on all ranks.
        codes, said = train(tmp_path / "parts", "--resume")
        assert codes == [0, 0] and "nothing to do" in said[0]


# ---- runs whose folder is not one file system for all processes: refused at the start, and never a


def own_folder(mesh, folder, shared):
    """What `check_shared` says to each rank: the error, or nothing."""
    place = Path(folder) / ("all" if shared else f"node{mesh.rank // 2}")
    place.mkdir(parents=True, exist_ok=True)
    try:
        check_shared(place, mesh, patience=0.5)
    except RunFileError as error:
        return str(error)
    return ""


def test_ranks_agree_that_they_see_one_folder(tmp_path):
    assert run_ranks(own_folder, 3, str(tmp_path), True) == ["", "", ""]
    assert not list((tmp_path / "all").iterdir())


def test_ranks_that_do_not_see_the_folder_are_named_to_all(tmp_path):
    said = run_ranks(own_folder, 4, str(tmp_path), False)
    assert all(
        "ranks 2, 3" in text and "shared" in text and "--run.folder" in text for text in said
    )
    assert not list((tmp_path / "node0").iterdir())


def unwritable(mesh, folder):
    try:
        check_shared(Path(folder) / "none", mesh, patience=0.5)
    except RunFileError as error:
        return str(error)
    return ""


def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path):
    assert all(
        "none: could not be written" in said for said in run_ranks(unwritable, 2, str(tmp_path))
    )


def save_apart(mesh, folder, shared):
    """Each rank holds a row; rank 1's folder is its own."""
    row = Pieces(
        torch.Size([2, 3]), torch.float32, [((mesh.rank, 0), torch.full((1, 3), float(mesh.rank)))]
    )
    place = Path(folder) / ("all" if shared else str(mesh.rank))
    try:
        save_checkpoint(place, 1, {"model.weight": row}, {}, 1, mesh)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_checkpoint_without_the_shards_of_other_ranks_is_none(tmp_path):
    assert run_ranks(save_apart, 2, str(tmp_path), True, layout=Layout(dp=2)) == ["", ""]
    said = run_ranks(save_apart, 2, str(tmp_path), False, layout=Layout(dp=2))
    assert all(
        "__1_0.distcp" in text and "shared" in text and "run.folder" in text for text in said
    )
    assert not [
        path for path in tmp_path.rglob("*") if "step-" in path.name and "all" not in path.parts
    ]
    assert not (tmp_path / "0" / "latest").exists()
