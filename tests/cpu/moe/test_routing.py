"""Routing: equal to the routers of transformers, padding routed nowhere, ties by number, documents
independent."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moekit import Settings
from torch import Tensor
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from packgraph.moe.dispatch.dispatcher import Routing
from packgraph.moe.routing import (
    drop_beyond,
    first_best,
    naive_drop_beyond,
    route,
)


def random_logits(tokens: int, experts: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


def no_padding(logits: Tensor) -> Tensor:
    return torch.zeros(logits.shape[0], dtype=torch.bool)


def by_number(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The same pairs with each token's places in the order of the experts' numbers."""
    experts, order = experts.long().sort(dim=-1)
    return experts, weights.gather(1, order)


DEEPSEEK = [
    (8, 2, 1, 1, True, 1.0, 0.0),
    (16, 4, 4, 2, True, 2.5, 0.3),
    (16, 3, 8, 3, False, 0.7, 0.3),
    (64, 6, 1, 1, True, 2.446, 0.1),
    (12, 4, 3, 2, True, 1.0, 5.0),
]


@pytest.mark.parametrize(
    ("experts", "k", "groups", "kept", "normalise", "scaling", "spread"), DEEPSEEK
)
def test_equals_the_router_of_deepseek_v3_with_gradients(
    experts, k, groups, kept, normalise, scaling, spread
):
    torch.manual_seed(0)
    router = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=10,
            n_routed_experts=experts,
            num_experts_per_tok=k,
            n_group=groups,
            topk_group=kept,
            norm_topk_prob=normalise,
            routed_scaling_factor=scaling,
        )
    )
    torch.nn.init.normal_(router.weight)
    # a spread of 5 makes biased scores negative, so that groups left out must be below any score
    router.e_score_correction_bias.normal_(std=spread)
    hidden = torch.randn(40, 10)
    _, weights, chosen = router(hidden)
    given_weights = torch.randn(40, experts)
    (weights * given_weights.gather(1, chosen)).sum().backward()

    weight = router.weight.detach().clone().requires_grad_()
    ours = route(
        hidden @ weight.t(),
        torch.zeros(40, dtype=torch.bool),
        router.e_score_correction_bias,
        Settings(k, "sigmoid", normalise, scaling, groups, kept),
    ).routing
    (ours.weights * given_weights.gather(1, ours.experts.long())).sum().backward()
    assert ours.experts.dtype == torch.int32 and ours.weights.dtype == torch.float32
    for mine, theirs in zip(by_number(*ours), by_number(chosen, weights)):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(weight.grad, router.weight.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalise", [True, False])
def test_equals_the_router_of_qwen3_moe_with_gradients(normalise):
    torch.manual_seed(0)
    router = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(
            hidden_size=10, num_experts=16, num_experts_per_tok=4, norm_topk_prob=normalise
        )
    )
    torch.nn.init.normal_(router.weight)
    hidden, grad = torch.randn(40, 10), torch.randn(40, 4)
    _, weights, chosen = router(hidden)
    weights.backward(grad)
    weight = router.weight.detach().clone().requires_grad_()
    ours = route(
        hidden @ weight.t(),
        torch.zeros(40, dtype=torch.bool),
        None,
        Settings(4, normalise=normalise),
    ).routing
    ours.weights.backward(grad)
    assert torch.equal(ours.experts.long(), chosen)
    torch.testing.assert_close(ours.weights, weights, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(weight.grad, router.weight.grad, rtol=1e-5, atol=1e-6)


KINDS = [
    Settings(2),
    Settings(3, "sigmoid", scaling=2.5, groups=4, groups_kept=2),
    Settings(8, normalise=False),
    Settings(1, "sigmoid", normalise=False, groups=8, groups_kept=3),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_padding_is_routed_nowhere_and_has_no_gradient(kind, poison):
    padding = torch.arange(12) % 3 == 1
    logits = random_logits(12, 8)
    grads = torch.randn(12, kind.per_token), torch.randn(12, 8)
    expected = logits[~padding].clone().requires_grad_()
    alone = route(expected, no_padding(expected), torch.arange(8.0) / 10, kind)
    torch.autograd.backward(
        [alone.routing.weights, alone.scores], [grad[~padding] for grad in grads]
    )

    logits[padding] = poison
    logits.requires_grad_()
    routing, scores = route(logits, padding, torch.arange(8.0) / 10, kind)
    torch.autograd.backward([routing.weights, scores], list(grads))
    assert (routing.experts[padding] == -1).all() and (routing.weights[padding] == 0).all()
    assert scores.isfinite().all() and (logits.grad[padding] == 0).all()
    assert torch.equal(routing.experts[~padding], alone.routing.experts)
    assert torch.equal(routing.weights[~padding], alone.routing.weights)
    assert torch.equal(logits.grad[~padding], expected.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_changes_no_other_documents_routing(kind):
    document = torch.tensor([0] * 7 + [1] * 5 + [2] * 4)
    outcomes = []
    for change in (0.0, 1.5):
        logits = random_logits(16, 8)
        logits[document == 1] *= 1 - change
        logits.requires_grad_()
        routing, _ = route(logits, document == 2, None, kind)
        routing.weights.square().sum().backward()
        outcomes.append((routing.experts, routing.weights, logits.grad))
    others = document != 1
    assert all(torch.equal(a[others], b[others]) for a, b in zip(*outcomes))
    assert not torch.equal(outcomes[0][1], outcomes[1][1])


def test_of_equal_scores_the_lower_number_wins():
    logits = torch.zeros(3, 512)
    assert (
        route(logits, no_padding(logits), None, Settings(4)).routing.experts.tolist()
        == [[0, 1, 2, 3]] * 3
    )
    grouped = route(
        logits, no_padding(logits), None, Settings(3, "sigmoid", groups=256, groups_kept=2)
    ).routing
    assert grouped.experts.tolist() == [[0, 1, 2]] * 3
    saturated = torch.tensor([[90.0, -5.0, 100.0, 95.0]])  # sigmoid gives 1 for three of them
    assert route(
        saturated, no_padding(saturated), None, Settings(2, "sigmoid")
    ).routing.experts.tolist() == [[0, 2]]


def test_a_nan_of_a_token_stays_visible():
    logits = torch.zeros(2, 4)
    logits[0, 3] = -float("nan")
    routing, _ = route(logits, no_padding(logits), None, Settings(2, "sigmoid"))
    assert routing.weights[0].isnan().any() and routing.weights[1].isfinite().all()


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=12),
    count=st.integers(1, 12),
)
def test_first_best_equals_a_stable_sort(values, count):
    count = min(count, len(values))
    found = first_best(torch.tensor(values) + 0.0, count).tolist()  # + 0.0: no -0
    assert found == sorted(range(len(values)), key=lambda place: -values[place])[:count]


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 14),
    experts=st.integers(2, 6),
    most=st.integers(0, 8),
    coarse=st.booleans(),
    seed=st.integers(0, 99),
)
def test_drop_beyond_equals_naive_with_gradients(tokens, experts, most, coarse, seed):
    logits = random_logits(tokens, experts, seed)
    logits = logits.round() if coarse else logits  # coarse logits give equal weights
    padding = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) < 0.3
    routing, _ = route(logits, padding, None, Settings(2))
    outcomes = []
    for function in (drop_beyond, naive_drop_beyond):
        weights = routing.weights.clone().requires_grad_()
        kept = function(Routing(routing.experts, weights), experts, most)
        kept.weights.square().sum().backward()
        outcomes.append((kept.experts, kept.weights, weights.grad))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*outcomes))
    for expert in range(experts):
        assert (outcomes[0][0] == expert).sum() == min(most, int((routing.experts == expert).sum()))


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_into_one_graph_with_the_same_bits(kind):
    logits, padding = random_logits(12, 8), torch.arange(12) > 9

    def whole(logits: Tensor, padding: Tensor) -> tuple[Routing, Tensor]:
        routing, scores = route(logits, padding, None, kind)
        return drop_beyond(routing, 8, 3), scores

    compiled = torch.compile(whole, backend="aot_eager", fullgraph=True)
    (left, left_scores), (right, right_scores) = whole(logits, padding), compiled(logits, padding)
    assert all(torch.equal(a, b) for a, b in zip((*left, left_scores), (*right, right_scores)))


def test_illegal_calls_are_named():
    with pytest.raises(ValueError, match=r"float32 logits, got torch\.bfloat16"):
        route(
            torch.zeros(2, 4, dtype=torch.bfloat16),
            torch.zeros(2, dtype=torch.bool),
            None,
            Settings(),
        )
    with pytest.raises(ValueError, match="cannot choose 4 of 8 experts in 4 groups"):
        route(
            torch.zeros(2, 8),
            torch.zeros(2, dtype=torch.bool),
            None,
            Settings(4, groups=4, groups_kept=1),
        )


def test_scores_that_vanish_give_zero_weights_and_finite_gradients():
    logits = torch.full((2, 4), -200.0, requires_grad=True)
    routing, _ = route(logits, torch.zeros(2, dtype=torch.bool), None, Settings(2, "sigmoid"))
    routing.weights.sum().backward()
    assert (routing.weights == 0).all() and logits.grad.isfinite().all()


def test_dropping_keeps_the_earlier_of_equal_tokens():
    routing = Routing(
        torch.tensor([[1], [0], [1], [1], [-1]], dtype=torch.int32),
        torch.tensor([[0.5], [0.1], [0.9], [0.5], [0.0]]),
    )
    assert drop_beyond(routing, 2, 2).experts.flatten().tolist() == [1, 0, 1, -1, -1]
