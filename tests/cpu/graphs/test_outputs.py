"""Outputs of a captured module: which are refused, and what callers may do with them."""

import copy

import pytest
import torch
from autogradkit import Returns, assert_same, gradients, run_both, sample, twins
from torch import nn

from packgraph import graph
from packgraph.graphs.errors import PackgraphWarning

# ---- outputs that share memory


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, y: (y, y.t()),
        lambda m, x, y: (y, y[1:]),
        lambda m, x, y: (y, y.detach()),
        lambda m, x, y: (y, x[1:]),
        lambda m, x, y: (y, m.linear.weight),
        lambda m, x, y: (y, m.linear.weight.view(-1)),
    ],
    ids=[
        "a view",
        "a part",
        "a detached alias",
        "a part of an input",
        "a parameter",
        "a view of a parameter",
    ],
)
def test_outputs_that_share_memory_are_refused(function):
    def loop(model):
        for number in range(4):
            x = sample(number)
            first, second = model(x)
            first.square().sum().backward()
            with torch.no_grad():
                second.mul_(0.5)
            outs.append([first.detach().clone(), x])
        return gradients(model)

    torch.manual_seed(1)
    eager = Returns(function)
    graphed = graph(copy.deepcopy(eager), warmup=1)
    found = []
    for model in (eager, graphed):
        outs = []
        found.append([*loop(model).values(), *(t for pair in outs for t in pair)])
    assert_same(dict(enumerate(found[0])), dict(enumerate(found[1])))
    assert graphed.stats.fallbacks["capture failed"] == 3


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, y: (y, y),
        lambda m, x, y: (y, x),
        lambda m, x, y: y.chunk(2, -1),
        lambda m, x, y: (y, y.t().clone()),
    ],
    ids=["one twice", "an input", "parts", "a copy"],
)
def test_other_outputs_are_fine(function):
    def act(model, number):
        first, second = model(sample(number))
        (first.square().sum() + 3 * (second * second.detach()).sum()).backward()
        with torch.no_grad():
            second.mul_(0.5)
        return [first, second]

    torch.manual_seed(1)
    eager = Returns(function)
    graphed = graph(copy.deepcopy(eager), warmup=1)
    run_both(eager, graphed, act)
    assert graphed.stats.replayed == 3


class Chained(nn.Module):
    """The second output is what the first was computed from, as logits are beside a loss."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.second(hidden), hidden


@pytest.mark.parametrize("both", [False, True])
def test_an_output_that_another_was_computed_from_is_no_surprise(both, recwarn):
    eager, graphed = twins(Chained, calls=0, strict=True)
    for number in range(6):
        for model in (eager, graphed):
            first, second = model(sample(number))
            (
                first.square().sum() + second.square().sum() if both else first.square().sum()
            ).backward()
        assert_same(gradients(eager), gradients(graphed))
    assert graphed.stats.replayed == 4
    assert not [w for w in recwarn if issubclass(w.category, PackgraphWarning)]
    assert graphed.stats.captured == 1 and set(graphed.stats.fallbacks) == {"warm-up"}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("look", ["retain_grad", "register_hook"])
def test_gradients_within_a_module_are_not_shown_in_part(look, late):
    """From a replay an inner output gets only what the caller's code gives it."""
    eager, graphed = twins(Chained, calls=3 if late else 0)

    def act(model, number):
        seen = []
        first, second = model(sample(number))
        second.retain_grad() if look == "retain_grad" else second.register_hook(
            lambda g: seen.append(g.clone())
        )
        (first.square().sum() + second.square().sum()).backward()
        return [second.grad] if look == "retain_grad" else seen

    if late:
        with pytest.raises(
            RuntimeError, match=r"an output of .* that other outputs were computed from has a hook"
        ):
            act(graphed, 3)
        act(eager, 3)
        eager.zero_grad()
        graphed.zero_grad()
    with pytest.warns(PackgraphWarning, match="an output that other outputs were computed from"):
        run_both(eager, graphed, act)
    assert (
        graphed.stats.fallbacks[
            "a hook or retain_grad on an output that other outputs were computed from"
        ]
        >= 3
    )


def test_a_hook_on_an_output_that_nothing_was_computed_from_fires_in_replays():
    eager, graphed = twins(Chained)

    def act(model, number):
        first, second = model(sample(number))
        first.retain_grad()
        (first.square().sum() + second.square().sum()).backward()
        return [first.grad]

    run_both(eager, graphed, act)
    assert graphed.stats.replayed >= 4


def test_the_gradient_of_an_inner_output_alone_is_an_error():
    eager, graphed = twins(Chained)
    first, second = graphed(sample(3))
    with pytest.raises(
        RuntimeError,
        match="asks for the gradient of an output that other outputs were computed from",
    ):
        torch.autograd.grad(first.square().sum() + second.square().sum(), second)
    first, second = eager(sample(3))
    torch.autograd.grad(first.square().sum() + second.square().sum(), second)


class Exponential(nn.Module):
    """Its backward reads one output, not the other."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x)
        return hidden.exp(), hidden * 2


@pytest.mark.parametrize("which", [0, 1])
def test_writing_to_an_output_that_the_backward_reads_is_an_error(which):
    eager, graphed = twins(Exponential)

    def act(model):
        outputs = model(sample(5))
        loss = outputs[0].square().sum() if which else outputs[0].sum()
        outputs[which].detach().add_(1.0)
        loss.backward()

    for model in (eager, graphed):
        if which:
            act(model)
        else:
            with pytest.raises(
                RuntimeError,
                match=r"inplace operation|an argument or output of shape .* changed in",
            ):
                act(model)
    if which:
        assert_same(gradients(eager), gradients(graphed))
