"""What experts keep from forward to backward of one microbatch, by the ways of running them; and
room for more rows.

    balanced    layers x n rows                            eager with exactly the rows that are
                                                           routed (host-splits)
    static      layers x R rows, R = room x n              graphs, and eager calls, with room for an
                                                           uneven load
    stash       layers x n rows in pages, and R rows       of the layer that runs

One process has all experts, so its load is always balanced: n = T * k. Room says what a rank of
several would have to hold free for a load that is not (the capacity factor): at `room` 2 a stash
may take 1.1 times what is balanced. These figures follow from shapes (`moe/stash/plan.py`); what is
measured, peak_bytes of a whole microbatch, is beside them, and slot_bytes: what graphs hold between
microbatches, pages among it.
"""

import math
from collections.abc import Sequence

import torch

from packgraph.bench.rows import Column, Row, gibibytes, value
from packgraph.models.layers.moe import moe_blocks
from packgraph.models.stack import DecoderStack
from packgraph.moe.dispatch.dispatcher import LocalDispatcher, Routing
from packgraph.moe.permute import RowPlan, plan_rows
from packgraph.moe.stash.experts import columns_of
from packgraph.moe.stash.plan import stash_memory
from packgraph.packing.capacity import Capacity

COLUMNS: list[Column] = [
    ("of first", value("peak_ratio", ".3f")),
    ("slots GiB", gibibytes("slot_bytes")),
    ("experts GiB", gibibytes("expert_bytes")),
    ("of balanced", value("expert_ratio", ".3f")),
]
LEFT_OUT = (
    "attention",
    "p99",
    "capture ms / layer",
    "padding",
)  # of the table, for want of room; rows have them


def with_memory(columns: Sequence[Column]) -> list[Column]:
    """A table's columns with those of memory behind the peak, and without some others."""
    kept = [column for column in columns if column[0] not in LEFT_OUT]
    place = [name for name, _ in kept].index("peak GiB") + 1
    return [*kept[:place], *COLUMNS, *kept[place:]]


class RoomyDispatcher(LocalDispatcher):
    """The local dispatcher with `room` times as many rows as there are pairs: those behind are
    empty."""

    def __init__(self, num_experts: int, room: float) -> None:
        super().__init__(num_experts)
        self.room = room

    def preprocess(self, routing: Routing) -> RowPlan:
        """The plan of rows; no host sync."""
        return plan_rows(
            routing.experts, self.num_experts, math.ceil(self.room * routing.experts.numel())
        )


def give_rows(model: torch.nn.Module, room: float) -> None:
    """Let all layers with experts have `room` times the rows that they need, 1 or more."""
    for block in moe_blocks([model]) if room > 1 else ():
        block.dispatcher = RoomyDispatcher(block.settings.count, room)


def expert_memory(way: str, model: DecoderStack, capacity: Capacity, room: float) -> Row:
    """expert_bytes of one microbatch that fills `capacity`, and their ratio to balanced eager's.
    None for layers that are not ours."""
    if way.startswith("transformers"):
        return {"expert_bytes": None, "expert_ratio": None}
    blocks = moe_blocks([model])
    columns = {
        (str(dtype).removeprefix("torch."), width): count
        for (dtype, width), count in columns_of(blocks[0].experts).items()
    }
    found = stash_memory(
        columns, capacity.tokens, model.config.experts.per_token, len(blocks), 1, room, factor=1.0
    )
    exact = way == "host-splits"
    nbytes = found.total if way.endswith("+stash") else found.balanced if exact else found.worst
    return {"expert_bytes": nbytes, "expert_ratio": round(nbytes / found.balanced, 4)}


def measured_memory(row: Row, first: Row) -> Row:
    """slot_bytes, and peak_ratio against the first way's peak, where they are known."""
    pool, peak, other = row.get("pool_bytes"), row.get("peak_bytes"), first.get("peak_bytes")
    return {
        "slot_bytes": None if pool is None else pool + row.get("stash_bytes", 0),
        "peak_ratio": round(peak / other, 4) if peak and other else None,
    }
