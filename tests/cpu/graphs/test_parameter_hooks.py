"""Hooks of parameters that a replay's backward brings no gradient: autograd must not seem to bring
one."""

import contextlib
import gc
import weakref

import pytest
import torch

from packgraph.graphs.graphed import graph


class Two(torch.nn.Module):
    """Two outputs; the weight reaches the first one only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.linear(x), x * self.scale


def hooked(module, kind):
    """What a hook of the weight has seen, and its handle."""
    seen = []
    if kind == "register_hook":
        return seen, module.linear.weight.register_hook(
            lambda gradient: seen.append(gradient.clone())
        )

    def descend(parameter):  # as an optimizer in the backward does
        seen.append(parameter.grad.clone())
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)

    return seen, module.linear.weight.register_post_accumulate_grad_hook(descend)


def train(model, module, seen, handle, keeps):
    torch.manual_seed(1)
    counts = []
    for step in range(10):
        x = torch.randn(3, 4)
        one, two = model(x)
        loss = one.sum() if step % 3 == 0 else two.sum() if step % 3 == 1 else one.sum() + two.sum()
        if step == 5:
            loss = loss + (x @ module.linear.weight).sum()  # a gradient from outside of the region
        loss.backward()
        counts.append(len(seen))
        if step == 8:
            handle.remove()
        if not keeps:
            module.linear.weight.grad = None
    return counts


@pytest.mark.parametrize("keeps", [True, False], ids=["accumulated", "set to None"])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_is_called_when_eager_calls_it(kind, keeps):
    eager, module = Two(), Two()
    graphed = graph(module, warmup=1)
    runs = [(eager, eager, *hooked(eager, kind)), (graphed, module, *hooked(module, kind))]
    counts = [train(model, own, seen, handle, keeps) for model, own, seen, handle in runs]
    assert counts[0] == counts[1] and graphed.stats.replayed > 5
    assert all(map(torch.equal, runs[0][2], runs[1][2]))
    assert torch.equal(eager.linear.weight, module.linear.weight)


@contextlib.contextmanager
def only_inputs(module, handles):
    yield lambda loss: loss.backward(inputs=[module.scale])


@contextlib.contextmanager
def fails(module, handles):
    def backward(loss):
        with pytest.raises(KeyError):
            loss.backward()

    with removed(module.scale.register_hook(raises)):
        yield backward


@contextlib.contextmanager
def removes_one(module, handles):
    with removed(module.scale.register_hook(lambda gradient: handles.pop().remove())):
        yield lambda loss: loss.backward()


@contextlib.contextmanager
def nests(module, handles):
    with removed(module.scale.register_hook(lambda gradient: inner(module))):
        yield lambda loss: loss.backward()


@contextlib.contextmanager
def zeroes(module, handles):
    with removed(
        module.scale.register_post_accumulate_grad_hook(lambda parameter: module.zero_grad())
    ):
        yield lambda loss: loss.backward()


@contextlib.contextmanager
def removed(handle):
    yield
    handle.remove()


def raises(gradient):
    raise KeyError("the user's own error")


def inner(module):
    with torch.enable_grad():
        (torch.ones(4, requires_grad=True) * module.scale.detach()).sum().backward()


@pytest.mark.parametrize("later", ["removed", "another"])
@pytest.mark.parametrize(
    "happens", [only_inputs, fails, removes_one, nests, zeroes], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_survive_whatever_happens_to_a_backward(kind, happens, later):
    def run(model, module):
        seen, handle = hooked(module, kind)
        handles, found = [handle], []
        for step in range(6):
            torch.manual_seed(step)
            if step == 3:
                with happens(module, handles) as backward:
                    backward(model(torch.randn(3, 4))[1].sum())
            else:
                sum(out.sum() for out in model(torch.randn(3, 4))).backward()
            if step == 3 and later == "another":
                getattr(module.linear.weight, kind)(lambda value: found.append("another"))
            elif step == 3 and handles:
                handles.pop().remove()
            found.append(len(seen))
            found.append(module.linear.weight.grad is None)
        return found, [parameter.grad for parameter in module.parameters()]

    eager, module = Two(), Two()
    graphed = graph(module, warmup=1)
    (expected, gradients), (found, others) = run(eager, eager), run(graphed, module)
    assert expected == found and graphed.stats.replayed == 5
    assert all(
        (a is None and b is None) or torch.equal(a, b)
        for a, b in zip(gradients, others, strict=True)
    )


def test_nothing_is_held_after_a_backward_that_did_not_come_to_a_parameter():
    module = Two()
    graphed = graph(module, warmup=1)
    hooked(module, "register_hook")
    for _ in range(3):
        graphed(torch.randn(3, 4))[1].sum().backward(inputs=[module.scale])
    gone = weakref.ref(module.linear.weight)
    graphed.close()
    del module, graphed
    gc.collect()
    assert gone() is None
