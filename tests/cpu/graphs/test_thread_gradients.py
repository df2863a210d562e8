"""A second thread begins to train, and backwards that run their forward again: step by step, by
events."""

import contextlib
import copy
import threading

import pytest
import torch
import torch.nn.functional as functional
from statekit import One, X, quietly
from threadkit import Wide, gradients, together, whole
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from packgraph.graphs import recompute, replay
from packgraph.graphs.fallback import eager as run_eagerly
from packgraph.graphs.gradients import SeparateGradients
from packgraph.graphs.graphed import control, graph
from packgraph.graphs.parameters import ParameterEdge

# ---- a second thread


class SlowAdds(TorchDispatchMode):
    """What is added in place in this thread is read, and written a while later."""

    def __init__(self):
        super().__init__()
        self.read, self.go_on, self.written = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.add_.Tensor:
            return function(*args, **(kwargs or {}))
        total = args[0] + args[1]
        self.read.set()
        self.go_on.wait(0.5)
        args[0].copy_(total)
        self.written.set()
        return args[0]


def trained(steps=3, width=8):
    """An eager and a graphed module, alike, that this thread has trained."""
    torch.manual_seed(0)
    eager, graphed = Wide(width), graph(Wide(width), warmup=1)
    graphed.load_state_dict(eager.state_dict())
    for model in (eager, graphed):
        for seed in range(steps):
            model(whole(4, seed, width)).sum().backward()
    assert graphed.stats.replayed == steps - 1
    return eager, graphed


def assert_same_sums(eager, graphed, seeds=()):
    """Gradients are those of the eager module, after these steps of it."""
    for seed in seeds:
        eager(whole(4, seed, 8)).sum().backward()
    for name, gradient in gradients(eager).items():
        assert torch.equal(gradient, gradients(graphed)[name]), name


def test_autograd_adds_while_another_thread_replays(monkeypatch):
    """A second thread begins to train: what autograd adds for it takes as long as a replay of the
    first thread."""
    eager, graphed = trained()
    slow, take = SlowAdds(), SeparateGradients.take

    def take_late(separate):
        slow.go_on.set()
        slow.written.wait(0.5)
        return take(separate)

    monkeypatch.setattr(SeparateGradients, "take", take_late)
    loss = graphed(whole(4, 10, 8)).sum()

    def second():
        with slow:  # which makes the call an eager one
            quietly(lambda: graphed(whole(4, 11, 8)).sum().backward())

    def first():
        assert slow.read.wait(60)
        loss.backward()

    assert not (errors := together(first, second)), errors
    assert_same_sums(eager, graphed, (10, 11))


class SlowCopies(TorchDispatchMode):
    """What is made of another tensor in this thread comes a while after that was read."""

    def __init__(self):
        super().__init__()
        self.read, self.added = threading.Event(), threading.Event()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.clone.default, torch.ops.aten.add.Tensor):
            self.read.set()
            self.added.wait(0.2)
        return result


@pytest.mark.parametrize("where", ["call", "backward"])
def test_autograd_adds_while_another_thread_moves_a_gradient(where):
    """The moment in which `.grad` becomes a tensor of its own takes long."""
    eager, graphed = trained()
    slow = SlowCopies()

    def first():
        with (
            slow if where == "call" else contextlib.nullcontext()
        ):  # which makes the call an eager one
            loss = quietly(lambda: graphed(whole(4, 10, 8)).sum())
        with slow:
            loss.backward()

    def second():
        if where == "call":
            slow.read.wait(1)
        with run_eagerly("a test"):
            loss = graphed(whole(4, 11, 8)).sum()
        slow.read.wait(1)
        loss.backward()
        slow.added.set()

    assert not (errors := together(first, second)), errors
    assert_same_sums(eager, graphed, (10, 11))


def test_a_backward_that_has_begun_when_a_second_thread_comes(monkeypatch):
    """Whether gradients are added in place is decided when nobody else can launch."""
    eager, graphed = trained()
    begun, go_on, is_whole = threading.Event(), threading.Event(), ParameterEdge.is_whole

    def wait(edge):
        if threading.current_thread().name == "first":
            begun.set()
            assert go_on.wait(60)
        return is_whole(edge)

    monkeypatch.setattr(ParameterEdge, "is_whole", wait)
    loss = graphed(whole(4, 10, 8)).sum()
    first = threading.Thread(target=loss.backward, name="first")
    first.start()
    assert begun.wait(60)
    assert not together(lambda: graphed(whole(4, 11, 8)).sum().backward())
    go_on.set()
    first.join(60)
    assert not first.is_alive()
    assert not any(buffer.is_grad() for buffer in control(graphed).capturer._buffers.made.values())
    assert_same_sums(eager, graphed, (10, 11))


def test_a_thread_may_change_gradients_while_another_one_runs_a_forward():
    """`.grad` stays the tensor that it is until a second thread has a backward."""
    eager, graphed = trained()
    losses = {}
    for model in (eager, graphed):
        grads = [parameter.grad for parameter in model.parameters()]
        assert not together(lambda model=model: losses.update({model: model(whole(4, 7, 8)).sum()}))
        torch._foreach_mul_(grads, 0.5)
        assert not together(losses.pop(model).backward)
    assert_same_sums(eager, graphed)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_see_no_other_gradients_when_a_second_thread_comes(register):
    """They come while a call is in flight: after that its parameters give their gradients to
    autograd anyway."""
    counts = []
    for model in trained():
        loss, seen = model(whole(4, 7, 8)).sum(), []
        getattr(model.first.bias, register)(
            lambda tensor, seen=seen: seen.append(tensor.sum().item())
        )
        assert not together(
            lambda model=model: quietly(lambda: model(whole(4, 8, 8)).sum().backward())
        )
        loss.backward()
        counts.append((seen, gradients(model)["first.bias"].tolist()))
    assert counts[0] == counts[1]


def test_a_frozen_parameter_is_no_obstacle_to_a_second_thread():
    models = trained()
    for model in models:
        model.first.bias.requires_grad_(False)
        errors = together(
            lambda model=model: quietly(lambda: model(whole(4, 8, 8)).sum().backward())
        )
        assert not errors, errors
    for name, gradient in gradients(models[0]).items():
        assert torch.equal(gradient, gradients(models[1])[name]), name


# ---- forwards that are run again


class Pair(nn.Module):
    """Two outputs, of which the loss of warm-up reads the first. within: run under a checkpoint."""

    def __init__(self, within=False):
        super().__init__()
        self.linear, self.within = nn.Linear(4, 4), within

    def forward(self, x):
        hidden = (
            checkpoint(self._hidden, x, use_reentrant=False) if self.within else self._hidden(x)
        )
        return hidden, functional.dropout(hidden, 0.5)

    def _hidden(self, x):
        return functional.dropout(self.linear(x), 0.5).square()


def pairs(within=False):
    torch.manual_seed(0)
    eager = Pair(within)
    graphed = graph(copy.deepcopy(eager), warmup=1)
    for model in (eager, graphed):
        torch.manual_seed(1)
        for _ in range(2):
            model(X)[0].sum().backward()
    assert graphed.stats.replayed == 1
    return eager, graphed


@pytest.mark.parametrize("within", [False, True], ids=["plain", "checkpoint"])
def test_a_forward_that_is_run_again_draws_what_its_replay_has_drawn(within):
    found = []
    for model in pairs(within):
        torch.manual_seed(5)
        quietly(lambda model=model: sum(map(torch.sum, model(X))).backward())
        found.append([*gradients(model).values(), torch.get_rng_state()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("home", "name"), [(replay, "replay_forward"), (recompute, "_compare")], ids=["replay", "again"]
)
def test_a_thread_that_draws_while_a_forward_runs_again_or_did_is_an_error(home, name, monkeypatch):
    _, graphed = pairs()
    run = getattr(home, name)

    def run_beside_another(*args):
        made = run(*args)
        assert not together(lambda: torch.rand(4))
        return made

    monkeypatch.setattr(home, name, run_beside_another)
    outs, state = graphed(X), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="another thread has drawn random numbers"):
        sum(map(torch.sum, outs)).backward()
    assert torch.equal(state, torch.get_rng_state())


def test_a_forward_is_run_again_while_another_thread_captures(monkeypatch):
    """The capture has put stand-ins in place of parameters: it is waited for."""
    entered, leave = (threading.Event() for _ in range(2))

    def forward(module, x):
        if len(x) == 2 and not leave.is_set():
            entered.set()
            leave.wait(60)
        return module.linear(x), module.linear(x).square()

    eager, graphed = One(forward), graph(One(forward), warmup=1)
    graphed.load_state_dict(eager.state_dict())
    for model in (eager, graphed):
        for _ in range(2):
            model(X)[0].sum().backward()
    outs = graphed(X)
    capturing = threading.Thread(target=lambda: quietly(lambda: graphed(X[:2])[0].sum().backward()))
    recompute = replay.recompute_gradients

    def recompute_then(*args):
        monkeypatch.undo()
        capturing.start()
        assert entered.wait(60)
        threading.Timer(0.3, leave.set).start()
        return recompute(*args)

    monkeypatch.setattr(replay, "recompute_gradients", recompute_then)
    quietly(lambda: sum(map(torch.sum, outs)).backward())
    capturing.join(60)
    sum(map(torch.sum, eager(X))).backward()
    eager(X[:2])[0].sum().backward()
    for name, gradient in gradients(eager).items():
        torch.testing.assert_close(gradient, gradients(graphed)[name])
