"""Ranks that would train on different things under one path end before the first step."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import faultkit
import pytest
import torch
from distkit import run_ranks

from packgraph.train.config.presets import preset
from packgraph.train.data import DataError
from packgraph.train.launch import _sampled, check_alike, input_facts, prepare

CPU = torch.device("cpu")


def write_rows(path: Path, count: int, text: str = "some words") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": f"{text} {n}"}) + "\n" for n in range(count)))


def facts_of(path: Path, **data):
    """What a rank would train on with the rows of one file."""
    config = preset("qwen3-tiny")
    config = replace(config, data=replace(config.data, source="jsonl", path=str(path), **data))
    facts = input_facts(config, prepare(config, CPU))
    return {**facts, "data": {**facts["data"], "path": "the same"}}


def test_facts_know_documents_tokenizer_options_and_versions(tmp_path):
    for name, count, text in (
        ("a", 30, "x"),
        ("same", 30, "x"),
        ("fewer", 29, "x"),
        ("y", 30, "y"),
    ):
        write_rows(tmp_path / f"{name}.jsonl", count, text)
    a, same, fewer, other = (
        facts_of(tmp_path / f"{name}.jsonl") for name in ("a", "same", "fewer", "y")
    )
    assert a == same and a["torch"] in torch.__version__
    assert {key for key in a if a[key] != fewer[key]} == {"documents", "data fingerprint"}
    assert {key for key in a if a[key] != other[key]} == {"data fingerprint"}
    seeded = facts_of(tmp_path / "a.jsonl", seed=1)
    assert {key for key in a if a[key] != seeded[key]} == {"data", "data.seed"}


@pytest.mark.parametrize("size", [3 * 2**20, 40 * 2**20])
def test_pieces_of_weights_tell_models_apart(tmp_path, size):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    content = bytearray(size)
    weights.write_bytes(content)
    before = _sampled(tmp_path)
    assert before == _sampled(tmp_path)
    content[size // 3 : size // 3 + 2**20] = os.urandom(2**20)  # one tensor is another one
    weights.write_bytes(content)
    assert _sampled(tmp_path) != before
    if size < 2**25:  # all of a small model counts
        content[size // 3 : size // 3 + 2**20] = bytes(2**20)
        content[size // 5] = 1
        weights.write_bytes(content)
        assert _sampled(tmp_path) != before


def told(mesh, differing):
    """What `check_alike` says to a rank."""
    facts = {"data fingerprint": "aa", "run": {"seed": 0, "steps": 3}}
    if mesh.rank in differing:
        facts = {"data fingerprint": "bb", "run": {"seed": mesh.rank, "steps": 9}}
    try:
        check_alike(mesh, facts)
    except DataError as error:
        return str(error)
    return ""


def test_all_ranks_name_those_that_differ_and_in_what():
    assert run_ranks(told, 3, ()) == ["", "", ""]
    said = run_ranks(told, 3, (1, 2))
    assert len(set(said)) == 1 and "\n" not in said[0]
    for words in ("rank 1 on ", "rank 2 on ", "data fingerprint is 'bb' and not 'aa'"):
        assert words in said[0]
    assert "run.seed is 2 and not 0" in said[0] and "run.steps" not in said[0]


@pytest.mark.parametrize(
    "layout", ["--parallel.dp 2", "--parallel.dp 2 --parallel.shard parameters", "--parallel.tp 2"]
)
def test_ranks_with_other_documents_under_one_path_do_not_train(tmp_path, layout):
    """Each rank has a folder of its own, and a path in it that is relative."""
    for rank, count in enumerate((60, 45)):
        write_rows(tmp_path / str(rank) / "rows.jsonl", count)
    words = f"train qwen3-tiny {layout} --run.device cpu --run.steps 4 --run.tokens-per-step 512"
    words += f" --graph.capacities 256x8 --run.folder {tmp_path / 'runs'} --run.name x"
    words += " --data.source jsonl --data.path rows.jsonl"
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(faultkit.free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "packgraph.cli", *words.split()],
            cwd=tmp_path / str(rank),
            env=os.environ
            | place
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(faultkit.SOURCE)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, said in [(rank, rank.communicate(timeout=90)[1]) for rank in ranks]:
        (line,) = [line for line in said.splitlines() if line.startswith("packgraph: ")]
        assert rank.returncode == 2 and "Traceback" not in said, said
        assert "documents is 45 and not 60" in line and "rank 1 on" in line
    assert not (tmp_path / "runs" / "x" / "metrics.jsonl").exists()
