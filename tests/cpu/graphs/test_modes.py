"""Modes and state that differ between a call, its backward, and what runs again for it."""

import functools
import uuid
import warnings

import numpy as np
import pytest
import torch
from autogradkit import assert_same, gradients, sample, twins
from statekit import One
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.graphed import graph
from packgraph.graphs.key import CallModes

COEFFICIENT = [1.0]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.linear(x)
        return hidden.tanh(), hidden.sigmoid()


class Router(nn.Module):
    """A part of it runs in float32 under autocast."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.router = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.up(x)
        with torch.autocast("cpu", enabled=False):
            weights = self.router(hidden.float()).softmax(-1)
        return (hidden * weights).sum()


def both(eager, graphed, step):
    for model in (eager, graphed):
        step(model)
    assert_same(gradients(eager), gradients(graphed))
    for model in (eager, graphed):
        model.zero_grad()


@pytest.mark.parametrize("warmup", [0, 2])
def test_a_forward_that_is_run_again_has_the_autocast_of_its_call(warmup):
    eager, graphed = twins(Two, calls=0, warmup=warmup)

    def step(model, number, used):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(sample(number))
        out[used].float().sum().backward()

    for number in range(6):
        both(eager, graphed, functools.partial(step, number=number, used=int(number > 3)))
    assert graphed.stats.replayed > 2


def test_modes_are_entered_and_left():
    before = CallModes.now("cpu")
    with sdpa_kernel([SDPBackend.MATH]), torch.device("meta"):
        torch.set_default_dtype(torch.float64)
        within = CallModes.now("cpu")
        torch.set_default_dtype(torch.float32)
    assert within != before
    with within.entered():
        assert CallModes.now("cpu") == within
        assert torch.zeros(1).device.type == "meta"
    assert CallModes.now("cpu") == before


@pytest.mark.parametrize("inside", [True, False], ids=["with its forward", "alone"])
def test_a_backward_under_autocast_is_that_of_eager(inside):
    eager, graphed = twins(Router, calls=0, warmup=1)

    def step(model, number):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            out = model(sample(number))
        with torch.autocast("cpu", torch.bfloat16):
            out.backward()

    with warnings.catch_warnings(record=True, action="always") as told:
        for number in range(4):
            both(eager, graphed, functools.partial(step, number=number))
    assert sum("the backward runs under autocast" in str(found.message) for found in told) == 1
    assert graphed.stats.fallbacks["the backward runs under autocast"] == 3


class Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * COEFFICIENT[0]


def scaled(module, x):
    return Scaling.apply(module.linear(x))


def recomputed(module, x):
    return checkpoint(
        lambda hidden: (module.linear(hidden) * COEFFICIENT[0]).tanh(), x, use_reentrant=False
    )


def with_default_dtype():
    torch.set_default_dtype(torch.float64)


def with_coefficient():
    COEFFICIENT[0] = 2.0


@pytest.mark.parametrize("change", [with_coefficient, with_default_dtype])
@pytest.mark.parametrize("function", [scaled, recomputed])
def test_what_python_code_in_a_backward_reads_may_not_change_before_it(function, change):
    """The gradients are those of eager, or it is an error."""
    found = []
    for model in (One(function), graph(One(function), warmup=1)):
        try:
            for number in range(3):
                model(sample(number)).sum().backward()
            out = model(sample(3)).sum()
            change()
            try:
                out.backward()
            except RuntimeError as error:
                if "was changed between forward and backward" in str(error):
                    return
                raise
            found.append(gradients(model))
        finally:
            COEFFICIENT[0] = 1.0
            torch.set_default_dtype(torch.float32)
    assert_same(*found)


def test_a_change_behind_autograds_back_is_an_error_where_the_forward_runs_again():
    _, graphed = twins(Two, calls=0, warmup=1)
    for number in range(3):
        graphed(sample(number))[0].sum().backward()
    out = graphed(sample(3))[1].sum()
    graphed.linear.weight.data.mul_(1.5)
    with pytest.raises(RuntimeError, match="something that it reads was changed"):
        out.backward()


@pytest.mark.parametrize("make", [lambda: uuid.uuid4().hex, lambda: np.float64(np.random.rand())])
def test_what_a_call_returns_beside_tensors_has_to_be_the_same(make):
    module = One(lambda module, x: (module.linear(x), make()))
    with pytest.raises(CaptureError):
        graph(module, warmup=0, strict=True)(sample(0))


def test_equal_numbers_of_other_kinds_are_other_calls():
    def forward(module, x, by):
        ((key, value),) = by.items()
        return module.linear(x) * value * {int: 1.0, float: 2.0, bool: 3.0}[type(key)]

    def of_sign(module, x, z):
        return module.linear(x) * np.copysign(1.0, z.imag)

    for function, arguments in [
        (forward, [{1: 2.0}, {1.0: 2.0}, {True: 2.0}]),
        (of_sign, [complex(-1, 0.0), complex(-1, -0.0)]),
    ]:
        eager, graphed = One(function), graph(One(function), warmup=0)
        for _ in range(3):
            for argument in arguments:
                assert torch.equal(eager(sample(0), argument), graphed(sample(0), argument))
        assert graphed.stats.replayed == 3 * len(arguments)


@pytest.mark.parametrize(
    ("name", "before"),
    [("_set_mkldnn_enabled", True), ("_set_math_sdp_allow_fp16_bf16_reduction", False)],
)
def test_settings_are_part_of_a_call(name, before):
    graphed = graph(One(lambda module, x: module.linear(x)), warmup=1)
    setting = getattr(torch._C, name)
    try:
        for value in (before, before, not before, before):
            setting(value)
            graphed(sample(0)).backward(torch.ones(3, 4))
    finally:
        setting(before)
    assert graphed.stats.captured == 2


@functools.lru_cache(maxsize=1)
def mask(length):
    return torch.ones(length, 4).cumsum(0)


def test_a_cache_that_has_lost_its_value_is_filled_before_the_capture():
    mask.cache_clear()
    graphed = graph(One(lambda module, x: module.linear(x) * mask(len(x))), warmup=1)
    # of new patterns
    for length in (3, 3, 3, 5, 5, 3):
        graphed(torch.ones(length, 4)).sum().backward()
    for out in [graphed(torch.ones(3, 4)) for _ in range(2)]:  # a second slot
        out.sum().backward()
    assert not graphed.stats.fallbacks["capture failed"]


def test_scripted_modules_run_eagerly():
    graphed = graph(torch.jit.script(nn.Linear(4, 4)), warmup=0)
    with pytest.warns(PackgraphWarning, match=r"torch\.jit\.script|ScriptModule"):
        graphed(sample(0)).sum().backward()
    graphed(sample(1)).sum().backward()
    assert graphed.stats.fallbacks["capture failed"] == 2
