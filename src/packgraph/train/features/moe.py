"""Mixture of experts in a run: balance, the stash, exchange buffers, and what happens when a budget
did not suffice.

Balance without an auxiliary loss (`ExpertBalance`): once per step every router's bias moves against
the load of the step.

The forwards of a step count on the device which experts tokens went to (`Gate.load`); here the
counts are summed over the replicas, in one exchange for all layers, and the biases move. It is part
of the optimizer's update, so that it is captured with it, repeated with it, and left out with it.
Source: arXiv 2408.15664. The same counts are kept for the `batch_loss` of the next step.

The memory through which ranks exchange tokens with `parallel.dispatcher = symmetric`
(`make_buffers`):

It is made once, before anything is captured, for the longest row and `parallel.expert_room`, and
serves all layers of a rank, which exchange one after another. Where its room does not suffice, all
ranks make a larger one together (`train/features/moe.py`).

Pages of the stash (`make_stash`) keep what the experts of this rank's layers save from forward to
backward.

How many is planned from the largest capacity and the microbatches that are in flight by the
schedule, for equally busy experts and `parallel.expert_stash` times that. Where it does not
suffice, the update of the step changes nothing (`train/features/moe.py`) and there are more pages when
the step is made again.

When a budget of experts did not suffice (`Overflow`), there is an overflow flag that all ranks
share, and more room:

    forwards      a dispatch that lacks rows notes what it would have needed       on the device
    update        any rank lacks something -> no rank changes anything             one reduction, no wait
    a step later  the host reads `blocked` with the loss, makes room, and repeats the steps that
                  changed nothing

The overflow flag stays until `make_room`, so a step that was launched before the host knew changes
nothing, either. What a step reads and writes besides parameters (gradients, loads of experts,
optimizer state) begins anew or is left alone by a blocked update; random states are the trainer's
to put back (`train/trainer.py`).

The room that experts turned out to need is in checkpoints (`room_of_experts`): a run that goes on
need not find out again.

    rows     of dispatchers, over what equally busy experts would need     `factor` of a dispatcher, as it grew
    pages    of the stash, over the same                                   pages / those of a balanced load

Both are shares, so they say something at another layout, too: other ranks, capacities, slots. The
largest of all ranks counts. Room that was configured and is larger stays; more rows than can ever
be needed are not given (with `ep` halved, half of them). Where that does not suffice after all, it
grows as ever (`train/features/moe.py`).
"""  # noqa: E501

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from packgraph.models.branches import routed_width
from packgraph.models.decoder import ModelChunks
from packgraph.models.layers.moe import Gate, MoEBlock, moe_blocks
from packgraph.moe.balance import update_bias
from packgraph.moe.dispatch.dispatcher import Dispatching
from packgraph.moe.dispatch.over_ranks import Budgeted, with_factor
from packgraph.moe.peer_read import SymmetricBuffers, symmetric_problem
from packgraph.moe.stash.plan import grown_pages, pages_for
from packgraph.moe.stash.stash import Stash, columns_of
from packgraph.ops.symmetric_memory import NoSymmetricMemory
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.pipeline.schedule import slot_counts
from packgraph.parallel.ranks import gather_numbers
from packgraph.train.config.reading import ConfigError, true_of
from packgraph.train.config.sections import TrainConfig
from packgraph.train.features.context import longest_row

MOST_ATTEMPTS = 5  # to make a step; room grows to what was needed, so a second one is rare
SPARE = 1.1  # room over what was needed: routing goes on to move
ROUNDING = 1e-9  # a share times what it is of


class ExpertBalance:
    """The routers of some chunks of a model. group: replicas with the same routers, None = this
    process alone."""

    def __init__(self, chunks: Sequence[nn.Module], group: dist.ProcessGroup | None) -> None:
        self._gates = [block.gate for block in moe_blocks(chunks)]
        self._names = [
            name
            for chunk in chunks
            for name, module in chunk.named_modules()
            if isinstance(module, Gate)
        ]
        self._rates = [block.settings.bias_rate for block in moe_blocks(chunks)]
        self._group = group

    @torch.no_grad()
    def update(self, skip: Tensor | None = None) -> None:
        """Move all biases by the counts of the step, which begin anew. skip: bool [], whether to
        leave the biases."""
        if not self._gates:
            return
        loads = torch.stack([gate.load for gate in self._gates])
        if self._group is not None:
            dist.all_reduce(loads, group=self._group)
        for gate, load, rate in zip(self._gates, loads, self._rates, strict=True):
            if gate.step_load is not None:
                kept = load if skip is None else torch.where(skip, gate.step_load, load)
                gate.step_load.copy_(kept)
            if (bias := gate.e_score_correction_bias) is not None:
                update_bias(bias, load, rate if skip is None else torch.where(skip, 0.0, rate))
            gate.load.zero_()

    def state_tensors(self) -> dict[str, Tensor]:
        """State of a run beside the biases: `balance.NAME.step_load` of each gate that has one."""
        return {
            f"balance.{name}.step_load": gate.step_load
            for name, gate in zip(self._names, self._gates, strict=True)
            if gate.step_load is not None
        }


def exchange_problems(config: TrainConfig, device_type: str) -> list[str]:
    """Lists what keeps ranks on devices of this type from exchanging tokens through each other's
    memory, if they are to."""
    parallel = config.parallel
    if not config.model.experts.enabled or parallel.dispatcher_name != "symmetric":
        return []
    problem = symmetric_problem(torch.device(device_type), parallel.ep)
    return true_of(
        {
            f"parallel.dispatcher = symmetric with parallel.ep = {parallel.ep}: {problem}; use "
            "dispatcher = padded": problem is not None,
            "offload.modules with graph.compile and parallel.dispatcher = symmetric is not there "
            "yet: all that a compiled layer saves would move, the memory that other ranks read "
            "among it; leave one of them out, or use dispatcher = padded": config.graph.compile
            and bool(config.offload.modules),
        }
    )


def has_shared_experts(config: TrainConfig) -> bool:
    """Returns whether layers have room for rows of experts that may not suffice."""
    live = config.hf.path is not None and config.parallel.ep > 1
    return config.model.experts.enabled or live


def make_buffers(
    chunks: Sequence[nn.Module], config: TrainConfig, device: torch.device, mesh: Mesh
) -> SymmetricBuffers | None:
    """Makes the buffers through which this rank's layers with experts exchange tokens; None where
    they need none.

    Collective over the ranks that share experts. Raises ConfigError where there is no such memory.
    """
    if config.parallel.dispatcher_name != "symmetric" or not moe_blocks(chunks):
        return None
    if problems := exchange_problems(config, device.type):
        raise ConfigError(problems)
    group = mesh.group("ep")
    assert group is not None  # of several ranks
    try:
        return SymmetricBuffers(
            group,
            longest_row(config) * config.model.experts.per_token,
            config.parallel.expert_room,
            routed_width(config.model),
            getattr(torch, config.run.dtype),
            device,
        )
    except NoSymmetricMemory as error:
        raise ConfigError([f"parallel.dispatcher = symmetric: {error}"]) from error


def make_stash(
    model: ModelChunks, config: TrainConfig, mesh: Mesh, device: torch.device
) -> Stash | None:
    """The stash of all layers with experts of this rank that have one, attached to them; None where
    there is none."""
    parallel, blocks = config.parallel, moe_blocks(model.chunks)
    if parallel.expert_stash_resident:
        blocks = blocks[:-1]
    if not parallel.expert_stash or not blocks:
        return None
    stash = Stash(device, parallel.expert_stash_page_rows)
    whole = parallel.expert_stash + parallel.expert_stash_host
    pages = planned_pages(model, config, mesh, whole, stash.page_rows)
    host = math.floor(pages * parallel.expert_stash_host / whole)
    stash.allocate(pages - host, host, columns=columns_of(blocks[0].experts))
    share(stash, blocks)
    return stash


def planned_pages(
    model: ModelChunks, config: TrainConfig, mesh: Mesh, factor: float, page_rows: int
) -> int:
    """Pages for what is in flight on this rank, of `factor` times the rows that equally busy
    experts would get."""
    # Without a pipeline one: the backward follows at once, however many slots there are.
    in_flight = slot_counts(mesh.size("pp"), len(model.chunks))[mesh.place["pp"]]
    records = sum(
        len(moe_blocks([chunk])) * slots
        for chunk, slots in zip(model.chunks, in_flight, strict=True)
    )
    return pages_for(
        longest_row(config),
        config.model.experts.per_token,
        records,
        1,
        factor,
        page_rows,
        config.parallel.expert_stash_resident,
    )


def share(stash: Stash, blocks: Sequence[MoEBlock]) -> None:
    """Give the stash to these layers, once its pages are there."""
    for block in blocks:
        block.stash = stash
        stash.attach(block)


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
        self._blocks = budgeted(chunks)
        self._group = group
        self.blocked = torch.zeros((), dtype=torch.float32, device=device)

    @torch.no_grad()
    def agree(self) -> Tensor:
        """`blocked`, after all ranks have said what they lack. Collective; no host sync."""
        flags = [block.demand > 0 for block in self._blocks]
        if self._stash is not None:
            flags.append(self._stash.overflow_flag())
        if flags:
            lacks = torch.stack(flags).any()
            self.blocked.copy_(torch.maximum(self.blocked, lacks.to(self.blocked.dtype)))
        if self._group is not None:
            dist.all_reduce(self.blocked, dist.ReduceOp.MAX, group=self._group)
        return self.blocked

    def begin(self) -> None:
        """Before a step: pages that nobody brings back (of an evaluation, of a step that failed)
        are free again."""
        if self._stash is not None:
            self._stash.pages.reset()

    @torch.no_grad()
    def make_room(self, whole: bool = False) -> str:
        """Give every layer the room that the largest demand needs, and lift the overflow flag.
        Collective; waits for the device. Returns what was done, for a person.

        whole: give all the room that there can ever be need for. A layer that had too little hides
        what the layers behind it need, so one attempt may only show the next lack.
        """
        needed, told = self.take_demand("demand"), []
        self.blocked.zero_()
        if needed:
            give_room(self._blocks, math.inf if whole else needed * SPARE)
            told.append(
                f"a rank needed {needed:.2f} times the room of a balanced load; now there is "
                + ("room for whatever comes" if whole else f"{needed * SPARE:.2f} times")
            )
        if self._stash is not None and bool(self._stash.overflow_flag()):
            before, lacking = all_pages(self._stash), int(self._stash.need_hi())
            set_pages(self._stash, grown_pages(before, lacking), moe_blocks(self._chunks))
            told.append(
                f"the stash had {before} pages and needed {lacking}; now there are "
                f"{all_pages(self._stash)}"
            )
        return "; ".join(told) or "another rank had too little room"

    @torch.no_grad()
    def take_demand(self, buffer: str) -> float:
        """The largest demand of any rank in `buffer` of its blocks, which begins anew: times the
        room of a balanced load, 0 where nothing was lacking. Collective; waits for the device.

        buffer: `demand` of training, or `evaluation_demand`.
        """
        largest = torch.zeros((), dtype=torch.int64, device=self.blocked.device)
        for block in self._blocks:
            demand = getattr(block, buffer)
            torch.maximum(largest, demand, out=largest)
            demand.zero_()
        return max(gather_numbers(self._group, [int(largest)]))[0] / 1000

    def give(self, needed: float) -> None:
        """Give every layer room for so many times the rows of a balanced load, and some more.
        Collective; graphs must have been freed."""
        give_room(self._blocks, needed * SPARE)


def all_pages(stash: Stash) -> int:
    """Pages on the device and on the host."""
    return stash.pages.pages + stash.pages.host_pages


def set_pages(stash: Stash, pages: int, blocks: Sequence[MoEBlock]) -> None:
    """Give the stash more pages, and its layers among `blocks` the new ones.

    Where there is a tier on the host it grows, since the device is to hold no more than was asked
    for. Nothing may be in flight.
    """
    host = pages - stash.pages.pages if stash.pages.host_pages else 0
    stash.allocate(pages - host, host, columns=dict(stash.columns))
    share(stash, [block for block in blocks if block.stash is stash])


def give_room(blocks: Sequence[Dispatching], factor: float) -> None:
    """Room for `factor` in these layers, whose dispatchers have a budget; inf = for whatever comes.
    Collective."""
    for block, larger in zip(blocks, with_factor(_budgets(blocks), factor), strict=True):
        block.dispatcher = larger


def room_of_experts(model: ModelChunks, config: TrainConfig, mesh: Mesh) -> dict[str, float]:
    """rows and pages, 0 where there is no such budget; empty for a model without experts. The same
    on all ranks; collective, waits for the device.
    """
    if not has_shared_experts(config):
        return {}
    stash = _stash(model)
    pages = (
        all_pages(stash) / planned_pages(model, config, mesh, 1.0, stash.page_rows)
        if stash is not None
        else 0.0
    )
    budgets = _budgets(budgeted(model.chunks))
    rows = max((dispatcher.factor for dispatcher in budgets), default=0.0)
    every = gather_numbers(mesh.everyone(), [rows, pages])
    return {"rows": max(rows for rows, _ in every), "pages": max(pages for _, pages in every)}


def restore_room(
    model: ModelChunks, config: TrainConfig, mesh: Mesh, saved: Mapping[str, float]
) -> list[str]:
    """Give layers and stash what `room_of_experts` has said, before the first capture: the same on
    all ranks, since it may be collective. Returns what was done, for a person.
    """
    told, blocks = [], budgeted(model.chunks)
    for dispatcher in _budgets(blocks[:1]):  # all have the same room
        rows = min(saved.get("rows", 0.0), dispatcher.most_factor)
        if rows > dispatcher.factor:
            give_room(blocks, rows)
            told.append(
                f"experts go on with {rows:.2f} times the room of a balanced load, as they had at "
                "last"
            )
    if (stash := _stash(model)) is not None:
        pages = math.ceil(
            saved.get("pages", 0.0)
            * planned_pages(model, config, mesh, 1.0, stash.page_rows)
            * (1 - ROUNDING)
        )
        if pages > all_pages(stash):
            set_pages(stash, pages, moe_blocks(model.chunks))
            told.append(f"the stash goes on with {pages} pages, as it had at last")
    return told


def budgeted(chunks: Sequence[nn.Module]) -> list[Dispatching]:
    """What has a dispatcher with a budget: layers with experts, and experts of transformers."""
    return [
        module
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, Dispatching) and isinstance(module.dispatcher, Budgeted)
    ]


def _budgets(blocks: Sequence[Dispatching]) -> list[Budgeted]:
    return [block.dispatcher for block in blocks if isinstance(block.dispatcher, Budgeted)]


def _stash(model: ModelChunks) -> Stash | None:
    return next((block.stash for block in moe_blocks(model.chunks)), None)
