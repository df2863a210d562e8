"""When a budget of experts did not suffice: a verdict that all ranks share, and more room.

    forwards      a dispatch that lacks rows notes what it would have needed       on the device
    update        any rank lacks something -> no rank changes anything             one reduction, no wait
    a step later  the host reads `blocked` with the loss, makes room, and repeats the steps that
                  changed nothing

The verdict stays until `make_room`, so a step that was launched before the host knew changes
nothing, either. What a step reads and writes besides parameters (gradients, loads of experts,
optimizer state) begins anew or is left alone by a blocked update; random states are the trainer's
to put back (`train/retry.py`).
"""  # noqa: E501

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from packgraph.models.layers.moe import MoEBlock, moe_blocks
from packgraph.moe.dispatch.choose import Budgeted, with_factor
from packgraph.moe.stash.plan import grown_pages
from packgraph.moe.stash.stash import Stash

SPARE = 1.1  # room over what was needed: routing goes on to move


class Overflow:
    """The budgets of this rank's chunks. group: all ranks of the run, None = this process alone.
    stash: of the chunks.

    blocked: float32 [], 1.0 while something did not fit; a fused optimizer takes it as `found_inf`.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        group: dist.ProcessGroup | None,
        device: torch.device,
        stash: Stash | None = None,
    ) -> None:
        self._chunks, self._stash = chunks, stash
        self._blocks = [
            block for block in moe_blocks(chunks) if isinstance(block.dispatcher, Budgeted)
        ]
        self._group = group
        self.blocked = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def agree(self) -> Tensor:
        """`blocked`, after all ranks have said what they lack. Collective; no host sync."""
        verdicts = [block.demand > 0 for block in self._blocks]
        if self._stash is not None:
            verdicts.append(self._stash.verdict())
        if verdicts:
            lacks = torch.stack(verdicts).any()
            self.blocked.copy_(torch.maximum(self.blocked, lacks.to(self.blocked.dtype)))
        if self._group is not None:
            dist.all_reduce(self.blocked, dist.ReduceOp.MAX, group=self._group)
        return self.blocked

    def begin(self) -> None:
        """Before a step: pages that nobody brings back (of an evaluation, of a step that failed)
        are free again."""
        if self._stash is not None:
            self._stash.reset()

    @torch.no_grad()
    def make_room(self, whole: bool = False) -> str:
        """Give every layer the room that the largest demand needs, and lift the verdict.
        Collective; waits for the device. Returns what was done, for a person.

        whole: give all the room that there can ever be need for. A layer that had too little hides
        what the layers behind it need, so one attempt may only show the next lack.
        """
        largest = torch.zeros((), dtype=torch.int64, device=self.blocked.device)
        for block in self._blocks:
            torch.maximum(largest, block.demand, out=largest)
            block.demand.zero_()
        if self._group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        self.blocked.zero_()
        told = []
        if needed := int(largest) / 1000:
            give_room(self._blocks, math.inf if whole else needed * SPARE)
            told.append(
                f"a rank needed {needed:.2f} times the room of a balanced load; now there is "
                + ("room for whatever comes" if whole else f"{needed * SPARE:.2f} times")
            )
        if self._stash is not None and bool(self._stash.verdict()):
            told.append(self._more_pages(self._stash))
        return "; ".join(told) or "another rank had too little room"

    def _more_pages(self, stash: Stash) -> str:
        before, needed = stash.pages.pages, int(stash.need_hi())
        stash.allocate(grown_pages(before, needed), columns=dict(stash.columns))
        for block in moe_blocks(self._chunks):
            stash.attach(block)
        return (
            f"the stash had {before} pages and needed {needed}; now there are {stash.pages.pages}"
        )


def give_room(blocks: Sequence[MoEBlock], factor: float) -> None:
    """Room for `factor` in these layers, whose dispatchers have a budget; inf = for whatever comes.
    Collective."""
    dispatchers = [block.dispatcher for block in blocks if isinstance(block.dispatcher, Budgeted)]
    for block, larger in zip(blocks, with_factor(dispatchers, factor), strict=True):
        block.dispatcher = larger
