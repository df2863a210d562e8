"""Runs of hybrids: the preset, weights in and out, offloading, options that do not fit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mambakit import MAMBA, hybrid
from trainkit import equal, ran, state_of, tiny

from packgraph import cli
from packgraph.models.decoder import DecoderModel
from packgraph.models.hf import load_pretrained, save_pretrained
from packgraph.train.config.sections import OffloadConfig

SHAPE = hybrid(
    "M-*",
    num_layers=3,
    vocab_size=300,
    activation="relu2",
    rotary_share=0.0,
    qk_norm=False,
    mamba=MAMBA,
    rope_theta=10_000.0,
)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Of a short run of hybrid-tiny on little data."""
    rows = [{"text": "to be or not to be " * (1 + index % 3)} for index in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "train",
        "hybrid-tiny",
        "--data.source",
        "jsonl",
        "--data.path",
        str(tmp_path / "data.jsonl"),
        "--run.folder",
        str(tmp_path / "runs"),
        "--graph.capacities",
        "64x8",
        "--run.tokens-per-step",
        "100",
        "--run.steps",
        "3",
        "--run.device",
        "cpu",
        "--run.name",
        "mine",
    ]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "runs" / "mine" / "summary.json").read_text())


@pytest.mark.parametrize(
    "granularity",
    ["chunk", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eager", "layer"))],
)
def test_a_run_that_offloads_what_mamba_saves_is_bitwise_one_that_does_not(
    granularity: str, tmp_path: Path
) -> None:
    config = tiny(graph=granularity != "eager", steps=4)
    shape = hybrid("M*M-", num_layers=4, vocab_size=32, dropout=0.1)
    config = dataclasses.replace(
        config,
        model=shape,
        graph=dataclasses.replace(
            config.graph,
            granularity="layer" if granularity == "eager" else granularity,
            strict=True,
        ),
    )
    modules = (
        ("mamba_scan", "mlp_act")
        if granularity == "layer"
        else ("mamba_norm", "mamba_scan", "mlp_act")
    )
    moved = dataclasses.replace(
        config, offload=OffloadConfig(modules=modules, min_bytes=1, margin=0)
    )
    states = []
    for number, settings in enumerate((config, moved)):
        run, _ = ran(tmp_path / str(number), settings)
        states.append(state_of(run))
        runtimes = [] if run.executor.prepare is None else run.executor.prepare.runtimes
    equal(*states)
    (runtime,) = runtimes
    assert runtime.plan.moves and all(runtime.plan.moves)


@pytest.mark.parametrize("granularity", ["step", pytest.param("layer", marks=pytest.mark.slow)])
def test_the_preset_trains_by_replay_and_goes_on(
    words: list[str], granularity: str, tmp_path: Path
) -> None:
    small = [
        "--model.hidden-size",
        "32",
        "--model.mamba.num-heads",
        "4",
        "--model.mamba.head-dim",
        "8",
    ]
    assert cli.main([*words, *small, "--graph.granularity", granularity]) == 0
    found = summary(tmp_path)
    assert found["replayed"] > 0 and "capture failed" not in found["fallbacks"]
    config = str(tmp_path / "runs" / "mine" / "config.json")
    assert cli.main(["train", "--config", config, "--resume", "--run.steps", "4"]) == 0
    assert cli.main(["export", str(tmp_path / "runs" / "mine"), str(tmp_path / "out")]) == 0
    assert load_pretrained(tmp_path / "out")[1].pattern == "M-M*ME"


def test_a_run_starts_from_weights_and_gives_them_back(words: list[str], tmp_path: Path) -> None:
    """In bfloat16: matrices are rounded, decays and steps are not."""
    save_pretrained(DecoderModel(SHAPE, seed=7), tmp_path / "weights")
    start = [*words, "--run.init-from", str(tmp_path / "weights"), "--run.dtype", "bfloat16"]
    assert cli.main([*start, "--optimizer.learning-rate", "1e-30"]) == 0
    assert cli.main(["export", str(tmp_path / "runs" / "mine"), str(tmp_path / "out")]) == 0
    before, after = (
        load_pretrained(tmp_path / name)[0].state_dict() for name in ("weights", "out")
    )
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == (
            torch.float32 if "A_log" in name or name.endswith((".D", "dt_bias")) else torch.bfloat16
        )
        torch.testing.assert_close(after[name], value.to(after[name].dtype), rtol=0.0, atol=1e-29)


def test_what_does_not_fit_is_told_at_once(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.main(
            [*words, "--model.pattern", "M*", "--model.mamba.groups", "3", "--graph.scope", "mambo"]
        )
        == 2
    )
    assert "num_heads 8 is no multiple of groups 3" in capsys.readouterr().err
    assert cli.main([*words, "--model.pattern", "M*"]) == 2
    assert "experts.count is set, but pattern has no E" in capsys.readouterr().err
    assert cli.main([*words, "--graph.scope", "mambo"]) == 2
    assert "did you mean 'mamba'?" in capsys.readouterr().err
