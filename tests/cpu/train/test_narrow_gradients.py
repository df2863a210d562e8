"""Gradients of bfloat16 weights are added up in float32, or as they are; both are updated with the
bits of float32 copies of all of them, which are not made."""

import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from memorykit import counting
from torch import Tensor, nn
from trainkit import equal
from updatekit import IDS, Small, ends_of_blocked_steps

from packgraph.train import optimizer
from packgraph.train.config.sections import OptimizerConfig
from packgraph.train.optimizer import TINY, Optimizer
from packgraph.train.updates import adamw
from packgraph.train.updates.adamw import MEANS, AdamW
from packgraph.train.updates.host_state import HostState

NAMES = ["adamw", "muon", "adamw8bit", "adafactor"]
RATES = (1e-2, 5e-2, 1e-3, 2e-2)
CLIPS = [None, 0.5, 1e9]


@pytest.fixture(params=[64, 200, 2**24])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Elements of AdamW's groups: many, an odd end, one."""
    size: int = request.param
    monkeypatch.setattr(optimizer, "AdamW", functools.partial(AdamW, group=size))
    return size


def made(dtype: torch.dtype, **options: Any) -> tuple[nn.Module, Optimizer]:
    """Weights that bfloat16 has, whatever the dtype."""
    model = Small().bfloat16().to(dtype)
    config = OptimizerConfig(**{"weight_decay": 0.25, "gradients": "bfloat16"} | options)
    return model, Optimizer(model.named_parameters(), config)


def draw(update: Optimizer, seed: int) -> None:
    """Gradients that bfloat16 has."""
    generator = torch.Generator().manual_seed(seed)
    for name, gradient in sorted(update.gradients().items()):
        values = torch.randn(gradient.shape, generator=generator) * len(name)
        gradient.copy_(values.bfloat16())


def state(model: nn.Module, update: Optimizer) -> dict[str, Tensor]:
    """Float32 values of all parameters, and the state."""
    found = {name.removesuffix(".master"): v for name, v in update.state_tensors().items()}
    named = {name: found.get(name, value) for name, value in model.named_parameters()}
    return {name: value.detach().clone() for name, value in (found | named).items()}


@pytest.mark.parametrize("gradients", ["bfloat16", "float32"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", NAMES)
def test_every_rule_has_the_bits_of_float32_gradients(
    name: str, clip: float | None, gradients: str
) -> None:
    """The twin's weights and gradients are float32, of the same values: its weights are masters."""
    options = {"name": name, "clip_norm": clip, "gradients": gradients}
    ours, twin = (made(dtype, **options) for dtype in (torch.bfloat16, torch.float))
    assert {str(g.dtype) for g in ours[1].gradients().values()} == {f"torch.{gradients}"}
    for seed, rate in enumerate(RATES):
        norms = []
        for _, update in (ours, twin):
            draw(update, seed)
            norms.append(update.step(rate))
        assert torch.equal(*norms) and norms[0].dtype == torch.float32
        equal(state(*ours), state(*twin))
        for key, value in ours[0].named_parameters():
            assert torch.equal(value, dict(twin[0].named_parameters())[key].bfloat16())


def copied(values: Tensor) -> Tensor:
    """In float32, and other memory."""
    return values.detach().to(torch.float32, copy=True)


class Naive:
    """Float32 copies of all gradients, clipped, and torch's fused AdamW over masters."""

    def __init__(self, update: Optimizer, clip: float | None) -> None:
        self.spans, self.clip = update.flat.spans, clip
        self.masters = [copied(span.own_parameters) for span in self.spans]
        kinds = [{"params": [m], "weight_decay": 0.25 * s.decays} for m, s in self.pairs()]
        betas = OptimizerConfig().betas
        self.adamw = torch.optim.AdamW(
            kinds, torch.tensor(1.0), betas, OptimizerConfig().eps, fused=True
        )

    def pairs(self) -> Iterator[tuple[Tensor, Any]]:
        return zip(self.masters, self.spans, strict=True)

    def step(self, rate: float) -> Tensor:
        copies = [copied(span.own_gradients) for span in self.spans]
        norm = torch.stack(torch._foreach_norm(copies)).square().sum().sqrt()
        if self.clip is not None:
            torch._foreach_mul_(copies, (self.clip / (norm + TINY)).clamp(max=1.0))
        for master, copy in zip(self.masters, copies, strict=True):
            master.grad = copy
        for kind in self.adamw.param_groups:
            kind["lr"] = torch.tensor(rate)
        self.adamw.step()
        return norm


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adamw_has_the_bits_of_a_naive_twin(
    dtype: torch.dtype, clip: float | None, group: int
) -> None:
    _, update = made(dtype, clip_norm=clip)
    naive = Naive(update, clip)
    for seed, rate in enumerate(RATES):
        draw(update, seed)
        expected = naive.step(rate)
        assert torch.equal(update.step(rate), expected)
        tensors = update.state_tensors()
        for master, span in naive.pairs():
            found = {key: naive.adamw.state[master][key] for key in MEANS}
            found |= {"master": master} if dtype == torch.bfloat16 else {}
            for member in span.members:
                weight = span.part(member, master)
                assert torch.equal(member.parameter, weight.to(dtype))
                for key, flat in found.items():
                    value = span.part(member, flat)
                    assert torch.equal(tensors[f"{member.name}.{key}"], value), key
        assert int(tensors["step"]) == seed + 1


@pytest.mark.parametrize("name", NAMES)
def test_gradients_stay_as_they_are(name: str) -> None:
    _, update = made(torch.bfloat16, name=name, clip_norm=1e-3)
    draw(update, 0)
    before = {key: value.clone() for key, value in update.gradients().items()}
    update.step(1e-2)
    equal(update.gradients(), before)


def taken(**options: Any) -> int:
    """Bytes of the temporaries that live at the same time in an update of 2**15 elements."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))).bfloat16()
    config = OptimizerConfig(gradients="bfloat16", **options)
    update = Optimizer(model.named_parameters(), config)
    update.step(1e-2)
    (span,) = update.flat.spans
    held = [span.parameters, span.gradients, *update.state_tensors().values()]
    with counting() as live:
        for tensor in held:
            tensor.detach()  # what is known by then is no temporary
        before = live.now
        update.step(1e-2)
    return live.peak - before


def pieces_of(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Norms and updates of so many elements at a time: norms of a CPU convert them, too."""
    monkeypatch.setattr(optimizer, "PIECE", size)
    monkeypatch.setattr(optimizer, "AdamW", functools.partial(AdamW, group=size))


@pytest.mark.parametrize("clip", CLIPS[:2])
def test_an_update_takes_memory_for_one_group(
    clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces_of(monkeypatch, 2**12)
    assert 4 * 2**12 <= taken(clip_norm=clip) < 5 * 2**12  # and scalars


def test_all_gradients_in_one_group_take_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the count sees them."""
    pieces_of(monkeypatch, 2**15)
    assert taken() >= 4 * 2**15


def test_groups_hold_every_element_once(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces_of(monkeypatch, group)
    _, update = made(torch.bfloat16)
    with mock.patch.object(adamw, "fused_adamw") as calls:
        update.step(1e-2)
    groups = [(call.args[0][0], call.kwargs["decays"]) for call in calls.call_args_list]
    assert all(0 < values.numel() <= group for values, _ in groups)
    for each in update._updated:
        first, size = each.values.data_ptr(), each.values.numel()
        ends = [
            (values.data_ptr() - first) // 4 + values.numel()
            for values, decays in groups
            if 0 <= values.data_ptr() - first < 4 * size and decays == each.span.decays
        ]
        assert ends == [*range(group, size, group), size]


@pytest.mark.parametrize("offload", [False, True])
def test_a_blocked_update_of_groups_changes_nothing(
    offload: bool, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends() -> list[dict[str, Tensor]]:
        model, update = made(torch.bfloat16, offload=offload)
        return ends_of_blocked_steps(update, model)

    good, first, second, last = ends()
    equal(first, good)
    equal(second, good)
    assert not any(torch.equal(last[key], good[key]) for key in good)
    kind = HostState if offload else AdamW
    step = kind.step

    def forgetful(self: Any, rate: Tensor, steps: Tensor, scale: Any, blocked: Any) -> None:
        step(self, rate, steps, scale, None)

    monkeypatch.setattr(kind, "step", forgetful)  # the negative control
    good, first, *_ = ends()
    assert not torch.equal(first["up.weight"], good["up.weight"])


def sums(like: bool, gradients: str, microbatches: int) -> tuple[dict[str, Tensor], ...]:
    """Sums of gradients of so many microbatches, and the same in float64. like: all are one."""
    model, update = made(torch.bfloat16, gradients=gradients)
    right = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    update.zero_grad()
    generator, ids = torch.Generator().manual_seed(1), IDS
    for _ in range(microbatches):
        if not like:
            ids = torch.randint(0, int(IDS.max()) + 1, IDS.shape, generator=generator)
        loss = model(ids) / microbatches
        named = dict(model.named_parameters())
        for name, one in zip(
            named, torch.autograd.grad(loss, list(named.values()), retain_graph=True), strict=True
        ):
            right[name] += one
        loss.backward()
    return update.gradients(), right


def off(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The error of all sums together, relative to their norm."""
    wrong = sum((found[name].double() - value).square().sum() for name, value in right.items())
    return float((wrong / sum(value.square().sum() for value in right.values())).sqrt())


@pytest.mark.parametrize("like", [True, False])
@pytest.mark.parametrize("microbatches", [16, 128, 1024])
def test_sums_over_microbatches_have_the_error_of_float32(like: bool, microbatches: int) -> None:
    assert off(*sums(like, "auto", microbatches)) < 1e-6


@pytest.mark.parametrize("like", [True, False])
def test_sums_in_bfloat16_stagnate(like: bool) -> None:
    """The negative control."""
    assert off(*sums(like, "bfloat16", 1024)) > (0.3 if like else 3e-3)


def test_a_gradient_that_is_there_is_taken_over() -> None:
    model = Small().bfloat16()
    model(IDS).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    update = Optimizer(model.named_parameters(), OptimizerConfig())
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.dtype == torch.float32
        assert not p.grad.any() and before[name].any()  # an optimizer begins with zeros
    model(IDS).backward()
    for name, gradient in update.gradients().items():
        assert torch.equal(gradient, before[name].float()), name
