"""The router's product: parts are exact, gradients as precise as float32's, rows apart, sums made
in place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import packgraph
from packgraph.graphs.compiled.products import AddingCode
from packgraph.graphs.stages import Stage, run_stages
from packgraph.moe import router_product
from packgraph.moe.router_product import (
    add_gradient_of_weight,
    exact_parts,
    gradient_of_weight,
    naive_router_logits,
    router_logits,
)

BF16 = torch.bfloat16
LARGEST = torch.finfo(torch.float32).max


def operands(tokens: int = 50, experts: int = 8, hidden: int = 96) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H] and weight [E, H] in bfloat16, a gradient of logits in float32 [T, E]."""
    generator = torch.Generator().manual_seed(3)
    x, weight, grad = (
        torch.randn(*shape, generator=generator)
        for shape in ((tokens, hidden), (experts, hidden), (tokens, experts))
    )
    return x.to(BF16), weight.to(BF16), grad


def gradients(function, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """[logits, gradient of x, gradient of weight]."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    logits = function(x, weight)
    logits.backward(grad)
    return [logits.detach(), x.grad, weight.grad]


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm())


def summed(values: Tensor) -> Tensor:
    return exact_parts(values).double().unflatten(1, (3, -1)).sum(1)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_parts_add_up_to_the_value(numbers):
    values = torch.tensor([numbers + [LARGEST, -LARGEST, 0.0, 1 / 3]])
    parts = exact_parts(values)
    assert (
        parts.dtype == BF16 and parts.shape == (1, 3 * values.shape[1]) and parts.isfinite().all()
    )
    apart = (summed(values) - values.double()).abs()
    assert (apart <= torch.where(values.abs() >= 2.0**-110, 0.0, 2.0**-134)).all()


def test_logits_are_those_of_float32():
    x, weight, grad = operands()
    ours, theirs = (
        gradients(router_logits, x, weight, grad),
        gradients(naive_router_logits, x, weight, grad),
    )
    assert (
        [found.dtype for found in ours]
        == [found.dtype for found in theirs]
        == [torch.float32, BF16, BF16]
    )
    assert distance(ours[0], x.double() @ weight.double().t()) < 1e-6
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(
            mine, other, rtol=1 / 128, atol=1e-5
        )  # bits of bfloat16 may be the next ones


def test_gradients_lose_no_bits_of_the_one_that_comes_in(monkeypatch):
    """Before they are rounded to bfloat16 themselves."""
    x, weight, grad = operands(tokens=200)
    right = grad.double() @ weight.double(), grad.double().t() @ x.double()

    def found(parts: Tensor) -> list[float]:
        rows = router_product._in_float32(parts, weight.repeat(3, 1))
        return [
            distance(rows, right[0]),
            distance(router_product._summed_parts(parts, x), right[1]),
        ]

    assert max(found(exact_parts(grad))) < 1e-6
    rounded = torch.cat([grad, torch.zeros_like(grad), torch.zeros_like(grad)], 1).to(BF16)
    assert min(found(rounded)) > 1e-3
    # and after that: the nearest bfloat16, but where another order of sums tips the balance
    for mine, exact in zip(gradients(router_logits, x, weight, grad)[1:], right):
        assert (mine != exact.to(BF16)).float().mean() < 1e-3


def test_a_row_depends_on_itself_alone():
    x, weight, grad = operands()
    others = torch.arange(50) % 3 == 0
    changed_x, changed_grad = x.clone(), grad.clone()
    changed_x[others] *= -7
    changed_grad[others] += 1
    before, after = (
        gradients(router_logits, x, weight, grad),
        gradients(router_logits, changed_x, weight, changed_grad),
    )
    for left, right in zip(before[:2], after[:2]):
        assert torch.equal(left[~others], right[~others]) and not torch.equal(left, right)


@pytest.mark.parametrize(
    ("rows", "weights"),
    [
        (torch.float32, torch.float32),
        (BF16, torch.float32),
        (torch.float32, BF16),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_other_dtypes_are_converted_as_ever(rows, weights):
    x, weight, grad = operands()
    x, weight = x.to(rows), weight.to(weights)
    assert "router_logits" not in type(router_logits(x, weight.requires_grad_()).grad_fn).__name__
    for ours, theirs in zip(
        *(gradients(function, x, weight, grad) for function in (router_logits, naive_router_logits))
    ):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype


def test_autocast_rounds_nothing():
    """Neither where logits are made nor where a backward runs inside of it."""
    x, weight, grad = operands()
    plain = gradients(router_logits, x, weight, grad)
    for dtype in (BF16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            found = gradients(router_logits, x, weight, grad)
        assert all(
            left.dtype == right.dtype and torch.equal(left, right)
            for left, right in zip(found, plain)
        )


def test_sums_in_place_are_rounded_once():
    x, weight, grad = operands()
    before = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(BF16)
    total, parts = before.clone(), exact_parts(grad)
    add_gradient_of_weight(total, parts, x)
    exact = before.double() + grad.double().t() @ x.double()
    assert (total != exact.to(BF16)).sum() <= 1
    assert gradient_of_weight(parts, x).shape == total.shape


def test_operations_say_of_themselves_what_is_true():
    x, weight, grad = operands()
    parts = exact_parts(grad)
    ours = torch.ops.packgraph
    torch.library.opcheck(ours.router_logits.default, (x.requires_grad_(), weight.requires_grad_()))
    x, weight = x.detach(), weight.detach()
    torch.library.opcheck(ours.router_gradient_of_rows.default, (parts, weight))
    torch.library.opcheck(ours.router_gradient_of_weight.default, (parts, x))
    torch.library.opcheck(ours.add_router_gradient_of_weight.default, (weight.clone(), parts, x))


class Router(nn.Module):
    """Scales its rows by scores of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16).to(BF16))

    def forward(self, state):
        scores = router_logits(state["x"], self.weight).softmax(-1)
        return {"x": state["x"] * (1 + scores.amax(-1, keepdim=True)).to(BF16)}


class Routers(nn.Module):
    """Two of them, as stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Router(), Router()])

    def begin(self, x):
        return {"x": x}

    def stages(self):
        return [
            Stage("mlp", number, lambda state, layer=layer: layer(state))
            for number, layer in enumerate(self.layers)
        ]

    def end(self, state):
        return state["x"]

    def forward(self, x):
        return run_stages(self, x)


def test_compiled_backwards_add_in_place_and_replay(monkeypatch):
    torch._dynamo.reset()
    added, total = [], AddingCode._total

    def noting(self, weight):
        answer = total(self, weight)
        added.append(answer[1])
        return answer

    monkeypatch.setattr(AddingCode, "_total", noting)

    def train(module, reason=None):
        for step in range(3):
            x = (
                torch.randn(5, 16, generator=torch.Generator().manual_seed(step))
                .to(BF16)
                .requires_grad_()
            )
            if reason:
                with packgraph.eager(reason):
                    out = module(x)
            else:
                out = module(x)
            out.float().square().sum().backward()
        return [weight.grad for weight in module.parameters()]

    graphs = [
        packgraph.graph(Routers(), warmup=1, strict=True, compile="aot_eager") for _ in range(2)
    ]
    eager = train(graphs[0], "compare")
    assert added.count(True) == 2 * 3, "both weights, three calls"
    assert (
        all(torch.equal(a, b) for a, b in zip(eager, train(graphs[1])))
        and graphs[1].stats.replayed == 2
    )
    for ours, theirs in zip(eager, train(Routers())):
        assert distance(ours, theirs.double()) < 0.02
    torch._dynamo.reset()


@pytest.mark.slow
def test_generated_code_cuts_exactly():
    """A compiler that keeps bfloat16 in float32 between operations would leave nothing to the lower
    parts."""
    torch._dynamo.reset()
    values = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)) * 1e-4
    compiled = torch.compile(lambda given: exact_parts(given * 1.5), fullgraph=True)
    assert torch.equal(compiled(values), exact_parts(values * 1.5))
    torch._dynamo.reset()
