"""Ranks in one process for tests of what ranks read from each other: a memory for each, and
routings to try."""

import torch

from packgraph.moe.peer_read import bytes_for

NAN = float("nan")


class Peers:
    """memories: of each rank, full of what means nothing. table: int64 [ranks], their addresses."""

    def __init__(self, ranks, room, width, dtype, device="cpu"):
        self.room = room
        size = -(-bytes_for(room, width, dtype) // 4) * 4
        self.memories = [
            torch.full((size // 4,), NAN, device=device).view(torch.uint8) for _ in range(ranks)
        ]
        self.table = torch.tensor([memory.data_ptr() for memory in self.memories], device=device)

    def publish(self, values, weights, plans=None):
        """Of every rank its rows [N, H] and their weights; only the live ones of `plans`, where
        given."""
        from packgraph.moe.peer_read import publish

        for rank, (rows, of_rows) in enumerate(zip(values, weights, strict=True)):
            publish(rows, of_rows, self.memories[rank], self.room, plans and plans[rank].offsets)


def draw_experts(ranks, tokens, places, count, kind):
    """int32 [ranks, T, k], of some kind of mixture."""
    if kind == "mixed":
        return torch.randint(-1, count, (ranks, tokens, places), dtype=torch.int32)
    return torch.full(
        (ranks, tokens, places), -1 if kind == "padding" else count - 1, dtype=torch.int32
    )
