"""Experts on CUDA: kernels against loops and the CPU, NaN in tails, large offsets, capture, no
syncs."""

import pytest
import torch
from moekit import NAN, Layer, by_module, ends_of, make, naive, poisoned, run, train

from packgraph.graphs.graphed import graph
from packgraph.models.config import ExpertConfig
from packgraph.moe.experts import activation, activation_backward
from packgraph.moe.permute import (
    RowPlan,
    combine_rows,
    gather_pairs,
    gather_rows,
    naive_plan_rows,
    plan_rows,
)
from packgraph.moe.router_product import (
    _summed_parts,
    exact_parts,
    naive_router_logits,
    router_logits,
)
from packgraph.moe.routing import naive_route, route
from packgraph.ops.grouped_gemm import grouped_problems, naive_grouped_mm
from packgraph.ops.linear import add_matrices_gradient, grouped_mm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RELATIVE = 0.02  # bfloat16: every product and the activation round once
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def quiet_again():
    yield
    torch.cuda.set_sync_debug_mode("default")


def needs_grouped_products() -> None:
    if problems := grouped_problems(torch.device("cuda", 0), BF16):
        pytest.skip("; ".join(problems))


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-9))


def routing(tokens: int, places: int, count: int, padding: float = 0.3) -> torch.Tensor:
    """experts int32 [T, k] on the CPU, some tokens padding, experts of unequal popularity, some
    without tokens."""
    popularity = torch.rand(count).square() * (torch.rand(count) > 0.1) + 1e-9
    experts = torch.multinomial(
        popularity.expand(tokens, -1), places, replacement=places > count
    ).int()
    return experts.masked_fill(torch.rand(tokens, 1) < padding, -1)


@pytest.mark.parametrize(
    ("tokens", "places", "count"), [(1, 1, 1), (7, 3, 5), (50, 8, 70), (200, 2, 512)], ids=str
)
@pytest.mark.parametrize("budget", [0.3, 1.0, 1.7])
def test_plan_equals_the_loops(tokens, places, count, budget):
    experts = routing(tokens, places, count)
    rows = max(int(budget * tokens * places), 1)
    for ours, theirs in zip(
        plan_rows(experts.cuda(), count, rows), naive_plan_rows(experts, count, rows)
    ):
        assert ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize(
    "tokens", [1024, 16384, 40000]
)  # 40000 x 6: more blocks than one tile of the scan
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_plan_of_large_batches_equals_the_sort(tokens, dtype):
    experts = routing(tokens, 6, 64).to(dtype)
    for ours, theirs in zip(
        plan_rows(experts.cuda(), 64, 6 * tokens), plan_rows(experts, 64, 6 * tokens)
    ):
        assert torch.equal(ours.cpu(), theirs)


def on(plan: RowPlan, device: str) -> RowPlan:
    return RowPlan(*(x.to(device) for x in plan))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16], ids=str)
@pytest.mark.parametrize(("places", "width"), [(1, 8), (3, 1030), (6, 2048), (8, 5)], ids=str)
@pytest.mark.parametrize("rows", [90, 800])
def test_moves_have_the_bits_of_the_cpu(places, width, rows, dtype):
    plan = plan_rows(routing(100, places, 16), 16, rows)
    x, y, weights = (
        torch.randn(100, width).to(dtype),
        torch.randn(rows, width).to(dtype),
        torch.rand(100, places),
    )
    y[plan.offsets[-1] :] = NAN
    grads = (y, x, y[:, 0].float())
    for move, value, grad in zip((gather_rows, combine_rows, gather_pairs), (x, y, weights), grads):
        results = []
        for device in ("cpu", "cuda"):
            there = on(plan, device)
            results.append(
                run(
                    lambda leaf, there=there, move=move: move(leaf, there),
                    [value.to(device)],
                    grad.to(device),
                )
            )
        for ours, theirs in zip(*results):
            assert torch.equal(ours, theirs.cpu()) and not ours.isnan().any()


def test_moves_reach_beyond_32_bits():
    """Rows times width is more than 2 ** 31. Whole numbers, so that sums are exact."""
    tokens, places, width = 140000, 8, 2048
    experts = torch.arange(places, dtype=torch.int32, device="cuda").expand(tokens, -1)
    plan = plan_rows(experts, places, tokens * places)
    x = torch.randint(-8, 8, (tokens, width), device="cuda").to(BF16)
    rows = gather_rows(x, plan)
    assert rows.numel() > 2**31
    assert torch.equal(rows[-tokens:], x)  # the last expert's rows
    assert torch.equal(combine_rows(rows, plan), places * x)


def test_activation_reaches_beyond_32_bits():
    rows, width = 1 << 20, 1280
    h = torch.randn(rows, 2 * width, device="cuda", dtype=BF16)
    weights, last = torch.rand(rows, device="cuda"), slice(rows - 5, rows)
    grad = torch.randn(rows, width, device="cuda", dtype=BF16)
    found = [
        activation(h, weights, ends_of([rows], "cuda"))[last],
        *(x[last] for x in activation_backward(grad, h, weights, ends_of([rows], "cuda"))),
    ]
    ends = ends_of([5])
    cpu = [x[last].cpu() for x in (grad, h, weights)]
    wanted = [activation(*cpu[1:], ends), *activation_backward(*cpu, ends)]
    for ours, theirs in zip(found, wanted):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(
    ("ends", "width"), [([0, 3, 3, 90], 24), ([100], 1408), ([0, 0], 16)], ids=str
)
@pytest.mark.parametrize("gated", [True, False])
def test_activation_equals_the_operations(gated, ends, width, dtype):
    used = ends[-1]
    h, weights = (3 * torch.randn(100, (1 + gated) * width)).to(dtype), torch.rand(100)
    grad = torch.randn(100, width).to(dtype)
    h[:1] *= 40  # where the sigmoid is 0 or 1
    for x in (h, weights, grad):
        x[used:] = NAN
    wanted = [
        activation(h, weights, ends_of(ends), gated),
        *activation_backward(grad, h, weights, ends_of(ends), gated),
    ]
    grad, h, weights, offsets = grad.cuda(), h.cuda(), weights.cuda(), ends_of(ends, "cuda")
    found = [
        activation(h, weights, offsets, gated),
        *activation_backward(grad, h, weights, offsets, gated),
    ]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            ours[:used].cpu(), theirs[:used], rtol=1e-2 if dtype is BF16 else 1e-4, atol=1e-4
        )
    assert not found[2][used:].any()
    again = [
        activation(h, weights, offsets, gated),
        *activation_backward(grad, h, weights, offsets, gated),
    ]
    assert all(torch.equal(ours[:used], theirs[:used]) for ours, theirs in zip(found, again))


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    "ends",
    [
        [37, 37, 165, 166],
        [0, 0, 0, 0],
        [200, 200, 200, 200],
        [0, 1, 2, 199],
        [1000, 1001, 3600, 3600],
    ],
    ids=str,
)
def test_grouped_product_equals_the_loop(ends, transposed):
    needs_grouped_products()
    used, device, rows = ends[-1], "cuda", max(200, ends[-1])
    a, grad = (torch.randn(rows, width, device=device, dtype=BF16) for width in (64, 96))
    b = torch.randn((4, 96, 64) if transposed else (4, 64, 96), device=device, dtype=BF16)

    def ours(a, b):
        return grouped_mm(a, b.mT if transposed else b, ends_of(ends, device))

    def loop(a, b):
        return naive_grouped_mm(a, b.mT if transposed else b, ends_of(ends, device))

    inputs = ([poisoned(a, used), b], poisoned(grad, used))
    found, wanted = run(ours, *inputs), run(loop, [a.float(), b.float()], grad.float())
    for left, right in zip((found[0][:used], found[1][:used], found[2]), wanted):
        assert torch.isfinite(left).all()
        assert distance(left, right[: len(left)]) <= RELATIVE
    assert found[2].is_contiguous()
    empty = [expert for expert, start in enumerate([0, *ends[:-1]]) if start == ends[expert]]
    assert not found[2][empty].any()
    assert all(
        torch.equal(
            left[:used] if left.shape[0] == rows else left,
            right[:used] if right.shape[0] == rows else right,
        )
        for left, right in zip(found, run(ours, *inputs))
    )


@pytest.mark.parametrize(
    "ends",
    [(0, 70, 70, 200), (64, 128, 192, 192), (0, 0, 0, 0), (1, 2, 3, 4), (100, 9000)],
    ids=str,
)
@pytest.mark.parametrize("transposed", [True, False])
def test_gradients_of_matrices_are_added_to_what_is_there(ends, transposed):
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    grad, a = (torch.randn(ends[-1] + 100, width, device="cuda").to(BF16) for width in (136, 304))
    grad[ends[-1] :], a[ends[-1] :] = NAN, NAN
    before = torch.randn(len(ends), *((136, 304) if transposed else (304, 136)), device="cuda").to(
        BF16
    )
    totals = [before.clone() for _ in range(3)]
    for total in totals:
        add_matrices_gradient(total, grad, a, offsets, transposed)
    assert all(torch.equal(total, totals[0]) for total in totals)
    for expert, (start, end) in enumerate(zip((0, *ends), ends)):
        left, right = (grad, a) if transposed else (a, grad)
        expected = before[expert].float() + left[start:end].float().mT @ right[start:end].float()
        assert start < end or torch.equal(totals[0][expert], before[expert])
        assert distance(totals[0][expert], expected) < RELATIVE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("ends", "inner"), [([50, 50, 130, 300], 37), ([3, 6, 7, 7], 64), ([0, 0, 0, 0], 5)], ids=str
)
def test_grouped_product_of_other_numbers_and_widths(ends, inner, transposed, dtype):
    """By pointers wherever torch's would read sizes on the host; float32 as such, so its error is
    one of float32."""
    used, offsets = ends[-1], ends_of(ends, "cuda")
    a, grad = (torch.randn(300, width, device="cuda", dtype=dtype) for width in (inner, 71))
    b = torch.randn((4, 71, inner) if transposed else (4, inner, 71), device="cuda", dtype=dtype)
    a[used:], grad[used:] = float("nan"), float("nan")
    leaves = [x.clone().requires_grad_() for x in (a, b)]
    torch.cuda.set_sync_debug_mode("error")
    out = grouped_mm(leaves[0], leaves[1].mT if transposed else leaves[1], offsets)
    found = [out, *torch.autograd.grad(out, leaves, grad)]
    torch.cuda.set_sync_debug_mode("default")
    wide = [torch.nan_to_num(x).double().requires_grad_() for x in (a, b)]
    expected = naive_grouped_mm(wide[0], wide[1].mT if transposed else wide[1], offsets)
    expected = [expected, *torch.autograd.grad(expected, wide, torch.nan_to_num(grad).double())]
    limit = 1e-6 if dtype is torch.float32 else RELATIVE
    for ours, theirs in zip(found, expected, strict=True):
        rows = slice(used) if ours.dim() == 2 else slice(None)
        assert not theirs[rows].numel() or distance(ours[rows].double(), theirs[rows]) < limit
    assert found[0].dtype is dtype and all(
        not found[2][e].any() for e in range(4) if ends[e] == ([0, *ends])[e]
    )


@pytest.mark.parametrize("ends", [[50, 50, 130], [0, 0, 0], [200, 200, 200], [0, 70, 200]], ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_experts_equal_the_loop(gated, ends):
    needs_grouped_products()
    used, offsets = ends[-1], ends_of(ends, "cuda")
    values, weights, matrices, down, grad = make(
        BF16, rows=200, hidden=64, width=96, device="cuda", gated=gated
    )
    found = run(
        by_module,
        [poisoned(values, used), poisoned(weights, used), matrices, down],
        poisoned(grad, used),
        offsets,
        gated,
    )
    wanted = run(
        naive, [x.float() for x in (values, weights, matrices, down)], grad.float(), offsets, gated
    )
    for name, ours, theirs in zip(("out", "values", "weights", "matrices", "down"), found, wanted):
        live = ours if name in ("matrices", "down") else ours[:used]
        assert torch.isfinite(live).all(), name
        assert distance(live, theirs[: len(live)]) <= RELATIVE, name
    assert not found[2][used:].any()


def layer() -> Layer:
    return Layer(count=8, hidden=128, width=64).to("cuda", BF16)


def test_nothing_waits_for_the_host():
    needs_grouped_products()
    module, experts = layer(), routing(64, 2, 8).cuda()
    x, weights = (
        torch.randn(64, 128, device="cuda", dtype=BF16, requires_grad=True),
        torch.rand(64, 2, device="cuda"),
    )
    for mode in ("default", "error"):  # kernels are compiled by the first call
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        module(x, weights, experts).sum().backward()


def test_replays_follow_new_routings_bitwise():
    needs_grouped_products()
    options = {"steps": 8, "tokens": 320, "device": "cuda", "dtype": BF16}
    graphed = graph(layer(), warmup=1, strict=True)
    for step, (plain, replayed) in enumerate(
        zip(train(layer(), **options), train(graphed, **options))
    ):
        for ours, theirs in zip(replayed, plain):
            assert torch.isfinite(ours).all(), step
            assert torch.equal(ours, theirs), step
    assert graphed.stats.replayed >= 6


@pytest.mark.parametrize("captured", [False, True])
def test_compiled_layer_is_near_the_eager_one(captured):
    """Compiled code rounds at other places than single operations."""
    needs_grouped_products()
    options = {"steps": 5, "tokens": 320, "device": "cuda", "dtype": BF16}
    compiled = (
        graph(layer(), warmup=1, strict=True, compile=True)
        if captured
        else torch.compile(layer(), fullgraph=True, dynamic=False)
    )
    for plain, other in zip(train(layer(), **options), train(compiled, **options)):
        assert all(distance(ours, theirs) <= RELATIVE for ours, theirs in zip(other, plain))


LEVELS = torch.tensor(
    [-2.3, -1.1, -0.2, 0.4, 0.9, 1.7, 3.1]
)  # few, so that there are ties; no two pairs sum up alike
CHOICES = [
    (64, {"per_token": 6, "score": "sigmoid", "scaling": 2.446}),
    (128, {"per_token": 8}),
    (256, {"per_token": 8, "score": "sigmoid", "groups": 8, "groups_kept": 4}),
    (30, {"per_token": 5, "score": "sigmoid", "groups": 6, "groups_kept": 4}),
    (512, {"per_token": 10, "normalise": False}),
    (1, {"per_token": 1}),
]


def choice_of(count: int, **options) -> ExpertConfig:
    return ExpertConfig(**{"count": count, "intermediate_size": 8, "normalise": True, **options})


@pytest.mark.parametrize(("count", "options"), CHOICES, ids=str)
@pytest.mark.parametrize("tokens", [1, 301, 4096])
@pytest.mark.parametrize("biased", [True, False])
def test_choice_equals_the_operations(count, options, tokens, biased):
    torch.manual_seed(0)
    kind, padding = choice_of(count, **options), torch.arange(tokens, device="cuda") % 4 == 1
    logits = LEVELS[torch.randint(len(LEVELS), (tokens, count))].cuda()
    logits[padding] = NAN
    # one bias for a group: sums of two that are equal must be sums of the same two
    place = torch.arange(count, device="cuda") // (count // kind.groups if kind.groups > 1 else 1)
    bias = torch.tensor([0.0, 0.13, -0.41], device="cuda")[place % 3] if biased else None
    grads = [
        torch.randn(tokens, width, device="cuda").masked_fill(padding[:, None], NAN)
        for width in (kind.per_token, count)
    ]
    found = []
    for function in (route, naive_route, route):
        leaf = logits.clone().requires_grad_()
        (experts, weights), scores = function(leaf, padding, bias, kind)
        torch.autograd.backward((weights, scores), grads)
        found.append((experts, weights.detach(), scores.detach(), leaf.grad))
    ours, theirs, again = found
    assert torch.equal(ours[0], theirs[0]) and ours[0].dtype == theirs[0].dtype
    for left, right in zip(ours[1:], theirs[1:]):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(left, right) for left, right in zip(ours, again))


@pytest.mark.parametrize(
    ("tokens", "count", "hidden"), [(4096, 64, 2048), (301, 10, 72), (1, 256, 2048)], ids=str
)
def test_products_of_the_router_have_the_precision_of_float32(tokens, count, hidden):
    x, weight = (torch.randn(rows, hidden, device="cuda").to(BF16) for rows in (tokens, count))
    grad = torch.randn(tokens, count, device="cuda") * 1e-5
    parts = exact_parts(grad)
    assert torch.equal(parts.double().unflatten(1, (3, -1)).sum(1), grad.double())
    assert torch.equal(torch.compile(exact_parts, fullgraph=True, dynamic=False)(grad), parts)
    of_x, of_weight = grad.double() @ weight.double(), grad.double().t() @ x.double()
    found = run(router_logits, [x, weight], grad)
    naive_found = run(naive_router_logits, [x, weight], grad)
    for left, right in zip(found, naive_found):
        assert left.dtype == right.dtype
        assert distance(left, right) < 1e-2
    exact = x.double() @ weight.double().t()
    assert (
        found[0] - exact
    ).norm() < 5e-5 * exact.norm()  # tensor cores cut off; rounded logits: 2e-3
    assert (_summed_parts(parts, x) - of_weight).norm() < 5e-5 * of_weight.norm()
    for left, right in zip(
        found[1:], (of_x, of_weight)
    ):  # the nearest bfloat16, up to sums that lie in the middle
        assert (left != right.to(BF16)).float().mean() < 0.05
    assert all(
        torch.equal(left, right)
        for left, right in zip(found, run(router_logits, [x, weight], grad))
    )


class Router(torch.nn.Module):
    """Weights of the chosen experts beside all scores, float32 [T, k + E]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(64, 256) / 16)
        self.kind = choice_of(64, per_token=6, score="sigmoid", scaling=2.446)

    def forward(self, x, padding):
        (_, weights), scores = route(router_logits(x, self.weight), padding, None, self.kind)
        return torch.cat([weights, scores], 1)


def train_router(module, steps: int = 6, tokens: int = 320) -> list[list[torch.Tensor]]:
    torch.manual_seed(1)
    facts = []
    for step in range(steps):
        x = torch.randn(tokens, 256, device="cuda").to(BF16).requires_grad_()
        out = module(x, torch.arange(tokens, device="cuda") >= tokens - 20 * step)
        (out[:, :6].square().sum() + out[:, 6:].sum() / 64).backward()
        facts.append([out.detach().clone(), x.grad, *(p.grad.clone() for p in module.parameters())])
    return facts


def router() -> Router:
    return Router().to("cuda", BF16)


def test_router_replays_bitwise():
    graphed = graph(router(), warmup=1, strict=True)
    for plain, replayed in zip(train_router(router()), train_router(graphed)):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(replayed, plain))
    assert graphed.stats.replayed >= 4


@pytest.mark.parametrize("captured", [False, True])
def test_compiled_router_is_near_the_eager_one(captured):
    compiled = (
        graph(router(), warmup=1, strict=True, compile=True)
        if captured
        else torch.compile(router(), fullgraph=True, dynamic=False)
    )
    for plain, other in zip(train_router(router()), train_router(compiled)):
        assert torch.equal(plain[0], other[0]), "the same kernels, of the same logits"
        assert all(distance(ours, theirs) <= RELATIVE for ours, theirs in zip(other, plain))


def test_no_part_of_the_router_waits_for_the_host():
    module, padding = router(), torch.arange(64, device="cuda") > 50
    x = torch.randn(64, 256, device="cuda", dtype=BF16, requires_grad=True)
    for mode in ("default", "error"):  # kernels are compiled by the first call
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        module(x, padding).sum().backward()
