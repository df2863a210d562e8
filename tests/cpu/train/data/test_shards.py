"""Shards are the documents of their source, bit by bit; what is not whole or not theirs is
refused."""

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from multiprocessing import resource_tracker, util
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from shardkit import shards_of, write_rows

from packgraph.cli import main
from packgraph.graphs.errors import PackgraphWarning
from packgraph.packing.capacity import Capacity
from packgraph.packing.document import Document
from packgraph.train.config.presets import preset
from packgraph.train.config.sections import RunConfig
from packgraph.train.data import (
    DataConfig,
    DataError,
    Microbatches,
    build_tokenizer,
    open_documents,
)
from packgraph.train.data.shard_build import build_shards
from packgraph.train.data.shards import (
    MANIFEST,
    Shard,
    decode_targets,
    encode_targets,
    read_manifest,
    targets_size,
)
from packgraph.train.data.source import DataChangedError
from packgraph.train.launch import prepare
from packgraph.train.progress import Phases
from packgraph.train.run_files import digest_of, read_json, write_json

CAPACITIES = (Capacity(16, 2), Capacity(24, 4))


def opened(config, capacities=CAPACITIES):
    return Microbatches(config, open_documents(config), build_tokenizer(config), capacities)


def same(left, right):
    return left.capacity == right.capacity and torch.equal(left.data, right.data)


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", 60)


@pytest.fixture
def shards(rows, tmp_path):
    return shards_of(rows, tmp_path / "shards")


@pytest.mark.parametrize("overlong", ["split", "drop"])
def test_packs_of_shards_are_those_of_their_source(rows, shards, overlong):
    ours, theirs = (
        opened(dataclasses.replace(config, overlong=overlong)) for config in (shards, rows)
    )
    for _ in range(150):  # several epochs
        assert same(next(ours), next(theirs))
    assert ours.report == theirs.report and ours.state_dict()["epoch"] > 1
    assert ours.empty_documents == theirs.empty_documents > 0
    assert ours.unlabelled_documents == theirs.unlabelled_documents


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_texts_and_chats_are_stored_as_they_are_tokenized(tmp_path, kind):
    path = tmp_path / "data.jsonl"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "grüß dich"}]
    row = {"text": "ein Text"} if kind == "text" else {"messages": turns}
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(9)))
    config = DataConfig(source="jsonl", path=str(path))
    ours, theirs = (
        opened(one, [Capacity(64, 4)]) for one in (shards_of(config, tmp_path / "shards"), config)
    )
    assert all(same(next(ours), next(theirs)) for _ in range(8))


def test_lengths_and_loss_tokens_are_known_without_reading(shards, monkeypatch):
    stream = opened(dataclasses.replace(shards, overlong="drop"))
    monkeypatch.setattr(Shard, "read", lambda *_: pytest.fail("tokens were read"))
    planned = [pack for _ in range(40) for pack in stream.plan_step(1)]
    monkeypatch.undo()
    for pack in planned:
        batch = pack.load()
        assert (pack.num_tokens, pack.num_loss_tokens, pack.num_documents) == (
            batch.num_tokens,
            batch.num_loss_tokens,
            batch.num_documents,
        )


@pytest.mark.parametrize("targets", [None, [5, -100, 7, 8], [-100, 5, -100, 9], [-100] * 4])
def test_targets_come_back(targets):
    tokens = np.array([5, 6, 7, 8])
    document = Document(tokens, None if targets is None else np.array(targets))
    kind, content = encode_targets(document)
    assert len(content) == targets_size(kind, 4)
    found = decode_targets(kind, content, tokens)
    assert found is None if targets is None else found.tolist() == targets


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_build_that_was_killed_goes_on_with_what_it_has(tmp_path):
    config = write_rows(tmp_path / "rows.jsonl", 1500)
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    words = ["data", "build", str(folder), "--source", "jsonl", "--path", config.path]
    words += ["--rows-per-shard", "20", "--workers", "2"]
    process = subprocess.Popen([sys.executable, "-m", "packgraph.cli", *words])
    end = time.monotonic() + 120
    while not (folder / MANIFEST).exists() or len(read_manifest(folder).shards) < 3:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    earlier = read_manifest(folder)
    assert 3 <= len(earlier.shards) < earlier.count
    (folder / "00000.tokens").write_bytes(b"x" * (folder / "00000.tokens").stat().st_size)
    kept = (folder / "00001.tokens").stat().st_ino
    with pytest.raises(DataError, match="run packgraph data build again"):
        open_documents(DataConfig(source="shards", path=str(folder)))
    told = []
    build_shards(config, folder, workers=1, rows_per_shard=20, phases=Phases(told.append))
    build_shards(config, whole, workers=1, rows_per_shard=20)
    assert told[0] == f"reading jsonl {config.path}", "at once"
    assert "shard 0 is written again" in told[1]
    done = 20 * (len(earlier.shards) - 1)
    assert told[2] == f"tokenizing {1500 - done:,} documents ({done:,} more are done) by 1 process"
    assert told[3].startswith("tokenized ") and told[3].endswith(" tokens/s")
    assert (folder / "00001.tokens").stat().st_ino == kept
    assert files(folder) == files(whole)


def test_a_run_on_shards_knows_its_tokens_and_the_steps_of_an_epoch(shards, rows, tmp_path):
    def words(data):
        run = RunConfig(tokens_per_step=100)
        config = dataclasses.replace(preset("qwen3-tiny"), data=data, run=run)
        return prepare(config, torch.device("cpu")).data

    tokens = sum(one.tokens for one in read_manifest(tmp_path / "shards").shards.values())
    assert words(shards) == (
        f"{shards.path}: 60 documents, {tokens:,} tokens; an epoch has about "
        f"{round(tokens / 100)} steps; 100 tokens a step"
    )
    assert words(rows) == f"{rows.path}: 60 documents; 100 tokens a step"
    limited = dataclasses.replace(shards, max_documents_loaded=9)
    assert words(limited) == f"{shards.path}: 9 documents; 100 tokens a step"


def test_the_bytes_of_shards_are_those_of_versions_before(rows, shards, tmp_path):
    """So folders that were built before are read, and runs on them go on."""
    found = sorted(files(tmp_path / "shards").items())
    content = b"".join(name.encode() + text for name, text in found if name != MANIFEST)
    assert hashlib.sha256(content).hexdigest()[:16] == "3baeba0a231ea2e9"
    fingerprints = [open_documents(one).fingerprint() for one in (rows, shards)]
    assert fingerprints == ["da81fc33184a11c9", "176d31e3ade10c7d"]


def test_a_damaged_manifest_is_built_anew(rows, tmp_path):
    folder, told = tmp_path / "shards", []
    build_shards(rows, folder, workers=1, rows_per_shard=20)
    whole = files(folder)
    for content in ("", "{", '{"format": 1}', whole[MANIFEST].decode().replace('"rows": 60', "")):
        (folder / MANIFEST).write_text(content)
        with pytest.raises(DataError, match="build the shards again"):
            open_documents(DataConfig(source="shards", path=str(folder)))
        build_shards(rows, folder, workers=1, rows_per_shard=20, phases=Phases(told.append))
        assert "all shards are written again" in told[1] and files(folder) == whole
        told.clear()
    # A manifest that is whole, of something else, is never written over.
    with pytest.raises(DataError, match="holds shards of something else"):
        build_shards(rows, folder, workers=1, rows_per_shard=30)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_ends_or_stops_as_it_starts_ends_the_build(tmp_path, monkeypatch, end):
    """Its work is more than a pipe holds, so Python would write it to nobody for ever. The workers
    of a live stream are started by the same code."""
    config = write_rows(tmp_path / "rows.jsonl", 12000)
    config = dataclasses.replace(config, worker_timeout=1.0)
    resource_tracker.ensure_running()
    spawn = util.spawnv_passfds

    def spawned(*words):
        os.kill(pid := spawn(*words), end)
        return pid

    monkeypatch.setattr(util, "spawnv_passfds", spawned)
    stopped = end == signal.SIGSTOP
    words = "did not answer for 1 s" if stopped else "was killed by SIGKILL"
    warned = pytest.warns(PackgraphWarning, match="has not answered for 0.5 s")
    with (
        warned if stopped else contextlib.nullcontext(),
        pytest.raises(DataError, match=f"{words}.* same command again"),
    ):
        build_shards(config, tmp_path / "shards", workers=2, rows_per_shard=20)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("error", [BrokenPipeError, ValueError("bad value(s) in fds_to_keep")])
def test_a_worker_killed_while_another_one_starts_ends_the_build(tmp_path, monkeypatch, error):
    """Its pipes are closed, or have the numbers of others."""
    resource_tracker.ensure_running()
    monkeypatch.setattr(util, "spawnv_passfds", Mock(side_effect=error))
    config = write_rows(tmp_path / "rows.jsonl", 4)
    with pytest.raises(DataError, match=r"was killed.* same command again"):
        build_shards(config, tmp_path / "shards", workers=2, rows_per_shard=2)


def spoil(path, place=-1):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["00002.tokens", "00002.targets", "00002.documents.npy"])
def test_damage_is_refused_by_name(shards, tmp_path, name, capsys):
    path = tmp_path / "shards" / name
    spoil(path, 0 if name.endswith("targets") else -1)  # a chat that is short enough to be read
    assert main(["data", "check", str(tmp_path / "shards")]) == 2
    assert f"{path}: damaged" in capsys.readouterr().err
    # the index when it is opened, tokens when they are read
    with pytest.raises(DataError, match=r"00002\.(tokens|documents\.npy): damaged"):
        list(islice(opened(shards), 60))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"{name}: damaged: it has"):
        open_documents(shards)
    path.unlink()
    with pytest.raises(DataError, match=f"{name}: damaged: it is gone"):
        open_documents(shards)


def test_a_shard_may_hold_no_token(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": ""}\n' * 3 + '{"text": "ab"}\n')
    config = shards_of(DataConfig(source="jsonl", path=str(path)), tmp_path / "shards", 2)
    assert main(["data", "check", config.path]) == 0 and next(opened(config)).num_tokens == 16
    assert files(tmp_path / "shards")["00000.tokens"] == b""


def test_a_whole_folder_passes(shards, tmp_path, capsys):
    assert main(["data", "check", str(tmp_path / "shards")]) == 0
    assert "60 documents" in capsys.readouterr().err
    spoil(tmp_path / "shards" / MANIFEST, 30)
    with pytest.raises(DataError, match=r"manifest\.json: damaged"):
        open_documents(shards)


def test_shards_of_something_else_are_not_written_to(rows, shards, tmp_path):
    folder, before = tmp_path / "shards", files(tmp_path / "shards")
    other = write_rows(tmp_path / "other.jsonl", 60, seed=1)
    with pytest.raises(DataError, match=r"shards of something else \(source was"):
        build_shards(other, folder, workers=1, rows_per_shard=7)
    with pytest.raises(DataError, match="rows_per_shard was 7, is 8"):
        build_shards(rows, folder, workers=1, rows_per_shard=8)
    assert files(folder) == before
    with pytest.raises(DataError, match=r"rows\.jsonl|other\.jsonl"):
        build_shards(rows, tmp_path, workers=1)


def test_another_tokenizer_is_refused(shards):
    class Other:
        vocab_size, fingerprint = 300, "other"

    stream = Microbatches(shards, open_documents(shards), Other(), CAPACITIES)
    with pytest.raises(DataError, match=r"tokenized with bytes .* not with data\.tokenizer"):
        next(stream)


def test_bad_documents_end_the_build_or_are_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [1, 9999]}\n' * 3)
    config = DataConfig(source="jsonl", path=str(path))
    with pytest.raises(DataError, match=r"rows\.jsonl:2: token id 9999"):
        shards_of(config, tmp_path / "stopped")
    skipping = dataclasses.replace(config, on_bad="skip")
    source = open_documents(shards_of(skipping, tmp_path / "skipping"))
    assert source.bad.count == 3 and "rows.jsonl:2" in source.bad.first[0] and len(source) == 6


def test_shards_that_change_during_a_run_end_it_with_the_epoch(shards, tmp_path):
    stream = opened(shards)
    next(stream)
    os.utime(tmp_path / "shards" / "00000.rows.npy")
    with pytest.raises(DataChangedError, match=r"00000\.rows\.npy: changed"):
        list(islice(stream, 200))
    stream = opened(shards)
    spoil(tmp_path / "shards" / "00000.rows.npy")  # the last row ends behind all documents
    with pytest.raises(DataError, match=r"00000\.rows\.npy: damaged: it was written to"):
        list(islice(stream, 200))


@pytest.fixture
def mixture(tmp_path):
    folders = []
    for name, longest in (("short", 10), ("long", 60)):
        config = write_rows(tmp_path / f"{name}.jsonl", 40, seed=longest, longest=longest)
        shards_of(config, tmp_path / name)
        folders.append(str(tmp_path / name))
    weights = (f"{folders[0]}=3", f"{folders[1]}=1")
    return DataConfig(source="shards", mixture=weights, window=16, overlong="split")


def test_a_mixture_gives_each_folder_its_share_of_tokens(mixture):
    stream = opened(mixture)
    for _ in range(200):
        next(stream)
    (short_epoch, *_, short), (long_epoch, *_, long) = stream.state_dict()["parts"]
    assert short / long == pytest.approx(3, rel=0.05) and short_epoch > long_epoch


@pytest.mark.parametrize("taken", [0, 3, 31])
def test_a_mixture_goes_on_as_if_never_stopped(mixture, taken):
    first, second = opened(mixture), opened(mixture)
    for _ in range(taken):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    assert all(same(next(first), next(second)) for _ in range(60))
    for wrong in ([1, 2], [[0, 0, 0, 0]], [[0, 0, 0, -1]] * 2, [[0, 10**6, 0, 0]] * 2):
        with pytest.raises(DataError, match="damaged: its parts"):
            opened(mixture).load_state_dict({**state, "parts": wrong})


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"source": "jsonl", "path": "x", "mixture": ("a=1",)}, "but source = jsonl"),
        ({"path": "x", "mixture": ("a=1",)}, "exclude each other"),
        ({"mixture": ("a",)}, "expected FOLDER=WEIGHT"),
        ({"mixture": ("a=0",)}, "expected FOLDER=WEIGHT"),
        ({"mixture": ("a=1", "a=2")}, "named twice"),
        ({"mixture": ("a" * 300 + "=1",)}, "cannot be a folder"),
        ({"mixture": ("a=1", "b=2"), "epochs": 1}, "use run.steps"),
        ({}, "needs a path"),
    ],
)
def test_what_a_mixture_cannot_be(given, match):
    with pytest.raises(ValueError, match=match):
        DataConfig(**{"source": "shards", **given})


def signed(folder, change):
    """Change the manifest of a folder of shards; its checksum is right afterwards."""
    content = read_json(folder / MANIFEST)
    change(content)
    write_json(folder / MANIFEST, content)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda content: content.update(rows="60"), "expected a whole number"),
        (lambda content: content.update(rows=61), "its counts"),
        (lambda content: content.update(rows_per_shard=0), "its counts"),
        (lambda content: content.update(token_bytes=3), "its counts"),
        (lambda content: content.pop("tokenizer"), "tokenizer"),
        (lambda content: content.update(shards=None), "NoneType"),
        (lambda content: content["shards"][0].update(number=1), "other files"),
        (lambda content: content["shards"][0].update(bad=1), "other files or counts"),
        (lambda content: content["shards"][0].update(files=[]), "list"),
        (lambda content: content["shards"][0]["files"].update({"../x": {}}), "size"),
        (lambda content: content["shards"][0]["files"]["00000.tokens"].pop("size"), "size"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(shards, tmp_path, change, says):
    signed(tmp_path / "shards", change)
    with pytest.raises(DataError, match=rf"manifest\.json: not what is written here: .*{says}"):
        open_documents(shards)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table[:-1],
        lambda table: table[None],
        lambda table: table.astype("<f8"),
        lambda table: np.array([{}] * len(table), dtype=object),
        lambda table: table + (np.arange(len(table)) > 0),  # a row holds what is another's
        lambda table: table[::-1].copy(),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(shards, tmp_path, change):
    path = tmp_path / "shards" / "00000.rows.npy"
    np.save(path, change(np.load(path)), allow_pickle=True)
    facts = {"size": path.stat().st_size, "sha256": digest_of(path)}
    signed(
        tmp_path / "shards",
        lambda content: content["shards"][0]["files"].update({path.name: facts}),
    )
    with pytest.raises(DataError, match=r"00000\.rows\.npy: "):
        open_documents(shards)
