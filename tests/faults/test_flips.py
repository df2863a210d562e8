"""Bits that flip in the files of a run: what a resumed run goes on from is what was written, or an
older whole one.

The short version runs by itself, the long one by PACKGRAPH_FLIPS=50000 (`make faults`).
"""

import collections
import os
import random

import pytest
import torch
from trainkit import tiny, trainer

from packgraph.train.checkpoint.reader import tensor_entries
from packgraph.train.checkpoint.state_file import CheckpointError
from packgraph.train.checkpoint.writer import load_tensors, newest_whole_checkpoint
from packgraph.train.config.reading import ConfigError
from packgraph.train.config.stored import stored_config
from packgraph.train.metrics import METRICS
from packgraph.train.run_files import CHECKPOINTS, SUMMARY, read_json
from packgraph.train.signals import StopRequest

FLIPS = int(os.environ.get("PACKGRAPH_FLIPS", "600"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flips") / "run"
    made = trainer(folder, tiny(steps=4, checkpoint_every=2, keep_checkpoints=2))
    made.run(StopRequest())
    made.close()
    return folder


def resumed(folder, flipped=None):
    """What a resumed run reads: configuration, step, state, tensors, the summary so far. flipped:
    tensors of other checkpoints than this file's need not be read."""
    config, _ = stored_config(folder)
    found = newest_whole_checkpoint(
        folder / CHECKPOINTS, needed=("data", "random_device", "graphs")
    )
    if flipped is not None and flipped.parent != found.path:
        return (
            dict(config.values),
            found.step,
            found.state,
            None,
            read_json(folder / SUMMARY, checked=True),
        )
    entries = tensor_entries(found.path / ".metadata")
    tensors = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
    }
    load_tensors(found.path, tensors)
    values = {name: value.numpy().tobytes() for name, value in tensors.items()}
    return (
        dict(config.values),
        found.step,
        found.state,
        values,
        read_json(folder / SUMMARY, checked=True),
    )


def outcome(folder, flipped, expected):
    """How a resume goes on after a flip. Raises AssertionError if that is from anything else than
    what was written."""
    try:
        config, step, state, values, summary = resumed(folder, flipped)
    except (CheckpointError, ConfigError):
        return "an error that says so"
    assert config == expected[max(expected)][0], "another configuration"
    assert step in expected, "a step that was never saved"
    assert state == expected[step][2], "another state"
    assert values in (None, expected[step][3]), "other tensors"
    assert summary in (expected[step][4], {}, None), "another summary"
    return "what was written" if step == max(expected) else "an older checkpoint"


def test_no_flipped_bit_changes_what_a_run_goes_on_from(run):
    newest = resumed(run)
    older = run / CHECKPOINTS / "step-00000004"
    older.rename(run / "aside")
    expected = {newest[1]: newest, 2: resumed(run)}
    (run / "aside").rename(older)
    assert set(expected) == {2, 4}
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size)
    assert len(files) >= 9
    draw, counts, wrong = random.Random(0), collections.Counter(), []
    for number in range(FLIPS):
        path = files[number % len(files)]
        content = path.read_bytes()
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        path.write_bytes(
            content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
        )
        try:
            counts[path.name, outcome(run, path, expected)] += 1
        except AssertionError as error:
            wrong.append(
                f"{path.relative_to(run)}, byte {place}, bit {bit}: {str(error).splitlines()[0]}"
            )
        path.write_bytes(content)
    print(*(f"{name}: {what}: {count}" for (name, what), count in sorted(counts.items())), sep="\n")
    assert not wrong
    assert counts[METRICS, "what was written"] and counts["state.json", "an older checkpoint"]


def test_a_flipped_bit_in_the_word_checksum_is_seen(run):
    path = run / SUMMARY
    content = path.read_text()
    assert read_json(path, checked=True)
    path.write_text(content.replace('"checksum"', '"chucksum"'))
    assert not read_json(path, checked=True)
    path.write_text(content)
