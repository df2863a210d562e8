"""Muon: held against torch's own. What every update keeps to is tested in test_update_rules."""

import dataclasses

import pytest
import torch
from torch.optim import _muon
from updatekit import Small, run_of

from packgraph.train.config.sections import OptimizerConfig, ParallelConfig
from packgraph.train.optimizer import Optimizer
from packgraph.train.updates.muon import is_hidden_matrix, orthogonalized
from packgraph.train.validate import validate

MUON = OptimizerConfig(name="muon", weight_decay=0.25, clip_norm=None)


HIDDEN = {"up.weight", "down.weight"}


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


def test_the_state_names_what_updates_a_parameter() -> None:
    names = set(Optimizer(Small().bfloat16().named_parameters(), MUON).state_tensors())
    for name, _ in Small().named_parameters():
        kinds = {"momentum"} if name in HIDDEN else {"exp_avg", "exp_avg_sq"}
        found = {key.removeprefix(f"{name}.") for key in names if key.startswith(f"{name}.")}
        assert found == kinds | {"master"}
    plain = Optimizer(Small().named_parameters(), OptimizerConfig()).state_tensors()
    assert not any(name.endswith(".momentum") for name in plain)


def test_what_has_no_whole_matrices_is_refused() -> None:
    config = run_of("muon")
    assert not validate(config, "cpu")
    two = dataclasses.replace(config, parallel=ParallelConfig(dp=2))
    assert any("needs whole matrices" in text for text in validate(two, "cpu", world=2))
    split = dataclasses.replace(config, parallel=ParallelConfig(tp=2))
    assert any("rows or columns" in text for text in validate(split, "cpu", world=2))
    stages = dataclasses.replace(config, parallel=ParallelConfig(pp=2))
    assert not any("muon" in text for text in validate(stages, "cpu", world=2))
