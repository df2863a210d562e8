"""Optimizer state on the host: the bits of an update on the device, whatever the copies' order."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainkit import StopAfter, equal, state_of, tiny, trainer

from packgraph.graphs.recorder.copy_streams import EmulatedCopyStreams
from packgraph.train import optimizer
from packgraph.train.config.sections import OptimizerConfig, TrainConfig
from packgraph.train.memory import need_of
from packgraph.train.optimizer import Optimizer
from packgraph.train.signals import StopRequest
from packgraph.train.spikes import Limits
from packgraph.train.updates import host_state
from packgraph.train.updates.host_state import HostState
from packgraph.train.validate import validate

PIECES = (64, 200, 2**25)  # elements: many pieces, an odd end, one
LATE = [(), ("out",), ("back",), ("out", "back")]


@pytest.fixture
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device and on the host norms are those of the same pieces."""
    size = request.param
    parts = functools.partial(host_state.parts_of, piece=size)
    monkeypatch.setattr(optimizer, "parts_of", parts)
    monkeypatch.setattr(optimizer, "HostState", functools.partial(HostState, piece=size))


def made(dtype: torch.dtype, **options: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 23), nn.LayerNorm(23), nn.Linear(23, 9)).to(dtype)
    config = OptimizerConfig(**{"clip_norm": 0.3, "weight_decay": 0.2} | options)
    return model, Optimizer(model.named_parameters(), config)


def learn(model: nn.Module, update: Optimizer, steps: int, *, blocked: int = -1) -> list[Tensor]:
    """Parameters, norm and state after every step. blocked: a step that a limit keeps out."""
    draw, found = torch.Generator().manual_seed(1), []
    update.watch()
    for step in range(steps):
        update.set_limits(Limits(norm=0.0) if step == blocked else Limits())
        x = torch.randn(5, 17, generator=draw).to(next(model.parameters()).dtype)
        loss = model(x).float().square().sum()
        loss.backward()
        found.append(update.step(0.01 / (1 + step), loss.detach()).clone())
        update.zero_grad()
        found += [p.detach().clone() for p in model.parameters()]
        state = update.state_tensors()
        found += [state[name].clone() for name in sorted(state)]
    return found


@pytest.mark.parametrize("pieces", PIECES, indirect=True)
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_updates_have_the_bits_of_those_on_the_device(
    dtype: torch.dtype, clip: float | None, pieces: None
) -> None:
    here = learn(*made(dtype, clip_norm=clip), 5, blocked=2)
    there = learn(*made(dtype, clip_norm=clip, offload=True), 5, blocked=2)
    assert len(here) == len(there)
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("pieces", [64], indirect=True)
@pytest.mark.parametrize("late", LATE, ids=str)
def test_copies_may_run_as_late_as_they_may(
    late: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, pieces: None
) -> None:
    here = learn(*made(torch.bfloat16), 4)
    monkeypatch.setattr(optimizer, "make_copy_streams", lambda device: EmulatedCopyStreams(late))
    there = learn(*made(torch.bfloat16, offload=True), 4)
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("pieces", [64], indirect=True)
def test_a_wait_that_is_missing_is_found(monkeypatch: pytest.MonkeyPatch, pieces: None) -> None:
    """The negative control: whoever does not wait reads NaN."""
    late = EmulatedCopyStreams(("out", "back"))
    monkeypatch.setattr(optimizer, "make_copy_streams", lambda device: late)
    model, update = made(torch.bfloat16, offload=True)
    monkeypatch.setattr(HostState, "_wait", lambda self, copies: None)
    model(torch.ones(2, 17, dtype=torch.bfloat16)).sum().backward()
    update.step(0.1)
    assert any(bool(p.isnan().any()) for p in model.parameters())


def settings(offload: bool, **changes: Any) -> TrainConfig:
    config = tiny(graph=True, **changes)
    return dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, offload=offload)
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(True, True, marks=pytest.mark.slow), (True, False), (False, True)],
)
def test_runs_resume_wherever_the_state_was(tmp_path: Path, before: bool, after: bool) -> None:
    whole = trainer(tmp_path / "whole", settings(False, steps=6))
    whole.run(StopRequest())
    first = trainer(tmp_path / "run", settings(before, steps=6))
    first.run(StopAfter(3))
    second = trainer(tmp_path / "run", settings(after, steps=6))
    second.resume()
    second.run(StopRequest())
    equal(state_of(whole), state_of(second))


def test_what_it_cannot_serve_is_said() -> None:
    config = settings(True)
    asked = dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, name="muon"),
        graph=dataclasses.replace(config.graph, granularity="step", optimizer=True),
    )
    found = [text for text in validate(asked, "cpu") if "optimizer.offload" in text]
    assert len(found) == 2 and not [t for t in validate(config, "cpu") if "offload" in t]


def test_the_device_needs_room_for_two_pieces_alone() -> None:
    here, there = (need_of(settings(offload), "cuda") for offload in (False, True))
    assert here.weights == there.weights and here.gradients == there.gradients
    assert there.optimizer <= 2 * 12 * host_state.PIECE
