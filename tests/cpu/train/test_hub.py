"""Names of the hub in the place of folders, by a hub on the loopback address."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hubkit import COMMIT, served
from tuningkit import tiny_model, word_tokenizer

from packgraph.train.config.hub import repository_of
from packgraph.train.config.presets import hf
from packgraph.train.config.sections import HfConfig
from packgraph.train.run_folder import model_name

ANSWERS = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
Run = Callable[..., subprocess.CompletedProcess[str]]
SHORT = "--run.steps 3 --run.tokens-per-step 60 --graph.capacities 64x8 --run.dtype float32"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Calls packgraph where a hub has a model and a dataset; offline: where there is none."""
    here = tmp_path_factory.mktemp("hub")
    model = word_tokenizer(tiny_model(here / "model"), ANSWERS)
    (model / "model.py").write_text("raise SystemExit('code of the hub ran')")
    (model / "onnx").mkdir()
    (model / "onnx" / "config.json").write_text("{}")
    rows = here / "data" / "default"
    for split, count in (("train", 40), ("test", 20), ("../other/test", 20)):
        (rows / split).mkdir(parents=True)
        told = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]]
        pq.write_table(pa.table({"messages": told * count}), rows / split / "0000.parquet")
    repositories = {"org/tiny": model, "datasets/org/chats": here / "data", "gated/tiny": model}
    repositories["org/words"] = model
    with served(repositories) as address:

        def packgraph(words: str, *, offline: bool = False) -> subprocess.CompletedProcess[str]:
            given = {"HF_ENDPOINT": address, "HF_HOME": str(here / "cache"), "COLUMNS": "400"}
            given |= {"HF_HUB_OFFLINE": "1" if offline else "0"}
            return subprocess.run(
                [sys.executable, "-m", "packgraph.cli", *words.split()],
                cwd=here, env=os.environ | given, capture_output=True, text=True, check=False,
            )  # fmt: skip

        packgraph.folder = here  # type: ignore[attr-defined]
        yield packgraph


def test_a_model_and_data_are_trained_by_name_and_go_on_without_the_hub(run: Any) -> None:
    words = f"train hf:org/tiny --data.source hub --data.path org/chats {SHORT} --run.name one"
    done = run(words)
    assert done.returncode == 0, done.stderr
    stored = json.loads((run.folder / "runs" / "one" / "config.json").read_text())
    path, data = stored["hf"]["path"], stored["data"]
    assert repository_of(path) == ("org/tiny", COMMIT) and data["tokenizer"] == path
    assert (data["source"], Path(data["path"]).name) == ("parquet", "train")
    assert "40 documents" in done.stdout + done.stderr
    there = {file.name for file in Path(path).rglob("*")}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= there
    assert not there & {"model.py", "onnx"}
    again = run("train --config runs/one/config.json --resume --run.steps 5", offline=True)
    assert again.returncode == 0, again.stderr
    rows = (run.folder / "runs" / "one" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 5


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("hf:org/other", "org/other: there is no such folder here, and no such model on the hub"),
        ("hf:org/tiny@missing", "org/tiny: this model has no revision missing"),
        ("hf:gated/tiny", "gated/tiny: its owner asks for consent"),
        ("hf:./org/tiny", "hf:./org/tiny: there is no org/tiny/config.json"),
        (
            "hf:org/tiny --data.source hub --data.path org/chats:validation",
            "org/chats:validation: names 0 whole splits that the hub has as Parquet, must be one",
        ),
        (
            "hf:org/tiny --data.source hub --data.path org/chats:test",
            "there is org/chats:default/test, org/chats:other/test.",
        ),
        (
            "hf:org/tiny --data.source hub --data.path ./chats",
            "./chats: data.source = hub reads a dataset by its name",
        ),
    ],
)
def test_what_the_hub_does_not_have_is_said_in_words(run: Any, words: str, told: str) -> None:
    words = words if "--data" in words else f"{words} --data.path chats.jsonl"
    (run.folder / "chats.jsonl").write_text('{"text": "hello"}\n')
    done = run(f"train {words} {SHORT}")
    assert done.returncode not in (0, 1) and told in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_that_nobody_can_ask_for_says_how_to_get_it(run: Any) -> None:
    done = run(f"train hf:org/else@v2 --data.path chats.jsonl {SHORT}", offline=True)
    assert "`hf download org/else --revision v2`" in done.stderr


def test_a_split_is_not_trained_on_without_the_list_of_its_files(run: Any) -> None:
    """A cache may hold some of them, and nobody there knows how many there are."""
    words = "train hf:org/tiny --data.source hub --data.path org/chats:other/test"
    assert run(f"{words} {SHORT}").returncode == 0
    done = run(f"{words} {SHORT}", offline=True)
    assert "org/chats: there is no such folder here" in done.stderr and done.returncode == 2


def test_random_weights_and_tokenizers_are_asked_for_without_weights(run: Any) -> None:
    words = f"--data.path chats.jsonl --data.tokenizer org/words {SHORT} --run.name words"
    assert run(f"train qwen3-tiny {words}").returncode == 0
    stored = json.loads((run.folder / "runs" / "words" / "config.json").read_text())
    there = {file.name for file in Path(stored["data"]["tokenizer"]).iterdir()}
    assert "tokenizer.json" in there and not any("safetensors" in name for name in there)


def test_other_folders_called_snapshots_have_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "step100"
    assert repository_of(str(folder)) is None
    config = replace(hf(), hf=HfConfig(path=str(folder)))
    assert model_name(config) == "step100"
