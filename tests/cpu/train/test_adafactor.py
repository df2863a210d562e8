"""Adafactor, held against torch's own, and on ranks that share parameters."""

import pytest
import torch
from torch import Tensor, nn
from updatekit import Small

from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.optimizer import Optimizer
from packgraph.train.updates import adafactor
from packgraph.train.updates.adafactor import Adafactor

OPTIONS = OptimizerConfig(name="adafactor", weight_decay=0.25, clip_norm=None)


def torchs_own(model: nn.Module) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """Torch's Adafactor of the same parameters; of the stack, one for each matrix."""
    named = {name: value for name, value in model.named_parameters() if name != "stack"}
    stack = dict(model.named_parameters())["stack"].detach()
    named |= {f"stack.{n}": nn.Parameter(stack[n].clone()) for n in range(len(stack))}
    groups = [
        {"params": [v for v in named.values() if v.ndim >= 2], "weight_decay": 0.25},
        {"params": [v for v in named.values() if v.ndim < 2], "weight_decay": 0.0},
    ]
    return named, torch.optim.Adafactor(groups, lr=1e-2)


@pytest.mark.parametrize("piece", [2**23, 64])
def test_it_equals_torchs_adafactor(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adafactor.slices_of, "__defaults__", (piece,))
    ours = Small()
    named, twin = torchs_own(Small())
    optimizer = Optimizer(ours.named_parameters(), OPTIONS)
    for step, rate in enumerate((1e-2, 5e-2, 1e-3, 2e-2, 1e-1)):
        optimizer.zero_grad()
        for name, gradient in optimizer.gradients().items():
            # the first large ones are clipped later, the last ones almost zero
            gradient.normal_().mul_((1.0, 0.1, 30.0, 1.0, 1e-9)[step])
            if name == "up.weight":
                gradient[3] = 0
            for key, value in matrices(name, gradient).items():
                named[key].grad = value.clone()
        optimizer.step(rate)
        for group in twin.param_groups:
            group["lr"] = rate
        twin.step()
        for name, value in ours.named_parameters():
            for key, matrix in matrices(name, value).items():  # sums are in another order
                torch.testing.assert_close(
                    matrix.detach(), named[key].detach(), rtol=1e-5, atol=1e-6, msg=key
                )
    state = optimizer.state_tensors()
    row = twin.state[named["up.weight"]]["row_var"][:, 0]
    torch.testing.assert_close(state["up.weight.row_var"], row, rtol=1e-5, atol=0)
    column = twin.state[named["stack.1"]]["col_var"][0]
    torch.testing.assert_close(state["stack.col_var"][1], column, rtol=1e-5, atol=0)
    variance = twin.state[named["norm.weight"]]["variance"]
    torch.testing.assert_close(state["norm.weight.variance"], variance, rtol=1e-5, atol=0)


def matrices(name: str, value: Tensor) -> dict[str, Tensor]:
    if name == "stack":
        return {f"stack.{number}": matrix for number, matrix in enumerate(value)}
    return {name: value}


def test_the_state_of_a_matrix_is_its_rows_and_columns() -> None:
    model = Small()
    optimizer = Optimizer(model.named_parameters(), OPTIONS)
    shapes = {name: tuple(value.shape) for name, value in optimizer.state_tensors().items()}
    assert shapes["up.weight.row_var"] == (47,) and shapes["up.weight.col_var"] == (30,)
    assert shapes["stack.row_var"] == (3, 30) and shapes["stack.col_var"] == (3, 8)
    assert shapes["up.bias.variance"] == (47,) and "up.bias.row_var" not in shapes
    assert not any(name.endswith("exp_avg") for name in shapes)
    assert isinstance(optimizer._rules[0], Adafactor)
