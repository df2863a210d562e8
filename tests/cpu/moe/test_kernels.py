"""The kernels of rows and of the experts' activation against the operations they replace, in
Triton's interpreter."""

import pytest
import torch
from interpreterkit import inside, needs_triton, outside, run_in_interpreter

from packgraph.moe.permute import plan_rows

pytestmark = needs_triton


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


@outside
def test_in_the_interpreter():
    run_in_interpreter(__file__)
