"""What is not the stash's: what others drop, what stays where it is, and who only looks."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from packgraph.moe.stash.stash import Stash

SIZE = 32


def sample() -> torch.Tensor:
    """A block's input."""
    return torch.randn(64, SIZE, generator=torch.Generator().manual_seed(1))


def test_what_a_checkpoint_drops_is_not_stashed():
    stash, weight = Stash("cpu", page_rows=16), nn.Parameter(torch.eye(SIZE))
    offsets = torch.tensor([64], dtype=torch.int32)

    def block(x):
        with stash.saving(offsets, 64):
            return (x @ weight).sin()

    stash.allocate(8, columns={(torch.float32, SIZE): 2})
    out = checkpoint(block, sample(), use_reentrant=False)
    assert stash.in_use().item() == 0
    out.sum().backward()
    assert stash.in_use().item() == 0 and weight.grad is not None


class Kept(torch.autograd.Function):
    """Stashes its input by hand."""

    @staticmethod
    def forward(ctx, x, stash):
        ctx.stash = stash
        ctx.save_for_backward(*stash.keep(torch.tensor([64], dtype=torch.int32), [x]))
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.stash.back(ctx.saved_tensors, 64)[0].cos(), None


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_pages_taken_by_hand_come_back_under_checkpoints_too(reentrant):
    stash, x = Stash("cpu", page_rows=16), sample().requires_grad_()
    stash.allocate(8, columns={(torch.float32, SIZE): 1})
    for _ in range(3):
        if reentrant is None:
            out = Kept.apply(x * 1, stash)
        else:
            out = checkpoint(
                lambda x: Kept.apply(x * 1, stash) if torch.is_grad_enabled() else x.sin(),
                x,
                use_reentrant=reentrant,
            )
        assert bool(stash.in_use().item()) == (reentrant is None)
        out.sum().backward()
        assert stash.in_use().item() == 0
    assert torch.equal(x.grad, x.cos() + x.cos() + x.cos())


@pytest.mark.parametrize("allocated", [False, True])
@pytest.mark.parametrize("what", ["weight", "hidden"])
def test_what_a_stash_leaves_where_it_is_is_refused_when_it_was_changed(what, allocated):
    stash, weight = Stash("cpu", page_rows=16), nn.Parameter(torch.eye(SIZE))
    if allocated:
        stash.allocate(16, columns={(torch.float32, SIZE): 2})
    hidden = sample().requires_grad_() * 1
    with stash.saving(torch.tensor([64], dtype=torch.int32), 64):
        loss = (hidden.sin() @ weight).sum()
    with torch.no_grad():
        (weight if what == "weight" else hidden).mul_(2)
    if what == "hidden" and allocated:  # it is in its pages
        assert torch.equal(torch.autograd.grad(loss, hidden)[0], sample().cos())
        return
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_who_looks_at_what_was_stashed_gives_no_pages_back():
    stash, weight = Stash("cpu", page_rows=16), nn.Parameter(torch.eye(SIZE))
    stash.allocate(8, columns={(torch.float32, SIZE): 2})
    with stash.saving(torch.tensor([64], dtype=torch.int32), 64):
        out = (sample() @ weight).sin()
    taken = stash.in_use().item()
    for _ in range(2):
        assert torch.equal(out.grad_fn._saved_self, sample() @ weight)
        assert torch.equal(out.grad_fn.next_functions[0][0]._saved_self, sample())
    assert stash.in_use().item() == taken > 0
    out.sum().backward()
    assert stash.in_use().item() == 0 and weight.grad is not None
