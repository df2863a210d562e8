"""Hooks of parameters that a replay's backward brings no gradient: autograd must not seem to bring one."""
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
        return seen, module.linear.weight.register_hook(lambda gradient: seen.append(gradient.clone()))

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
