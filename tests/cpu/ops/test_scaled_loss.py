"""Scaled and capped logits, and log-probabilities of single rows, against all logits at once."""

import pytest
import torch
import torch.nn.functional as F

from packgraph.ops.log_probabilities import linear_log_probabilities, naive_log_probabilities
from packgraph.ops.loss import IGNORED, linear_cross_entropy, naive_linear_cross_entropy

# float32 sums of 40 terms of size one in different order
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
CASES = [(1.0, 0.0), (0.3, 0.0), (1.0, 1.5), (2.0, 0.8)]


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(13, 8, generator=generator)
    weight = torch.randn(40, 8, generator=generator)
    labels = torch.randint(40, (13,), generator=generator)
    labels[[2, 7, 12]] = IGNORED
    hidden[7] = torch.nan
    return hidden, weight, labels


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize(("scale", "softcap"), CASES)
@pytest.mark.parametrize("chunk", [None, 4])
def test_scaled_and_capped_loss(scale, softcap, chunk):
    hidden, weight, labels = inputs()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    options = {"scale": scale, "softcap": softcap}
    loss = linear_cross_entropy(*leaves, labels, chunk, **options)
    expected = naive_linear_cross_entropy(*leaves, labels, **options)
    torch.testing.assert_close(loss, expected, **TOLERANCE)
    wanted = [gradient.nan_to_num() for gradient in gradients(expected, *leaves)]
    for ours, theirs in zip(gradients(loss, *leaves), wanted):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.parametrize(("scale", "softcap"), CASES)
@pytest.mark.parametrize("chunk", [None, 4])
def test_log_probabilities_have_a_gradient_for_each_row(scale, softcap, chunk):
    hidden, weight, labels = inputs()
    counted = labels != IGNORED
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    found = linear_log_probabilities(*leaves, labels, chunk, scale=scale, softcap=softcap)
    logits = hidden[counted] @ weight.t() * scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    expected = torch.zeros(13).masked_scatter(
        counted, -F.cross_entropy(logits, labels[counted], reduction="none")
    )
    torch.testing.assert_close(found, expected, **TOLERANCE)
    factors = torch.linspace(-2, 3, 13)
    factors[2] = torch.nan  # of a row that does not count
    ours = gradients((found * factors)[counted].sum(), *leaves)
    theirs = gradients((expected * factors)[counted].sum(), *leaves)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other.nan_to_num(), **TOLERANCE)


@pytest.mark.parametrize(("scale", "softcap"), CASES)
@pytest.mark.parametrize("chunk", [None, 4])
def test_entropies_and_their_gradients(scale, softcap, chunk):
    hidden, weight, labels = inputs()
    counted = labels != IGNORED
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    options = {"scale": scale, "softcap": softcap, "entropy": True}
    found = linear_log_probabilities(*leaves, labels, chunk, **options)
    expected = naive_log_probabilities(
        hidden.masked_fill(~counted[:, None], 0.0) @ weight.t(), labels, **options
    )
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert not found[:, ~counted].any() and (found[1, counted] > 0).all()
    one = linear_log_probabilities(*leaves, labels, chunk, scale=scale, softcap=softcap)
    torch.testing.assert_close(found[0], one, **TOLERANCE)
    factors = torch.linspace(-2, 3, 26).view(2, 13)
    factors[:, 2] = torch.nan  # of a row that does not count
    ours = gradients((found * factors)[:, counted].sum(), *leaves)
    theirs = gradients((expected * factors)[:, counted].sum(), *leaves)
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, **TOLERANCE)


def test_a_certain_prediction_has_no_entropy_and_a_label_that_is_no_word_is_no_number():
    hidden, weight = torch.ones(3, 2), torch.tensor([[1e4, 1e4], [0.0, 0.0]])
    hidden.requires_grad_()
    found = linear_log_probabilities(hidden, weight, torch.tensor([0, 0, 5]), entropy=True)
    assert torch.equal(found[:, :2], torch.zeros(2, 2)) and found[:, 2].isnan().all()
    (gradient,) = torch.autograd.grad(found[:, :2].sum(), hidden, retain_graph=True)
    assert not gradient[:2].any()
    assert torch.autograd.grad(found.sum(), hidden)[0][2].isnan().all()
