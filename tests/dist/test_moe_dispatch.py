"""Dispatchers over 1, 2 and 4 ranks give what one process with all experts gives: outputs and all
gradients."""

import pytest
import torch
import torch.distributed as dist
from dispatchkit import EmulatedBuffers, Layer, draw_routing, run_layer
from distkit import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from packgraph.graphs.errors import CaptureError
from packgraph.graphs.graphed import graph
from packgraph.moe.dispatch.dispatcher import LocalDispatcher, Routing
from packgraph.moe.dispatch.over_ranks import (
    HostSplitsDispatcher,
    PaddedDispatcher,
    SymmetricDispatcher,
    make_dispatcher,
    with_factor,
)
from packgraph.moe.peer_read import SymmetricBuffers, plan_peer_read, symmetric_problem
from packgraph.moe.permute import before, count_rows, place_segments, plan_rows
from packgraph.parallel.layout import Layout

EXPERTS = 8
# tokens, places, share of padding, experts that may be chosen
CASES = {
    "plain": (16, 2, 0.0, None),
    "half padding": (24, 3, 0.5, None),
    "one token": (1, 2, 0.0, None),
    "empty experts": (12, 2, 0.25, (1, 2, 6)),
    "one expert": (10, 1, 0.0, (5,)),
    "all padding": (4, 2, 1.0, None),
    "more than eight": (40, 4, 0.1, (0, 1, 2, 3, 4)),
}


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4),
    st.integers(0, 5),
)
@settings(deadline=None)
def test_segments_lie_as_a_plan_of_their_experts_says(counts, more):
    """The naive twin: write down the expert of every place, and sort."""
    counts = torch.tensor(counts)
    room = int(counts.sum(1).max()) + more
    starts = before(counts) + torch.arange(len(counts))[:, None] * room
    experts = torch.full((len(counts) * room,), -1)
    for rank, row in enumerate(counts.tolist()):
        place = rank * room
        for expert, count in enumerate(row):
            experts[place : place + count] = expert
            place += count
    expected = plan_rows(experts[:, None], 3, len(experts)) if len(experts) else None
    found = place_segments(counts, starts, len(experts), len(experts))
    if expected is not None:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(count_rows(found.offsets), counts.sum(0))


def alone(seeds, case):
    """What one process with all experts makes of the tokens of all ranks: by rank, the experts'
    gradients summed."""
    tokens, places, padding, busy = CASES[case]
    layer = Layer(LocalDispatcher(EXPERTS), EXPERTS)
    found = [
        run_layer(layer, *draw_routing(seed, tokens, places, EXPERTS, padding=padding, busy=busy))
        for seed in seeds
    ]
    for name, _ in layer.experts.named_parameters():
        total = sum(result[name] for result in found)
        for result in found:
            result[name] = total
    return found


def slice_experts(layer):
    """Keep the experts that the dispatcher says are here."""
    first, count = layer.dispatcher.first, layer.dispatcher.count
    for name, whole in list(layer.experts.named_parameters()):
        setattr(layer.experts, name, nn.Parameter(whole.detach()[first : first + count].clone()))
    return layer


def symmetric(group, pairs, factor):
    return SymmetricDispatcher(EXPERTS, group, factor, EmulatedBuffers(group, pairs, factor))


def every_case(mesh):
    found = {}
    group, ranks = mesh.group("ep"), mesh.size("ep")
    for number, (case, (tokens, places, padding, busy)) in enumerate(CASES.items()):
        given_ = draw_routing(
            100 * number + mesh.rank, tokens, places, EXPERTS, padding=padding, busy=busy
        )
        for name, dispatcher in (
            ("host_splits", HostSplitsDispatcher(EXPERTS, group)),
            ("padded", PaddedDispatcher(EXPERTS, group, ranks)),
            ("symmetric", symmetric(group, tokens * places, ranks)),
        ):
            layer = slice_experts(Layer(dispatcher, EXPERTS))
            found[case, name] = run_layer(layer, *given_)
            plan = dispatcher.preprocess(Routing(*given_[1:]))
            assert not dispatcher.overflow(plan)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_dispatchers_equal_one_process(ranks):
    """Outputs and gradients of tokens in every bit, since every sum has the same order; experts' to
    rounding, since one process sums its own tokens first."""
    results = run_ranks(every_case, ranks, layout=Layout(ep=ranks))
    for number, case in enumerate(CASES):
        expected = alone([100 * number + rank for rank in range(ranks)], case)
        for rank, found in enumerate(results):
            part = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
            for name in ("host_splits", "padded", "symmetric"):
                for what, value in found[case, name].items():
                    if what in ("out", "x", "weights"):
                        assert torch.equal(value, expected[rank][what]), (case, name, what, rank)
                    else:
                        torch.testing.assert_close(
                            value, expected[rank][what][part], rtol=1e-10, atol=1e-12
                        )
                        unused = ~expected[rank][what][part].flatten(1).any(1)
                        assert not value[unused].any(), (
                            "experts without a token have no gradient at all"
                        )


def overflows(mesh):
    """All tokens of rank 1 go to one expert of rank 0; those of rank 0 are spread evenly. Then the
    factor is raised."""
    group = mesh.group("ep")
    dispatcher = PaddedDispatcher(4, group, 1.0)
    tokens = torch.arange(32)[:, None]
    experts = torch.where(torch.tensor(mesh.rank == 1), torch.zeros_like(tokens), tokens % 4).int()
    x, weights = torch.ones(32, 6, dtype=torch.float64), torch.ones(32, 1)
    layer = slice_experts(Layer(dispatcher, 4))
    found, verdicts = [], []
    for _ in range(2):
        layer.dispatcher = dispatcher
        plan = dispatcher.preprocess(Routing(experts, weights))
        verdicts.append((int(dispatcher.overflow(plan)), int(plan.needed)))
        found.append(run_layer(layer, x, experts, weights))
        most = torch.stack([dispatcher.demand(plan)])
        dist.all_reduce(most, dist.ReduceOp.MAX, group)
        (dispatcher,) = with_factor([dispatcher], int(most) / 1000)
    return verdicts, found, dispatcher.factor


def test_an_overflow_is_seen_where_it_happens_and_leaves_no_garbage():
    (calm, of_calm, _), (busy, of_busy, factor) = run_ranks(overflows, 2, layout=Layout(ep=2))
    assert calm == [(0, 16), (0, 16)] and busy == [(16, 32), (0, 32)]
    assert factor == 2.0
    assert torch.equal(of_calm[0]["out"], of_calm[1]["out"]), "nobody else's rows are touched"
    dropped = of_busy[0]
    assert (
        not dropped["out"][16:].any()
        and not dropped["x"][16:].any()
        and not dropped["weights"][16:].any()
    )
    assert torch.equal(dropped["out"][:16], of_busy[1]["out"][:16]) and of_busy[1]["out"][16:].all()
    for result in (*of_calm, *of_busy):
        assert all(value.isfinite().all() for value in result.values())


def shared_overflow(mesh):
    """Both ranks send all tokens to the experts of rank 0, which has room for 40 of 64 rows; then
    there is room."""
    group = mesh.group("ep")
    dispatcher = SymmetricDispatcher(4, group, 1.25, EmulatedBuffers(group, 32, 1.25))
    experts = (torch.arange(32)[:, None] % 2).int()
    x, weights = torch.ones(32, 6, dtype=torch.float64), torch.ones(32, 1)
    layer = slice_experts(Layer(dispatcher, 4))
    found, verdicts = [], []
    for _ in range(2):
        layer.dispatcher = dispatcher
        plan = dispatcher.preprocess(Routing(experts, weights))
        verdicts.append(
            (int(dispatcher.overflow(plan)), int(plan.needed), int(dispatcher.demand(plan)))
        )
        found.append(run_layer(layer, x, experts, weights))
        (dispatcher,) = with_factor([dispatcher], 2.0)
    return verdicts, found


def test_an_overflow_of_a_rank_is_seen_by_all_that_share_its_experts():
    (first, of_first), (second, of_second) = run_ranks(shared_overflow, 2, layout=Layout(ep=2))
    assert first == second == [(24, 64, 2000), (0, 64, 0)]
    evens, odds = list(range(0, 32, 2)), list(range(1, 16, 2))
    for (tight, wide), live in ((of_first, sorted(evens + odds)), (of_second, evens)):
        kept = tight["out"].any(1)
        assert kept.nonzero().flatten().tolist() == live, (
            "the last by expert have none, then the last by rank"
        )
        assert torch.equal(tight["out"][kept], wide["out"][kept]) and wide["out"].all()
        assert not tight["x"][~kept].any() and not tight["weights"][~kept].any()
    for result in (*of_first, *of_second):
        assert all(value.isfinite().all() for value in result.values())


def refuse_buffers(mesh):
    group, pairs = mesh.group("ep"), 40
    dispatcher = SymmetricDispatcher(EXPERTS, group, 2.0, EmulatedBuffers(group, pairs, 1.0))
    x, experts, weights = draw_routing(0, 20, 2, EXPERTS)
    with pytest.raises(
        ValueError,
        match=f"{pairs} routed pairs need symmetric buffers of 80 rows, but these have 40",
    ):
        dispatcher.preprocess(Routing(experts, weights))
    dispatcher = symmetric(group, pairs, 2.0)
    plan = dispatcher.preprocess(Routing(experts, weights))
    with pytest.raises(ValueError, match=r"rows torch\.float32 of width 6 do not go through"):
        dispatcher.dispatch(x.float(), Routing(experts, weights), plan)
    with pytest.raises(ValueError, match="100 rows do not go through symmetric buffers of 80 rows"):
        dispatcher.combine(x.new_zeros(100, 6), plan)
    with pytest.raises(ValueError, match="cannot be numbered in 32 bits"):
        plan_peer_read(experts, EXPERTS, 2, mesh.rank, 2**30, "")
    with pytest.raises(RuntimeError, match="memory of GPUs, not of cpu; use dispatcher = padded"):
        SymmetricBuffers(group, pairs, 1.0, 6, torch.float32, torch.device("cpu"))
    return True


def test_symmetric_buffers_are_refused_where_they_cannot_be():
    assert all(run_ranks(refuse_buffers, 2, layout=Layout(ep=2)))
    assert "2 to 8 ranks of one host, not 16" in symmetric_problem(torch.device("cuda"), 16)
    with pytest.raises(ValueError, match="needs the buffers that its layers share"):
        make_dispatcher("symmetric", EXPERTS, None, 1.0)


class Routed(nn.Module):
    """A router and a layer: routing follows from the input, so it changes with every replay."""

    def __init__(self, dispatcher):
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(6, EXPERTS, bias=False, dtype=torch.float64)
        self.layer = slice_experts(Layer(dispatcher, EXPERTS))

    def forward(self, x, live):
        scores, experts = self.gate(x).softmax(-1).topk(2)
        experts = torch.where(live[:, None], experts, -1).int()
        return x + self.layer(x, experts, torch.where(live[:, None], scores, 0).float())


def replayed(mesh, name):
    def make():
        if name == "symmetric":
            return symmetric(mesh.group("ep"), 40, 1.25)
        return PaddedDispatcher(EXPERTS, mesh.group("ep"), 1.25)

    eager, graphed = Routed(make()), graph(Routed(make()), warmup=0)
    traces = []
    for module in (eager, graphed):
        draw = torch.Generator().manual_seed(mesh.rank)
        trace = []
        for step in range(5):
            x = torch.randn(20, 6, generator=draw, dtype=torch.float64).requires_grad_()
            live = torch.arange(20) < 20 - 4 * step
            out = module(x, live)
            (out * out).sum().backward()
            gradients = [parameter.grad.clone() for parameter in module.parameters()]
            trace.append([out.detach().clone(), x.grad.clone(), *gradients])
        traces.append(trace)
    return traces, graphed.stats.replayed


@pytest.mark.parametrize("name", ["padded", "symmetric"])
def test_replays_equal_eager_in_every_bit_while_the_routing_changes(name):
    for (eager, graphed), replays in run_ranks(replayed, 2, name, layout=Layout(ep=2)):
        assert replays == 5
        for ours, theirs in zip(graphed, eager, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_host_splits_say_why_they_cannot_be_captured():
    dispatcher = HostSplitsDispatcher(EXPERTS, None)
    assert dispatcher.why_not.keys() == {
        "moe_preprocess",
        "moe_dispatch",
        "moe_experts",
        "moe_combine",
    }
    assert "the host reads how many rows" in dispatcher.why_not["moe_preprocess"]
    assert not PaddedDispatcher(EXPERTS, None, 1.0).why_not
    with pytest.raises(CaptureError, match="waits for the device"):
        graph(Routed(dispatcher), warmup=0, strict=True)(
            torch.ones(4, 6, dtype=torch.float64), torch.ones(4, dtype=torch.bool)
        )


def test_a_factor_that_cannot_hold_a_balanced_load_is_refused():
    with pytest.raises(ValueError, match="less room than a balanced load"):
        PaddedDispatcher(EXPERTS, None, 0.5)


def narrow(mesh):
    """In bfloat16, as on devices: what arrives is what was sent, bit for bit."""
    x, experts, weights = draw_routing(mesh.rank, 12, 2, EXPERTS, dtype=torch.bfloat16)
    routing, got = Routing(experts, weights), []
    buffers = EmulatedBuffers(mesh.group("ep"), 24, 2.0, dtype=torch.bfloat16)
    for name in ("host_splits", "padded", "symmetric"):
        dispatcher = make_dispatcher(name, EXPERTS, mesh.group("ep"), 2.0, buffers)
        plan = dispatcher.preprocess(routing)
        got.append(dispatcher.combine(dispatcher.dispatch(x, routing, plan).values, plan))
    with pytest.raises(ValueError, match="local dispatcher sends nothing, but 2 ranks"):
        make_dispatcher("local", EXPERTS, mesh.group("ep"), 2.0)
    return x, got


def test_rows_come_back_as_they_went():
    for x, got in run_ranks(narrow, 2, layout=Layout(ep=2)):
        assert all(torch.equal(found, x + x) for found in got)
