"""What captures do to a pool that is attached to the captured module: nothing."""

import pytest
import torch
from graphkit import toy_inputs, toy_loss
from stashkit import COLUMNS, ExpertToy, make_expert_toy

from packgraph.graphs.graphed import graph
from packgraph.moe.stash.stash import Stash


def stashed():
    stash = Stash("cpu", page_rows=16)
    stash.allocate(70, columns=COLUMNS)
    return stash


class Reading(torch.autograd.Function):
    """Reads a number in its backward, which no graph can hold."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad * (1.0 + 0.0 * grad.sum().item())


class ReadingToy(ExpertToy):
    def head(self, state):
        return super().head({**state, "hidden": Reading.apply(state["hidden"])})


@pytest.mark.filterwarnings("ignore:running eagerly")
@pytest.mark.parametrize("attached", [False, True])
def test_a_capture_that_fails_in_its_backward_keeps_no_pages(attached):
    stash = stashed()
    model = ReadingToy(stash)
    if attached:
        stash.attach(model)
    graphed = graph(model, granularity="chunk", warmup=0)
    pages = []
    for _ in range(2):
        out = graphed(*toy_inputs(10))
        pages.append(stash.in_use().item())
        toy_loss(out).backward()
        pages.append(stash.in_use().item())
    assert "capture failed" in graphed.stats.fallbacks and "stash_state" not in model.state_dict()
    assert (pages[1] == pages[3] == 0) == attached


@pytest.mark.filterwarnings("ignore:capturing again")
def test_a_new_pool_that_is_attached_is_captured_again():
    stash = stashed()
    model = make_expert_toy(stash)
    stash.attach(model)
    graphed = graph(model, granularity="chunk", warmup=0)
    for pages in (70, 50, 60):
        stash.allocate(pages)
        stash.attach(model)
        out = graphed(*toy_inputs(10))
        assert 0 < stash.in_use().item() <= 4
        toy_loss(out).backward()
        assert stash.in_use().item() == 0 and not stash.overflow_flag().item()
    assert graphed.stats.replayed == 3
