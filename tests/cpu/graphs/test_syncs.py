"""What a graph cannot hold is refused at the user's line, with the way out; training goes on with
unchanged state."""

import warnings

import numpy
import pytest
import torch
from statekit import wheres
from torch import nn

from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.graphed import graph


class Snippet(nn.Module):
    """A linear layer followed by one piece of code; the piece is on its own line."""

    def __init__(self, piece):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)
        self.piece = piece

    def forward(self, x):
        return self.piece(self.linear(x), x)


UNSAFE = {
    "item": lambda h, x: h * h.sum().item(),
    "float of": lambda h, x: h * float(h.detach().mean()),
    "int of": lambda h, x: h[: int(x.abs().sum() * 0) + 2],
    "tolist": lambda h, x: h * x.sum(0).tolist()[0],
    "numpy": lambda h, x: h * float(x.numpy().sum()),
    "cpu": lambda h, x: h + x.cpu(),
    "branch": lambda h, x: h if (x > 0).any() else -h,
    "negated branch": lambda h, x: h if not x.sum() > 0 else -h,
    "conjunction": lambda h, x: h * 2 if x.sum() > 0 and x.mean() < 100 else h,
    "maximum of tensors": lambda h, x: max(h.sum(), x.sum()) * h,
    "range of": lambda h, x: sum(h for _ in range(x.long().abs().max() + 1)),
    "nonzero": lambda h, x: h.sum() + (x > 0).nonzero().sum(),
    "where condition": lambda h, x: h[torch.where(x[:, 0] > 0)],
    "boolean mask": lambda h, x: h[x[:, 0] > 0],
    "boolean assign": lambda h, x: h.clone().index_put_((x[:, 0] > 0,), x[0]),
    "masked select": lambda h, x: h.masked_select(x > 0),
    "unique": lambda h, x: h.sum() + x.unique().sum(),
    "unique consecutive": lambda h, x: h.sum() + x.flatten().unique_consecutive().sum(),
    "bincount": lambda h, x: h.sum() + x.abs().long().flatten().bincount().sum(),
    "repeats": lambda h, x: h.repeat_interleave(x[:, 0].abs().long() + 1, dim=0),
    "equal": lambda h, x: h if torch.equal(h, x) else h * 2,
    "one hot": lambda h, x: h.sum() + nn.functional.one_hot(x.abs().long()).sum(),
    "split sizes": lambda h, x: h.split(x[:2, 0].mul(0).long().add(2).tolist())[0],
    "slicing": lambda h, x: h[: x[:, 0].abs().long().argmax() + 1],
    "array constant": lambda h, x: h + torch.tensor(numpy.ones(6), device=h.device),
    "contains": lambda h, x: h if 3.0 in x else h * 2,
    "f string": lambda h, x: h * len(f"{x.sum().item():.1f}"),
    "complex of": lambda h, x: h * complex(x.sum()).real,
    "printed": lambda h, x: h * len(str(x.mean())),
    "shown": lambda h, x: h * len(f"{x}"),
    "logged": lambda h, x: h * len(f"{x!r}"),
}
SAFE = {
    "long index": lambda h, x: h[torch.arange(3) % 2],
    "gather": lambda h, x: h.gather(1, x.abs().long() % 6),
    "masked fill": lambda h, x: h.masked_fill(x > 0, 0.0),
    "where three": lambda h, x: torch.where(x > 0, h, -h),
    "scatter": lambda h, x: torch.zeros(6).scatter_add(0, x[0].abs().long() % 6, h[0]),
    "fixed repeats": lambda h, x: h.repeat_interleave(
        torch.tensor([2, 1, 1, 1]), dim=0, output_size=5
    ),
    "shape arithmetic": lambda h, x: h[: h.shape[0] // 2] * (h.numel() / 3),
    "one hot static": lambda h, x: h + (x[:, :1].abs().long() % 6 == torch.arange(6)),
    "cumulative": lambda h, x: h.cumsum(0) + x.argsort(0),
    "any on device": lambda h, x: h * (x > 0).any(),
    "host constant": lambda h, x: h + torch.tensor([1.0] * 6, device=h.device),
}


def make_input():
    return torch.tensor([[1.5, -2.0, 0.5, 1.0, -1.0, 2.0]] * 4) + torch.arange(4.0)[:, None]


@pytest.mark.parametrize("piece", UNSAFE.values(), ids=UNSAFE)
def test_a_sync_is_refused_at_the_users_line(piece):
    graphed = graph(Snippet(piece), warmup=0, strict=True)
    with pytest.raises(CaptureError) as caught:
        graphed(make_input())
    assert caught.value.where in wheres(piece)
    assert "to do:" in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize("piece", UNSAFE.values(), ids=UNSAFE)
def test_after_a_refused_capture_training_goes_on_eagerly(piece):
    eager, graphed = Snippet(piece), graph(Snippet(piece), warmup=0)
    for step in range(3):
        expected = eager(make_input())
        expected.sum().backward()
        with warnings.catch_warnings(record=True, action="always") as caught:
            out = graphed(make_input())
        out.sum().backward()
        ours = [w for w in caught if w.category is PackgraphWarning]
        assert len(ours) == (1 if step == 0 else 0)
        assert torch.equal(out, expected)
    assert torch.equal(graphed.linear.weight.grad, eager.linear.weight.grad)
    assert dict(graphed.stats.fallbacks) == {"capture failed": 3}
    assert graphed.stats.replayed == 0


@pytest.mark.parametrize("piece", SAFE.values(), ids=SAFE)
def test_static_code_is_not_refused(piece):
    eager, graphed = Snippet(piece), graph(Snippet(piece), warmup=0, strict=True)
    for _ in range(3):
        expected, out = eager(make_input()), graphed(make_input())
        expected.sum().backward()
        out.sum().backward()
        assert torch.equal(out, expected)
    assert torch.equal(graphed.linear.weight.grad, eager.linear.weight.grad)
    assert graphed.stats.replayed == 3


class SyncInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.sum().item()


def test_a_sync_in_a_backward_is_refused_at_its_line():
    with pytest.raises(CaptureError, match=r"Tensor.item\(\)") as caught:
        graph(Snippet(lambda h, x: SyncInBackward.apply(h)), warmup=0, strict=True)(make_input())
    assert "in backward" in caught.value.where and __file__ in caught.value.where


def test_an_input_changed_in_place_is_refused():
    with pytest.raises(CaptureError, match="in place"):
        graph(Snippet(lambda h, x: h + x.add_(1)), warmup=0, strict=True)(make_input())


def test_an_unregistered_trainable_tensor_is_refused():
    loose = torch.ones(6, requires_grad=True)
    with pytest.raises(CaptureError, match="no registered parameter"):
        graph(Snippet(lambda h, x: h * loose), warmup=0, strict=True)(make_input())


def test_a_resized_storage_is_refused():
    def resize(h, x):
        x.untyped_storage().resize_(0)
        return h

    with pytest.raises(CaptureError, match="other memory"):
        graph(Snippet(resize), warmup=0, strict=True)(make_input())


def test_the_users_own_error_is_shown_once_captured_and_again_eagerly():
    def broken(h, x):
        return h @ torch.ones(5, 5)

    graphed = graph(Snippet(broken), warmup=0)
    with (
        pytest.warns(PackgraphWarning, match="in broken"),
        pytest.raises(RuntimeError, match="mat1 and mat2"),
    ):
        graphed(make_input())
