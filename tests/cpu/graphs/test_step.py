"""A whole step in one graph equals the same loop run eagerly, bit by bit."""

import contextlib
import random

import pytest
import torch
from graphkit import make_toy, toy_inputs, toy_loss
from torch import nn
from tracekit import differences

import packgraph
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.recorder.backend import RecorderBackend
from packgraph.graphs.step import GraphedStep


def step_of(model, optimizer=None):
    def run(*pairs):
        total = torch.zeros(())
        for ids, x in pairs:
            loss = toy_loss(model(ids, x))
            total += loss.detach()
            loss.backward()
        if optimizer is not None:
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad.zero_()
        return total

    return run


def train_steps(model, run, *, steps=8, counts=(1, 2, 3)):
    torch.manual_seed(5)
    order = random.Random(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trace = []
    for _ in range(steps):
        made = [toy_inputs(order.choice((6, 9))) for _ in range(order.choice(counts))]
        pairs = [(ids, x.detach()) for ids, x in made]
        loss = run(*pairs)
        facts = {f"gradient {name}": p.grad.clone() for name, p in model.named_parameters()}
        facts |= {"loss": loss.clone(), "rng": torch.get_rng_state(), "calls": model.calls.clone()}
        optimizer.step()
        facts |= {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        trace.append(facts)
    return trace


def graphed_step(model, run, **options):
    return GraphedStep([model], run, RecorderBackend(), torch.device("cpu"), **options)


def test_steps_with_changing_counts_and_shapes_equal_eager_bitwise():
    eager_model, model = make_toy(), make_toy()
    step = graphed_step(model, step_of(model), limit=64)
    expected = train_steps(eager_model, step_of(eager_model), steps=12)
    assert differences(expected, train_steps(model, step, steps=12)) == []
    assert step.stats.replayed == 12 and not step.stats.fallbacks


def test_a_full_bank_falls_back_and_stays_exact():
    eager_model, model = make_toy(), make_toy()
    step = graphed_step(model, step_of(model), limit=2)
    expected = train_steps(eager_model, step_of(eager_model), steps=12)
    assert differences(expected, train_steps(model, step, steps=12)) == []
    assert (
        step.stats.fallbacks["too many different call signatures"] > 0 and step.stats.replayed > 0
    )


def test_the_optimizer_may_be_part_of_the_step():
    def loop(model, wrap):
        torch.manual_seed(0)
        rate = torch.tensor(0.01)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        step = wrap(step_of(model, optimizer))
        losses = []
        for number in range(6):
            rate.fill_(0.01 / (1 + number))
            pair = toy_inputs(8)
            with (
                packgraph.eager("warm-up: the optimizer makes its state")
                if number == 0
                else contextlib.nullcontext()
            ):
                losses.append(step((pair[0], pair[1].detach())))
        return torch.stack(losses), [p.detach().clone() for p in model.parameters()]

    model = make_toy()
    expected = loop(make_toy(), lambda run: run)
    losses, parameters = loop(model, lambda run: graphed_step(model, run))
    assert torch.equal(losses, expected[0])
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected[1], strict=True))


def test_a_sync_in_the_step_names_its_line_and_changes_nothing():
    model = make_toy()

    def run(ids, x):
        loss = toy_loss(model(ids, x))
        loss.backward()
        return loss * float(loss.detach())

    step = graphed_step(model, run)
    ids, x = toy_inputs(8)
    state = torch.get_rng_state()
    with pytest.raises(CaptureError, match="reading a number") as caught:
        step(ids, x.detach())
    assert __file__ in caught.value.where
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters()) and model.calls == 0
    assert step(ids, x.detach()).isfinite()
    assert step.stats.fallbacks["capture failed"] == 1


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_on_a_module_is_refused_and_runs_at_every_step(late):
    model, called = make_toy(), []
    step = graphed_step(model, step_of(model))
    pair = toy_inputs(8)
    pair = pair[0], pair[1].detach()
    inner = next(module for module in model.modules() if not list(module.children()))
    if late:
        step(pair)
        assert step.stats.replayed == 1
    inner.register_forward_pre_hook(lambda module, args: called.append(1))
    with pytest.raises(CaptureError, match="has forward pre hooks"):
        step(pair)
    assert not called
    for number in range(1, 4):
        step(pair)
        assert len(called) == number
    assert step.stats.fallbacks["capture failed"] == 3


def test_packed_batches_are_step_arguments():
    embedding = nn.Embedding(30, 4)

    def run(*batches):
        total = torch.zeros(())
        for batch in batches:
            hidden = torch.where(batch.padding_mask[:, None], 0.0, embedding(batch.tokens))
            loss = hidden.pow(2).sum()
            loss.backward()
            total += loss.detach()
        return total

    step = graphed_step(embedding, run)
    capacity = packgraph.Capacity(8, 4)
    for lengths in ([3, 2], [8], [1, 1, 1]):
        batch = packgraph.pack([list(range(n)) for n in lengths], [capacity])[0]
        embedding.weight.grad = None
        replayed = step(batch, batch)
        gradient = embedding.weight.grad.clone()
        embedding.weight.grad = None
        assert torch.equal(run(batch, batch), replayed) and torch.equal(
            embedding.weight.grad, gradient
        )
    assert step.stats.captured == 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_no_part_of_a_step(kind, late):
    module = nn.Linear(4, 4)

    def run(x):
        loss = module(x).square().mean()
        loss.backward()
        return loss.detach()

    step = GraphedStep([module], run, RecorderBackend(), torch.device("cpu"))
    hook = lambda given: given * 3 if kind == "register_hook" else None  # noqa: E731
    if late:
        step(torch.ones(2, 4))
    getattr(module.weight, kind)(hook)
    with pytest.raises(CaptureError, match="has a hook, which a graph of a whole step"):
        step(torch.ones(2, 4))
