"""Weights that leave the device between phases, and come back."""

import copy

import pytest
import torch
from graphkit import make_toy, toy_inputs, toy_loss, train
from torch import nn
from tracekit import differences

import packgraph
from packgraph.graphs.graphed import graph


def test_training_with_phases_of_release_between_is_that_of_eager():
    released = []

    def between(model, step):
        if (
            isinstance(model, packgraph.GraphedModule)
            and not packgraph.control(model).slots.in_flight()
        ):
            own = packgraph.control(model)
            released.append(own.release())
            assert own.stats.pool_bytes == 0 and not own.slots.all
            own.restore()

    eager, graphed = make_toy(), graph(make_toy(), warmup=1)
    options = {"steps": 3, "sizes": (8,), "in_flight": 2}
    traces = [train(model, between=between, **options) for model in (eager, graphed)]
    assert differences(*traces) == []
    assert len(released) > 3 and min(released) > 1000
    assert set(graphed.stats.fallbacks) == {"warm-up"} and graphed.stats.replayed > 2
    assert graphed.stats.recaptures["weights were released"] >= 2
    assert "module changed" not in graphed.stats.recaptures


def test_device_memory_is_gone_and_storages_come_back():
    module = nn.Linear(4, 4)
    flat = torch.randn(20)
    module.weight.data, module.bias.data = flat[:16].view(4, 4), flat[16:]
    before, storage = flat.clone(), flat.untyped_storage()
    graphed = graph(module, warmup=0)
    graphed(torch.ones(2, 4)).sum().backward()
    gradient = module.weight.grad.clone()
    own = packgraph.control(graphed)
    assert own.release() == flat.nbytes + gradient.nbytes + 16
    assert storage.nbytes() == 0
    assert torch.equal(module.weight, before[:16].view(4, 4)), "a tensor of the host"
    state = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        module.bias.add_(1)
    own.restore()
    assert storage.nbytes() == flat.nbytes
    assert module.weight.untyped_storage()._cdata == module.bias.untyped_storage()._cdata
    assert torch.equal(flat[:16], before[:16]) and torch.equal(flat[16:], before[16:] + 1)
    assert torch.equal(module.weight.grad, gradient)
    graphed.load_state_dict(state)
    assert torch.equal(flat, before) and graphed(torch.ones(2, 4)).requires_grad


def test_a_replay_after_it_has_the_values_of_the_host():
    """The negative control: graphs that stayed would have read memory that is another's."""
    module = nn.Linear(4, 4)
    graphed, x = graph(module, warmup=0), torch.ones(2, 4)
    for number in range(3):
        graphed(x).sum().backward()
        packgraph.control(graphed).release()
        kept = torch.full((64,), float("nan"))  # takes what was given back
        module.weight.data.fill_(number)
        packgraph.control(graphed).restore()
        assert torch.equal(graphed(x), x @ torch.full((4, 4), float(number)) + module.bias)
        del kept
    assert graphed.stats.recaptures["weights were released"] == 3


def test_calls_between_are_errors():
    graphed = graph(make_toy(), warmup=0)
    own = packgraph.control(graphed)
    with pytest.raises(RuntimeError, match="restore\\(\\) follows release"):
        own.restore()
    waiting = graphed(*toy_inputs(8))
    with pytest.raises(RuntimeError, match="between steps only"):
        own.release()
    toy_loss(waiting).backward()
    own.release()
    calls = {
        "call": lambda: graphed(*toy_inputs(8)),
        "asked": lambda: eagerly(graphed),
        "without gradients": lambda: torch.no_grad()(graphed)(*toy_inputs(8)),
        "in inference mode": lambda: torch.inference_mode()(graphed)(*toy_inputs(8)),
        "build": lambda: own.build([toy_inputs(8)]),
        "trial": lambda: own.trial(toy_inputs(8)).__enter__(),
        "again": own.release,
    }
    for call in calls.values():
        with pytest.raises(RuntimeError, match="lie in host memory"):
            call()
    own.restore()
    toy_loss(graphed(*toy_inputs(8))).backward()


def eagerly(graphed):
    with packgraph.eager("why"):
        return graphed(*toy_inputs(8))


def test_memory_that_cannot_be_given_back_is_refused_before_anything_moves(tmp_path):
    module = nn.Linear(4, 4)
    path = tmp_path / "weights"
    path.write_bytes(bytes(64))
    mapped = torch.from_file(str(path), shared=True, size=16).view(4, 4)
    module.weight.data = mapped
    graphed = graph(module, warmup=0)
    graphed(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match="weight is not torch's to give back"):
        packgraph.control(graphed).release()
    graphed(torch.ones(2, 4)).sum().backward()
    assert graphed.stats.replayed == 2
    assert "weights were released" not in graphed.stats.recaptures
