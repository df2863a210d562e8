"""Optimizer state on the host: the bits of an update on the device, whatever the copies' order."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainkit import StopAfter, equal, ran, state_of, tiny, trainer

from packgraph.graphs.memory.budget import budget_bytes
from packgraph.graphs.recorder.copy_streams import EmulatedCopyStreams
from packgraph.train import build, optimizer
from packgraph.train.config.sections import OptimizerConfig, TrainConfig
from packgraph.train.memory import (
    memory_of_run,
    need_of,
    planned_state,
    predicted_peak,
    resident_bytes,
)
from packgraph.train.optimizer import Optimizer
from packgraph.train.run_folder import check_same_run
from packgraph.train.signals import StopRequest
from packgraph.train.spikes import Limits
from packgraph.train.updates import adamw
from packgraph.train.updates import host_state as host_states
from packgraph.train.updates.adamw import fused_adamw
from packgraph.train.updates.host_state import HostState
from packgraph.train.validate import validate
from packgraph.verification.compared_run import ComparedRun

PIECES = (64, 200, 2**25)  # elements: many pieces, an odd end, one
# Bytes that may stay: none, two biases, what no parameter ends at, all.
RESIDENT = (0, 3072, 10000, 2**20)
LATE = [(), ("out",), ("back",), ("out", "back")]


@pytest.fixture
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device and on the host norms are those of the same pieces."""
    size = request.param
    monkeypatch.setattr(optimizer, "PIECE", size)
    monkeypatch.setattr(optimizer, "HostState", functools.partial(HostState, piece=size))


def made(dtype: torch.dtype, resident: int = 0, **options: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 23), nn.LayerNorm(23), nn.Linear(23, 9)).to(dtype)
    config = OptimizerConfig(**{"clip_norm": 0.3, "weight_decay": 0.2} | options)
    return model, Optimizer(model.named_parameters(), config, resident=resident)


def host_state(update: Optimizer) -> HostState:
    assert update.host_state is not None
    return update.host_state


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
@pytest.mark.parametrize("resident", RESIDENT)
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_updates_have_the_bits_of_those_on_the_device(
    dtype: torch.dtype, clip: float | None, resident: int, pieces: None
) -> None:
    here = learn(*made(dtype, clip_norm=clip), 5, blocked=2)
    there = learn(*made(dtype, resident, clip_norm=clip, offload=True), 5, blocked=2)
    assert len(here) == len(there)
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("pieces", [64], indirect=True)
@pytest.mark.parametrize("buffers", [2, 3])
@pytest.mark.parametrize("resident", RESIDENT[:3])
@pytest.mark.parametrize("late", LATE, ids=str)
def test_copies_may_run_as_late_as_they_may(
    late: tuple[str, ...],
    resident: int,
    buffers: int,
    monkeypatch: pytest.MonkeyPatch,
    pieces: None,
) -> None:
    here = learn(*made(torch.bfloat16), 4)
    monkeypatch.setattr(optimizer, "make_copy_streams", lambda device: EmulatedCopyStreams(late))
    monkeypatch.setattr(host_states, "BUFFERS", buffers)
    there = learn(*made(torch.bfloat16, resident, offload=True), 4)
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("pieces", [64], indirect=True)
@pytest.mark.parametrize("resident", RESIDENT)
def test_a_wait_that_is_missing_is_found(
    resident: int, monkeypatch: pytest.MonkeyPatch, pieces: None
) -> None:
    """The negative control: whoever does not wait reads NaN. What stays needs no waiting."""
    late = EmulatedCopyStreams(("out", "back"))
    monkeypatch.setattr(optimizer, "make_copy_streams", lambda device: late)
    model, update = made(torch.bfloat16, resident, offload=True)
    monkeypatch.setattr(HostState, "_wait", lambda self, copies: None)
    model(torch.ones(2, 17, dtype=torch.bfloat16)).sum().backward()
    update.step(0.1)
    spoiled = {name for name, p in model.named_parameters() if bool(p.isnan().any())}
    assert spoiled == MOVING[resident]


# Parameters of a span in the order of a backward; what is no matrix comes first.
ORDER = ["2.bias", "1.bias", "1.weight", "0.bias", "2.weight", "0.weight"]
MOVING = {0: {*ORDER}, 3072: {*ORDER[2:]}, 10000: {*ORDER[5:]}, 2**20: set()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("resident", [*RESIDENT, 3071])
def test_what_stays_is_whole_parameters_within_the_size(resident: int, dtype: torch.dtype) -> None:
    _, update = made(dtype, resident, offload=True)
    state, whole = host_state(update), host_state(made(dtype, offload=True)[1]).moved
    assert state.resident <= resident and state.resident + state.moved == whole
    if dtype == torch.bfloat16:
        known = {0: 0, 3071: 1536, 3072: 3072, 10000: 9216, 2**20: whole}
        assert state.resident == known[resident]
        held = {tensor.untyped_storage().data_ptr() for tensor in update.state_tensors().values()}
        assert len(held) == 1 + 3 * (2 if resident in (0, 2**20) else 3)  # a span is cut once


def test_what_stays_is_updated_in_equal_shares_between_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a piece is on its way, and before anyone waits for it."""
    told: list[str] = []

    class Streams(EmulatedCopyStreams):
        def back(self, host: Any, targets: Any) -> Any:
            told.append("back")
            return super().back(host, targets)

        def out(self, sources: Any, host: Any, since: Any = None) -> Any:
            told.append("out")
            return super().out(sources, host, since)

    def fused(*arguments: Any, **options: Any) -> None:
        told.append("update")
        fused_adamw(*arguments, **options)

    monkeypatch.setattr(optimizer, "make_copy_streams", lambda device: Streams(()))
    monkeypatch.setattr(optimizer, "HostState", functools.partial(HostState, piece=64))
    monkeypatch.setattr(adamw, "fused_adamw", fused)
    model, update = made(torch.bfloat16, 3072, offload=True)
    model(torch.ones(2, 17, dtype=torch.bfloat16)).sum().backward()
    update.step(0.1)
    found = [what for what, _ in itertools.groupby(told)]
    shares = " ".join(told).split("out out out")
    counts = [share.count("update") for share in shares[:-1]]
    assert sum(counts) == 4 + len(counts) and set(counts) == {1, 2}  # four pieces stay
    assert found[:2] == ["back", "update"] or found[:3] == ["back", "update", "back"]


def settings(offload: bool | str, **changes: Any) -> TrainConfig:
    """offload: or what stays on the device."""
    config = tiny(graph=True, **changes)
    options = dataclasses.replace(config.optimizer, offload=bool(offload))
    if isinstance(offload, str):
        options = dataclasses.replace(options, resident=offload)
    return dataclasses.replace(config, optimizer=options)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(True, True, marks=pytest.mark.slow),
        (True, False),
        (False, True),
        ("20KiB", True),
        ("8KiB", "20KiB"),
        (False, "20KiB"),
        ("20KiB", "1GiB"),
        ("1GiB", False),
    ],
)
@pytest.mark.few(4)
def test_runs_resume_wherever_the_state_was(
    tmp_path: Path, before: bool | str, after: bool | str
) -> None:
    whole = state_of(ran(tmp_path / "whole", settings(False, steps=6))[0])
    first, _ = ran(tmp_path / "run", settings(before, steps=6), stop=StopAfter(3))
    check_same_run(tmp_path / "run", settings(after, steps=6))
    second = trainer(tmp_path / "run", settings(after, steps=6))
    for run, where in ((first, before), (second, after)):
        if where in ("8KiB", "20KiB"):
            state = host_state(run.optimizer)
            assert 0 < state.resident <= budget_bytes(str(where), None) and state.moved
    second.resume()
    second.run(StopRequest())
    equal(state_of(second), whole)


def test_what_it_cannot_serve_is_said() -> None:
    config = settings(True)
    asked = dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, name="muon"),
        graph=dataclasses.replace(config.graph, granularity="step", optimizer=True),
    )
    found = [text for text in validate(asked, "cpu") if "optimizer.offload" in text]
    assert len(found) == 2 and not [t for t in validate(config, "cpu") if "offload" in t]


def test_a_size_that_stays_is_of_a_state_on_the_host() -> None:
    config = settings("20KiB")
    assert not validate(config, "cpu")
    alone = dataclasses.replace(config.optimizer, offload=False)
    (found,) = validate(dataclasses.replace(config, optimizer=alone), "cpu")
    assert "optimizer.resident = 20KiB is of a state on the host" in found
    for wrong in ("0", "0GiB", "40%", "", "most", "20 XB"):
        with pytest.raises(ValueError, match="resident must be auto, none or a size such as"):
            OptimizerConfig(resident=wrong)


def test_the_device_needs_room_for_two_pieces_and_what_stays() -> None:
    here, there, some, most = (
        need_of(settings(offload), "cuda") for offload in (False, True, "20KiB", "1GiB")
    )
    assert here.weights == there.weights and here.gradients == there.gradients
    assert there.optimizer <= 2 * 12 * host_states.PIECE
    assert some.optimizer == there.optimizer + 20 * 2**10
    assert most.optimizer == here.optimizer


GIB = 2**30


def test_what_fits_beside_the_predicted_peak_stays() -> None:
    config = settings(True)
    peak = predicted_peak(config, "cuda")
    assert resident_bytes(config, 10 * GIB) == round(0.9 * 10 * GIB) - peak
    assert resident_bytes(config, peak) == 0  # no less
    assert resident_bytes(config, None) == 0  # a CPU
    for where, expected in ((False, 0), ("none", 0), ("20KiB", 20 * 2**10)):
        for memory in (None, 10 * GIB):
            assert resident_bytes(settings(where), memory) == expected


def test_memory_of_a_run_is_what_it_has_and_what_nobody_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process has 10 GiB of 80, this one 30 for this run and 10 for others, and 5 in its
    cache."""
    cuda = {
        "mem_get_info": (80 * GIB - 55 * GIB, 80 * GIB),
        "memory_reserved": 45 * GIB,
        "memory_allocated": 40 * GIB,
        "get_per_process_memory_fraction": 1.0,
    }
    for name in cuda:
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: cuda[name])
    device = torch.device("cuda", 0)
    assert memory_of_run(device, 30 * GIB) == (25 + 5 + 30) * GIB
    cuda["get_per_process_memory_fraction"] = 0.75
    assert memory_of_run(device, 30 * GIB) == (60 - 40 + 30) * GIB


def test_plans_say_where_the_state_is() -> None:
    sized = settings("1KiB")
    assert planned_state(settings(False), 100, 500, 1000) == (0, 0)
    assert planned_state(settings(True), 100, 500, None) == (0, 100)
    assert planned_state(settings(True), 100, 500, 600) == (40, 60)
    assert planned_state(settings(True), 100, 500, 1000) == (100, 0)
    assert planned_state(settings("none"), 100, 500, 1000) == (0, 100)
    assert planned_state(sized, 3000, 500, 1000) == (0, 3000 - 1024)  # `need_of` counts the rest


def test_runs_that_are_compared_leave_the_device_to_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def resident_on(model: Any, config: TrainConfig, mesh: Any) -> int:
        asked.append(config.optimizer.resident)
        return 0

    monkeypatch.setattr(build, "resident_on", resident_on)
    for where in (True, "20KiB"):
        ComparedRun(settings(where), torch.device("cpu")).close()
    assert asked == ["none", "20KiB"]
