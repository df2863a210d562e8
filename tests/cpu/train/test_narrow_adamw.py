"""AdamW of bfloat16 weights in one kernel: its specification against torch's, and how it is
used. The kernel is held against its specification in tests/gpu/test_update_rules_gpu.py."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from trainkit import captured_as_eager, equal
from updatekit import Small, ends_of_blocked_steps, one_kernel, run_of

from packgraph.train import optimizer
from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.optimizer import Optimizer
from packgraph.train.updates import adamw
from packgraph.train.updates.adamw import MEANS, Numbers, in_one_kernel, narrow_adamw
from packgraph.train.updates.host_state import HostState

RATES = (1e-2, 5e-2, 1e-3, 2e-2)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # of gradients about 10: torch's AdamW rounds elsewhere


@pytest.fixture
def calls() -> Iterator[mock.Mock]:
    with one_kernel() as found:
        yield found


def made(**options: Any) -> tuple[nn.Module, Optimizer]:
    model = Small().bfloat16()
    config = OptimizerConfig(**{"weight_decay": 0.25} | options)
    return model, Optimizer(model.named_parameters(), config)


def draw(update: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, gradient in sorted(update.gradients().items()):
        gradient.copy_(torch.randn(gradient.shape, generator=generator) * len(name))


@pytest.mark.parametrize("decay", [0.25, 0.0])
@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
def test_the_specification_is_torchs_adamw(
    clip: float | None, decay: float, calls: mock.Mock
) -> None:
    model, update = made(clip_norm=clip, weight_decay=decay)
    twins = {name: value.detach().float() for name, value in model.named_parameters()}
    groups = [{"params": [v], "weight_decay": decay * (v.ndim > 1)} for v in twins.values()]
    config = OptimizerConfig()
    twin = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)
    for seed, rate in enumerate(RATES):
        draw(update, seed)
        gradients = update.gradients()
        for name, value in twins.items():
            value.grad = gradients[name].float()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(twins.values()), clip)
        for group in twin.param_groups:
            group["lr"] = rate
        update.step(rate)
        twin.step()
        found = update.state_tensors()
        for name, value in model.named_parameters():
            master = found[f"{name}.master"]
            torch.testing.assert_close(master, twins[name], **CLOSE)
            assert torch.equal(value, master.bfloat16())
            for key in MEANS:
                expected = twin.state[twins[name]][key]
                torch.testing.assert_close(found[f"{name}.{key}"], expected, **CLOSE)
    assert calls.call_count == len(RATES) * len(update.flat.spans)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_where_nothing_is_asked_scale_is_1_and_nothing_is_blocked(dtype: torch.dtype) -> None:
    config, ends = OptimizerConfig(), []
    rate, steps, one, zero = (torch.tensor(value) for value in (1e-2, 3.0, 1.0, 0.0))
    for scale, blocked in ((None, None), (one, zero)):
        torch.manual_seed(0)
        flats = [torch.randn(300).to(dtype) for _ in range(2)]
        flats += [torch.rand(300) for _ in range(3)]
        before = flats[0].clone()
        numbers = Numbers.of(rate, steps, scale, blocked, config)
        narrow_adamw(*flats, numbers, config, decays=True)  # type: ignore[arg-type,misc]
        assert not torch.equal(flats[0], before) and flats[0].dtype == dtype
        ends.append(flats)
    for first, second in zip(*ends, strict=True):
        assert torch.equal(first, second)


def test_a_blocked_update_changes_nothing(calls: mock.Mock) -> None:
    model, update = made()
    ends = ends_of_blocked_steps(update, model)
    equal(ends[1], ends[0])
    equal(ends[2], ends[0])
    assert not [key for key in ends[3] if torch.equal(ends[3][key], ends[0][key])]
    assert calls.call_count == 4 * len(update.flat.spans)


def test_an_update_that_is_not_blocked_is_told_apart(
    calls: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: whoever does not look changes values and state."""
    of = Numbers.of

    def forgetful(rate: Tensor, steps: Tensor, scale: Any, blocked: Any, config: Any) -> Numbers:
        return of(rate, steps, scale, None, config)

    monkeypatch.setattr(Numbers, "of", forgetful)
    model, update = made()
    ends = ends_of_blocked_steps(update, model)
    assert not torch.equal(ends[1]["up.weight"], ends[0]["up.weight"])


def test_parameters_are_written_once(calls: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what updates them: masters are not updated alone, and copied to them then."""
    _, update = made()
    draw(update, 0)
    with mock.patch.object(adamw, "fused_adamw") as alone:
        update.step(1e-2)
    assert not alone.called
    monkeypatch.setattr(adamw, "in_one_kernel", in_one_kernel)  # the negative control
    _, update = made()
    with mock.patch.object(adamw, "fused_adamw") as alone:
        update.step(1e-2)
    assert alone.called


def test_weights_of_float32_are_updated_as_ever(calls: mock.Mock) -> None:
    """A model of two dtypes has both ways."""
    ends = []
    for fused in (True, False):
        model = Small().bfloat16()
        model.norm.float()
        with mock.patch.object(adamw, "in_one_kernel", adamw.in_one_kernel if fused else _never):
            update = Optimizer(model.named_parameters(), OptimizerConfig(weight_decay=0.25))
            for seed, rate in enumerate(RATES):
                draw(update, seed)
                update.step(rate)
        ends.append({**dict(model.named_parameters()), **update.state_tensors()})
    wide = {key for key in ends[0] if key.startswith("norm")}
    assert wide and all(torch.equal(ends[0][key], ends[1][key]) for key in wide)
    for key in ends[0].keys() - wide:
        if ends[0][key].dtype == torch.float32:
            torch.testing.assert_close(ends[0][key], ends[1][key], **CLOSE)
    assert 0 < calls.call_count < len(RATES) * len(update.flat.spans)


def _never(parameters: Tensor) -> bool:
    return False


def test_it_is_a_way_of_cuda_alone() -> None:
    assert not in_one_kernel(torch.zeros(1, dtype=torch.bfloat16))
    for dtype in (torch.float32, torch.bfloat16):
        there = mock.Mock(is_cuda=True, dtype=dtype)
        with mock.patch.object(adamw, "HAS_TRITON", True):
            assert in_one_kernel(there) == (dtype == torch.bfloat16)
        with mock.patch.object(adamw, "HAS_TRITON", False):
            assert not in_one_kernel(there)


@pytest.mark.parametrize("piece", [64, 200, 2**25])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_state_on_the_host_has_the_bits_of_that_on_the_device(
    clip: float | None, piece: int, calls: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "PIECE", piece)
    monkeypatch.setattr(optimizer, "HostState", functools.partial(HostState, piece=piece))
    ends = []
    with mock.patch.object(adamw, "narrow_adamw", side_effect=narrow_adamw) as there:
        for offload in (False, True):
            model, update = made(offload=offload, clip_norm=clip)
            ends.append(ends_of_blocked_steps(update, model))
    for here, other in zip(*ends, strict=True):
        equal(here, other)
    assert there.call_count >= 4 * len(update.flat.spans)


def test_an_update_inside_a_graph_has_the_bits_of_an_eager_one(
    tmp_path: Path, calls: mock.Mock
) -> None:
    captured_as_eager(tmp_path, run_of("adamw", steps=10, dtype="bfloat16"))
    assert calls.called
