"""What every way to update parameters keeps to: blocked steps, resumed runs, graphs, memory."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainkit import captured_as_eager, equal, goes_on, trainer
from updatekit import Small, ends_of_blocked_steps, losses, run_of

from packgraph.train.config.sections import OptimizerConfig, ParallelConfig
from packgraph.train.memory import need_of
from packgraph.train.optimizer import Optimizer
from packgraph.train.updates.adafactor import Adafactor
from packgraph.train.updates.adamw import AdamW
from packgraph.train.updates.adamw8bit import AdamW8bit
from packgraph.train.updates.muon import Muon
from packgraph.train.validate import validate

NAMES = ["adamw", "muon", "adamw8bit", "adafactor"]
RATES = {"adamw": 1e-2, "muon": 1e-2, "adamw8bit": 1e-2, "adafactor": 5e-2}


def made(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Optimizer]:
    model = Small().to(dtype)
    return model, Optimizer(
        model.named_parameters(),
        OptimizerConfig(name=name, weight_decay=0.25),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_blocked_update_changes_nothing(name: str, dtype: torch.dtype) -> None:
    model, optimizer = made(name, dtype)
    ends = ends_of_blocked_steps(optimizer, model)
    equal(ends[1], ends[0])
    equal(ends[2], ends[0])
    same = [key for key in ends[3] if torch.equal(ends[3][key], ends[0][key])]
    assert same == []  # so every one of them can tell


@pytest.mark.parametrize("rule", [AdamW, Muon, AdamW8bit, Adafactor])
def test_an_update_that_is_not_blocked_is_told_apart(
    rule: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: a rule that knows of no blocked updates is found."""
    step = rule.step  # type: ignore[attr-defined]

    def forgetful(self: Any, rate: Tensor, steps: Tensor, scale: Any, blocked: Any) -> None:
        step(self, rate, steps, scale, None)

    monkeypatch.setattr(rule, "step", forgetful)
    names = {AdamW: "adamw", Muon: "muon", AdamW8bit: "adamw8bit", Adafactor: "adafactor"}
    model, optimizer = made(names[rule])
    ends = ends_of_blocked_steps(optimizer, model)
    assert not torch.equal(ends[1]["up.weight"], ends[0]["up.weight"])


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name: str) -> None:
    model, optimizer = made(name)
    found = losses(optimizer, model, RATES[name])
    assert found[-1] < 0.5 * found[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES[1:])
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(
    tmp_path: Path, name: str, dtype: str
) -> None:
    state = goes_on(tmp_path, run_of(name, dtype=dtype))
    assert any(key.endswith("q_proj.weight.momentum") for key in state) == (name == "muon")


@pytest.mark.parametrize("name", NAMES[1:])
def test_an_update_inside_a_graph_has_the_bits_of_an_eager_one(tmp_path: Path, name: str) -> None:
    captured_as_eager(tmp_path, run_of(name, steps=10))


def test_the_loss_falls_as_with_adamw() -> None:
    found = {name: losses(*reversed(made(name)), 3e-3, 60) for name in ("adamw", "adamw8bit")}
    for one, other in zip(found["adamw"], found["adamw8bit"], strict=True):
        assert other == pytest.approx(one, rel=0.01, abs=0.01)  # of 32 at first
    assert found["adamw8bit"][-1] < 1e-3 * found["adamw8bit"][0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_the_state_are_planned(tmp_path: Path, name: str, dtype: str) -> None:
    config = run_of(name, dtype=dtype)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_layers": 8}
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **sizes))
    run = trainer(tmp_path / "run", config)
    storages = {}
    for value in tensors_of(run.optimizer):
        storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    planned, held = need_of(config, "cpu").optimizer, sum(storages.values())
    # Some matrices here are much narrower than the model.
    assert planned == pytest.approx(held, rel=0.05 if name != "adafactor" else 0.25)
    run.close()


def tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """All that rules and masters hold, beside what the flat buffers have."""
    flat = {
        tensor.untyped_storage().data_ptr()
        for span in optimizer.flat.spans
        for tensor in (span.parameters, span.gradients)
    }
    found: list[Tensor] = []
    waiting: list[Any] = [optimizer._rules, optimizer._updated]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif type(value).__module__.startswith("packgraph.train.updates"):
            waiting += vars(value).values()
    return [value for value in found if value.untyped_storage().data_ptr() not in flat]


def test_what_rules_cannot_serve_is_refused() -> None:
    for name in NAMES:
        config = run_of(name)
        assert not validate(config, "cpu")
        split = dataclasses.replace(config, parallel=ParallelConfig(tp=2))
        found = [text for text in validate(split, "cpu", world=2) if "optimizer.name" in text]
        assert len(found) == (name in ("muon", "adafactor"))
        options = dataclasses.replace(config.optimizer, offload=True)
        there = dataclasses.replace(config, optimizer=options)
        found = [text for text in validate(there, "cpu") if f"optimizer.name = {name}" in text]
        assert len(found) == (name != "adamw")
    for name in ("adamw8bit", "adafactor"):
        shared = dataclasses.replace(run_of(name), parallel=ParallelConfig(dp=2))
        assert not [text for text in validate(shared, "cpu", world=2) if "optimizer" in text]
