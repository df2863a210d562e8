"""The ways of running a model with experts, beside those that run any model (bench/variants.py).

    host-splits     eager; the host reads how many rows each expert gets, tensors have exactly
                    these: the classic
    partial         graphs of each layer's attention, router and plan of rows; dispatch, experts and
                    combine run eagerly
    chunk+stash     one graph of everything; what experts keep for the backward lies in pages, live
                    rows only
    transformers    its own layers, eagerly; transformers+compile: each under torch.compile

`partial+compile`, `chunk+compile+stash`: compiled code in these graphs. Which shape a way gets its
documents in: host-splits and transformers as eager, the others as chunk.
"""

from typing import Any

from torch import Tensor

from packgraph.bench.parts import TimedPart, twin
from packgraph.bench.transformers_layers import transformers_stack
from packgraph.bench.variants import Compiled, Graphed, Setting, Way, make_way
from packgraph.models.config import DecoderConfig
from packgraph.models.layers.moe import MoEBlock, moe_blocks
from packgraph.models.stack import DecoderStack
from packgraph.moe.dispatch.all_to_all import HostSplitsDispatcher
from packgraph.moe.stash.experts import columns_of
from packgraph.moe.stash.plan import pages_for
from packgraph.moe.stash.stash import Stash
from packgraph.packing.batch import PackedBatch
from packgraph.packing.capacity import Capacity

EXPERT_WAYS = (
    "host-splits",
    "partial",
    "partial+compile",
    "chunk+stash",
    "chunk+compile+stash",
    "transformers",
    "transformers+compile",
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
    "transformers",
    "transformers+compile",
)
PARTIAL = ("moe_router", "moe_preprocess")


def make_expert_way(name: str, setting: Setting) -> Way:
    """The way called `name`, one of EXPERT_WAYS or of STEP_WAYS. Raises as `make_way`, and
    ValueError for a way of EXPERT_WAYS where the model has no experts."""
    if name not in EXPERT_WAYS:
        return make_way(name, setting)
    if not setting.model.config.experts.enabled:
        raise ValueError(f"{name} is a way of running experts, but the model has none")
    kind, _, form = name.partition("+")
    model = twin(setting.model, setting.attention_of(name))
    work = setting.work.by(model)
    if kind == "host-splits":
        for block in moe_blocks([model]):
            block.dispatcher = HostSplitsDispatcher(block.settings.count, None)
        return Way(name, work)
    if kind == "partial":
        return Graphed(
            name,
            work,
            (setting.capacity,),
            "layer",
            compile=setting.compiler if form else False,
            scope=partial_scope(model.config),
        )
    if kind == "chunk":
        return Stashed(
            name, work, setting.capacity, setting.compiler if "compile" in form else False
        )
    stack = transformers_stack(model, setting.compiler if form else None)
    return Compiled(name, setting.work.by(stack), (), stack)


def partial_scope(config: DecoderConfig) -> tuple[str, ...]:
    """What is captured of a decoder whose experts stay out of graphs; dense layers whole."""
    return (*(name for name in config.kinds() if name != "moe"), *PARTIAL)


class Stashed(Graphed):
    """Graphs whose experts keep live rows in pages of one pool, as many as the capacity can
    need."""

    def __init__(
        self, name: str, work: TimedPart, capacity: Capacity, compile: bool | str = False
    ) -> None:
        assert isinstance(work.model, DecoderStack)
        self.blocks = moe_blocks([work.model])
        self.stash = share_stash(self.blocks, work.config, capacity)
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
        if bool(self.stash.verdict()):
            return f"rows found no page: {int(self.stash.need_hi())} pages were in demand"
        return super().complaint()

    def close(self) -> None:
        super().close()
        del self.stash, self.blocks


def share_stash(blocks: list[MoEBlock], config: DecoderConfig, capacity: Capacity) -> Stash:
    """A stash that these layers use, with pages for one microbatch of `capacity` in flight, all of
    its tokens live."""
    experts = blocks[0].experts
    stash = Stash(experts.first_proj.device)
    pages = pages_for(
        capacity.tokens, config.experts.per_token, len(blocks), 1, 1.0, stash.page_rows
    )
    stash.allocate(pages, columns=columns_of(experts))
    for block in blocks:
        block.stash = stash
        stash.attach(block)
    return stash
