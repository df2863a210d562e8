"""What autograd may be asked of a captured module: whatever it may be asked of the module
itself."""

import copy

import pytest
import torch
import torch.nn.functional as functional
from autogradkit import Net, assert_same, gradients, run_both, sample, twins
from torch import nn

from packgraph import graph
from packgraph.graphs.errors import PackgraphWarning

# ---- gradients of some tensors only


def backward_of_inputs(model, number):
    names = ["first.weight", "second.bias"] if number % 2 else ["first.bias"]
    chosen = [p for name, p in model.named_parameters() if name in names]
    model(sample(number))[0].square().sum().backward(inputs=chosen)


def grad_of_parameters(model, number):
    x = sample(number, requires_grad=True)
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    return torch.autograd.grad(model(x)[0].square().sum(), wanted, allow_unused=True)


def grad_of_input(model, number):
    x = sample(number, requires_grad=True)
    return torch.autograd.grad(model(x)[0].square().sum(), [x])


def two_calls_in_one_grad(model, number):
    loss = model(sample(number))[0].square().sum() + model(sample(number + 50))[0].square().sum()
    return torch.autograd.grad(loss, [model.first.weight, model.second.weight])


@pytest.mark.parametrize("granularity", ["chunk", "layer"])
@pytest.mark.parametrize(
    "act",
    [backward_of_inputs, grad_of_parameters, grad_of_input, two_calls_in_one_grad],
    ids=lambda act: act.__name__,
)
def test_gradients_of_some_tensors_only_are_those_of_eager(act, granularity):
    eager, graphed = twins(granularity=granularity)
    run_both(eager, graphed, act)
    assert graphed.stats.replayed >= 4


def test_backward_of_inputs_after_gradients_were_dropped():
    eager, graphed = twins()
    for model in (eager, graphed):
        for p in model.parameters():
            p.grad = None
        model(sample(7))[0].square().sum().backward(inputs=[model.first.weight])
        assert model.second.weight.grad is None
    assert_same(gradients(eager), gradients(graphed))


def test_the_graphs_go_on_after_gradients_of_some_tensors():
    eager, graphed = twins()

    def act(model, number):
        found = grad_of_parameters(model, number)
        model(sample(number))[0].square().sum().backward()
        return found

    run_both(eager, graphed, act)
    assert graphed.stats.captured <= 3


def penalty(model, number):
    x = sample(number, requires_grad=True)
    (found,) = torch.autograd.grad(model(x)[0].square().sum(), [x], create_graph=True)
    found.norm().backward()
    return [found.detach()]


def test_second_derivatives_are_an_error_and_run_eagerly_from_then_on():
    eager, graphed = twins()
    x = sample(7, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"create_graph=True through .*packgraph\.eager"):
        torch.autograd.grad(graphed(x)[0].square().sum(), [x], create_graph=True)

    with torch.no_grad():
        eager(x)  # the call that failed has written to the statistic
    for model in (eager, graphed):
        model.zero_grad()
    run_both(eager, graphed, penalty)
    assert (
        graphed.stats.fallbacks[
            "gradients of the module are differentiated themselves (create_graph=True)"
        ]
        == 4
    )


def test_second_derivatives_in_warm_up_keep_a_module_eager():
    torch.manual_seed(1)
    eager = Net()
    graphed = graph(copy.deepcopy(eager), warmup=2)
    run_both(eager, graphed, penalty)
    assert graphed.stats.captured == 0


# ---- which outputs get gradients


def first(model, number):
    model(sample(number))[0].square().sum().backward()


def second(model, number):
    model(sample(number).abs() + 1)[1].nan_to_num().square().sum().backward()


def both(model, number):
    a, b = model(sample(number))
    (a.square().sum() + b.nan_to_num().sum()).backward()


def expanded(model, number):
    model(sample(number))[0].sum().backward()


def transposed(model, number):
    model(sample(number))[0].t().contiguous().square().sum().backward()


@pytest.mark.parametrize(
    "change", [second, both, expanded, transposed], ids=lambda act: act.__name__
)
def test_another_use_of_outputs_is_learned(change):
    """Its first backward runs eagerly, with a warning, and is captured at the next call; None stays
    None."""
    eager, graphed = twins()
    for model in (eager, graphed):
        model.zero_grad()
    with pytest.warns(PackgraphWarning, match="another set of outputs"):
        run_both(eager, graphed, change)
    for model in (eager, graphed):
        model.zero_grad()
    run_both(eager, graphed, first)
    run_both(eager, graphed, change)
    reason = "another set of outputs got gradients than any captured backward starts from"
    assert graphed.stats.fallbacks[reason] == 1 and graphed.stats.recaptures[reason] == 1
    # An argument that was computed has a key of its own.
    variants = graphed.slots.all[0].variants.values()
    assert [len(variant.regions[0].backwards) for variant in variants][-1] == 2


def test_an_output_that_the_loss_leaves_out_gets_no_gradient_and_no_nan():
    """`sqrt` of a negative number is NaN, and its gradient NaN even for a gradient of zero."""
    eager, graphed = twins()
    run_both(eager, graphed, first)
    assert graphed.aside.weight.grad is None
    assert graphed.stats.fallbacks.keys() == {"warm-up"}


def test_dropout_is_drawn_again_for_a_backward_that_nobody_captured():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            hidden = functional.dropout(self.linear(x), 0.5)
            return hidden, functional.dropout(hidden, 0.5)

    eager, graphed = twins(Drops)
    results = []
    for model in (eager, graphed):
        torch.manual_seed(5)
        model.zero_grad()
        outs = [model(sample(n)) for n in range(3)]
        for a, b in reversed(outs):
            (a.square().sum() + b.square().sum()).backward()
        results.append({**gradients(model), "rng": torch.get_rng_state()})
    assert_same(*results)


def test_a_forward_that_reads_what_it_writes_is_not_run_again():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            out = self.linear(x) * self.calls
            return out, out * 2

    _, graphed = twins(Counts)
    a, b = graphed(sample(3))
    with pytest.raises(RuntimeError, match="it reads what it writes"):
        (a + b).square().sum().backward()


# ---- what changes between forward and backward


@pytest.mark.parametrize("name", ["frozen", "second.weight", "first.weight"])
def test_what_the_backward_reads_must_not_change(name):
    eager, graphed = twins()
    for model in (eager, graphed):
        loss = model(sample(5))[0].square().sum()
        with torch.no_grad():
            model.get_parameter(name).mul_(2)
        with pytest.raises(
            RuntimeError, match=r"inplace operation|changed in place, or given other memory"
        ):
            loss.backward()


def test_a_parameter_hook_that_comes_between_forward_and_backward_fires():
    eager, graphed = twins()
    seen = {}
    for key, model in (("eager", eager), ("graphed", graphed)):
        loss = model(sample(5))[0].square().sum()

        def double(gradient, key=key):
            seen.setdefault(key, []).append(gradient.clone())
            return gradient * 2

        handle = model.first.weight.register_hook(double)
        loss.backward()
        handle.remove()
    assert len(seen["eager"]) == len(seen["graphed"]) == 1 and torch.equal(
        seen["eager"][0], seen["graphed"][0]
    )
    assert_same(gradients(eager), gradients(graphed))


def test_hooks_on_accumulators_fire():
    eager, graphed = twins()
    seen = {}
    for key, model in (("eager", eager), ("graphed", graphed)):
        node = torch.autograd.graph.get_gradient_edge(model.first.weight).node
        handle = node.register_hook(
            lambda *_, key=key, m=model: seen.setdefault(key, []).append(
                m.first.weight.grad.clone()
            )
        )
        model(sample(5))[0].square().sum().backward()
        handle.remove()
    assert len(seen["eager"]) == len(seen["graphed"]) == 1 and torch.equal(
        seen["eager"][0], seen["graphed"][0]
    )


# ---- gradients that are the user's


def test_gradients_in_a_users_own_tensor_stay_there():
    eager, graphed = twins()
    flats = []
    for model in (eager, graphed):
        flat = torch.ones(32)
        model.first.weight.grad = flat.view(8, 4)
        for number in range(3):
            model(sample(number))[0].square().sum().backward()
        assert model.first.weight.grad.data_ptr() == flat.data_ptr()
        flats.append(flat)
    assert torch.equal(*flats)
    assert_same(gradients(eager), gradients(graphed))


@pytest.mark.parametrize(
    "keep",
    [lambda g: g, lambda g: g.view(-1), lambda g: g.detach(), lambda g: g.numpy()],
    ids=["itself", "a view", "detached", "as an array"],
)
def test_gradients_that_were_kept_stay_what_they_were(keep):
    eager, graphed = twins()
    found = []
    for model in (eager, graphed):
        kept = []
        for number in range(3):
            for p in model.parameters():
                p.grad = None
            model(sample(number))[0].square().sum().backward()
            kept.append(
                {name: keep(p.grad) for name, p in model.named_parameters() if p.grad is not None}
            )
        found.append(
            {
                f"{number} {name}": torch.as_tensor(g)
                for number, grads in enumerate(kept)
                for name, g in grads.items()
            }
        )
        del kept
    assert_same(*found)
    found.clear()
    for p in graphed.parameters():
        p.grad = None
    graphed(sample(1))[0].square().sum().backward()
    owned = next(iter(graphed.slots.all[0].variants.values())).regions[0].backward.owned
    assert all(
        buffer.parameter.grad is buffer.shown for buffer in owned
    )  # nobody else holds them any more


@pytest.mark.parametrize("through", [lambda function: function, torch._dynamo.run])
def test_a_gradient_that_nobody_else_holds_is_exchanged(through):
    """Code of torch.compile replaces the interpreter's evaluation of frames, which changes how many
    references a call holds."""
    _, graphed = twins()

    def step(number):
        for p in graphed.parameters():
            if p.grad is not None:
                p.grad = torch.ones_like(p)
        graphed(sample(number))[0].square().sum().backward()

    for number in range(3):
        through(step)(number)
        owned = next(iter(graphed.slots.all[0].variants.values())).regions[0].backward.owned
        assert all(buffer.parameter.grad is buffer.shown for buffer in owned)


# ---- complex tensors


def test_conjugate_inputs_are_a_key_of_their_own():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

        def forward(self, x):
            return (x @ self.weight).abs()

    def act(model, number):
        x = torch.complex(sample(number), sample(number + 1))
        out = model(x.conj() if number % 2 else x)
        out.square().sum().backward()
        return [out.detach()]

    torch.manual_seed(1)
    eager = Scaled()
    graphed = graph(copy.deepcopy(eager), warmup=1)
    run_both(eager, graphed, act)
    assert graphed.stats.captured == 2


class Normed(nn.Module):
    """Two outputs behind running averages, which torch writes to without saying so in the
    operation's schema."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.norm(self.first(x))
        return self.second(hidden), hidden


def test_running_averages_move_once_where_a_backward_runs_its_forward_again():
    eager, graphed = twins(Normed)
    for number in range(10, 14):
        for model in (eager, graphed):
            first, second = model(sample(number))
            (
                second.square().sum() if number % 2 else first.square().sum() + second.sum()
            ).backward()
        assert_same(dict(eager.named_buffers()), dict(graphed.module.named_buffers()))
        assert_same(gradients(eager), gradients(graphed))
    again = {
        reason: count for reason, count in graphed.stats.fallbacks.items() if reason != "warm-up"
    }
    assert sum(again.values()) == 2, again


def test_running_averages_have_the_versions_that_eager_calls_leave():
    eager, graphed = twins(Normed)
    versions = [[buffer._version for buffer in model.buffers()] for model in (eager, graphed)]
    for model in (eager, graphed):  # a backward after another forward is no error
        flight = [model(sample(number))[0].sum() for number in range(2)]
        for loss in flight:
            loss.backward()
    grown = [
        [buffer._version - before for buffer, before in zip(model.buffers(), found, strict=True)]
        for model, found in zip((eager, graphed), versions, strict=True)
    ]
    assert (
        grown[0] == [0, 0, 2] and grown[1][:2] == [0, 0] and grown[1][2] > 0
    )  # a capture and its undoing count, too
    assert_same(gradients(eager), gradients(graphed))


def test_hooks_of_parameters_that_get_no_gradient_are_not_called():
    eager, graphed = twins(warmup=1)
    seen = {}

    def note(gradient, key):
        seen.setdefault(key, []).append(gradient.clone())
        return gradient * 2

    for label, model in (("eager", eager), ("graphs", graphed)):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda g, key=(label, name): note(g, key))

    def act(model, number):
        first, second = model(sample(number))
        (second if number % 2 else first).nansum().backward()

    run_both(eager, graphed, act)
    for (label, name), got in list(seen.items()):
        other = seen["graphs" if label == "eager" else "eager", name]
        assert len(got) == len(other), name
        assert all(
            torch.equal(a.nan_to_num(7.7), b.nan_to_num(7.7))
            for a, b in zip(got, other, strict=True)
        )


def hook_is_called_as_in_eager(name, act, scale=1):
    """A hook of a parameter sees the same gradients of eager calls and of graphs, in every step."""
    eager, graphed = twins(warmup=1)
    seen = {"eager": [], "graphs": []}
    for label, model in (("eager", eager), ("graphs", graphed)):
        model.get_parameter(name).register_hook(
            lambda g, label=label: (
                seen[label].append(g.clone()) or (g * scale if scale > 1 else None)
            )
        )
    run_both(eager, graphed, act)
    assert len(seen["graphs"]) == len(seen["eager"]) == 4
    assert all(torch.equal(a, b) for a, b in zip(*seen.values(), strict=True))


@pytest.mark.parametrize("used_first", [True, False])
def test_a_hook_is_called_where_one_of_two_calls_gives_a_gradient(used_first):
    def act(model, number):
        one, two = (model(sample(10 * number + n)) for n in range(2))
        (one[0 if used_first else 1].nansum() + two[1 if used_first else 0].nansum()).backward()

    hook_is_called_as_in_eager("second.weight", act)


def test_a_hook_is_called_for_a_gradient_that_comes_from_elsewhere():
    """The call gives none, eager code in the same backward gives one."""

    def act(model, number):
        outside = model.get_parameter("aside.bias").square().sum()
        (model(sample(number))[0].sum() + outside).backward()

    hook_is_called_as_in_eager("aside.bias", act, scale=3)
