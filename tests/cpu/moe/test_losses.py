"""Auxiliary losses against loops over documents, padding and documents apart; the bias that
balances without a loss."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moekit import Settings
from torch import Tensor, nn

from packgraph.graphs.graphed import graph
from packgraph.moe.balance import (
    attach,
    batch_loss,
    document_loss,
    expert_counts,
    load_loss,
    naive_batch_loss,
    naive_document_loss,
    naive_load_loss,
    naive_z_loss,
    update_bias,
    z_loss,
)
from packgraph.moe.routing import route

TOLERANCE = {"rtol": 2e-5, "atol": 1e-6}  # float32 sums in different order
DOCUMENTS = 6


def pack(lengths: list[int], padding: int) -> Tensor:
    """document_ids of documents (some may be empty) and a tail."""
    ids = [number for number, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor(ids + [DOCUMENTS] * padding, dtype=torch.int32)


def random_logits(tokens: int, experts: int, seed: int) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


def run(function, logits: Tensor, *rest, factor: float = 1.0) -> list[Tensor]:
    """Value and gradient of a loss of logits."""
    logits = logits.clone().requires_grad_()
    loss = function(logits, *rest)
    (loss * factor).backward()
    return [loss.detach(), logits.grad]


def of_documents(function, kind: Settings):
    """A document loss as a function of logits."""

    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        valid = ids < DOCUMENTS
        routing, scores = route(logits, ~valid, None, kind)
        return function(scores, routing.experts, ids, valid, DOCUMENTS)

    return loss


def of_load(function, kind: Settings):
    """A load loss as a function of logits."""

    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        valid = ids < DOCUMENTS
        routing, scores = route(logits, ~valid, None, kind)
        return function(scores, routing.experts, valid)

    return loss


def of_batch(function, kind: Settings):
    """A batch loss as a function of logits, for a step that has used later experts more."""

    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        valid = ids < DOCUMENTS
        _, scores = route(logits, ~valid, None, kind)
        return function(scores, torch.arange(scores.shape[1]) ** 2, valid)

    return loss


def of_z(function):
    """A z-loss with the arguments of the others."""
    return lambda logits, ids: function(logits, ids < DOCUMENTS)


KINDS = [Settings(2), Settings(3, "sigmoid")]
FAST = [
    of_documents(document_loss, KINDS[0]),
    of_documents(document_loss, KINDS[1]),
    of_load(load_loss, KINDS[0]),
    of_load(load_loss, KINDS[1]),
    of_batch(batch_loss, KINDS[1]),
    of_z(z_loss),
]
NAIVE = [
    of_documents(naive_document_loss, KINDS[0]),
    of_documents(naive_document_loss, KINDS[1]),
    of_load(naive_load_loss, KINDS[0]),
    of_load(naive_load_loss, KINDS[1]),
    of_batch(naive_batch_loss, KINDS[1]),
    of_z(naive_z_loss),
]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), max_size=DOCUMENTS),
    padding=st.integers(0, 4),
    experts=st.integers(3, 7),
    which=st.integers(0, len(FAST) - 1),
    seed=st.integers(0, 99),
)
def test_equals_naive_for_value_and_gradients(lengths, padding, experts, which, seed):
    ids = pack(lengths, padding if sum(lengths) + padding else 1)
    logits = random_logits(len(ids), experts, seed)
    for ours, theirs in zip(
        run(FAST[which], logits, ids, factor=0.3), run(NAIVE[which], logits, ids, factor=0.3)
    ):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_loss_of_the_counts_of_one_microbatch_is_its_load_loss(kind):
    """And parts of a batch, by their tokens, are the loss of the whole: unlike the load loss it
    does not depend on how tokens are cut into microbatches."""
    ids, logits = pack([5, 7], 0), random_logits(12, 8, 7)
    valid = ids < DOCUMENTS
    routing, scores = route(logits, ~valid, None, kind)
    counts = expert_counts(routing.experts, 8)
    whole = batch_loss(scores, counts, valid)
    torch.testing.assert_close(whole, load_loss(scores, routing.experts, valid), **TOLERANCE)
    parts = [batch_loss(scores[at], counts, valid[at]) for at in (slice(0, 5), slice(5, 12))]
    torch.testing.assert_close(5 / 12 * parts[0] + 7 / 12 * parts[1], whole, **TOLERANCE)
    assert batch_loss(scores, torch.zeros(8, dtype=torch.int64), valid) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_document_loss_is_the_average_of_documents_run_alone(kind):
    lengths = [3, 8, 1, 5]
    ids = pack(lengths, 0)
    logits = random_logits(len(ids), 8, 3)
    together, gradient = run(of_documents(document_loss, kind), logits, ids)
    alone = [
        run(of_load(load_loss, kind), part, torch.zeros(len(part), dtype=torch.int32))
        for part in logits.split(lengths)
    ]
    torch.testing.assert_close(
        together, torch.stack([loss for loss, _ in alone]).mean(), **TOLERANCE
    )
    torch.testing.assert_close(
        gradient, torch.cat([grad for _, grad in alone]) / len(lengths), **TOLERANCE
    )


@pytest.mark.parametrize("kind", KINDS)
def test_perturbing_a_document_changes_no_other_documents_gradient(kind):
    ids = pack([3, 8, 2, 5], 6)
    logits = random_logits(len(ids), 8, 4)
    other = torch.where((ids == 1)[:, None], logits.flip(-1), logits)
    before, after = (run(of_documents(document_loss, kind), each, ids) for each in (logits, other))
    assert torch.equal(before[1][ids != 1], after[1][ids != 1])
    assert not torch.equal(before[1][ids == 1], after[1][ids == 1])


@pytest.mark.parametrize("loss", FAST)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_padding_has_no_part_in_value_or_gradient(loss, poison):
    ids = pack([3, 5, 2], 0)
    logits = random_logits(len(ids), 8, 5)
    value, gradient = run(loss, logits, ids)
    tail = torch.full((len(ids), 8), poison)  # half of the batch is padding
    padded = run(loss, torch.cat([logits, tail]), pack([3, 5, 2], len(ids)))
    torch.testing.assert_close(padded[0], value, **TOLERANCE)
    torch.testing.assert_close(padded[1][: len(ids)], gradient, **TOLERANCE)
    assert (padded[1][len(ids) :] == 0).all()


@pytest.mark.parametrize("function", [load_loss, document_loss])
def test_undefined_scores_and_choices_of_padding_are_not_read(function):
    ids = pack([3, 2], 5)
    valid = ids < DOCUMENTS
    experts = torch.arange(20).view(10, 2) % 4
    rest = (ids, valid, DOCUMENTS) if function is document_loss else (valid,)
    results = []
    for poison, choice in ((0.5, -1), (float("nan"), 3)):
        scores = torch.where(valid[:, None], random_logits(10, 4, 6).sigmoid(), poison)
        chosen = torch.where(valid[:, None], experts, choice).int()
        results.append(run(function, scores, chosen, *rest))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("loss", FAST)
def test_only_padding_gives_zero_and_zero_gradients(loss):
    value, gradient = run(loss, torch.full((7, 8), float("nan")), pack([], 7))
    assert (
        value == 0 and value.dtype == torch.float32 and value.dim() == 0 and (gradient == 0).all()
    )


class WithLoss(nn.Module):
    """A gate whose losses are attached to what passes by."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(6, 8, bias=False)
        self.register_buffer("load", torch.zeros(8, dtype=torch.int64))

    def forward(self, hidden: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
        valid = ids < DOCUMENTS
        logits = self.gate(hidden)
        routing, scores = route(logits, ~valid, None, KINDS[1])
        with torch.no_grad():
            self.load.add_(expert_counts(routing.experts, 8))
        loss = (
            z_loss(logits, valid)
            + document_loss(scores, routing.experts, ids, valid, DOCUMENTS)
            + load_loss(scores, routing.experts, valid)
        )
        return attach(hidden, loss, scale).clone()


PACKS = [pack([3, 4], 3), pack([1, 0, 5], 4), pack([10], 0), pack([], 10), pack([2, 2, 2], 4)]


def train(model, eager: WithLoss) -> list[Tensor]:
    found = []
    for seed, ids in enumerate(PACKS):
        hidden = random_logits(10, 6, seed).requires_grad_()
        out = model(hidden, ids, torch.tensor(0.5 + seed))
        out.square().sum().backward()
        assert torch.equal(hidden.grad[ids == DOCUMENTS], 2 * hidden.detach()[ids == DOCUMENTS])
        found += [
            out.detach().clone(),
            hidden.grad,
            eager.gate.weight.grad.clone(),
            eager.load.clone(),
        ]
    return found


def test_compiled_into_one_graph_and_captured_it_gives_the_same_bits():
    eager, compiled, graphed = (
        WithLoss(),
        WithLoss(),
        graph(WithLoss(), warmup=1, strict=True, backend="recorder"),
    )
    expected = train(eager, eager)
    assert expected[3].sum() == 7 * 3 and expected[-1].sum() == (7 + 6 + 10 + 0 + 6) * 3
    whole = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    for ours in (train(whole, compiled), train(graphed, graphed)):
        assert all(torch.equal(a, b) for a, b in zip(expected, ours))
    assert graphed.stats.replayed > 0


@pytest.mark.parametrize("incoming", [1.0, -7.0, 0.0, float("nan")])
def test_attach_gives_the_loss_its_scale_whatever_comes_in(incoming):
    hidden, weight = torch.randn(3, 2, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    scale = torch.tensor(0.25)
    out = attach(hidden, weight * weight, scale)
    assert torch.equal(out, hidden)
    (out + out * 0).backward(torch.full((3, 2), incoming))  # two uses are still one backward
    torch.testing.assert_close(hidden.grad, torch.full((3, 2), incoming), equal_nan=True)
    assert weight.grad == 0.25 * 4
    assert scale == 0.25


def test_attach_counts_once_for_each_accumulated_microbatch_with_the_scale_of_then():
    weight, scale = torch.tensor(1.0, requires_grad=True), torch.tensor(0.0)
    for share in (0.25, 0.5, 2.0):
        scale.fill_(share)
        hidden = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
        attach(hidden, weight * 3, scale).sum().backward()
        assert hidden.grad.dtype == torch.bfloat16 and (hidden.grad == 1).all()
    assert weight.grad == 3 * 2.75 and scale == 2.0
    leaf = torch.tensor(1.0, requires_grad=True)
    for _ in range(2):  # a leaf as loss: its gradient must not be the memory of the scale
        attach(torch.ones(2, requires_grad=True), leaf, scale).sum().backward()
    assert leaf.grad == 4.0 and scale == 2.0


@settings(max_examples=30, deadline=None)
@given(
    experts=st.lists(st.lists(st.integers(-1, 4), min_size=2, max_size=2), min_size=1, max_size=12)
)
def test_expert_counts_leave_padding_out(experts):
    flat = [expert for pair in experts for expert in pair]
    counts = expert_counts(torch.tensor(experts, dtype=torch.int32), 5)
    assert counts.dtype == torch.int64 and counts.tolist() == [
        flat.count(expert) for expert in range(5)
    ]


def test_the_bias_of_three_steps_with_half_padding_is_that_of_runs_without():
    rate, runs = 0.125, []
    for padding in (0, 16):
        bias, load, seen = torch.zeros(8), torch.zeros(8, dtype=torch.int64), []
        for step in range(3):
            for microbatch in range(2):
                logits = torch.cat(
                    [
                        random_logits(16, 8, 2 * step + microbatch) + torch.arange(8) / 4,
                        torch.zeros(padding, 8),
                    ]
                )
                mask = torch.arange(len(logits)) >= 16
                load.add_(expert_counts(route(logits, mask, bias, KINDS[1]).routing.experts, 8))
            mean = load.sum() / 8
            expected = [
                float(before) + rate * ((mean > count).item() - (mean < count).item())
                for before, count in zip(bias, load)
            ]
            seen.append(load.tolist())
            update_bias(bias, load, rate)
            assert bias.tolist() == expected and (load == 0).all()
        runs.append((seen, bias))
    assert sum(runs[0][0][0]) == 2 * 16 * 3
    assert runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1])


def theirs(layers: list[Tensor], per_token: int, mask: Tensor) -> Tensor:
    """The loss of transformers, of which `router_aux_loss_coef` is the factor."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    return mixtral.load_balancing_loss_func(  # type: ignore[no-any-return]
        tuple(layers), layers[0].shape[1], per_token, mask[None].float()
    )


def ours(layers: list[Tensor], kind: Settings, mask: Tensor) -> Tensor:
    """The sum over layers, by the rule of docs/guides/experts.md for a coefficient of 1."""
    losses = []
    for logits in layers:
        routing, scores = route(logits, ~mask, None, kind)
        losses.append(load_loss(scores, routing.experts, mask))
    return torch.stack(losses).sum() * kind.per_token / len(layers)


@pytest.mark.parametrize("per_token", [1, 2, 4])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_rule_of_the_guide_gives_the_loss_of_transformers(layers: int, per_token: int) -> None:
    kind, mask = Settings(per_token=per_token), torch.arange(50) < 41
    logits = random_logits(50, 8, 0)
    values = []
    for loss in (lambda x: ours(x, kind, mask), lambda x: theirs(x, per_token, mask)):
        alike = [logits.clone().requires_grad_() for _ in range(layers)]
        found = loss(alike)
        found.backward()
        values.append([found.detach(), *(leaf.grad for leaf in alike)])
    for mine, other in zip(*values, strict=True):
        torch.testing.assert_close(mine, other, **TOLERANCE)


def test_loads_of_other_layers_excuse_nothing_here() -> None:
    """As the guide says: one layer uses the first experts alone, the other one the last."""
    kind, mask = Settings(per_token=2), torch.ones(50, dtype=torch.bool)
    logits = random_logits(50, 8, 0)
    first, last = logits.clone(), logits.clone()
    first[:, :4] += 9
    last[:, 4:] += 9
    assert theirs([first, last], 2, mask) < 1.1 * 2 < 1.8 * 2 < ours([first, last], kind, mask)


def test_document_loss_equals_sums_by_segment():
    """Against the formula written with sums per document, with a gradient through the mean
    shares."""
    ids, experts = pack([5, 0, 1, 9], 4).long(), 7
    valid = ids < DOCUMENTS
    chosen = random_logits(len(ids), experts, 1).topk(2).indices
    shares = random_logits(len(ids), experts, 2).double().softmax(-1).requires_grad_()
    tokens = (
        torch.zeros(DOCUMENTS + 1, 1)
        .double()
        .index_add(0, ids, torch.ones(len(ids), 1).double())[:-1]
    )
    mean = torch.zeros(DOCUMENTS + 1, experts).double().index_add(0, ids, shares)[
        :-1
    ] / tokens.clamp(min=1)
    counts = (
        torch.zeros(DOCUMENTS + 1, experts)
        .double()
        .index_add(0, ids, nn.functional.one_hot(chosen, experts).sum(1).double())[:-1]
    )
    expected = ((counts / (tokens * 2).clamp(min=1)) * mean).sum() * experts / 3
    expected.backward()
    ours = shares.detach().float().requires_grad_()
    actual = document_loss(ours, chosen, ids, valid, DOCUMENTS)
    actual.backward()
    torch.testing.assert_close(actual, expected.float(), **TOLERANCE)
    # shares are normalised once more, so gradients agree up to what all experts of a token have in
    # common
    inner = (shares.grad * shares.detach()).sum(-1, keepdim=True)
    torch.testing.assert_close(
        ours.grad, torch.where(valid[:, None], shares.grad - inner, 0).float(), **TOLERANCE
    )


def test_scores_that_all_vanish_give_finite_gradients():
    value, gradient = run(of_load(load_loss, KINDS[1]), torch.full((4, 5), -200.0), pack([4], 0))
    assert value == 0 and gradient.isfinite().all()
