"""Ways of running a model with experts, for `bench moe`, beside those of the package.

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
from collections.abc import Sequence
from typing import Any

from bench_models import TimedPart
from bench_step import StepArguments
from bench_ways import Graphed, Maker, Setting, Way
from step_figures import StepFigures
from torch import Tensor

from packgraph.bench.rows import Column, Row, gibibytes, value
from packgraph.models.config import DecoderConfig
from packgraph.models.layers.moe import moe_blocks
from packgraph.models.stack import DecoderStack
from packgraph.moe.dispatch.dispatcher import LocalDispatcher, Routing
from packgraph.moe.dispatch.over_ranks import HostSplitsDispatcher
from packgraph.moe.permute import RowPlan, plan_rows
from packgraph.moe.stash.plan import pages_for
from packgraph.moe.stash.stash import Stash, columns_of
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


def make_expert_way(name: str, setting: Setting) -> Way:
    """The way called `name`. Raises ValueError for models without experts."""
    if not setting.model.config.experts.enabled:
        raise ValueError(f"{name} is a way of running experts, but the model has none")
    work = setting.work.by(setting.model_of(name))
    compile = setting.compiler if "+compile" in name else False
    if name.endswith("stash"):
        return Stashed(name, work, setting.capacity, compile)
    if name == "host-splits":
        for block in moe_blocks([work.model]):
            block.dispatcher = HostSplitsDispatcher(block.settings.count, None)
        return Way(name, work)
    scope = partial_scope(setting.model.config)
    return Graphed(name, work, (setting.capacity,), "layer", compile, scope)


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
        self.stash.pages.reset()  # as at the beginning of a step
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


def expert_memory(way: str, model: DecoderStack, capacity: Capacity, room: float) -> Row:
    """expert_bytes of one microbatch that fills `capacity`, and their ratio to balanced eager's.
    None for layers that are not ours."""
    if way.startswith("transformers"):
        return {"expert_bytes": None, "expert_ratio": None}
    blocks = moe_blocks([model])
    layers, per_token = len(blocks), model.config.experts.per_token
    columns = columns_of(blocks[0].experts)
    row = sum(dtype.itemsize * width * count for (dtype, width), count in columns.items())
    rows = capacity.tokens * per_token
    balanced, layer = layers * rows * row, math.ceil(rows * room) * row
    nbytes = balanced if way == "host-splits" else layers * layer
    if way.endswith("+stash"):  # its pages, and the layer that runs
        nbytes = pages_for(capacity.tokens, per_token, layers, 1, 1.0) * 64 * row + layer
    return {"expert_bytes": nbytes, "expert_ratio": round(nbytes / balanced, 4)}


class ExpertComparison(StepFigures):
    """All ways at one number of tokens; rows of models with experts tell what these keep."""

    def __init__(
        self, options: StepArguments, tokens: int, model: DecoderStack, *rest: Any
    ) -> None:
        self.room: float = getattr(options, "room", 1.0)
        for block in moe_blocks([model]) if self.room > 1 else ():
            block.dispatcher = RoomyDispatcher(block.settings.count, self.room)
        super().__init__(options, tokens, model, *rest)

    def row(self, name: str) -> Row:
        """The row of one way: slot_bytes, and peak_ratio against the first way's peak, where they
        are known."""
        row = super().row(name)
        if not self.model.config.experts.enabled:
            return row
        first = self.results.extras[self.results.names[0]]
        pool, peak, other = row.get("pool_bytes"), row.get("peak_bytes"), first.get("peak_bytes")
        return {
            **row,
            "room": self.room,
            "slot_bytes": None if pool is None else pool + row.get("stash_bytes", 0),
            "peak_ratio": round(peak / other, 4) if peak and other else None,
            **expert_memory(name, self.model, self.setting.capacity, self.room),
        }


EXPERT_WAYS: dict[str, Maker] = dict.fromkeys(
    ("host-splits", "partial", "partial+compile", "chunk+stash", "chunk+compile+stash"),
    make_expert_way,
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
