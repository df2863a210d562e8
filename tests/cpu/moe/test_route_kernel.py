"""The kernels of the choice of experts against the operations they replace, in Triton's
interpreter."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as how_often
from hypothesis import strategies as st
from interpreterkit import inside, needs_triton, outside, run_in_interpreter
from moekit import Settings

from packgraph.moe import routing
from packgraph.moe.dispatch.dispatcher import Routing
from packgraph.moe.routing import Scored, naive_route, route_in_one

pytestmark = needs_triton
NAN = float("nan")
LEVELS = torch.tensor(
    [-2.3, -1.1, -0.2, 0.4, 0.9, 1.7, 3.1]
)  # few, so that there are ties; no two pairs sum up alike


def kernels(logits, padding, bias, kind) -> Scored:
    """As `route` on CUDA."""
    experts, weights, scores = route_in_one(
        logits,
        padding,
        bias,
        kind.per_token,
        kind.score == "softmax",
        kind.normalise,
        kind.scaling,
        kind.groups,
        kind.groups_kept,
    )
    return Scored(Routing(experts, weights), scores)


def outcome(function, logits, padding, bias, kind, grads):
    """experts, weights, scores, gradient of logits. grads: of weights and of scores, None = not
    asked for."""
    logits = logits.clone().requires_grad_()
    (experts, weights), scores = function(logits, padding, bias, kind)
    asked = [(result, grad) for result, grad in zip((weights, scores), grads) if grad is not None]
    torch.autograd.backward(*zip(*asked))
    return experts, weights.detach(), scores.detach(), logits.grad


def compare(logits, padding, bias, kind, both=(True, True)):
    """Kernel and operations on the same; returns what the kernel has made."""
    grads = torch.randn(logits.shape[0], kind.per_token), torch.randn(logits.shape)
    for grad in grads:
        grad[padding] = NAN
    wanted = [grad if asked else None for grad, asked in zip(grads, both)]
    ours, theirs = (
        outcome(function, logits, padding, bias, kind, wanted)
        for function in (kernels, naive_route)
    )
    assert torch.equal(ours[0], theirs[0]) and ours[0].dtype == theirs[0].dtype
    for found, expected, tolerance in zip(ours[1:], theirs[1:], (1e-6, 1e-6, 1e-5)):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert (
        (ours[0][padding] == -1).all() and not ours[1][padding].any() and not ours[3][padding].any()
    )
    return ours


def given_logits(tokens: int, experts: int, coarse: bool, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    if coarse:
        return LEVELS[torch.randint(0, len(LEVELS), (tokens, experts), generator=generator)]
    return torch.randn(tokens, experts, generator=generator)


KINDS = [
    (8, Settings(2)),
    (64, Settings(6, "sigmoid", scaling=2.446)),
    (512, Settings(8)),
    (1, Settings(1)),
    (100, Settings(3, "sigmoid", normalise=False)),
    (12, Settings(4, "sigmoid", True, 2.5, 3, 2)),
    (30, Settings(5, "softmax", False, 0.7, 6, 4)),
    (16, Settings(3, "sigmoid", groups=16, groups_kept=5)),
    (8, Settings(8, "softmax", False)),
    (300, Settings(7, "softmax")),
]


@inside
@pytest.mark.parametrize(("experts", "kind"), KINDS, ids=str)
@pytest.mark.parametrize("coarse", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_kernels_equal_the_operations(experts, kind, coarse, biased):
    tokens = 9 if experts < 100 else 3
    logits = given_logits(tokens, experts, coarse)
    padding = torch.arange(tokens) % 4 == 1
    logits[padding] = NAN
    bias = torch.tensor([0.0, 0.13, -0.41])[torch.arange(experts) % 3] if biased else None
    compare(logits, padding, bias, kind)


@inside
@pytest.mark.parametrize("both", [(True, False), (False, True)])
@pytest.mark.parametrize("kind", [Settings(3), Settings(3, "sigmoid", scaling=2.0)], ids=str)
def test_either_gradient_may_be_missing(kind, both):
    compare(given_logits(9, 20, False), torch.arange(9) > 6, None, kind, both)


@inside
@how_often(max_examples=15, deadline=None)
@given(
    tokens=st.integers(0, 20),
    each=st.integers(1, 9),
    groups=st.integers(1, 4),
    softmax=st.booleans(),
    normalise=st.booleans(),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_settings(tokens, each, groups, softmax, normalise, seed, data):
    kept = data.draw(st.integers(1, groups))
    kind = Settings(
        data.draw(st.integers(1, each * kept)),
        "softmax" if softmax else "sigmoid",
        normalise,
        1.5,
        groups,
        kept,
    )
    padding = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) < 0.3
    compare(given_logits(tokens, each * groups, True, seed), padding, None, kind)


@inside
def test_of_equal_scores_the_lower_number_wins():
    nowhere = torch.zeros(3, dtype=torch.bool)
    assert (
        kernels(torch.zeros(3, 512), nowhere, None, Settings(4)).routing.experts.tolist()
        == [[0, 1, 2, 3]] * 3
    )
    grouped = kernels(
        torch.zeros(3, 512), nowhere, None, Settings(3, "sigmoid", groups=256, groups_kept=2)
    )
    assert grouped.routing.experts.tolist() == [[0, 1, 2]] * 3
    saturated = torch.tensor([[90.0, -5.0, 100.0, 95.0]])  # sigmoid gives 1 for three of them
    assert kernels(
        saturated, nowhere[:1], None, Settings(2, "sigmoid")
    ).routing.experts.tolist() == [[0, 2]]


@inside
def test_extremes_of_a_token():
    logits, nowhere = torch.full((2, 4), -200.0), torch.zeros(2, dtype=torch.bool)
    _, weights, _, gradient = outcome(
        kernels, logits, nowhere, None, Settings(2, "sigmoid"), (torch.ones(2, 2), None)
    )
    assert not weights.any() and gradient.isfinite().all()
    logits[0, 3] = -NAN
    for kind in (Settings(2, "sigmoid"), Settings(2), Settings(2, "sigmoid", groups=2)):
        found, wanted = (
            kernels(logits, nowhere, None, kind),
            naive_route(logits, nowhere, None, kind),
        )
        assert torch.equal(found.routing.experts, wanted.routing.experts)
        assert found.routing.weights[0].isnan().any() and found.routing.weights[1].isfinite().all()


@inside
def test_rows_and_layouts_change_nothing():
    """Strided inputs, gradients that are expanded, and other rows."""
    kind, padding = Settings(3, "sigmoid", groups=4, groups_kept=2), torch.arange(20) % 5 == 2
    logits, bias = given_logits(20, 40, False), torch.rand(20)
    every = outcome(
        kernels, logits[:, ::2], padding, bias, kind, (torch.ones(()).expand(20, 3), None)
    )
    alone = outcome(
        kernels, logits[7:8, ::2].clone(), padding[7:8], bias, kind, (torch.ones(1, 3), None)
    )
    assert all(torch.equal(left[7:8], right) for left, right in zip(every, alone))


@inside
def test_operation_says_of_itself_what_is_true():
    logits, padding = given_logits(5, 6, False).requires_grad_(), torch.arange(5) > 3
    # not the check of AOTAutograd: it adds up outputs, beginning with integers; compiled code is
    # tested below
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(
        torch.ops.packgraph.route.default,
        (logits, padding, None, 2, True, True, 1.0, 1, 1),
        test_utils=checks,
    )
    experts, _, scores = (
        result.detach() for result in route_in_one(logits, padding, None, 2, True, True, 1.0, 1, 1)
    )
    for grads in ((torch.ones(5, 2), None), (None, torch.ones(5, 6))):
        torch.library.opcheck(
            torch.ops.packgraph.route_backward.default, (*grads, scores, experts, True, True, 1.0)
        )


@inside
def test_compiles_into_one_graph_with_the_same_bits(monkeypatch):
    monkeypatch.setattr(routing, "naive_route", kernels)  # what CUDA tensors get
    logits, padding = given_logits(12, 8, False), torch.arange(12) > 9
    kind, grads = Settings(2, "sigmoid"), (torch.randn(12, 2), None)
    compiled = torch.compile(
        lambda *given: routing.route(*given, kind), backend="aot_eager", fullgraph=True
    )
    found = [
        outcome(
            lambda x, p, b, k, function=function: function(x, p, b),
            logits,
            padding,
            None,
            kind,
            grads,
        )
        for function in (compiled, lambda *given: routing.route(*given, kind))
    ]
    assert all(torch.equal(left, right) for left, right in zip(*found))


@outside
def test_in_the_interpreter():
    run_in_interpreter(__file__)
