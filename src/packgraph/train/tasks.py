"""Scores what a run has trained on benchmarks of lm-evaluation-harness
(https://github.com/EleutherAI/lm-evaluation-harness).

The harness loads an export as anybody does, so scores are those of the weights that others get. Its
tasks, prompts and metrics are its own.
"""

import importlib
import json
import tempfile
from importlib.util import find_spec
from pathlib import Path

from packgraph.train.config.commands import EvalArguments
from packgraph.train.config.reading import ConfigError
from packgraph.train.export import TOKENIZER_FILES, export
from packgraph.train.launch import choose_device
from packgraph.train.progress import phases_of_command
from packgraph.train.run_files import writing


def run_eval(asked: EvalArguments) -> int:
    """Run `packgraph eval`; returns the exit code.

    Raises:
        ConfigError: The harness is not installed, knows no such task, or cannot ask a model with
            this tokenizer; and what `export` raises.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError(["packgraph eval runs lm-evaluation-harness: pip install lm-eval"])
    device = choose_device(asked.device)
    manager = importlib.import_module("lm_eval.tasks").TaskManager(
        include_path=None if asked.include is None else str(asked.include)
    )
    if unknown := [name for name in asked.tasks if not manager.match_tasks([name])]:
        told = "`lm-eval ls tasks` lists those that there are"
        raise ConfigError([f"--tasks {name}: no such task; {told}" for name in unknown])
    with phases_of_command() as phases, tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights"
        checkpoint = export(asked.run, weights, best=asked.best, phases=phases)
        if not (weights / TOKENIZER_FILES[0]).is_file():
            raise ConfigError(
                [f"{asked.run}: a run without a tokenizer.json, and the harness asks in words"]
            )
        found = importlib.import_module("lm_eval").simple_evaluate(
            model="hf",
            model_args={"pretrained": str(weights), "dtype": "auto"},
            tasks=manager.match_tasks(list(asked.tasks)),
            task_manager=manager,
            num_fewshot=asked.shots,
            limit=asked.limit,
            apply_chat_template=asked.chat,
            batch_size="auto" if device.type == "cuda" else 1,
            device=str(device),
            log_samples=False,
        )
    print(f"{checkpoint}\n{importlib.import_module('lm_eval.utils').make_table(found)}")
    if asked.out is not None:
        with writing(asked.out, "Choose another file"):
            content = {name: found[name] for name in ("results", "versions", "n-shot", "n-samples")}
            text = json.dumps({"checkpoint": str(checkpoint)} | content, indent=2, default=str)
            asked.out.write_text(text + "\n", encoding="utf-8")
    return 0
