"""What graphs bake about a module and its Python state: seen when it changes, undone after a
capture, or refused."""

import random

import pytest
import torch
from statekit import One, Staged, X, captured, quietly, train
from torch import nn

from packgraph.graphs.checks.host_sync import refuse_unsafe
from packgraph.graphs.checks.operations import operation_of
from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.graphed import graph

# ---- facts that change after the capture


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_that_comes_later_fires(kind):
    graphed = captured(One(), X)
    seen = []
    handle = getattr(graphed.module.linear.weight, kind)(lambda _: seen.append(1))
    with pytest.warns(PackgraphWarning, match="a parameter got its first hook"):
        graphed(X).sum().backward()
    train(graphed, X, 2)
    assert len(seen) == 3 and graphed.stats.replayed == 5
    handle.remove()
    train(graphed, X)
    assert len(seen) == 3


def masked(module, x):
    return module.linear(x) if module.mask is None else module.linear(x) * module.mask


def buffer_of_none():
    module = One(masked)
    module.register_buffer("mask", None)
    return module


CHANGES = {
    "a bias where none was": (
        lambda: nn.Linear(4, 4, bias=False),
        lambda m: setattr(m, "bias", nn.Parameter(torch.ones(4))),
    ),
    "a buffer that was None": (buffer_of_none, lambda m: setattr(m, "mask", torch.zeros(4))),
    "an attribute that was None": (
        lambda: One(masked, mask=None),
        lambda m: setattr(m, "mask", torch.zeros(4)),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(1.0)),
        lambda m: setattr(m[1], "p", 0.0),
    ),
    "a number": (
        lambda: One(lambda m, x: m.linear(x) * m.alpha, alpha=1.0),
        lambda m: setattr(m, "alpha", 0.5),
    ),
    "a new attribute": (
        lambda: One(lambda m, x: m.linear(x) * getattr(m, "alpha", 1.0)),
        lambda m: setattr(m, "alpha", 0.5),
    ),
    "a function": (
        lambda: One(lambda m, x: m.act(m.linear(x)), act=torch.relu),
        lambda m: setattr(m, "act", torch.tanh),
    ),
    "a tensor in a list": (
        lambda: One(lambda m, x: m.linear(x) * m.tables[0], tables=[torch.ones(4)]),
        lambda m: m.tables.__setitem__(0, torch.zeros(4)),
    ),
    "a tensor in a dict of tuples": (
        lambda: One(lambda m, x: m.linear(x) * m.t["a"][0], t={"a": (torch.ones(4),)}),
        lambda m: m.t.update(a=(torch.zeros(4),)),
    ),
    "a number in a list": (
        lambda: One(lambda m, x: m.linear(x) * m.scales[1], scales=[1, 2]),
        lambda m: m.scales.__setitem__(1, 3),
    ),
    "a longer list": (
        lambda: One(lambda m, x: m.linear(x) * len(m.scales), scales=[1]),
        lambda m: m.scales.append(2),
    ),
    "other strides": (
        lambda: nn.Linear(4, 4),
        lambda m: setattr(m.weight, "data", m.weight.data.t()),
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_fact_that_changes_after_the_capture_is_seen(case):
    make, change = CHANGES[case]
    torch.manual_seed(3)
    module = make()
    graphed = captured(module, X)
    change(module)
    with pytest.warns(PackgraphWarning, match="capturing again"):
        out = graphed(X)
    assert torch.equal(out, module(X)) and graphed.stats.replayed == 3
    train(graphed, X)
    assert graphed.stats.recaptures["module changed"] == 1


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda m: setattr(m.weight, "data", m.weight.data.clone()), "in place"),
        (lambda m: m.weight.requires_grad_(False), "requires_grad mismatch"),
        (lambda m: setattr(m, "forward", lambda x: x), "as an argument"),
    ],
)
def test_the_warning_says_what_fits(change, remedy):
    graphed = captured(nn.Linear(4, 4), X)
    change(graphed.module)
    with pytest.warns(PackgraphWarning, match=remedy):
        graphed(X)


def test_equal_values_are_no_change():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    graphed = captured(module, X)
    module[1].p, module[0].in_features = float("0.1"), int("4")
    train(graphed, X)
    assert graphed.stats.replayed == 3 and not graphed.stats.recaptures


# ---- what forward does to Python


def counts(module, x):
    module.calls += 1
    return module.linear(x)


def keeps_a_loss(module, x):
    out = module.linear(x)
    module.auxiliary = out.pow(2).mean()
    return out


def appends(module, x):
    module.log["losses"].append(1.0)
    return module.linear(x)


def replaces_a_buffer(module, x):
    module.average = 0.9 * module.average + 0.1 * x.mean(0)
    return module.linear(x) + module.average


def with_buffer():
    module = One(replaces_a_buffer)
    module.register_buffer("average", torch.zeros(4))
    return module


ASSIGNMENTS = {
    "calls": lambda: One(counts, calls=0),
    "auxiliary": lambda: One(keeps_a_loss),
    "log": lambda: One(appends, log={"losses": []}),
    "average": with_buffer,
}


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_a_forward_that_assigns_is_refused_and_undone(name):
    eager, graphed = ASSIGNMENTS[name](), graph(ASSIGNMENTS[name](), warmup=1)
    for model in (eager, graphed):
        model(X).sum().backward() if model is eager else train(model, X)
    before = str(vars(graphed.module).get(name))
    strict = graph(graphed.module, warmup=0, strict=True)
    with pytest.raises(CaptureError, match=r"forward changes a .* that was there") as caught:
        strict(X)
    assert __file__ in caught.value.where and "return the value" in caught.value.remedy
    assert before == str(vars(graphed.module).get(name))
    for model in (eager, graphed):
        train(model, X, 3)
    assert graphed.stats.fallbacks["capture failed"] == 3
    now = [getattr(model, name) for model in (eager, graphed)]
    assert torch.equal(*now) if isinstance(now[0], torch.Tensor) else now[0] == now[1]


def test_the_line_of_the_assignment_is_named():
    class Counting(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            self.calls = getattr(self, "calls", 0) + 1
            return out

    with pytest.raises(CaptureError, match="forward changes a Counting") as caught:
        graph(nn.Sequential(Counting(4, 4)), warmup=0, strict=True)(X)
    line = Counting.forward.__code__.co_firstlineno + 2
    assert caught.value.where == f"{__file__}:{line} in forward"


@pytest.mark.parametrize("draw", ["random", "numpy"])
def test_drawing_random_numbers_on_the_host_is_refused_and_undone(draw):
    numpy = pytest.importorskip("numpy")
    function = random.random if draw == "random" else numpy.random.rand
    random.seed(1)
    numpy.random.seed(1)
    expected = [function() for _ in range(2)]
    random.seed(1)
    numpy.random.seed(1)
    with pytest.raises(CaptureError) as caught:
        graph(One(lambda m, x: m.linear(x) * float(function())), warmup=0, strict=True)(X)
    assert __file__ in caught.value.where
    assert [function() for _ in range(2)] == expected


def test_an_eager_stage_may_do_what_it_likes():
    def between(module, state):
        module.seen = getattr(module, "seen", 0) + 1
        module.last = state["x"].detach().sum()
        random.random()
        return state

    module = Staged(between)
    graphed = graph(module, scope=["attn", "mlp"], warmup=1, strict=True)
    for _ in range(4):
        graphed(X).sum().backward()
    assert module.seen == 4 and graphed.stats.replayed == 3 and graphed.stats.captured == 2


def test_a_failed_capture_is_not_tried_again_because_eager_calls_assign():
    graphed = graph(One(counts, calls=0), warmup=0)
    for rows in (2, 3, 2, 3, 2):
        train(graphed, X[:rows])
    assert graphed.module.calls == 5 and graphed.failures == 2
    assert graphed.stats.fallbacks["capture failed"] == 5


def test_a_call_that_failed_is_tried_again_when_the_user_changes_the_module():
    def forward(module, x):
        return counts(module, x) if module.counting else module.linear(x)

    module = One(forward, calls=0, counting=True)
    graphed = graph(module, warmup=0)
    train(graphed, X, 3)
    module.counting = False
    train(graphed, X, 3)
    assert module.calls == 3 and graphed.stats.captured == 1 and graphed.stats.replayed == 3


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_the_lists_that_an_rnn_makes_anew_are_put_back(kind):
    module = kind(4, 4)
    weights = list(module._flat_weights)
    graphed = graph(module, warmup=1, strict=True)
    for _ in range(4):
        graphed(X[None])[0].square().sum().backward()
    assert graphed.stats.captured == 1
    assert all(a is b for a, b in zip(weights, module._flat_weights, strict=True))


def test_a_number_in_the_result_is_that_of_eager():
    module = One(lambda m, x: (m.linear(x), m.scale, m.scale * 2), scale=1.5)
    graphed = graph(module, warmup=0)
    for scale in (1.5, 1.5, 2.5, 2.5):
        module.scale = scale
        out = quietly(graphed, X)
        assert torch.equal(out[0], module.linear(X)) and out[1:] == (scale, scale * 2)
    assert graphed.stats.replayed == 4


# ---- random generators


def noisy(module, x):
    held = module.held
    return module.linear(x) * torch.rand(4, generator=held[0] if isinstance(held, list) else held)


@pytest.mark.parametrize("wrap", [lambda g: g, lambda g: [g]], ids=["attribute", "list"])
def test_a_generator_that_comes_after_wrapping_is_advanced_as_in_eager(wrap):
    states, outputs = [], []
    for wrapped in (False, True):
        module = One(noisy)
        model = graph(module, warmup=0) if wrapped else module
        generator = torch.Generator().manual_seed(5)
        module.held = wrap(generator)
        outputs.append([quietly(model, X) for _ in range(4)])
        states.append(generator.get_state())
    assert torch.equal(*states)
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def seeds_by_function(module, x):
    torch.manual_seed(7)
    return module.linear(x) * torch.rand(4)


def seeds_the_default(module, x):
    torch.default_generator.manual_seed(7)
    return module.linear(x) * torch.rand(4)


def seeds_its_own(module, x):
    module.held.manual_seed(5)
    return module.linear(x) * torch.rand(4, generator=module.held)


@pytest.mark.parametrize("forward", [seeds_by_function, seeds_the_default, seeds_its_own])
def test_seeding_inside_a_region_is_refused(forward):
    module = One(forward, held=torch.Generator().manual_seed(5))
    state = torch.get_rng_state()
    with pytest.raises(CaptureError) as caught:
        graph(module, warmup=0, strict=True)(X)
    assert __file__ in caught.value.where and f"in {forward.__name__}" in caught.value.where
    assert torch.equal(state, torch.get_rng_state()) and module.held.initial_seed() == 5
    torch.manual_seed(1)


def test_a_generator_from_elsewhere_is_refused_at_the_users_line():
    stranger = torch.Generator().manual_seed(1)
    with pytest.raises(CaptureError) as caught:
        graph(
            One(lambda m, x: m.linear(x) * torch.rand(4, generator=stranger)), warmup=0, strict=True
        )(X)
    assert "test_module_state.py" in caught.value.where


def test_random_numbers_of_the_host_are_refused_on_a_device():
    rand = operation_of(torch.ops.aten.rand.default)
    assert rand is not None
    with pytest.raises(CaptureError, match="drawn on the cpu inside a captured stage on cuda"):
        refuse_unsafe(rand, ([4],), {}, [4], "cuda")
    refuse_unsafe(rand, ([4],), {"device": torch.device("cuda")}, [4], "cuda")
