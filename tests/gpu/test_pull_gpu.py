"""The kernels that read from peers, on one GPU that holds the memories of all ranks."""

import pytest
import torch
from pullkit import NAN, Peers, draw_experts

from packgraph.moe.peer_read import PeerReadPlan, locate, rows_for
from packgraph.moe.permute import RowPlan, combine_rows, plan_rows

pytestmark = pytest.mark.gpu
COUNT = 64


@pytest.mark.parametrize("width", [2048, 1000])
@pytest.mark.parametrize(
    ("ranks", "tokens", "places", "factor"), [(4, 1024, 6, 1.5), (8, 300, 8, 1.0), (2, 77, 1, 2.0)]
)
def test_rows_travel_bit_by_bit(ranks, tokens, places, factor, width):
    """Tokens and weights into rows, and rows back into sums and weights: what gathers from one
    large tensor make."""
    from packgraph.moe.peer_read import collect, spread

    torch.manual_seed(0)
    rows = rows_for(tokens * places, factor, ranks)
    everyone = draw_experts(ranks, tokens, places, COUNT, "mixed").cuda().flatten(0, 1)
    ordered = plan_rows(everyone, COUNT, everyone.numel())
    on_host = RowPlan(*(field.cpu() for field in ordered))
    plans = [PeerReadPlan(*locate(everyone, ordered, ranks, rank, rows)) for rank in range(ranks)]
    for rank, plan in enumerate(plans):
        expected = locate(everyone.cpu(), on_host, ranks, rank, rows)
        assert all(
            torch.equal(ours.cpu(), theirs) for ours, theirs in zip(plan, expected, strict=True)
        )
    x = torch.randn(ranks * tokens, width, device="cuda").bfloat16()
    weights = torch.rand(ranks * tokens, places, device="cuda")
    peers = Peers(ranks, rows, width, torch.bfloat16, "cuda")
    peers.publish(x.chunk(ranks), weights.chunk(ranks))
    made = []
    for rank, (row_of_pair, _, offsets, _) in enumerate(plans):
        values, of_rows = spread(peers.table, row_of_pair, offsets, x, True, rows, rows, rank)
        pair = (row_of_pair.flatten() >= 0).nonzero().flatten()
        row = row_of_pair.flatten()[pair].long()
        assert torch.equal(values[row], x[pair // places]) and torch.equal(
            of_rows[row], weights.flatten()[pair]
        )
        assert (
            not values[offsets[-1] :].any()
            and not of_rows[offsets[-1] :].any()
            and len(row) == offsets[-1]
        )
        values[offsets[-1] :], of_rows[offsets[-1] :] = NAN, NAN
        made.append((values * 3 + 1, of_rows))
    peers.publish(*zip(*made, strict=True), plans)
    whole, of_all = (torch.cat(parts) for parts in zip(*made, strict=True))
    for _, place_of_pair, offsets, _ in plans:
        sums, of_pairs = collect(peers.table, place_of_pair, x, True, rows, rows)
        assert torch.equal(
            sums, combine_rows(whole, RowPlan(place_of_pair, place_of_pair, offsets, offsets))
        )
        expected = torch.where(place_of_pair >= 0, of_all[place_of_pair.clamp(min=0).long()], 0)
        assert torch.equal(of_pairs, expected)
