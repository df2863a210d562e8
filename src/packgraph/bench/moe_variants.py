"""The ways of running a model with experts, beside those that run any model (bench/variants.py).

    host-splits     eager; the host reads how many rows each expert gets, tensors have exactly
                    these: the classic
    partial         graphs of each layer's attention, router and plan of rows; dispatch, experts and
                    combine run eagerly
    chunk+stash     one graph of everything; what experts keep for the backward lies in pages, live
                    rows only
    transformers    its own layers, eagerly; transformers+compile: each under torch.compile

`partial+compile`, `chunk+compile+stash`: compiled code in these graphs. host-splits gets its
documents in the shape that eager does, the others as chunk.

`expert_memory` is what experts keep from forward to backward of one microbatch, by the ways of
running them, and room for more rows:

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
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from packgraph.bench.models import TimedPart
from packgraph.bench.rows import Column, Row, gibibytes, value
from packgraph.bench.variants import Graphed, Maker, Setting, Way
from packgraph.models.config import DecoderConfig
from packgraph.models.layers.moe import moe_blocks
from packgraph.models.stack import DecoderStack
from packgraph.moe.dispatch.all_to_all import HostSplitsDispatcher
from packgraph.moe.dispatch.dispatcher import LocalDispatcher, Routing
from packgraph.moe.permute import RowPlan, plan_rows
from packgraph.moe.stash.experts import columns_of
from packgraph.moe.stash.plan import pages_for, stash_memory
from packgraph.moe.stash.stash import Stash
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

PARTIAL = ("moe_router", "moe_preprocess")
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


def _of_experts(make: Maker) -> Maker:
    def checked(name: str, setting: Setting) -> Way:
        if not setting.model.config.experts.enabled:
            raise ValueError(f"{name} is a way of running experts, but the model has none")
        return make(name, setting)

    return checked


def _host_splits(name: str, setting: Setting) -> Way:
    work = setting.work_of(name)
    for block in moe_blocks([work.model]):
        block.dispatcher = HostSplitsDispatcher(block.settings.count, None)
    return Way(name, work)


def _partial(name: str, setting: Setting) -> Way:
    return Graphed(
        name,
        setting.work_of(name),
        (setting.capacity,),
        "layer",
        compile=setting.compiler if name.endswith("+compile") else False,
        scope=partial_scope(setting.model.config),
    )


def _stashed(name: str, setting: Setting) -> Way:
    compile = setting.compiler if "+compile" in name else False
    return Stashed(name, setting.work_of(name), setting.capacity, compile)


def partial_scope(config: DecoderConfig) -> tuple[str, ...]:
    """Captured stages of a decoder whose experts stay out of graphs; dense layers whole."""
    return (*(name for name in config.kinds() if name != "moe"), *PARTIAL)


class Stashed(Graphed):
    """Graphs whose experts keep live rows in pages of one pool, as many as one microbatch of
    `capacity` in flight can need, all of its tokens live."""

    def __init__(
        self, name: str, work: TimedPart, capacity: Capacity, compile: bool | str = False
    ) -> None:
        assert isinstance(work.model, DecoderStack)
        self.blocks = moe_blocks([work.model])
        self.stash = Stash(self.blocks[0].experts.first_proj.device)
        per_token, layers = work.config.experts.per_token, len(self.blocks)
        pages = pages_for(capacity.tokens, per_token, layers, 1, 1.0, self.stash.page_rows)
        self.stash.allocate(pages, columns=columns_of(self.blocks[0].experts))
        for block in self.blocks:
            block.stash = self.stash
            self.stash.attach(block)
        super().__init__(name, work, (capacity,), "chunk", compile)

    def run(self, batch: PackedBatch) -> Tensor:
        self.stash.reset()  # as at the beginning of a step
        return super().run(batch)

    def facts(self) -> dict[str, Any]:
        return super().facts() | {
            "stash_bytes": self.stash.nbytes(),
            "stash_pages": int(self.stash.need_hi()),
        }

    def complaint(self) -> str | None:
        if bool(self.stash.overflow_flag()):
            return f"rows found no page: {int(self.stash.need_hi())} pages were in demand"
        return super().complaint()

    def close(self) -> None:
        super().close()
        del self.stash, self.blocks


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


EXPERT_WAYS: Mapping[str, Maker] = MappingProxyType(
    {
        name: _of_experts(make)
        for name, make in (
            ("host-splits", _host_splits),
            ("partial", _partial),
            ("partial+compile", _partial),
            ("chunk+stash", _stashed),
            ("chunk+compile+stash", _stashed),
        )
    }
)
MOE_WAYS = (
    "host-splits",
    "chunk+compile",
    "chunk",
    "eager",
    "partial",
    "reduce-overhead",
    "chunk+stash",
    "chunk+compile+stash",
    "compile",
    "partial+compile",
)
