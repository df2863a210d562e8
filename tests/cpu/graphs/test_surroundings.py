"""What is around a call, and a replay would not show: the call runs eagerly under a reason, and
replays afterwards."""

import contextlib
import copy
import warnings

import pytest
import torch
from statekit import One, X, quietly
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import packgraph
from packgraph.graphs import fallback
from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.graphed import graph


def made(**options):
    module = One(lambda module, x: module.linear(x).sin())
    return copy.deepcopy(module), graph(module, warmup=0, **options)


def train(model, calls=3):
    for _ in range(calls):
        model(X).square().sum().backward()


def same_gradients(eager, graphed):
    return all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(eager.parameters(), graphed.parameters(), strict=True)
    )


def tangents(model):
    """Of the output, for one of the input and one of the weight."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        weight = forward_ad.make_dual(model.linear.weight.detach(), torch.ones(4, 4))
        of_input = forward_ad.unpack_dual(model(dual)).tangent
        of_weight = forward_ad.unpack_dual(
            torch.func.functional_call(model, {"linear.weight": weight}, (X,))
        ).tangent
    return [of_input, of_weight]


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Naming(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def seen_by(mode, model):
    with mode as found:
        model(X)
    return found


def flops(model):
    return [torch.tensor(seen_by(FlopCounterMode(display=False), model).get_total_flops())]


def dispatched(model):
    assert any("addmm" in name for name in seen_by(Counting(), model).seen)
    return []


def functions(model):
    assert "linear" in seen_by(Naming(), model).seen
    return []


def checkpointed(model):
    x = X.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).square().sum().backward()
    return [x.grad]


def on_the_host(model):
    with torch.autograd.graph.save_on_cpu():
        out = model(X)
    out.square().sum().backward()
    return [out]


def cached(model):
    with torch.nn.utils.parametrize.cached():
        return [model(X)]


CASES = {
    "dual tensors": (tangents, fallback.TANGENTS),
    "jvp": (
        lambda model: list(torch.func.jvp(model, (X,), (torch.ones_like(X),))),
        fallback.TRANSFORMED,
    ),
    "vmap": (lambda model: [torch.func.vmap(model)(torch.stack([X, X * 2]))], fallback.TRANSFORMED),
    "grad": (lambda model: [torch.func.grad(lambda x: model(x).sum())(X)], fallback.TRANSFORMED),
    "hessian": (
        lambda model: [torch.func.hessian(lambda x: model(x).sum())(X[0])],
        fallback.TRANSFORMED,
    ),
    "anomaly": (lambda model: anomaly(model), fallback.ANOMALY),
    "flops": (flops, fallback.MODES),
    "dispatch mode": (dispatched, fallback.MODES),
    "function mode": (functions, fallback.MODES),
    "checkpoint": (checkpointed, fallback.SAVED_TENSOR_HOOKS),
    "saved on the host": (on_the_host, fallback.SAVED_TENSOR_HOOKS),
    "cached": (cached, fallback.CACHED),
    "traced": (
        lambda model: [torch.jit.trace(model, (X,), check_trace=False)(X * 2)],
        fallback.TRACED,
    ),
}


def anomaly(model):
    with torch.autograd.detect_anomaly(check_nan=True):
        out = model(X)
        out.square().sum().backward()
    return [out]


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:`torch.jit.trace")
def test_a_call_that_a_replay_would_hide_runs_eagerly_and_the_next_replays(case, captured):
    look, reason = CASES[case]
    eager, graphed = made()
    if captured:
        train(eager)
        train(graphed)
    expected = look(eager)
    with pytest.warns(PackgraphWarning, match=reason.split("(")[0]):
        found = look(graphed)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert graphed.stats.fallbacks[reason] > 0 and set(graphed.stats.fallbacks) <= {reason}
    before = graphed.stats.replayed
    for model in (eager, graphed):
        train(model)
    assert graphed.stats.replayed == before + 3 and graphed.stats.captured == 1, (
        "no key was given up"
    )
    assert same_gradients(eager, graphed) and not graphed.stats.recaptures


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:`torch.jit.trace")
def test_strict_says_what_is_around_the_call(case):
    look, reason = CASES[case]
    _, graphed = made(strict=True)
    train(graphed)
    with pytest.raises(CaptureError, match=reason.split("(")[0]):
        look(graphed)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:`torch.jit.trace")
@pytest.mark.few(3)
def test_what_is_around_counts_in_a_steady_block_too(case):
    look, reason = CASES[case]
    eager, graphed = made()
    expected = look(eager)
    train(graphed)
    with packgraph.control(graphed).frozen():
        train(graphed, 2)
        found = quietly(look, graphed)
        train(graphed, 1)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert graphed.stats.fallbacks[reason] and graphed.stats.replayed == 6


def test_anomaly_detection_finds_the_users_line_and_dooms_nothing():
    class Diverging(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (self.weight * x).sqrt()

    graphed = graph(Diverging(), warmup=0)
    good, bad = torch.ones(4), torch.zeros(4)
    for _ in range(3):
        graphed(good).square().sum().backward()
    with (
        warnings.catch_warnings(record=True, action="always") as caught,
        torch.autograd.detect_anomaly(),
    ):
        loss = (graphed(bad) * 0).sum()
        with pytest.raises(RuntimeError, match="SqrtBackward0"):
            loss.backward()
    assert any("sqrt()" in str(warning.message) for warning in caught), (
        "the forward's line is in what torch says"
    )
    graphed(good).square().sum().backward()
    assert graphed.stats.replayed == 4 and dict(graphed.stats.fallbacks) == {fallback.ANOMALY: 1}


def test_nothing_is_captured_under_anomaly_detection_and_build_turns_it_off():
    _, graphed = made()
    with (
        warnings.catch_warnings(action="ignore", category=UserWarning),
        torch.autograd.detect_anomaly(),
    ):
        train(graphed, 2)
        assert graphed.stats.captured == 0
        graphed.build([(X,)])
        assert graphed.stats.captured == 1 and torch.is_anomaly_enabled()
    train(graphed)
    assert graphed.stats.replayed == 3 and graphed.stats.captured == 1


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_a_compiled_module_holds_the_plain_one(fullgraph, nested):
    eager, graphed = made()
    torch._dynamo.reset()
    target = nn.Sequential(nn.Identity(), graphed) if nested else graphed
    compiled = torch.compile(target, backend="aot_eager", fullgraph=fullgraph)
    with pytest.warns(PackgraphWarning, match="the call is traced"):
        compiled(X)
    for _ in range(3):
        out, expected = quietly(compiled, X), eager(X)
        out.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(out, expected)
    assert same_gradients(eager, graphed)
    assert set(graphed.stats.fallbacks) == {fallback.TRACED} and graphed.stats.replayed == 0
    train(graphed)
    assert graphed.stats.replayed == 3


def test_an_exported_module_is_the_plain_one():
    eager, graphed = made()
    exported = quietly(lambda: torch.export.export(nn.Sequential(graphed), (X,))).module()
    assert torch.equal(exported(X), eager(X))


def test_fake_tensors_stay_fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    _, graphed = made()
    train(graphed)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(X)
    with pytest.warns(PackgraphWarning, match="argument 'x' is a FakeTensor"):
        out = graphed(fake)
    assert type(out) is type(fake) and graphed.stats.fallbacks == {fallback.NO_KEY: 1}


def test_tensors_of_a_class_of_their_own_are_not_taken_for_plain_ones():
    class Tagged(torch.Tensor):
        pass

    eager, graphed = made()
    train(graphed)
    with pytest.warns(PackgraphWarning, match="argument 'x' is a Tagged"):
        out = graphed(X.as_subclass(Tagged))
    assert type(out) is Tagged and torch.equal(out, eager(X.as_subclass(Tagged)))


@pytest.mark.parametrize(
    "around",
    [
        contextlib.nullcontext,
        lambda: torch.device("cpu"),
        torch.enable_grad,
        lambda: torch.profiler.record_function("step"),
        lambda: torch.autograd.set_detect_anomaly(False),
        lambda: torch.autograd.profiler.profile(),
    ],
)
def test_what_changes_nothing_lets_calls_replay(around):
    eager, graphed = made(strict=True)
    for model in (eager, graphed):
        train(model)
        with around():
            train(model)
    assert graphed.stats.replayed == 6 and same_gradients(eager, graphed)


def test_another_default_device_is_another_key():
    module = One(lambda module, x: module.linear(x) * torch.ones(4).device.type.count("c"))
    eager, graphed = copy.deepcopy(module), graph(module, warmup=0)
    for model in (eager, graphed):
        train(model)
    with torch.device("meta"):
        assert torch.equal(quietly(graphed, X), eager(X))
    with torch.device("cpu"):
        train(graphed)
    train(graphed)
    assert (
        graphed.stats.captured == 2
        and graphed.stats.replayed == 9
        and graphed.stats.fallbacks.total() == 1
    )
