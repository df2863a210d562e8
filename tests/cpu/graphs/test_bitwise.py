"""Graph equals eager, bit by bit: outputs, all gradients, buffers, parameters, random state."""

import pytest
import torch
from graphkit import Toy, make_toy, poison_free_slots, toy_inputs, toy_loss, train
from torch import nn
from tracekit import differences

from packgraph.graphs.graphed import control, graph
from packgraph.graphs.recorder.backend import RecorderWindow
from packgraph.graphs.slots import Slots

SCOPES = [
    None,
    ["attn"],
    ["mlp"],
    ["attn", "mlp"],
    ["embed", "head"],
    ["embed", "attn", "head"],
    ["head"],
]


LOOP = {"steps": 5, "sizes": (8, 12)}


@pytest.fixture(scope="module")
def eager_trace():
    return train(make_toy(layers=3), **LOOP)


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.parametrize("scope", SCOPES, ids=str)
@pytest.mark.few(4)
def test_every_scope_and_granularity_equals_eager_bitwise(scope, granularity, eager_trace):
    graphed = graph(make_toy(layers=3), scope=scope, granularity=granularity)
    assert differences(eager_trace, train(graphed, between=poison_free_slots, **LOOP)) == []
    assert graphed.stats.replayed > 5
    assert dict(graphed.stats.fallbacks) == {"warm-up": 2}
    assert graphed.slots.in_flight() == 0


@pytest.mark.parametrize("set_to_none", [True, False, "alternate"])
def test_gradients_survive_every_way_of_clearing_them(set_to_none):
    options = {"steps": 4, "sizes": (8,), "in_flight": 2, "set_to_none": set_to_none}
    traces = [train(model, **options) for model in (make_toy(), graph(make_toy(), warmup=1))]
    assert differences(*traces) == []


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@pytest.mark.few(2)
def test_any_order_over_slots_and_variants_with_poisoned_memory(seed, granularity):
    options = {"steps": 5, "seed": seed, "sizes": (4, 8, 20), "in_flight": 5}
    eager = train(make_toy(layers=2), **options)
    graphed = graph(make_toy(layers=2), granularity=granularity, warmup=1)
    assert differences(eager, train(graphed, between=poison_free_slots, **options)) == []


def test_slots_sharing_one_pool_are_wrong_and_the_order_test_sees_it(monkeypatch):
    """Negative control of R1: with one pool for all slots the same test must fail."""
    make = Slots.acquire
    pools = []

    def acquire(self, key):
        lease = make(self, key)
        pools.append(lease.slot.pool)
        lease.slot.pool = pools[0]
        return lease

    options = {"steps": 5, "seed": 1, "sizes": (8,), "in_flight": 5}
    eager = train(make_toy(layers=2), **options)
    monkeypatch.setattr(Slots, "acquire", acquire)
    assert differences(eager, train(graph(make_toy(layers=2), warmup=1), **options)) != []


def test_what_forwards_leave_must_not_be_brief_and_the_order_test_sees_it(monkeypatch):
    """Negative control: with forwards, too, in the memory that all slots share the same test must
    fail."""
    capture = RecorderWindow.capture
    options = {"steps": 5, "seed": 1, "sizes": (8,), "in_flight": 5}
    eager = train(make_toy(layers=2), **options)
    monkeypatch.setattr(
        RecorderWindow, "capture", lambda self, run, scratch=False: capture(self, run, True)
    )
    assert differences(eager, train(graph(make_toy(layers=2), warmup=1), **options)) != []


@pytest.mark.parametrize("slots", [1, 2])
def test_lent_gradients_of_inputs_stay_whole(slots):
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    graphed = graph(module, warmup=0, slots=slots)
    control(graphed).capturer.lends = True
    for _ in range(4):
        one, up = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
        other = one.detach().clone().requires_grad_()
        graphed(one).backward(up)
        module(other).backward(up)
        assert torch.equal(one.grad, other.grad)


def test_another_slot_costs_no_second_memory_for_backwards():
    sizes = []
    for slots in (2, 5):
        graphed = graph(make_toy(layers=2), warmup=0, slots=slots)
        outs = [graphed(*toy_inputs(20)) for _ in range(slots)]
        for out in outs:
            toy_loss(out).backward()
        sizes.append(graphed.stats.pool_bytes)
        shared = graphed.slots.shared.nbytes()
        assert shared > 0 and {slot.pool.nbytes() for slot in graphed.slots.all} == {
            (sizes[-1] - shared) // slots
        }
    single = graph(make_toy(layers=2), warmup=0, slots=1)
    toy_loss(single(*toy_inputs(20))).backward()
    assert single.stats.pool_bytes <= sizes[0] - shared
    assert (sizes[1] - shared) * 2 == (sizes[0] - shared) * 5


def test_modulo_slots_are_wrong_and_the_order_test_sees_it(monkeypatch):
    """Negative control of R6: handing out slots that are still owned must fail."""
    calls = iter(range(10**6))
    make = Slots.acquire

    def acquire(self, key):
        lease = make(self, key)
        slot = self.all[next(calls) % 2 % len(self.all)]
        self._free = [s for s in [*self._free, lease.slot] if s is not slot]
        lease.slot = slot
        monkeypatch.setattr(self, "release", lambda slot: None)
        return lease

    options = {"steps": 5, "seed": 1, "sizes": (8,), "in_flight": 5}
    eager = train(make_toy(layers=2), **options)
    monkeypatch.setattr(Slots, "acquire", acquire)
    assert differences(eager, train(graph(make_toy(layers=2), warmup=1), **options)) != []


def test_hundreds_of_replays_with_changing_data_and_shapes():
    def loop(model):
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        losses = []
        for step in range(200):
            loss = toy_loss(model(*toy_inputs((5, 9, 7)[step % 3])))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses), [p.detach() for p in model.parameters()]

    eager_losses, eager_parameters = loop(make_toy(layers=1))
    graphed = graph(make_toy(layers=1))
    losses, parameters = loop(graphed)
    assert torch.equal(losses, eager_losses)
    assert all(torch.equal(a, b) for a, b in zip(parameters, eager_parameters, strict=True))
    assert graphed.stats.replayed == 198


def test_module_inside_a_model_keeps_its_parameter_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    names = list(model.state_dict())
    model[1] = graph(model[1], warmup=0)
    assert list(model.state_dict()) == names
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
    model.load_state_dict(state)
    x = torch.randn(2, 4)
    expected = nn.functional.linear(
        nn.functional.linear(x, state["0.weight"], state["0.bias"]),
        state["1.weight"],
        state["1.bias"],
    )
    assert torch.equal(model(x), expected)
    assert model[1].stats.replayed == 4


def test_outputs_and_losses_kept_by_the_user_do_not_change():
    graphed = graph(make_toy(), warmup=0)
    kept, copies = [], []
    for _ in range(5):
        out = graphed(*toy_inputs(8))
        kept.append(out["hidden"].detach())
        copies.append(out["hidden"].detach().clone())
        toy_loss(out).backward()
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_hooks_on_outputs_and_parameters_fire_as_in_eager():
    def loop(model):
        torch.manual_seed(0)
        seen = []
        weight = model.embedding.weight
        weight.register_hook(lambda g: seen.append(("hook", g.clone())) or 2 * g)
        model.attention[0].weight.register_post_accumulate_grad_hook(
            lambda p: seen.append(("post", p.grad.clone()))
        )
        for _ in range(4):
            out = model(*toy_inputs(8))
            out["aux"].register_hook(lambda g: seen.append(("output", g.clone())))
            toy_loss(out).backward()
        return seen, [p.grad.clone() for p in model.parameters()]

    seen, gradients = loop(make_toy())
    graphed_seen, graphed_gradients = loop(graph(make_toy(), warmup=1))
    for kind in ("output", "hook", "post"):
        expected, got = ([value for k, value in run if k == kind] for run in (seen, graphed_seen))
        assert len(expected) == 4 and all(
            torch.equal(a, b) for a, b in zip(expected, got, strict=True)
        )
    assert all(torch.equal(a, b) for a, b in zip(gradients, graphed_gradients, strict=True))


def test_gradients_made_elsewhere_are_kept():
    """A gradient that an eager microbatch or the user made is what the next backward graph adds
    to."""

    def loop(model, wrap):
        torch.manual_seed(0)
        for step in range(6):
            with wrap(step):
                toy_loss(model(*toy_inputs(8))).backward()
            if step == 3:
                for p in model.parameters():
                    p.grad = p.grad * 0.5
        return [p.grad.clone() for p in model.parameters()]

    import contextlib

    from packgraph.graphs.fallback import eager

    expected = loop(make_toy(dropout=0.0), lambda step: contextlib.nullcontext())
    graphed = graph(make_toy(dropout=0.0), warmup=1)
    got = loop(graphed, lambda step: eager("odd steps") if step % 2 else contextlib.nullcontext())
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert graphed.stats.fallbacks["odd steps"] == 3


def test_activation_checkpointing_inside_a_region():
    class Checkpointed(Toy):
        def mix(self, state, layer):
            hidden = torch.utils.checkpoint.checkpoint(
                lambda h: nn.functional.dropout(self.mlps[layer](h), 0.2, self.training),
                state["hidden"],
                use_reentrant=False,
            )
            return {**state, "hidden": state["hidden"] + hidden}

    def make():
        torch.manual_seed(1)
        return Checkpointed()

    options = {"steps": 3, "sizes": (8,), "in_flight": 2}
    assert differences(train(make(), **options), train(graph(make(), warmup=1), **options)) == []


def test_autocast_is_part_of_the_key_and_exact():
    def loop(model):
        torch.manual_seed(0)
        results = []
        for step in range(6):
            with torch.autocast("cpu", torch.bfloat16, enabled=step % 2 == 0):
                out = model(*toy_inputs(8))
            toy_loss(out).backward()
            results.append(out["hidden"].detach().clone())
        return results + [p.grad.clone() for p in model.parameters()]

    graphed = graph(make_toy(), warmup=0)
    assert all(torch.equal(a, b) for a, b in zip(loop(make_toy()), loop(graphed), strict=True))
    assert graphed.stats.captured == 2
