"""Modules that do what looks like a wait for the device, and is none, replay; what is one is told
with its line and its reason."""

import copy
import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from autogradkit import assert_same, gradients
from graphkit import poison_free_slots
from statekit import One, quietly
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from packgraph.graphs.errors import CaptureError, PackgraphWarning
from packgraph.graphs.front import Reader
from packgraph.graphs.graphed import graph
from packgraph.graphs.guards import refuse_host_memory
from packgraph.graphs.program import Program

MASK = torch.tensor([[True, False, True, False]] * 3)
LOG = logging.getLogger("packgraph.test_harmless")


def fills(mask):
    def forward(module, x):
        hidden = module.linear(x).clone()
        hidden[mask(x)] = 0.5
        return hidden.square()

    return forward


def zeroes_padding(module, x):
    hidden = module.linear(x) * 1
    hidden[(x > 0).all(-1)] = 0.0
    return hidden


def logs(module, x):
    LOG.debug("x of shape %s", tuple(x.shape))
    return module.linear(x)


def differentiates(module, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = module.linear(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return force


def sums_mask(module, x):
    return module.linear(x).masked_fill(x.abs() < 0.5, 0.0).sum(-1, keepdim=True)


class Encoder(nn.Module):
    """torch's own encoder, with padding."""

    def __init__(self, norm_first=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
        self.register_buffer("padding", torch.tensor([[False, False, True]]))

    def forward(self, x):
        return self.encoder(x[None], src_key_padding_mask=self.padding)


HARMLESS = {
    "a number where a mask says": lambda: One(fills(lambda x: MASK)),
    "a number where data say": lambda: One(fills(lambda x: x > 0)),
    "rows of padding": lambda: One(zeroes_padding),
    "a call of a logger": lambda: One(logs),
    "an inner gradient": lambda: One(differentiates),
    "a sum under a mask": lambda: One(sums_mask),
    "an encoder": Encoder,
    "an encoder, norm first": lambda: Encoder(norm_first=True),
    # Its kernels take flat weights.
    "a recurrent layer": lambda: One(lambda m, x: m.layer(x)[0], layer=nn.LSTM(4, 4)),
}


MARKS = {
    "an inner gradient": pytest.mark.skipif(
        torch.__version__ < "2.12", reason="torch's tracer cannot read requires_grad_() before 2.12"
    )
}


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name, marks=MARKS.get(name, ())) for name, make in HARMLESS.items()],
)
def test_what_only_looks_like_a_wait_replays(make):
    torch.manual_seed(0)
    eager = make()
    graphed = graph(copy.deepcopy(eager), warmup=1, strict=True)
    for number in range(5):
        poison_free_slots(graphed, number)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        outs = [model(x) for model in (eager, graphed)]
        assert torch.equal(*outs)
        for out in outs:
            out.square().sum().backward()
        assert_same(gradients(eager), gradients(graphed))
    assert graphed.stats.replayed == 4


def asserts(module, x):
    hidden = module.linear(x)
    assert not torch.isnan(hidden).any()
    return hidden


def fills_rows(module, x):
    hidden = module.linear(x).clone()
    hidden[x[:, 0] > 0] = x[:1]
    return hidden


WAITS = {
    "an assertion": (asserts, "waits for the device"),
    "rows where data say": (fills_rows, "boolean mask waits for the device"),
    "classes": (lambda m, x: F.one_hot((x > 0).long()).sum(-1) * m.linear(x), "one_hot"),
    "a product": (lambda m, x: m.linear(x).prod(1), "looks for zeros on the host"),
    "an encoder with a mask": (
        lambda m, x: m.encoder(m.linear(x)[None], mask=torch.zeros(3, 3)),
        "is_causal=True or False",
    ),
    "a distribution": (
        lambda m, x: torch.distributions.Normal(m.linear(x), 1.0).log_prob(x),
        "validate_args=False",
    ),
}


def with_encoder(forward):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
    return One(forward, encoder=nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))


@pytest.mark.parametrize(("forward", "words"), WAITS.values(), ids=WAITS)
def test_what_waits_is_told_at_its_line_and_equals_eager(forward, words, monkeypatch):
    # The first torch.compile of a process sets this to False.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    with pytest.raises(CaptureError) as caught:
        graph(with_encoder(forward), warmup=0, strict=True)(torch.ones(3, 4))
    assert words in str(caught.value) and "test_harmless.py" in caught.value.where
    eager, graphed = with_encoder(forward), graph(with_encoder(forward), warmup=0)
    for number in range(3):
        x = torch.full((3, 4), float(number))
        assert torch.equal(eager(x), quietly(graphed, x))


def test_a_number_in_host_memory_is_refused_beside_a_device():
    """Kernels get the number of a tensor without dimensions, and a graph would keep it."""
    module = One(lambda m, x: m.linear(x) / m.temperature, temperature=torch.tensor(0.07))
    program = Program(module, None, "chunk", reader=Reader())
    used = program.read((torch.ones(3, 4),), {})
    refuse_host_memory(used, None)
    refuse_host_memory(used, "cpu")
    with pytest.raises(CaptureError, match=r"forward reads module\..*, a tensor on the cpu"):
        refuse_host_memory(used, "cuda")


def test_a_distribution_without_validation_replays():
    forward = lambda m, x: torch.distributions.Normal(  # noqa: E731
        m.linear(x), 1.0, validate_args=False
    ).log_prob(x)
    eager, graphed = One(forward), graph(One(forward), warmup=0, strict=True)
    with warnings.catch_warnings(action="error", category=PackgraphWarning):
        for number in range(3):
            x = torch.full((3, 4), float(number))
            assert torch.equal(eager(x), graphed(x))
    assert graphed.stats.replayed == 3


# ---- operations that compute shapes and no numbers, as DTensor's do when a shape is new


@torch.compiler.allow_in_graph
def mean_of_columns(x, weight):
    with FakeTensorMode():
        columns = (
            torch.empty_strided((x.shape[0], 3), (1, 0)).sum(0).shape[0]
        )  # elements that share memory
    return (x * weight).sum() / columns


class AsksForAShape(nn.Module):
    """Learns the shape of a sum on fake tensors, made by a factory: no operand says that they are
    fake."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return mean_of_columns(x, self.weight)


def test_factories_of_fake_tensors_are_not_replayed():
    module = AsksForAShape()
    graphed = graph(module, backend="recorder", warmup=1, strict=True)
    for number in range(4):
        x = torch.full((2, 3), float(number))
        loss = graphed(x)
        loss.backward()
        assert torch.equal(loss.detach(), x.sum() / 3)
    assert graphed.stats.replayed > 0
    assert torch.equal(module.weight.grad, torch.full((3,), 2.0 * (0 + 1 + 2 + 3) / 3))
    graphed.close()
