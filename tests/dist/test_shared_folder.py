"""Runs whose folder is not one file system for all processes: refused at the start, and never a
checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distkit import run_ranks

from packgraph.parallel.mesh import Layout
from packgraph.parallel.pieces import Pieces
from packgraph.train.checkpoint.reader import CheckpointError
from packgraph.train.checkpoint.writer import save_checkpoint
from packgraph.train.run_files import RunFileError
from packgraph.train.run_folder import check_shared

pytestmark = pytest.mark.dist


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


@pytest.mark.slow
def test_torchrun_refuses_a_folder_of_each_rank_at_the_start(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, sys\nfrom pathlib import Path\nfrom packgraph import cli\nfrom packgraph.train "
        "import run_folder\n"
        "run_folder.PATIENCE_SECONDS = 0.5\nfolder = Path(sys.argv[1]) / "
        "os.environ['RANK']\nfolder.mkdir()\n"
        "os.chdir(folder)\nsys.exit(cli.main(sys.argv[2:]))\n"
    )
    words = [
        "train",
        "qwen3-tiny",
        "--run.steps",
        "4",
        "--run.device",
        "cpu",
        "--run.name",
        "x",
        "--run.tokens-per-step",
        "512",
        "--model.num-layers",
        "1",
        "--graph.capacities",
        "256x8",
        "--parallel.dp",
        "2",
    ]
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(script),
            str(tmp_path),
            *words,
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    assert ended.returncode != 0 and ended.stderr.startswith("packgraph: error: ")
    assert "runs/x: rank 1 (on " in ended.stderr and "--run.per-node-folder" in ended.stderr
    assert not list(tmp_path.rglob("step-*"))
