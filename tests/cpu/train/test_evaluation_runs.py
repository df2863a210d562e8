"""Evaluations of whole runs from the command line: models of transformers and adapters, shards and
mixtures, offloading, experts; and what is exported of the best checkpoint."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from evalkit import config, documents, made, rows
from safetensors.torch import load_file
from shardkit import shards_of
from trainkit import ended, equal, state_of, traced
from tuningkit import tiny_model, train

from packgraph import cli
from packgraph.models.config import ExpertConfig
from packgraph.packing.capacity import Capacity
from packgraph.parallel.ranks import Launch
from packgraph.train.autotune import EAGER, FASTER, Autotune, Choice
from packgraph.train.checkpoint.reader import tensor_entries
from packgraph.train.checkpoint.writer import best_checkpoint, latest_checkpoint, load_tensors
from packgraph.train.config.presets import preset
from packgraph.train.config.sections import DataConfig, EvalConfig
from packgraph.train.data import DataError
from packgraph.train.evaluation import STOPPED_EARLY
from packgraph.train.launch import closing_lines, next_commands, prepare
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.run_files import read_json
from packgraph.train.validate import validate

SHARE = EvalConfig(every=2, share=0.2)
OPTIONS = ("--eval.every", "2", "--eval.share", "0.3")


def stored(path: Path | None) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    assert path is not None
    found = {
        name: torch.zeros(tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in tensor_entries(path / ".metadata").items()
    }
    load_tensors(path, found)
    return found


@pytest.mark.parametrize("more", [(), ("--lora.rank", "4")], ids=["all", "lora"])
def test_models_of_transformers_are_evaluated_and_the_best_is_exported(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    model = tiny_model(tmp_path / "base", attention_dropout=0.1)
    run = train(tmp_path / "a", model, *more, *OPTIONS, steps=5)
    plain = train(tmp_path / "b", model, *more, "--eval.share", "0.3", steps=5)
    newest = (latest_checkpoint(folder / "checkpoints") for folder in (run, plain))
    equal(*map(stored, newest))
    losses = {row["step"]: row["eval_loss"] for row in rows(run) if "eval_loss" in row}
    assert set(losses) == {2, 4}
    best = best_checkpoint(run / "checkpoints")
    assert best is not None and best.name == f"step-{min(losses, key=losses.__getitem__):08}"
    found = read_json(run / "summary.json")["evaluation"]
    assert found["replayed"] > 0 and not found["fallbacks"]

    assert cli.main(["export", str(run), str(tmp_path / "best"), "--best"]) == 0
    assert cli.main(["export", str(run), str(tmp_path / "newest")]) == 0
    weights, newest = (
        load_file(tmp_path / name / "model.safetensors") for name in ("best", "newest")
    )
    assert any(not torch.equal(weights[name], newest[name]) for name in weights)
    name = "model.layers.1.mlp.up_proj.weight"
    if not more:
        assert torch.equal(weights[name], stored(best)[f"model.model.{name}"])


def test_without_a_best_checkpoint_none_is_exported(tmp_path: Path, capsys: Any) -> None:
    run = train(tmp_path / "a", tiny_model(tmp_path / "base"), steps=3)
    assert cli.main(["export", str(run), str(tmp_path / "best"), "--best"]) != 0
    assert "no checkpoint that is called the best" in capsys.readouterr().err


def test_folders_of_a_mixture_have_losses_of_their_own(tmp_path: Path) -> None:
    folders = []
    for name, alphabet in (("ab", "ab"), ("klmnop", "klmnop")):
        path = documents(tmp_path / f"{name}.jsonl", 40, alphabet=alphabet)
        data = DataConfig(source="jsonl", path=path)
        folders.append(str(tmp_path / name))
        shards_of(data, tmp_path / name)
    options = config("later", SHARE, graph=False, steps=4)
    mixture = (f"{folders[0]}=0.5", f"{folders[1]}=0.5")
    data = dataclasses.replace(options.data, source="shards", path=None, mixture=mixture)
    ended(made(tmp_path / "run", dataclasses.replace(options, data=data)))
    row = rows(tmp_path / "run")[-1]
    low, high = (row[f"eval_loss/{folder}"] for folder in folders)
    assert min(low, high) < row["eval_loss"] < max(low, high) and low != high


def test_paths_of_every_kind_are_read(tmp_path: Path) -> None:
    lines = documents(tmp_path / "lines.jsonl", 9)
    shards_of(DataConfig(source="jsonl", path=lines), tmp_path / "shards")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("abcabc")
    paths = (lines, str(tmp_path / "shards"), str(tmp_path / "texts"))
    options = dataclasses.replace(
        config(lines, EvalConfig(every=2, path=paths)),
        data=DataConfig(overlong="split"),
    )
    found = prepare(options, torch.device("cpu")).evaluation
    assert list(found) == list(paths)
    first, second = ([batch.tokens.tolist() for batch in iter(found[path])] for path in paths[:2])
    assert first == second and len(list(found[paths[2]])) == 1
    gone = dataclasses.replace(options, eval=EvalConfig(every=2, path=("/nowhere",)))
    with pytest.raises(DataError, match="/nowhere"):
        prepare(gone, torch.device("cpu"))


def test_what_autotuning_has_given_up_is_evaluated_eagerly(tmp_path: Path) -> None:
    options = config(documents(tmp_path / "data.jsonl"), SHARE, steps=4)
    eager = dataclasses.replace(options.graph, enabled=False)
    ended(made(tmp_path / "other", dataclasses.replace(options, graph=eager)))
    run = made(tmp_path / "run", options)

    class Tuned:
        """Of `Autotune`, what a run asks."""

        def begin(self, *ignored: Any) -> bool:
            return False

        def summary(self) -> dict[str, Any]:
            return {}

        def chosen(self, batch: Any) -> Any:
            return Autotune.chosen(self, batch)  # type: ignore[arg-type]

        def microbatch(self, batch: Any) -> Any:
            return self.chosen(batch)

    tuned: Any = Tuned()
    tuned.choices = {capacity: Choice(EAGER) for capacity in run.executor.bank()}
    tuned.whole_steps = False
    run.executor.autotune = tuned
    _, summary = ended(run)
    assert summary["evaluation"]["replayed"] == 0 and summary["evaluation"]["fallbacks"] > 0
    assert set(summary["fallbacks"]) == {"warm-up", FASTER}
    assert rows(tmp_path / "run")[3]["eval_loss"] == rows(tmp_path / "other")[3]["eval_loss"]


@pytest.mark.parametrize(
    "changes",
    [
        {"offload_": {"modules": ("qkv_linear", "mlp_act"), "min_bytes": 1}},
        pytest.param({"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param({"graph_": {"scope": ("attn",)}}, marks=pytest.mark.slow),
        {"graph_": {"max_documents": 4}},
        {
            "model_": {
                "experts": ExpertConfig(
                    count=4, per_token=2, intermediate_size=16, document_loss=0.1, score_bias=True
                )
            }
        },
    ],
    ids=["offload", "recompute", "scope", "documents", "experts"],
)
def test_evaluations_go_with_what_a_run_may_have(tmp_path: Path, changes: dict[str, Any]) -> None:
    data = documents(tmp_path / "data.jsonl")
    found = []
    for name, evaluation, enabled in (
        ("plain", dataclasses.replace(SHARE, every=0), True),
        ("evaluated", SHARE, True),
        ("eager", SHARE, False),
    ):
        options = {**changes, "graph_": {**changes.get("graph_", {}), "enabled": enabled}}
        if not enabled:
            options.pop("offload_", None)
        settings = config(data, evaluation, enabled, steps=5, **options)
        found.append(state_of(ended(made(tmp_path / name, settings))[0]))
    equal(found[0], found[1])
    equal(found[0], found[2])
    losses = [
        [row.get("eval_loss") for row in rows(tmp_path / name)] for name in ("evaluated", "eager")
    ]
    assert losses[0] == losses[1] and losses[0][3] is not None


def test_compiled_stages_are_evaluated_by_compiled_code(tmp_path: Path) -> None:
    data, found = documents(tmp_path / "data.jsonl", 30), []
    for name, every in (("plain", 0), ("evaluated", 2)):
        evaluation = dataclasses.replace(SHARE, every=every)
        changes = {"compile": True, "capacities": (Capacity(64, 8),)}
        options = config(data, evaluation, steps=4, graph_=changes, model_={"num_layers": 1})
        with traced():
            run, summary = ended(made(tmp_path / name, options))
        found.append(state_of(run))
    equal(*found)
    assert summary["evaluation"]["replayed"] > 0 and not summary["evaluation"]["fallbacks"]


def test_the_way_on_from_an_early_stop_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / "checkpoints" / "step-00000007").mkdir(parents=True)
    summary = {"ended": f"{STOPPED_EARLY}: no better evaluation since step 4", "steps": 7}
    best = {"evaluation": {"loss": 2.5, "step": 4}}
    lines = closing_lines(preset("qwen3-tiny"), folder, summary | best, Launch())
    assert lines[1] == f"best evaluation loss 2.5000 at step 4: {folder}/checkpoints/step-00000004"
    words = next_commands(preset("qwen3-tiny"), folder, summary, Launch())["to go on"]
    assert words[-3:] == ["--resume", "--eval.patience", "0"]


def test_evaluations_that_never_come_are_refused() -> None:
    options = config("data.jsonl", dataclasses.replace(SHARE, every=9), steps=8)
    problems = validate(options, "cpu")
    assert problems == ["eval.every = 9 leaves no evaluation in run.steps = 8; lower it"]


def test_rows_hold_numbers_that_json_has(tmp_path: Path) -> None:
    data = documents(tmp_path / "data.jsonl")
    run = made(tmp_path / "run", config(data, SHARE, graph=False, steps=4))
    run.evaluation._sums = lambda: ({"data": [float("inf")]}, {"data": 1})  # type: ignore[method-assign]
    ended(run)
    lines = (tmp_path / "run" / METRICS).read_text().splitlines()
    assert json.loads(lines[1])["eval_loss"] is None
    assert read_metrics(tmp_path / "run" / METRICS)[1]["eval_perplexity"] is None
    assert "the loss is no number" in (tmp_path / "log-run-0").read_text()
    assert best_checkpoint(tmp_path / "run" / "checkpoints") is None
