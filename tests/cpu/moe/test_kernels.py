"""The kernels of rows and of the experts' activation against the operations they replace, in
Triton's interpreter."""

import pytest
import torch
from interpreterkit import bounds_from_memory, inside, needs_triton, outside, run_in_interpreter

from packgraph.moe import experts as operations
from packgraph.moe.permute import RowPlan, combine_rows, gather_pairs, gather_rows, plan_rows

pytestmark = needs_triton
NAN = float("nan")


def routing(tokens: int, places: int, count: int, kind: str) -> torch.Tensor:
    """experts [T, k] of some kind of mixture."""
    if kind == "mixed":
        return torch.randint(-1, count, (tokens, places), dtype=torch.int32)
    return torch.full((tokens, places), -1 if kind == "padding" else count - 1)


@inside
@pytest.mark.parametrize(
    ("tokens", "places", "count", "rows"),
    [
        (1, 1, 1, 1),
        (7, 3, 5, 21),
        (50, 8, 70, 400),
        (100, 6, 64, 601),
        (100, 6, 64, 300),
        (3, 2, 200, 900),
        (300, 1, 2, 299),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["mixed", "padding", "one"])
def test_plan_equals_the_operations(tokens, places, count, rows, kind):
    from packgraph.moe.permute import plan

    experts = routing(tokens, places, count, kind)
    for ours, theirs in zip(plan(experts, count, rows), plan_rows(experts, count, rows)):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@inside
@pytest.mark.parametrize("illegal", [-7, 5, 64, 2**31 - 1, 2**32 + 1, -(2**40)])
def test_what_is_no_expert_is_routed_nowhere(illegal):
    from packgraph.moe.permute import plan

    experts = torch.randint(-1, 5, (40, 3))
    experts[3, 1] = experts[17, 0] = -1
    wanted = plan_rows(experts, 5, 130)
    experts[3, 1] = experts[17, 0] = illegal
    for found in (plan(experts, 5, 130), plan_rows(experts, 5, 130)):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted))


@inside
@pytest.mark.parametrize("illegal", [12, 4000, 2**31 - 1])
def test_numbers_outside_a_map_are_not_followed(illegal):
    """The rows lie in a larger buffer, which an illegal number would read."""
    from packgraph.moe.permute import combine, gather, pick

    buffer = torch.randn(6000, 8)
    numbers = torch.tensor([3, -1, illegal, 0], dtype=torch.int32)
    rows = gather(buffer[:4], numbers, 3)
    assert torch.equal(rows, torch.stack([buffer[1], torch.zeros(8), torch.zeros(8), buffer[0]]))
    assert torch.equal(
        combine(buffer[:4], numbers[:, None]),
        torch.stack([buffer[3], torch.zeros(8), torch.zeros(8), buffer[0]]),
    )
    assert pick(buffer.view(-1)[:12], numbers).tolist() == [buffer[0, 3], 0.0, 0.0, buffer[0, 0]]


@inside
def test_plan_scans_more_blocks_than_one_tile(monkeypatch):
    from packgraph.moe import permute as rows_kernel

    monkeypatch.setattr(rows_kernel, "SCAN", 4)
    experts = routing(500, 3, 5, "mixed")
    for ours, theirs in zip(rows_kernel.plan(experts, 5, 1400), plan_rows(experts, 5, 1400)):
        assert torch.equal(ours, theirs)


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("places", "width", "rows"), [(1, 8, 20), (3, 1030, 40), (6, 96, 120)], ids=str
)
def test_moves_equal_the_operations(places, width, rows, dtype):
    from packgraph.moe.permute import combine, gather, pick

    plan = RowPlan(*plan_rows(torch.randint(-1, 5, (21, places)), 5, rows))
    x, y = torch.randn(21, width).to(dtype), torch.randn(rows, width + 8).to(dtype)[:, :width]
    y[plan.offsets[-1] :] = NAN
    assert torch.equal(gather(x, plan.pair_of_row, places), gather_rows(x, plan))
    assert torch.equal(
        gather(x[:1].expand(21, -1), plan.pair_of_row, places),
        gather_rows(x[:1].expand(21, -1), plan),
    )
    rounding = (
        1e-2 if dtype is torch.bfloat16 else 0.0
    )  # the interpreter cuts off where a GPU rounds
    torch.testing.assert_close(
        combine(y, plan.row_of_pair), combine_rows(y, plan), rtol=rounding, atol=rounding
    )
    weights = torch.rand(21, places)
    assert torch.equal(pick(weights.reshape(-1), plan.pair_of_row), gather_pairs(weights, plan))
    assert torch.equal(
        pick(y[:, 0], plan.row_of_pair.reshape(-1)),
        torch.ops.packgraph.pick(y[:, 0], plan.row_of_pair.reshape(-1), plan.pair_of_row),
    )


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("ends", "width"), [([0, 3, 3, 9], 24), ([11], 520), ([0, 0], 16)], ids=str
)
@pytest.mark.parametrize("gated", [True, False])
def test_activation_equals_the_operations(gated, ends, width, dtype):
    from packgraph.moe.experts import activate, activate_backward

    offsets, used = torch.tensor(ends, dtype=torch.int32), ends[-1]
    h, weights = (3 * torch.randn(11, (1 + gated) * width)).to(dtype), torch.rand(11)
    grad = torch.randn(11, width).to(dtype)
    h[:1] *= 40  # where the sigmoid is 0 or 1
    h[1, 0] = NAN  # of a live row stays
    for x in (h, weights, grad):
        x[used:] = NAN
    close = {"rtol": 1e-2 if dtype is torch.bfloat16 else 1e-5, "atol": 1e-5}
    found = [
        activate(h, weights, offsets, gated),
        *activate_backward(grad, h, weights, offsets, gated),
    ]
    wanted = [
        operations.activation(h, weights, offsets, gated),
        *operations.activation_backward(grad, h, weights, offsets, gated),
    ]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        torch.testing.assert_close(ours[:used], theirs[:used], equal_nan=True, **close)
    assert not found[2][used:].any()


@inside
@bounds_from_memory
@pytest.mark.parametrize(
    "ends", [(0, 70, 70, 200), (64, 128, 192, 192), (0, 0, 0, 0), (1, 2, 3, 4)], ids=str
)
@pytest.mark.parametrize(("of_left", "of_right"), [(40, 24), (130, 300)])
def test_products_are_added_to_what_is_there(ends, of_left, of_right):
    from packgraph.ops.grouped_gemm import add_products

    offsets = torch.tensor(ends, dtype=torch.int32)
    left, right = torch.randn(210, of_left), torch.randn(210, of_right + 4)[:, :of_right]
    left[ends[-1] :], right[ends[-1] :] = NAN, NAN
    before = torch.randn(4, of_left, of_right)
    total = before.clone()
    add_products(total, left, right, offsets)
    for expert, (start, end) in enumerate(zip((0, *ends), ends)):
        expected = before[expert] + left[start:end].mT @ right[start:end]
        torch.testing.assert_close(total[expert], expected, rtol=1e-5, atol=1e-4)
        assert start < end or torch.equal(total[expert], before[expert])


@outside
def test_in_the_interpreter():
    run_in_interpreter(__file__)
