"""A frozen block looks at calls only briefly, but at all that may differ between two of its
calls."""

import pytest
import torch
from torch import nn

from packgraph.graphs import capture
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.graphed import graph
from packgraph.graphs.guards import Guards
from packgraph.graphs.stages import Stage


class Scored(nn.Module):
    """A linear layer and a loss."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).tanh().mean()


def prepared():
    """A graphed module that has its graphs, and a call's argument."""
    torch.manual_seed(0)
    graphed, x = graph(Scored(), warmup=0), torch.randn(3, 4)
    graphed.forward_backward(x)
    return graphed, x


def test_evaluation_is_seen():
    graphed, x = prepared()
    with graphed.frozen():
        graphed.forward_backward(x)
        graphed.eval()
        graphed.linear.weight.requires_grad_(False)  # what is promised holds for one mode
        graphed(x).backward()
    assert graphed.linear.weight.grad is not None and not graphed.stats.fallbacks
    before = graphed.linear.weight.grad.clone()
    graphed(x).backward()
    assert torch.equal(graphed.linear.weight.grad, before)


def test_closing_is_seen():
    graphed, x = prepared()
    with graphed.frozen():
        graphed.forward_backward(x)
        graphed.close()
        graphed(x)
    assert dict(graphed.stats.fallbacks) == {"closed": 1} and not graphed.slots.all


def test_autocast_is_seen():
    graphed, x = prepared()
    with graphed.frozen():
        graphed.forward_backward(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(graphed(x), graphed.module(x))
        assert torch.equal(graphed(x), graphed.module(x))


def test_hooks_on_saved_tensors_are_seen():
    graphed, x = prepared()
    with graphed.frozen():
        graphed.forward_backward(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            graphed(x)
    assert sum(graphed.stats.fallbacks.values()) == 1


def test_a_capture_that_fails_is_not_tried_again(monkeypatch):
    graphed, x = prepared()
    tries = []

    def fail(*_, **__):
        tries.append(1)
        raise CaptureError("no memory is left", None, "use fewer slots")

    monkeypatch.setattr(capture, "capture_variant", fail)
    with graphed.frozen():
        held = graphed.acquire((x,), {})
        with pytest.warns(UserWarning, match="no memory is left"):
            assert graphed.acquire((x,), {}) == "capture failed"
        assert graphed.acquire((x,), {}) == "capture failed"
    held.lease.release()
    assert len(tries) == 1


class Optional(Scored):
    """A call with arguments that may be left out, as a decoder's: tokens or hidden states, a number
    of ranks."""

    def forward(self, tokens, x, ranks=None):
        return super().forward(x) * (1 if ranks is None else ranks)


def test_calls_with_constants_are_known_too(monkeypatch):
    torch.manual_seed(0)
    graphed, x = graph(Optional(), warmup=0), torch.randn(3, 4)
    graphed.forward_backward(None, x, 2)
    for ranks in (None, 1, 3):
        graphed.forward_backward(None, x, ranks)
    looked, look = [], Guards.holds
    monkeypatch.setattr(Guards, "holds", lambda *about: looked.append(about) or look(*about))
    with graphed.frozen():
        for ranks in (2, None, 1, 3, 2, None, 1, 3, 2):
            expected = graphed.module(None, x, ranks)
            assert torch.equal(graphed.forward_backward(None, x, ranks), expected.detach())
        captured = graphed.stats.captured
        assert graphed.forward_backward(None, x, True).equal(graphed.module(None, x, True).detach())
        assert graphed.stats.captured == captured + 1, "True is not 1, nor 2"
        assert len(looked) == 4, "once, at its first call in the block"
    graphed.forward_backward(None, x, 2)
    assert len(looked) == 5


class Scaled(Scored):
    """Multiplies by a number, which Python reads."""

    scale = 2.0

    def forward(self, x):
        return super().forward(x) * self.scale


class ScaledStages(Scaled):
    """The same in stages, as chunks of a schedule."""

    def begin(self, x):
        return {"x": x}

    def stages(self):
        return [Stage("scaled", 0, self.scaled)]

    def scaled(self, state):
        return {"loss": self.forward(state["x"])}

    def end(self, state):
        return state["loss"]


@pytest.mark.parametrize("kind", [Scaled, ScaledStages])
@pytest.mark.parametrize("change", ["number", "hook"])
def test_what_changes_between_blocks_is_seen(kind, change):
    """A training step is a block: what a callback has changed holds from the next step on."""
    torch.manual_seed(0)
    graphed, x = graph(kind(), warmup=0), torch.randn(3, 4)
    for step in range(4):
        if step == 2 and change == "number":
            graphed.module.scale = 0.5
        elif step == 2:
            graphed.module.linear.register_forward_hook(lambda module, given, made: 2 * made)
        with graphed.frozen():
            for _ in range(2):
                expected = graphed.module(x)
                assert torch.equal(graphed.forward_backward(x), expected.detach())
    assert graphed.stats.replayed == (8 if change == "number" else 4)
