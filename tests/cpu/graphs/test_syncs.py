"""What a graph cannot hold is refused at the user's line, with the way out; training goes on with
unchanged state."""

import warnings

import numpy as numpy_module
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


def item(h, x):
    return h * h.sum().item()


def float_of(h, x):
    return h * float(h.detach().mean())


def int_of(h, x):
    return h[: int(x.abs().sum() * 0) + 2]


def tolist(h, x):
    return h * x.sum(0).tolist()[0]


def numpy(h, x):
    return h * float(x.numpy().sum())


def cpu(h, x):
    return h + x.cpu()


def branch(h, x):
    return h if (x > 0).any() else -h


def negated_branch(h, x):
    return h if not x.sum() > 0 else -h


def conjunction(h, x):
    return h * 2 if x.sum() > 0 and x.mean() < 100 else h


def maximum_of_tensors(h, x):
    return max(h.sum(), x.sum()) * h


def range_of(h, x):
    return sum(h for _ in range(x.long().abs().max() + 1))


def nonzero(h, x):
    return h.sum() + (x > 0).nonzero().sum()


def where_condition(h, x):
    return h[torch.where(x[:, 0] > 0)]


def boolean_mask(h, x):
    return h[x[:, 0] > 0]


def boolean_assign(h, x):
    return h.clone().index_put_((x[:, 0] > 0,), x[0])


def masked_select(h, x):
    return h.masked_select(x > 0)


def unique(h, x):
    return h.sum() + x.unique().sum()


def unique_consecutive(h, x):
    return h.sum() + x.flatten().unique_consecutive().sum()


def bincount(h, x):
    return h.sum() + x.abs().long().flatten().bincount().sum()


def repeats(h, x):
    return h.repeat_interleave(x[:, 0].abs().long() + 1, dim=0)


def equal(h, x):
    return h if torch.equal(h, x) else h * 2


def one_hot(h, x):
    return h.sum() + nn.functional.one_hot(x.abs().long()).sum()


def split_sizes(h, x):
    return h.split(x[:2, 0].mul(0).long().add(2).tolist())[0]


def slicing(h, x):
    return h[: x[:, 0].abs().long().argmax() + 1]


def array_constant(h, x):
    return h + torch.tensor(numpy_module.ones(6), device=h.device)


def contains(h, x):
    return h if 3.0 in x else h * 2


def f_string(h, x):
    return h * len(f"{x.sum().item():.1f}")


def complex_of(h, x):
    return h * complex(x.sum()).real


def printed(h, x):
    return h * len(str(x.mean()))


def shown(h, x):
    return h * len(f"{x}")


def logged(h, x):
    return h * len(f"{x!r}")


UNSAFE = [
    item,
    float_of,
    int_of,
    tolist,
    numpy,
    cpu,
    branch,
    negated_branch,
    conjunction,
    maximum_of_tensors,
    range_of,
    nonzero,
    where_condition,
    boolean_mask,
    boolean_assign,
    masked_select,
    unique,
    unique_consecutive,
    bincount,
    repeats,
    equal,
    one_hot,
    split_sizes,
    slicing,
    array_constant,
    contains,
    f_string,
    complex_of,
    printed,
    shown,
    logged,
]


def long_index(h, x):
    return h[torch.arange(3) % 2]


def gather(h, x):
    return h.gather(1, x.abs().long() % 6)


def masked_fill(h, x):
    return h.masked_fill(x > 0, 0.0)


def where_three(h, x):
    return torch.where(x > 0, h, -h)


def scatter(h, x):
    return torch.zeros(6).scatter_add(0, x[0].abs().long() % 6, h[0])


def fixed_repeats(h, x):
    return h.repeat_interleave(torch.tensor([2, 1, 1, 1]), dim=0, output_size=5)


def shape_arithmetic(h, x):
    return h[: h.shape[0] // 2] * (h.numel() / 3)


def one_hot_static(h, x):
    return h + (x[:, :1].abs().long() % 6 == torch.arange(6))


def cumulative(h, x):
    return h.cumsum(0) + x.argsort(0)


def any_on_device(h, x):
    return h * (x > 0).any()


def host_constant(h, x):
    return h + torch.tensor([1.0] * 6, device=h.device)


SAFE = [
    long_index,
    gather,
    masked_fill,
    where_three,
    scatter,
    fixed_repeats,
    shape_arithmetic,
    one_hot_static,
    cumulative,
    any_on_device,
    host_constant,
]


def make_input():
    return torch.tensor([[1.5, -2.0, 0.5, 1.0, -1.0, 2.0]] * 4) + torch.arange(4.0)[:, None]


@pytest.mark.parametrize("piece", UNSAFE, ids=lambda piece: piece.__name__)
def test_a_sync_is_refused_at_the_users_line(piece):
    graphed = graph(Snippet(piece), warmup=0, strict=True)
    with pytest.raises(CaptureError) as caught:
        graphed(make_input())
    assert caught.value.where in wheres(piece)
    assert "to do:" in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize("piece", UNSAFE, ids=lambda piece: piece.__name__)
def test_after_a_refused_capture_training_goes_on_eagerly(piece):
    eager, graphed = Snippet(piece), graph(Snippet(piece), warmup=0)
    for step in range(3):
        expected = eager(make_input())
        expected.sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = graphed(make_input())
        out.sum().backward()
        ours = [w for w in caught if w.category is PackgraphWarning]
        assert len(ours) == (1 if step == 0 else 0)
        assert torch.equal(out, expected)
    assert torch.equal(graphed.linear.weight.grad, eager.linear.weight.grad)
    assert dict(graphed.stats.fallbacks) == {"capture failed": 3}
    assert graphed.stats.replayed == 0


@pytest.mark.parametrize("piece", SAFE, ids=lambda piece: piece.__name__)
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
