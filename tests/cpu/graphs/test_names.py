"""Whose name is it: the wrapped module's own names win over those of what wraps it, for reading,
setting, deleting."""

import copy
import gc
import inspect
import pickle
import types
import weakref

import pytest
import torch
from statekit import One, Staged, X, captured, quietly, train
from torch import nn

import packgraph
from packgraph.graphs.errors import PackgraphWarning
from packgraph.graphs.graphed import Control, GraphedModule, graph

NAMES = [
    "stats",
    "device",
    "strict",
    "capacities",
    "consensus",
    "capturer",
    "backend",
    "frozen",
    "acquire",
    "build",
    "close",
    "failures",
    "module",
    "fall_back",
    "run_eagerly",
    "compiles",
    "capture_backend",
    "slots",
    "_slots",
    "_program",
    "_lock",
    "_backend",
    "_control",
]


def same_gradients(one, other):
    pairs = [(a.grad, b.grad) for a, b in zip(one.parameters(), other.parameters(), strict=True)]
    return any(a is not None for a, _ in pairs) and all(
        a is b if a is None else torch.equal(a, b) for a, b in pairs
    )


KINDS = ["child", "buffer", "parameter", "attribute", "class attribute"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.slow] * (kind != KINDS[number % len(KINDS)]))
        for number, name in enumerate(NAMES)
        for kind in KINDS
    ],
)
def test_the_modules_own_names_win(name, kind):
    forward = lambda module, x: (  # noqa: E731
        module.linear(x) * getattr(module, name)
        if kind != "child"
        else getattr(module, name)(module.linear(x))
    )
    kinds = {
        "child": lambda: nn.Linear(4, 4),
        "buffer": lambda: nn.Buffer(torch.tensor(3.0)),
        "parameter": lambda: nn.Parameter(torch.tensor(3.0)),
        "attribute": lambda: 3.0,
    }
    if kind == "class attribute":
        module = type("Named", (One,), {name: 3.0})(forward)
    else:
        module = One(forward)
        setattr(module, name, kinds[kind]())
    eager, graphed = copy.deepcopy(module), graph(module, warmup=0, strict=True)
    for model in (eager, graphed):
        for _ in range(3):
            model(X).square().sum().backward()
    control = packgraph.control(graphed)
    assert control.stats.replayed == 3 and control.stats.captured == 1
    assert getattr(graphed, name) is getattr(module, name)
    assert same_gradients(eager, module)
    assert list(graphed.state_dict()) == list(module.state_dict()) == list(eager.state_dict())
    if kind != "class attribute":
        delattr(graphed, name)
        assert name not in dict(module.named_parameters()) and name not in vars(module)
    control.close()
    assert control.acquire((X,), {}) == "closed"


@pytest.mark.parametrize("name", ["strict", "stats", "scale", "lends"])
def test_what_is_set_reaches_the_module(name):
    module = One(lambda module, x: module.linear(x) * getattr(module, name, 1.0))
    graphed = captured(module, X)
    for value in (5.0, 2.0):
        setattr(graphed, name, value)
        with pytest.warns(PackgraphWarning, match=rf"{name}|an attribute of the module"):
            out = graphed(X)
        assert getattr(module, name) == value and torch.equal(out, module.linear(X) * value)
    delattr(graphed, name)
    assert not hasattr(module, name) and torch.equal(quietly(graphed, X), module.linear(X))
    with pytest.raises(AttributeError):
        delattr(graphed, name)


def test_the_wrappers_names_are_there_where_the_module_has_none():
    graphed = graph(nn.Linear(4, 4), warmup=0)
    control = packgraph.control(graphed)
    assert type(control) is Control and type(graphed) is GraphedModule
    assert (
        graphed.stats is control.stats
        and graphed.capacities == ()
        and graphed.backend == "recorder"
    )
    assert {"stats", "close", "build", "weight", "in_features"} <= set(dir(graphed))
    with pytest.raises(AttributeError, match="no_such_name"):
        graphed.no_such_name  # noqa: B018
    for other in (nn.Linear(4, 4), None, control):
        with pytest.raises(TypeError, match=r"packgraph\.control .* packgraph\.graph returned"):
            packgraph.control(other)


def test_a_property_that_fails_is_not_taken_for_a_name_of_the_wrapper():
    class Failing(nn.Linear):
        @property
        def stats(self):
            raise AttributeError("not fitted yet")

    graphed = graph(Failing(4, 4), warmup=0)
    with pytest.raises(AttributeError, match=r"no attribute .stats."):
        graphed.stats  # noqa: B018
    assert not hasattr(graphed, "stats") and packgraph.control(graphed).stats.captured == 0


def test_methods_of_every_module_that_this_one_overrides_are_the_modules():
    class Own(nn.Linear):
        def named_parameters(self, *args, **kwargs):
            return iter([("only", self.weight)])

        def half(self):
            self.halved = True
            return self

        def extra_repr(self):
            return "own words"

    module = Own(4, 4)
    graphed = graph(module)
    assert [name for name, _ in graphed.named_parameters()] == ["only"] and len(
        list(graphed.parameters())
    ) == 1
    assert graphed.half() is graphed and module.halved and module.weight.dtype == torch.float32
    assert "own words" in repr(graphed)
    assert graphed.to(torch.float64) is graphed and module.weight.dtype == torch.float64
    assert graphed.eval() is graphed and not module.training
    module.zero_grad = lambda: "patched"
    assert graphed.zero_grad() == "patched"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda x: x, "a function"),
        (nn.Linear, r"the class Linear.*Linear\(\.\.\.\)"),
        (None, "NoneType"),
        (torch.ones(2), "Tensor"),
        ([nn.Linear(2, 2)], "list"),
    ],
)
def test_what_is_no_module_is_refused_in_words(given, said):
    with pytest.raises(
        TypeError, match=rf"(?s)packgraph\.graph wraps a torch\.nn\.Module, not .*{said}"
    ):
        graph(given)


class Patched:
    """What a library does: keep the forward that was there, and put another one in its place."""

    def __init__(self, model, how):
        self.original = model.forward
        if how == "function":
            model.forward = self.call
        elif how == "method":  # bound to what was given, as accelerate does
            model.forward = types.MethodType(lambda module, *args: self.call(*args), model)
        else:  # past every __setattr__, as liger-kernel does
            model.__dict__["forward"] = self.call

    def call(self, *args):
        return self.original(*args) * 2


@pytest.mark.parametrize("how", ["function", "method", "table"])
def test_a_patched_forward_takes_effect(how):
    module = One()
    eager, graphed = copy.deepcopy(module), captured(module, X)
    train(eager, X, 2)
    for model in (eager, graphed):
        Patched(model, how)
        train(model, X, 3)
        assert torch.equal(quietly(model, X), model.linear(X) * 2)
    assert same_gradients(eager, module)
    assert graphed.stats.recaptures["module changed"] == 1 and graphed.stats.fallbacks.total() == 0
    del graphed.forward
    train(graphed, X, 2)
    assert (
        torch.equal(quietly(graphed, X), module.linear(X)) and graphed.stats.fallbacks.total() == 0
    )
    with pytest.raises(AttributeError):
        del graphed.forward


def test_a_forward_that_is_not_patched_is_not_captured_again():
    graphed = captured(One(), X)
    assert inspect.signature(graphed.forward) == inspect.signature(graphed.module.forward)
    assert graphed.forward == graphed.module.forward
    train(graphed, X, 2)
    assert graphed.stats.captured == 1 and graphed.stats.replayed == 4


def test_a_patched_forward_may_be_put_back():
    graphed = captured(One(), X)
    patched = Patched(graphed, "function")
    train(graphed, X)
    graphed.forward = patched.original
    train(graphed, X, 2)
    assert (
        torch.equal(quietly(graphed, X), graphed.linear(X)) and graphed.stats.fallbacks.total() == 0
    )


def test_a_method_with_super_may_be_bound_to_the_wrapper():
    class Doubled(One):
        def forward(self, x):
            return super().forward(x) * 2

    graphed = captured(Doubled(), X)
    graphed.forward = types.MethodType(graphed.forward.__func__, graphed)
    assert torch.equal(quietly(graphed, X), graphed.linear(X) * 2)
    assert vars(graphed.module)["forward"].__self__ is graphed.module


def test_a_staged_module_with_a_patched_forward_runs_it_eagerly():
    module = Staged()
    eager, graphed = copy.deepcopy(module), graph(module, warmup=0, scope=["attn", "mlp"])
    train(graphed, X, 2)
    train(eager, X, 2)
    Patched(eager, "function")
    Patched(graphed, "function")
    with pytest.warns(PackgraphWarning, match="its forward was replaced"):
        out = graphed(X)
    assert torch.equal(out, eager(X))
    for model in (eager, graphed):
        train(model, X, 2)
    assert dict(graphed.stats.fallbacks) == {
        "its forward was replaced, so stages no longer say what it does": 3
    }
    assert same_gradients(eager, module)
    replayed = graphed.stats.replayed
    del graphed.forward
    train(graphed, X, 2)
    assert graphed.stats.replayed == replayed + 2


def test_a_forward_patched_in_the_class_of_a_staged_module_is_not_replayed_by_its_stages():
    class Own(Staged):
        pass

    graphed = graph(Own(), warmup=0, scope=["attn", "mlp"])
    train(graphed, X, 2)
    Own.forward = lambda self, x: x * 3
    assert torch.equal(quietly(graphed, X), X * 3)
    assert graphed.stats.fallbacks.total() == 1


def test_hooks_of_the_graphed_module_run_around_replays_and_see_it():
    graphed, seen = captured(One(), X), []
    graphed.register_forward_pre_hook(lambda module, args: seen.append(module) or (args[0] * 2,))
    graphed.register_forward_hook(lambda module, args, out: seen.append(module) or out + 1)
    graphed.register_full_backward_hook(lambda module, grads, outs: seen.append(module))
    out = graphed(X.clone().requires_grad_())
    out.square().sum().backward()
    assert torch.equal(out, graphed.linear(X * 2) + 1) and seen == [graphed] * 3
    assert graphed.stats.replayed == 3 and not graphed.module._forward_hooks


def test_a_graphed_module_is_freed_at_once_and_copied_as_its_module():
    graphed = captured(One(), X)
    control = packgraph.control(graphed)
    gone = [weakref.ref(graphed), weakref.ref(control), weakref.ref(control.module)]
    assert type(copy.deepcopy(graphed)) is One and copy.copy(graphed) is control.module
    assert type(pickle.loads(pickle.dumps(graph(nn.Linear(2, 2))))) is nn.Linear
    gc.collect()
    gc.disable()
    try:
        del graphed, control
        assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.enable()


def test_the_class_of_a_graphed_module_has_a_forward_with_a_signature():
    """Trainers look at `type(model).forward` for names of labels."""
    assert "self" in inspect.signature(type(graph(One())).forward).parameters


def test_hooks_of_a_graphed_module_inside_another_are_seen():
    inner = graph(One(), warmup=0)
    outer = graph(nn.Sequential(nn.Identity(), inner), warmup=0)
    train(outer, X, 2)
    inner.register_forward_hook(lambda module, args, out: out + 1)
    with pytest.warns(PackgraphWarning, match="forward hooks"):
        out = outer(X)
    assert torch.equal(out, inner.linear(X) + 1)
