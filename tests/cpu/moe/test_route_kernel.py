"""The kernels of the choice of experts against the operations they replace, in Triton's
interpreter."""

import torch
from interpreterkit import inside, needs_triton, outside, run_in_interpreter
from moekit import Settings

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


def given_logits(tokens: int, experts: int, coarse: bool, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    if coarse:
        return LEVELS[torch.randint(0, len(LEVELS), (tokens, experts), generator=generator)]
    return torch.randn(tokens, experts, generator=generator)


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


@outside
def test_in_the_interpreter():
    run_in_interpreter(__file__)
