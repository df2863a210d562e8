"""The first replay of every key is compared with a plain call of the module: what differs is found
by name, and nothing of the user's changes."""

import itertools
import random

import pytest
import torch
from graphkit import make_toy, toy_inputs, toy_loss
from statekit import One
from torch import nn

import packgraph
from packgraph.graphs import fallback
from packgraph.graphs.recorder.backend import RecorderGraph
from packgraph.graphs.reference import CHUNK, digest


class Small(nn.Module):
    """A matrix, a bias, a buffer that forward writes to, and dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.inner = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        hidden = nn.functional.dropout(self.inner(x), 0.5, self.training)
        self.seen.add_(hidden.detach().mean(0))
        return hidden.square().mean(), hidden


def call(graphed, backward=True):
    """One call: the loss."""
    loss, _ = graphed(torch.randn(3, 4, requires_grad=True))
    if backward and loss.requires_grad:
        loss.backward()
    return loss


def patched_replays(monkeypatch, change, which):
    """Every replay of the graph that is the first but `which` to be replayed ends in `change()`."""
    plain, graphs = RecorderGraph.replay, []

    def replay(graph):
        plain(graph)
        if all(graph is not other for other in graphs):
            graphs.append(graph)
        if next(n for n, other in enumerate(graphs) if other is graph) == which:
            with torch.no_grad():
                change()

    monkeypatch.setattr(RecorderGraph, "replay", replay)


def flip(tensor):
    """Change the last bit of the last element."""
    tensor.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.parametrize("scope", [None, ["attn"], ["mlp"]])
@pytest.mark.few(2)
def test_module_that_repeats_itself_is_compared_once_per_key(granularity, scope):
    graphed = packgraph.graph(
        make_toy(), warmup=1, strict=True, granularity=granularity, scope=scope
    )
    for tokens in (8, 8, 12, 8, 12, 12):
        toy_loss(graphed(*toy_inputs(tokens))).backward()
    assert graphed.stats.compared == 2
    assert dict(graphed.stats.fallbacks) == {fallback.WARM_UP: 1}


def test_further_slots_are_not_compared_again():
    graphed = packgraph.graph(make_toy(), warmup=1, strict=True)
    toy_loss(graphed(*toy_inputs(8))).backward()
    outs = [graphed(*toy_inputs(8)) for _ in range(3)]
    for out in outs:
        toy_loss(out).backward()
    assert graphed.stats.captured == 3 and graphed.stats.compared == 1


def test_build_compares():
    graphed = packgraph.graph(make_toy(), warmup=0, strict=True)
    graphed.build([toy_inputs(8), toy_inputs(12)], slots=2)
    assert graphed.stats.captured == 4 and graphed.stats.compared == 2


def test_calls_without_gradients_are_compared():
    graphed = packgraph.graph(make_toy(), warmup=0, strict=True)
    with torch.no_grad():
        graphed(*toy_inputs(8))
    graphed.eval()
    with torch.no_grad():
        graphed(*toy_inputs(8))
    assert graphed.stats.compared == 2


def test_comparison_leaves_everything_as_it_was():
    """Gradients, None and others, buffers, generators, hooks: as after a call without graphs."""
    model, graphed = Small(), packgraph.graph(Small(), warmup=0)
    fired, kept = [], {}
    graphed.inner.bias.register_hook(lambda gradient: fired.append("tensor"))
    graphed.inner.bias.register_post_accumulate_grad_hook(lambda p: fired.append("late"))
    for each in (model, graphed):
        each.inner.weight.grad = torch.full((4, 4), 2.0)
    kept = graphed.inner.weight.grad
    states = []
    for each in (model, graphed):
        torch.manual_seed(5)
        random.seed(5)
        loss = call(each, backward=False)
        states.append((loss, each.seen.clone(), torch.get_rng_state(), random.getstate()))
        assert each.inner.bias.grad is None
        assert torch.equal(each.inner.weight.grad, torch.full((4, 4), 2.0))
    assert graphed.stats.compared == 1 and not fired
    for one, other in zip(*states, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    for each in (model, graphed):
        states[each is graphed][0].backward()
    assert graphed.inner.weight.grad is kept
    assert torch.equal(model.inner.weight.grad, kept)
    assert torch.equal(model.inner.bias.grad, graphed.inner.bias.grad)
    assert fired == ["tensor", "late"]


def test_gradients_that_are_there_stay_while_they_accumulate():
    model, graphed = Small(), packgraph.graph(Small(), warmup=1, strict=True, compare_every=2)
    for each in (model, graphed):
        torch.manual_seed(6)
        for _ in range(6):
            call(each)
    assert graphed.stats.compared == 3
    for one, other in zip(model.parameters(), graphed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(
    ("what", "which", "message"),
    [
        ("output", 0, r"output 0 of Small \(stage module of layer 0\)"),
        ("weight", 1, r"the gradient of parameter 'inner.weight' of Small \(stage module"),
        ("argument", 1, r"the gradient of argument 'x' of Small"),
        ("buffer", 0, r"buffer 'seen' of Small"),
        ("generator", 0, r"the state of random generator 0 of Small"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_difference_of_one_bit_is_named(monkeypatch, what, which, message, strict):
    graphed = packgraph.graph(Small(), warmup=1, strict=strict)
    call(graphed)

    def change():
        variant = next(iter(graphed.slots.all[0].variants.values()))
        region = variant.regions[0]
        backward = next(iter(region.backwards.values()))
        if what == "output":
            flip(region.outputs[variant.ends[0][1]].static.tensor)
        elif what == "weight":
            owned = {id(buffer.parameter): buffer for buffer in backward.owned}
            flip(owned[id(graphed.inner.weight)].tensor)
        elif what == "argument":
            flip(backward.gradients[0].tensor)
        elif what == "buffer":
            flip(graphed.seen)
        else:
            torch.rand(1)

    patched_replays(monkeypatch, change, which)
    if strict:
        with pytest.raises(packgraph.CaptureError, match=message):
            call(graphed)
        return
    with pytest.warns(packgraph.PackgraphWarning, match=message):
        call(graphed)
    call(graphed)
    assert graphed.stats.fallbacks[fallback.CAPTURE_FAILED] == 2
    assert graphed.stats.compared == 0 and graphed.stats.replayed == 0
    assert sum(graphed.stats.recaptures.values()) == 1


def test_difference_says_how_large_it_is(monkeypatch):
    graphed = packgraph.graph(Small(), warmup=1, strict=True)
    call(graphed)
    patched_replays(monkeypatch, lambda: graphed.seen.add_(0.5), 0)
    with pytest.raises(packgraph.CaptureError, match=r"buffer 'seen'.*by up to 0\.5"):
        call(graphed)


def test_sign_of_zero_is_a_difference_and_nan_is_none(monkeypatch):
    class Zeros(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("zero", torch.zeros(2))
            self.register_buffer("nothing", torch.full((2,), torch.nan))

        def forward(self, x):
            return x + self.zero, x * self.nothing

    graphed = packgraph.graph(Zeros(), warmup=0, strict=True)
    graphed(torch.ones(2))
    assert graphed.stats.compared == 1
    other = packgraph.graph(Zeros(), warmup=0, strict=True)
    patched_replays(monkeypatch, lambda: other.zero.neg_(), 0)
    with pytest.raises(packgraph.CaptureError, match=r"buffer 'zero'.*by up to 0"):
        other(torch.ones(2))


def test_later_replays_are_compared(monkeypatch):
    graphed = packgraph.graph(Small(), warmup=1, compare_every=3)
    for _ in range(8):
        call(graphed)
    assert graphed.stats.compared == 3 and graphed.stats.replayed == 7
    patched_replays(monkeypatch, lambda: graphed.seen.add_(1), 0)
    for _ in range(2):
        call(graphed)
    with pytest.warns(packgraph.PackgraphWarning, match="buffer 'seen'"):
        call(graphed)
    call(graphed)
    assert graphed.stats.replayed == 9 and graphed.stats.fallbacks[fallback.CAPTURE_FAILED] == 2


def test_count_of_replays_must_not_be_negative():
    with pytest.raises(ValueError, match="compare_every=-1"):
        packgraph.graph(Small(), compare_every=-1)


CALLS = itertools.count()  # nobody sees that it moves


@torch.library.custom_op("packgraph_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + 1e-6 * (next(CALLS) % 2))


@noisy.register_fake
def _(x):
    return torch.empty_like(x)


noisy.register_autograd(lambda ctx, gradient: noisy(gradient))


class Noisy(Small):
    def forward(self, x):
        loss, hidden = super().forward(x)
        return loss, noisy(hidden)


@pytest.mark.parametrize("slips", [False, True])
def test_module_that_does_not_repeat_itself_may_differ_by_as_much(monkeypatch, slips):
    graphed = packgraph.graph(Noisy(), warmup=1, strict=True)
    loss, hidden = graphed(torch.randn(3, 4))
    (loss + hidden.sum()).backward()
    if slips:
        patched_replays(monkeypatch, lambda: graphed.seen.add_(0.01), 0)
        with pytest.raises(packgraph.CaptureError, match="buffer 'seen'"):
            graphed(torch.randn(3, 4))
        return
    loss, hidden = graphed(torch.randn(3, 4))
    (loss + hidden.sum()).backward()
    assert graphed.stats.compared == 1 and graphed.stats.replayed == 1


@pytest.mark.parametrize("times", [1, 99])
def test_replays_that_do_not_repeat_themselves_may_differ_in_the_last_place(monkeypatch, times):
    """Kernels with atomic additions may be alike in every plain call, and not in a replay."""
    graphed, left = packgraph.graph(Small(), warmup=0, strict=True), iter(range(times))
    patched_replays(monkeypatch, lambda: next(left, None) is None or flip(graphed.seen), 0)
    if times == 99:
        with pytest.raises(packgraph.CaptureError, match="buffer 'seen'"):
            call(graphed)
        return
    call(graphed)
    assert graphed.stats.compared == 1 and graphed.stats.replayed == 1


class Coarse(Small):
    """Has a parameter of another type."""

    def __init__(self, dtype):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x):
        loss, hidden = super().forward(x)
        return loss * self.scale, hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_last_place_is_that_of_the_coarsest_type(monkeypatch, dtype):
    """Sums in float32 of numbers that were rounded to bfloat16 differ by its units."""
    graphed, turns = packgraph.graph(Coarse(dtype), warmup=0, strict=True), itertools.count(1)
    patched_replays(monkeypatch, lambda: graphed.seen.mul_(1 + next(turns) % 3 / 256), 0)
    if dtype == torch.float32:
        with pytest.raises(packgraph.CaptureError, match="buffer 'seen'"):
            call(graphed)
        return
    call(graphed)
    assert graphed.stats.compared == 1 and graphed.stats.replayed == 1


def test_difference_that_shows_late_is_measured_again(monkeypatch):
    """Replays and plain calls may be alike for two rounds, and differ by chance all the same."""
    graphed, turns = packgraph.graph(Small(), warmup=0, strict=True), itertools.count()
    patched_replays(monkeypatch, lambda: next(turns) < 3 and flip(graphed.seen), 0)
    call(graphed)
    assert graphed.stats.compared == 1 and graphed.stats.replayed == 1


class AsksForItself(nn.Module):
    """Tells its parameter from what stands in for it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.known = id(self.weight)

    def forward(self, x):
        return x * self.weight * (1.0 if id(self.weight) == self.known else 2.0)


def test_what_stands_in_for_a_parameter_is_found_out():
    graphed = packgraph.graph(AsksForItself(), warmup=0)
    with pytest.warns(packgraph.PackgraphWarning):
        out = graphed(torch.ones(4))
    assert torch.equal(out, torch.ones(4)) and graphed.stats.replayed == 0


def test_one_tensor_in_two_places_is_one_in_graphs_and_in_the_plain_call():
    asks = One(lambda m, q, k: m.linear(q) + (0.0 if q is k else m.linear(k)))
    graphed = packgraph.graph(asks, warmup=0, strict=True)
    x, y = torch.ones(2, 4), torch.ones(2, 4)
    for q, k in ((x, x), (x, y), (y, y), (y, x)):
        assert torch.equal(graphed(q, k), graphed.module(q, k))
    assert graphed.stats.compared == 2 and graphed.stats.replayed == 4


def test_layout_that_graphs_do_not_keep_runs_eagerly_where_kernels_choose_by_it():
    model, graphed = (nn.Linear(400, 400), packgraph.graph(nn.Linear(400, 400), warmup=0))
    graphed.load_state_dict(model.state_dict())
    x = torch.randn(600, 600)[:, :500].T[:, :400]
    assert torch.equal(graphed(x), model(x))


def test_new_pattern_of_gradients_is_compared():
    graphed = packgraph.graph(make_toy(), warmup=0)
    for _ in range(3):
        graphed(*toy_inputs(8))["loss"].backward()
    assert graphed.stats.compared == 2
    for _ in range(3):
        toy_loss(graphed(*toy_inputs(8))).backward()
    assert graphed.stats.compared == 3


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
)
def test_digest_finds_every_element(dtype):
    plain = torch.zeros(5, 3, dtype=dtype)
    known = digest(plain).item()
    assert digest(plain.t().contiguous().t()).item() == known
    seen = {known}
    for number in range(15):
        other = plain.clone()
        other.view(-1)[number] = 1
        seen.add(digest(other).item())
    assert len(seen) == 16


def test_digest_covers_chunks_and_forms():
    large = torch.zeros(2 * CHUNK + 3, dtype=torch.int8)
    known = digest(large).item()
    for place in (0, CHUNK, 2 * CHUNK + 2):
        large[place] = 1
        assert digest(large).item() != known
        large[place] = 0
    assert digest(torch.zeros(3)).item() != digest(torch.zeros(4)).item()
    assert digest(torch.zeros(3)).item() != digest(-torch.zeros(3)).item()
    assert digest(torch.empty(0)).item() == 0


class Averaging(nn.Module):
    """Linear layers around a batch norm and dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        hidden = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3)
        return self.last(hidden).square().mean()


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("emptied", [True, False])
def test_training_with_comparisons_is_training_without_graphs(casts, emptied):
    """Under autocast and a gradient scaler, with running averages, dropout, hooks, an optimizer."""
    seen = []
    for model in (
        Averaging(),
        packgraph.graph(Averaging(), warmup=1, strict=True, compare_every=2),
    ):
        noted = []
        model.first.weight.register_hook(lambda g, noted=noted: noted.append(g.sum().item()))
        model.norm.bias.register_post_accumulate_grad_hook(
            lambda p, noted=noted: noted.append(p.grad.sum().item())
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        torch.manual_seed(3)
        for step in range(7):
            x = torch.randn(5, 8, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                loss = model(x)
            scaler.scale(loss).backward()
            noted += [loss.item(), *x.grad.view(-1).tolist(), scaler.get_scale()]
            noted += [value.double().sum().item() for value in model.buffers()]
            if step % 2:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=emptied)
        seen.append((sorted(noted), *(p.tolist() for p in model.parameters())))
    assert model.stats.compared == 3 and seen[0] == seen[1]
