"""Models of transformers and adapters through the trainer: going on bitwise, and export."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3_5ForConditionalGeneration,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from tuningkit import VOCAB, logits, tiny_model, train, words

from packgraph import cli
from packgraph.models.layers.decoder import DecoderLayer
from packgraph.parallel.mesh import single_process
from packgraph.train import trainer
from packgraph.train.build import build_chunks
from packgraph.train.checkpoint.reader import tensor_entries
from packgraph.train.checkpoint.writer import latest_checkpoint, load_state, load_tensors
from packgraph.train.config.reading import ConfigError
from packgraph.train.export import config_of
from packgraph.train.features.lora import BASE, base_fingerprints, refuse_untrained_stages
from packgraph.train.metrics import METRICS, read_metrics
from packgraph.train.run_files import read_json

LORA = ("--lora.rank", "4")
# Merging adds the product of two matrices to a weight, adapters add theirs to its output: float32
# sums in another order.
MERGED = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs that never stopped, by their options, each made once."""
    made: dict[tuple[str, ...], Path] = {}

    def run(*more: str) -> Path:
        if more not in made:
            made[more] = train(tmp_path_factory.mktemp("whole"), model, *more)
        return made[more]

    return run


def stored(run: Path) -> dict[str, torch.Tensor]:
    path = latest_checkpoint(run / "checkpoints")
    assert path is not None
    found = {
        name: torch.zeros(tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in tensor_entries(path / ".metadata").items()
    }
    load_tensors(path, found)
    return found


def losses(run: Path) -> list[Any]:
    return [(row["loss"], row["gradient_norm"]) for row in read_metrics(run / METRICS)]


def assert_same(one: Path, other: Path) -> None:
    left, right = stored(one), stored(other)
    assert left.keys() == right.keys()
    assert not [name for name in left if not torch.equal(left[name], right[name])]
    assert losses(one) == losses(other)


EIGHT_BITS = (*LORA, "--optimizer.name", "adamw8bit")
FACTORS = ("--optimizer.name", "adafactor")


@pytest.mark.parametrize(
    "more",
    [
        (),
        LORA,
        pytest.param((*LORA, "--lora.dora"), marks=pytest.mark.slow),
        pytest.param(EIGHT_BITS, marks=pytest.mark.slow),
        pytest.param(FACTORS, marks=pytest.mark.slow),
    ],
    ids=["all", "lora", "dora", "eight bits", "adafactor"],
)
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(
    tmp_path: Path, model: Path, whole: Callable[..., Path], more: tuple[str, ...]
) -> None:
    straight = whole(*more)
    stopped = train(tmp_path / "b", model, *more, steps=3)
    config = str(stopped / "config.json")
    assert cli.main(["train", "--config", config, "--resume", "--run.steps", "6"]) == 0
    assert_same(straight, stopped)
    summary = read_json(straight / "summary.json")
    assert summary["replayed"] > 0 and set(summary["fallbacks"]) == {"warm-up"}
    eager = train(tmp_path / "c", model, *more, "--graph.enabled", "false")
    assert_same(straight, eager)


def test_all_weights_are_trained_and_exported(
    tmp_path: Path, model: Path, whole: Callable[..., Path]
) -> None:
    run = whole()
    names = [name for name in stored(run) if name.startswith("model.")]
    assert "model.model.model.embed_tokens.weight" in names
    assert not [name for name in names if "lm_head" in name], "tied: stored once"
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    trained = stored(run)["model.model.model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(weights["model.layers.1.mlp.up_proj.weight"], trained)
    assert not torch.equal(logits(tmp_path / "out"), logits(model))
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 2, "is there already"


@pytest.mark.parametrize("change", ["missing", "of another shape", "of nothing"])
def test_an_export_that_transformers_does_not_load_is_none(
    tmp_path: Path,
    whole: Callable[..., Path],
    change: str,
    monkeypatch: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def save(model: Any, folder: Path) -> None:
        saved(model, folder)
        weights = load_file(folder / "model.safetensors")
        if change != "of nothing":
            weights.pop("model.norm.weight")
        if change != "missing":
            name = {"of nothing": "model.other.weight"}.get(change, "model.norm.weight")
            weights[name] = torch.zeros(3)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    saved = PreTrainedModel.save_pretrained
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save)
    assert cli.main(["export", str(whole()), str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "transformers does not load this model as it was trained" in told
    assert ("model.other" if change == "of nothing" else "model.norm.weight") in told
    assert not (tmp_path / "out" / "config.json").exists()
    monkeypatch.undo()
    assert cli.main(["export", str(whole()), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("dora", [(), ("--lora.dora",)], ids=["lora", "dora"])
def test_adapters_alone_are_stored_and_merge_into_the_base(
    tmp_path: Path, model: Path, dora: tuple[str, ...]
) -> None:
    run = train(tmp_path, model, *LORA, *dora, "--lora.targets", "q_proj,down_proj")
    names = [name for name in stored(run) if not name.startswith("random.")]
    trained = [name for name in names if name.startswith("model.")]
    assert len(trained) == 2 * 2 * (3 if dora else 2)
    assert all("lora_" in name or name == "optimizer.step" for name in names)
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    assert cli.main(["export", str(run), str(merged)]) == 0
    assert cli.main(["export", str(run), str(adapter), "--adapter"]) == 0
    assert not [name for name in load_file(merged / "model.safetensors") if "lora" in name]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, adapter).eval()
    with torch.no_grad():
        found = adapted(torch.arange(0, 300, 7)[None]).logits
    torch.testing.assert_close(logits(merged), found, **MERGED)
    assert (found - logits(model)).abs().max() > 0.01


def test_adapters_do_not_go_on_over_another_base(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "model"
    shutil.copytree(model, mine)
    run = train(tmp_path, mine, *LORA, steps=4)
    weights = load_file(mine / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, mine / "model.safetensors", metadata={"format": "pt"})
    config = str(run / "config.json")
    capsys.readouterr()
    assert cli.main(["train", "--config", config, "--resume", "--run.steps", "6"]) == 2
    assert "were trained on other weights" in capsys.readouterr().err
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 2
    assert "were trained on other weights" in capsys.readouterr().err
    resume = ["train", "--config", config, "--resume", "--run.steps", "6"]
    assert cli.main([*resume, "--hf.path", str(model)]) == 0, "the base is where it is said to be"


def test_a_stage_without_an_adapter_is_refused() -> None:
    layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    layers[2].requires_grad_(False)
    whole: Any = SimpleNamespace(layers=layers)
    refuse_untrained_stages(whole, [range(1), range(1, 3)])
    with pytest.raises(ConfigError, match=r"has no adapter \(layers 2 to 2\)"):
        refuse_untrained_stages(whole, [range(2), range(2, 3)])


def test_adapters_go_on_from_what_versions_without_stages_stored(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def earlier(chunks: Any, *rest: Any, **more: Any) -> tuple[str, ...]:
        return base_fingerprints(chunks)[1:]

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "base_fingerprints", earlier)
        run = train(tmp_path, model, *LORA, steps=4)
    config = str(run / "config.json")
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    assert cli.main(["train", "--config", config, "--resume", "--run.steps", "6"]) == 0
    stored = {load_state(path)[1][BASE] for path in (run / "checkpoints").glob("step-*")}
    assert len(stored) == 2, "the earlier one, and the one of now"


def test_adapters_of_a_model_of_packgraph(tmp_path: Path) -> None:
    def own(folder: Path, steps: int) -> Path:
        options = words(folder, Path("unused"), *LORA, steps=steps)
        options[1] = "qwen3-tiny"
        assert cli.main([*options, "--model.num-layers", "2", "--model.hidden-size", "32"]) == 0
        return folder / "runs" / "mine"

    straight, stopped = own(tmp_path / "a", 6), own(tmp_path / "b", 3)
    config = str(stopped / "config.json")
    assert cli.main(["train", "--config", config, "--resume", "--run.steps", "6"]) == 0
    assert_same(straight, stopped)
    assert cli.main(["export", str(straight), str(tmp_path / "out")]) == 0
    assert logits(tmp_path / "out").shape[-1] == VOCAB
    assert cli.main(["export", str(straight), str(tmp_path / "x"), "--adapter"]) == 2


def recomputed(run: Path) -> list[bool]:
    """Of each layer of the model of a run, whether the backward computes it again."""
    (model,) = build_chunks(config_of(run), torch.device("cpu"), single_process()).chunks
    own = [bool(part.recompute) for part in model.modules() if isinstance(part, DecoderLayer)]
    live = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    return own or [part.gradient_checkpointing for part in live]


@pytest.mark.parametrize(
    ("own", "more"),
    [
        pytest.param(True, (), id="own-all"),
        pytest.param(True, LORA, id="own-lora", marks=pytest.mark.slow),
        pytest.param(False, (), id="live-all", marks=pytest.mark.slow),
        pytest.param(False, LORA, id="live-lora"),
    ],
)
def test_layers_are_recomputed_with_the_bits_of_those_that_are_kept(
    tmp_path: Path, model: Path, own: bool, more: tuple[str, ...]
) -> None:
    def run(what: str) -> Path:
        folder = tmp_path / what
        options = words(folder, model, *more, "--run.recompute", what, steps=4)
        if own:
            options[1] = "qwen3-tiny"
            options += ["--model.num-layers", "2", "--model.hidden-size", "32"]
        assert cli.main(options) == 0
        return folder / "runs" / "mine"

    kept, again = run("none"), run("full")
    assert_same(kept, again)
    assert set(read_json(again / "summary.json")["fallbacks"]) == {"warm-up"}
    assert recomputed(kept) == [False, False]
    assert recomputed(again) == [True, True]


def test_random_values_depend_on_the_seed_alone(tmp_path: Path, model: Path) -> None:
    (tmp_path / "shape").mkdir()
    shutil.copyfile(model / "config.json", tmp_path / "shape" / "config.json")
    runs = [
        train(tmp_path / name, tmp_path / "shape", "--hf.random", "--run.seed", seed, steps=3)
        for name, seed in (("a", "1"), ("b", "1"), ("c", "2"))
    ]
    assert_same(runs[0], runs[1])
    assert losses(runs[0]) != losses(runs[2])


def test_a_whole_step_with_its_update_is_one_graph(
    tmp_path: Path, model: Path, whole: Callable[..., Path]
) -> None:
    more = ("--graph.granularity", "step", "--graph.optimizer")
    assert_same(train(tmp_path, model, *more), whole())


def _refused(capsys: pytest.CaptureFixture[str], options: list[str]) -> str:
    capsys.readouterr()
    assert cli.main(options) == 2
    return capsys.readouterr().err


def test_what_cannot_be_is_named(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    def refused(*more: str, path: Path = model) -> str:
        return _refused(capsys, words(tmp_path, path, *more))

    assert "there is no" in refused(path=tmp_path)
    assert "hf needs the folder" in _refused(capsys, ["train", "hf"])
    assert "parallel.tp = 2" in refused("--parallel.tp", "2")
    assert "offload.modules" in refused("--offload.modules", "mlp_act")
    assert "model.hidden_size is 16" in refused("--model.hidden-size", "32")
    assert "whole layers or nothing" in refused("--run.recompute", "selective")
    assert "no linear layer is called qq" in refused(*LORA, "--lora.targets", "qq,q_proj")
    assert "need a rank" in refused("--lora.dora")
    assert "needs a path" in _refused(capsys, ["train", "qwen3-tiny", "--hf.random"])
    config = json.loads((model / "config.json").read_text())
    for name, change in (("kind", {"model_type": "mamba"}), ("bare", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | change))
    assert "cannot be packed" in refused(path=tmp_path / "kind")
    assert "cannot load its weights" in refused(path=tmp_path / "bare")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "peft" else found(name)
    )
    assert "needs the package `peft`" in refused(*LORA)


def test_weights_that_lack_a_tensor_are_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    err = _refused(capsys, words(tmp_path, tmp_path / "model"))
    assert "missing model.norm.weight" in err


def test_a_checkpoint_with_images_trains_and_exports_its_text(tmp_path: Path) -> None:
    linear = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
    linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    text = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    config = AutoConfig.for_model(
        "qwen3_5", text_config=text | linear, vision_config=vision | {"out_hidden_size": 32}
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        whole = Qwen3_5ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path / "model")
    run = train(tmp_path / "run", tmp_path / "model")
    assert cli.main(["export", str(run), str(tmp_path / "text")]) == 0
    trained = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "text").named_parameters())
    before = whole.model.language_model.embed_tokens.weight
    after = trained["model.embed_tokens.weight"]
    assert after.shape == before.shape and not torch.equal(after, before)
    assert not [name for name in trained if "visual" in name]
