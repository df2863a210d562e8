"""The kernel for losses and gradients of logits against the operations it replaces, in Triton's
interpreter."""

import pytest
import torch
from interpreterkit import inside, needs_triton, outside, run_in_interpreter

from packgraph.ops import loss
from packgraph.ops.loss import IGNORED, naive_gradient_of_logits

pytestmark = needs_triton


@inside
@pytest.mark.parametrize("label", [-1, 50, 64, 5000, -101, 2**40, -(2**40)])
def test_a_label_outside_the_vocabulary_reads_nothing_and_makes_nan(label):
    """The rows lie in a larger buffer, whose other numbers an illegal label would find."""
    from packgraph.ops.loss import logits_to_gradients

    torch.manual_seed(0)
    buffer = torch.randn(5, 64)
    logits, around = buffer[1:4, :50], buffer.clone()
    labels, losses = torch.tensor([3, label, 49]), torch.empty(3)
    expected_losses = torch.empty(3)
    expected = naive_gradient_of_logits(logits.clone(), labels, expected_losses, wanted=True)
    logits_to_gradients(logits, labels, losses)
    assert losses[1].isnan() and logits[1].isnan().all()
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-7, equal_nan=True)
    buffer[1:4, :50] = around[1:4, :50]
    assert torch.equal(buffer, around)


@inside
@pytest.mark.parametrize("chunk", [4, 16])
def test_compiled_loss_holds_the_kernel(monkeypatch, chunk):
    """What it writes to, it writes to in compiled code as well: chunk after chunk, views of the
    losses among it."""
    from packgraph.ops.loss import logits_to_gradients

    def by_kernel(logits, labels, losses, *, wanted):
        logits_to_gradients(logits, labels, losses)
        return logits if wanted else None

    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 8), torch.randn(50, 8)
    labels = torch.randint(0, 50, (10,)).index_fill(0, torch.tensor([2, 9]), IGNORED)
    results = []
    for function in (
        loss.linear_cross_entropy,
        torch.compile(loss.linear_cross_entropy, fullgraph=True, backend="aot_eager"),
    ):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        value = function(*leaves, labels, chunk)
        (value / 7).backward()
        results.append([value.detach(), *(leaf.grad for leaf in leaves)])
        monkeypatch.setattr(loss, "gradient_of_logits", by_kernel)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6)


@outside
def test_in_the_interpreter():
    run_in_interpreter(__file__)
