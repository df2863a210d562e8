"""What the graphs of a run will take of the device, known before they are captured, and what a
budget leaves of them.

    largest capacity ─▶ trial capture of every chunk ─▶ predicted bank ─▶ within the budget? ─▶
    capture
           ▲                                                                │ no
           └───────────────── dropped: its microbatches run eagerly ◀───────┘

A slot's pool is as large as its largest bucket needs, so only dropping the largest helps, and
tracing it is enough. The trace takes the memory of one eager microbatch of that capacity, which a
run needs in any case (a microbatch that has no graph runs eagerly), then that of its graphs in one
slot. What is decided is the same on all ranks: all of them measure, and one that has no room
decides for all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from packgraph.graphs.cache import Consensus, alone
from packgraph.graphs.dry_run import explained
from packgraph.graphs.errors import CaptureError
from packgraph.graphs.graphed import GraphedModule, control
from packgraph.graphs.key import OVER_BUDGET, CapturedCapacities
from packgraph.graphs.memory.allocator import free_memory
from packgraph.graphs.memory.budget import budget_bytes, shown
from packgraph.graphs.memory.trial import BankMemory, trial_memory
from packgraph.packing.capacity import Capacity

Arguments = Callable[[int, Capacity], tuple[Any, ...]]
Agree = Callable[[bool], bool]


def limit_of(budget: str | None, device: torch.device) -> int | None:
    """The bytes of a budget on `device`, None where there is none. Raises ValueError as
    `budget_bytes`."""
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return None if budget is None else budget_bytes(budget, total)


def agreement(group: dist.ProcessGroup | None, device: torch.device) -> Agree:
    """A question to all ranks of `group` (None: this process alone): is it so everywhere?
    Collective."""
    if group is None:
        return lambda mine: mine

    def agree(mine: bool) -> bool:
        told = torch.tensor(int(mine), device=device)
        dist.all_reduce(told, dist.ReduceOp.MIN, group=group)
        return bool(told.item())

    return agree


@dataclass(frozen=True)
class MemoryPlan:
    """What will be captured. kept: capacities, smallest first. dropped: those over the budget.
    banks: the prediction for each chunk of this rank, empty where there is none. notes: what is to
    be said of it.
    """

    kept: tuple[Capacity, ...]
    dropped: tuple[Capacity, ...] = ()
    banks: tuple[BankMemory, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def pools(self) -> int:
        """Predicted bytes of all pools of this rank."""
        return sum(bank.pools for bank in self.banks)

    def summary(self, measured: int) -> dict[str, Any]:
        """What summary.json says. measured: bytes that the pools hold."""
        if not self.banks:
            return (
                {"dropped": [str_of(capacity) for capacity in self.dropped]} if self.dropped else {}
            )
        return {
            "slots": [bank.slots for bank in self.banks],
            "slot_bytes": [bank.slot for bank in self.banks],
            "shared_bytes": [bank.shared for bank in self.banks],
            "buffer_bytes": [bank.buffers for bank in self.banks],
            "predicted_pool_bytes": self.pools,
            "measured_pool_bytes": measured,
            "predicted_to_measured": self.pools / measured if measured else None,
            "dropped": [str_of(capacity) for capacity in self.dropped],
        }


def plan_memory(
    chunks: Sequence[GraphedModule],
    arguments: Arguments,
    slots: Sequence[int],
    capacities: Sequence[Capacity],
    budget: int | None = None,
    agree: Agree = lambda mine: mine,
    vote: Consensus = alone,
) -> MemoryPlan:
    """Predict the graphs of `capacities` in `slots` slots of each chunk, and tell the chunks what
    is dropped.

    arguments: of a call of chunk number ... for a capacity. budget: bytes for pools and slot
    buffers of all chunks, None = no limit. vote: whether a trace went well on all ranks that
    exchange data in it. Changes no training state. Collective where `agree` is, or the chunks are.
    """
    kept, dropped, notes = sorted(set(capacities)), list[Capacity](), list[str]()
    banks: tuple[BankMemory, ...] = ()
    while kept:
        largest = str_of(kept[-1])
        banks, failed = _predicted(chunks, arguments, slots, kept[-1], vote)
        needed, why = sum(bank.total for bank in banks), "it is too large on another rank"
        if failed is not None:
            notes.append(f"memory of graphs of {largest} is not predicted: {failed.what}")
        fits = failed is None or not failed.no_room
        if not fits:
            why = "there is no room for its graphs"
        elif budget is not None and needed > budget:
            fits, why = False, f"its graphs need {shown(needed)}"
        if budget is None or agree(fits):
            break
        notes.append(
            f"capacity {largest} is dropped: {why}, graph.memory_budget is {shown(budget)}; its "
            "microbatches "
            f"run eagerly, counted as '{OVER_BUDGET}'"
        )
        dropped.append(kept.pop())
        banks = ()
    if dropped:
        for chunk in chunks:
            control(chunk).capacities = CapturedCapacities(
                kept, dict.fromkeys(dropped, OVER_BUDGET)
            )
    if banks:
        notes.append(_told(banks, kept))
    return MemoryPlan(tuple(kept), tuple(dropped), banks, tuple(notes))


class _Failed(NamedTuple):
    """Why a trace failed, on this rank or another; whether that was for want of memory here."""

    what: str
    no_room: bool


def _predicted(
    chunks: Sequence[GraphedModule],
    arguments: Arguments,
    slots: Sequence[int],
    capacity: Capacity,
    vote: Consensus,
) -> tuple[tuple[BankMemory, ...], _Failed | None]:
    """The banks of `capacity` alone, one of each chunk; none where a trace failed on any rank that
    votes. They ask each other after every chunk, since the next one's trace exchanges data, too."""
    banks = []
    for number, chunk in enumerate(chunks):
        error: CaptureError | None = None
        try:
            with (
                explained()
            ):  # also want of memory for arguments, say: who does not come to vote is waited for
                sample = arguments(number, capacity)
                banks.append(trial_memory(chunk, [sample], slots[number]))
        except CaptureError as failed:
            error = failed
        error = vote(f"the memory of graphs of {str_of(capacity)}", error)
        if error is not None:
            told = _Failed(error.what, isinstance(error.__cause__, torch.OutOfMemoryError))
            error = None  # its traceback holds this frame, and what was to be captured
            for traced in chunks:
                control(traced).forget_code()
            free_memory(
                chunks[0].device
            )  # the next trial may need it, and no allocator looks for it
            return (), told
    return tuple(banks), None


def _told(banks: Sequence[BankMemory], kept: Sequence[Capacity]) -> str:
    shared = [f" + {shown(bank.shared)} shared" if bank.shared else "" for bank in banks]
    chunks = [
        f"{bank.slots} x {shown(bank.slot)} for slots{also} + {bank.slots} x {shown(bank.buffers)} "
        "for inputs"
        for bank, also in zip(banks, shared, strict=True)
    ]
    count = f"{len(kept)} capacit{'y' if len(kept) == 1 else 'ies'} up to {str_of(kept[-1])}"
    return (
        f"graphs of {count} will take {shown(sum(bank.total for bank in banks))}: "
        f"{'; '.join(chunks)}"
    )


def str_of(capacity: Capacity) -> str:
    """A capacity as the options write it."""
    return f"{capacity.tokens}x{capacity.documents}"
