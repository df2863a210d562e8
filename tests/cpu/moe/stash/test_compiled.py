"""The stash in an autograd function, as torch.compile needs it: the same bits, and pages taken and
given back once."""

import torch
from graphkit import WIDTH, train
from stashkit import BY_HAND, Experts, StashedExperts, make_expert_toy, poison_pages
from tracekit import differences

from packgraph.graphs.graphed import graph
from packgraph.moe.stash.stash import Stash


def by_hand(identity=False):
    stash = Stash("cpu", page_rows=16, identity=identity)
    if not identity:
        stash.allocate(60, columns=BY_HAND)
    return stash, make_expert_toy(stash, by_hand=True, layers=1)


def test_kept_and_brought_back_by_an_autograd_function():
    (_, plain), (stash, model) = by_hand(identity=True), by_hand()
    expected = train(plain, steps=4)
    assert (
        differences(
            expected, train(model, steps=4, between=lambda model, step: poison_pages(stash))
        )
        == []
    )
    assert stash.in_use().item() == 0 and not stash.overflow_flag().item()
    stash, model = by_hand()
    graphed = graph(model, granularity="chunk", warmup=1)
    assert (
        differences(
            expected, train(graphed, steps=4, between=lambda model, step: poison_pages(stash))
        )
        == []
    )
    assert (
        stash.in_use().item() == 0
        and not stash.overflow_flag().item()
        and graphed.stats.replayed > 3
    )


class KeptExperts(Experts):
    """Experts that keep by hand."""

    def __init__(self, stash):
        super().__init__()
        self.stash = stash

    def forward(self, values, weights, offsets):
        return StashedExperts.apply(2 * values, weights, offsets, self.up, self.down, self.stash)


def test_compiled_code_keeps_once_and_brings_back_once():
    """A compiler may move what only the backward needs; what it must not do is to reserve twice."""
    stash = by_hand()[0]
    experts = KeptExperts(stash)
    plain = KeptExperts(Stash("cpu", identity=True))
    plain.load_state_dict(experts.state_dict())
    graphed = graph(experts, warmup=0, compile="aot_eager")
    for live in (40, 17, 0, 48):
        offsets, results = torch.tensor([0, live // 3, live // 2, live], dtype=torch.int32), []
        given = torch.randn(48, WIDTH), torch.rand(48), torch.randn(48, WIDTH)
        for model in (plain, graphed):
            values, weights = (x.clone().requires_grad_() for x in given[:2])
            model(values, weights, offsets).backward(given[2])
            results.append(
                [values.grad, weights.grad, *(p.grad.clone() for p in model.parameters())]
            )
            poison_pages(stash)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (
        graphed.stats.replayed == 4 and stash.in_use().item() == 0 and stash.need_hi().item() == 3
    )
