"""Benchmarks of lm-evaluation-harness: what it is asked, and what comes back. A stub stands for the
harness, which tests do not install; it loads the export as the harness does."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from tuningkit import byte_level_tokenizer, tiny_model, train

from packgraph import cli

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)
FOUND = {"results": {"sums": {"acc,none": 0.5}}, "versions": {"sums": 1}, "n-shot": {"sums": 2}}
FOUND |= {"n-samples": {"sums": {"original": 9, "effective": 3}}, "config": {"model": "hf"}}


class TaskManager:
    def __init__(self, include_path: str | None = None) -> None:
        self.names = {"sums"} | ({"mine"} if include_path == "tasks" else set())

    def match_tasks(self, names: list[str]) -> list[str]:
        return [name for name in names if name in self.names]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The harness as a stub; what it was called with."""
    given: dict[str, Any] = {}

    def simple_evaluate(**options: Any) -> dict[str, Any]:
        folder = options["model_args"]["pretrained"]
        given.update(options, model=AutoModelForCausalLM.from_pretrained(folder))
        given.update(tokenizer=AutoTokenizer.from_pretrained(folder))
        return FOUND

    root, tasks, utils = (ModuleType(f"lm_eval{name}") for name in ("", ".tasks", ".utils"))
    root.__spec__ = ModuleSpec("lm_eval", None)
    vars(root)["simple_evaluate"], vars(tasks)["TaskManager"] = simple_evaluate, TaskManager
    vars(utils)["make_table"] = lambda found: f"a table of {list(found['results'])}"
    for module in (root, tasks, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return given


def test_a_run_is_scored_by_the_weights_that_others_get(
    tmp_path: Path, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model = byte_level_tokenizer(tiny_model(tmp_path / "model"), TEMPLATE)
    run, out = train(tmp_path / "run", model, steps=3), tmp_path / "scores.json"
    capsys.readouterr()
    words = ["eval", str(run), "--tasks", "sums,mine", "--include", "tasks", "--shots", "2"]
    assert cli.main([*words, "--limit", "3", "--out", str(out), "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert "step-00000003" in told and "a table of ['sums']" in told
    wanted = {"tasks": ["sums", "mine"], "num_fewshot": 2, "limit": 3, "device": "cpu"}
    assert wanted.items() <= asked.items() and not asked["apply_chat_template"]
    assert asked["model"].config.model_type == "llama" and asked["tokenizer"]("a")["input_ids"]
    written = json.loads(out.read_text())
    assert written["results"] == FOUND["results"] and "step-00000003" in written["checkpoint"]
    assert cli.main(["eval", str(run), "--tasks", "sums,nothing"]) == 2
    assert "--tasks nothing: no such task" in capsys.readouterr().err


def test_what_cannot_be_scored_is_refused(
    tmp_path: Path, asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", tiny_model(tmp_path / "model"), steps=3)  # on bytes
    capsys.readouterr()
    assert cli.main(["eval", str(run), "--tasks", "sums"]) == 2
    assert "without a tokenizer.json" in capsys.readouterr().err and not asked
    sys.modules.pop("lm_eval")
    assert cli.main(["eval", str(run), "--tasks", "sums"]) == 2
    assert "pip install lm-eval" in capsys.readouterr().err
