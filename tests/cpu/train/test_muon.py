"""Muon: held against torch's own, and through the trainer, graphs and checkpoints."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import _muon
from trainkit import StopAfter, equal, state_of, tiny, trainer

from packgraph.train.config.sections import OptimizerConfig, ParallelConfig, TrainConfig
from packgraph.train.optimizer import Optimizer
from packgraph.train.signals import StopRequest
from packgraph.train.spikes import Limits
from packgraph.train.updates.muon import is_hidden_matrix, orthogonalized
from packgraph.train.validate import validate

MUON = OptimizerConfig(name="muon", weight_decay=0.25, clip_norm=None)


class Small(nn.Module):
    """An embedding, two matrices, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(11, 6)
        self.up, self.norm, self.down = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 6)
        self.lm_head = nn.Linear(6, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.down(self.norm(self.up(self.embed_tokens(ids))))
        return self.lm_head(hidden).square().sum()  # type: ignore[no-any-return]


HIDDEN = {"up.weight", "down.weight"}
IDS = torch.arange(11)


def test_matrices_of_hidden_layers_are_found_by_shape_and_name() -> None:
    found = {name for name, value in Small().named_parameters() if is_hidden_matrix(name, value)}
    assert found == HIDDEN
    assert not is_hidden_matrix("layers.0.mlp.experts", torch.zeros(4, 3, 2))


@pytest.mark.parametrize("shape", [(9, 6), (6, 9), (7, 7), (1, 5)])
def test_orthogonalized_has_the_bits_of_torchs_own(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = _muon._zeropower_via_newtonschulz(
        matrix, (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C), 5, 1e-7
    )
    assert torch.equal(orthogonalized(matrix), expected)
    values = torch.linalg.svdvals(orthogonalized(matrix).float())
    assert bool(((values > 0.4) & (values < 1.6)).all())


def test_it_equals_torchs_muon_and_adamw() -> None:
    ours, theirs = Small(), Small()
    optimizer = Optimizer(ours.named_parameters(), MUON)
    named = dict(theirs.named_parameters())
    rest = [value for name, value in named.items() if name not in HIDDEN]
    twins: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            [named[name] for name in sorted(HIDDEN)],
            weight_decay=MUON.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [
                {"params": [v for v in rest if v.ndim >= 2], "weight_decay": MUON.weight_decay},
                {"params": [v for v in rest if v.ndim < 2], "weight_decay": 0.0},
            ],
            betas=MUON.betas,
            eps=MUON.eps,
        ),
    ]
    for rate in (1e-2, 5e-2, 1e-3, 2e-2):
        optimizer.zero_grad()
        for name, gradient in optimizer.gradients().items():
            gradient.normal_()
            named[name].grad = gradient.clone()
        optimizer.step(rate)
        for twin in twins:
            for group in twin.param_groups:
                group["lr"] = rate
            twin.step()
        for name in HIDDEN:
            momentum = twins[0].state[named[name]]["momentum_buffer"]
            assert torch.equal(optimizer.state_tensors()[f"{name}.momentum"], momentum)
        for name, value in ours.named_parameters():  # the rate is float32 here, a double there
            torch.testing.assert_close(value, named[name], rtol=1e-5, atol=1e-6, msg=name)
    changed = dict(Small().named_parameters())
    assert not any(torch.equal(value, changed[name]) for name, value in ours.named_parameters())


def test_it_learns() -> None:
    model = Small()
    optimizer = Optimizer(model.named_parameters(), MUON)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(IDS)
        loss.backward()
        optimizer.step(1e-2)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_the_state_names_what_updates_a_parameter() -> None:
    names = set(Optimizer(Small().bfloat16().named_parameters(), MUON).state_tensors())
    for name, _ in Small().named_parameters():
        kinds = {"momentum"} if name in HIDDEN else {"exp_avg", "exp_avg_sq"}
        found = {key.removeprefix(f"{name}.") for key in names if key.startswith(f"{name}.")}
        assert found == kinds | {"master"}
    plain = Optimizer(Small().named_parameters(), OptimizerConfig()).state_tensors()
    assert not any(name.endswith(".momentum") for name in plain)


def test_a_blocked_update_changes_nothing() -> None:
    model = Small()
    optimizer = Optimizer(model.named_parameters(), MUON)
    optimizer.watch()
    ends = []
    for limit, spoiled in ((1e9, False), (1e9, True), (0.0, False), (1e9, False)):
        optimizer.set_limits(Limits(loss=limit))
        optimizer.zero_grad()
        loss = model(IDS)
        loss.backward()
        if spoiled:
            optimizer.gradients()["up.weight"].fill_(float("nan"))
        optimizer.step(1e-2, loss.detach())
        state = {**dict(model.named_parameters()), **optimizer.state_tensors()}
        ends.append({name: value.detach().clone() for name, value in state.items()})
    equal(ends[1], ends[0])
    equal(ends[2], ends[0])
    assert not torch.equal(ends[3]["up.weight"], ends[0]["up.weight"])
    assert not torch.equal(ends[3]["up.weight.momentum"], ends[0]["up.weight.momentum"])


def settings(graph: bool = False, **run: Any) -> TrainConfig:
    config = tiny(graph=graph, **run)
    return dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, name="muon", clip_norm=1.0)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(tmp_path: Path, dtype: str) -> None:
    whole = trainer(tmp_path / "whole", settings(dtype=dtype))
    whole.run(StopRequest())
    stopped = trainer(tmp_path / "run", settings(dtype=dtype))
    stopped.run(StopAfter(3))
    again = trainer(tmp_path / "run", settings(dtype=dtype))
    again.resume()
    assert 0 < again.step < 6
    again.run(StopRequest())
    equal(state_of(again), state_of(whole))
    assert any(name.endswith("q_proj.weight.momentum") for name in whole.tensors())


def test_an_update_inside_a_graph_has_the_bits_of_an_eager_one(tmp_path: Path) -> None:
    ends = {}
    for graph in (False, True):
        config = settings(graph, steps=10)
        inside = dataclasses.replace(config.graph, granularity="step", optimizer=True)
        run = trainer(tmp_path / str(graph), dataclasses.replace(config, graph=inside))
        summary = run.run(StopRequest())
        ends[graph] = state_of(run)
        run.close()
    assert summary["replayed"] >= 3
    equal(ends[True], ends[False])


def test_what_has_no_whole_matrices_is_refused() -> None:
    config = settings()
    assert not validate(config, "cpu")
    two = dataclasses.replace(config, parallel=ParallelConfig(dp=2))
    assert any("needs whole matrices" in text for text in validate(two, "cpu", world=2))
    split = dataclasses.replace(config, parallel=ParallelConfig(tp=2))
    assert any("rows or columns" in text for text in validate(split, "cpu", world=2))
    stages = dataclasses.replace(config, parallel=ParallelConfig(pp=2))
    assert not any("muon" in text for text in validate(stages, "cpu", world=2))
