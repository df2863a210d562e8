"""The room that experts turned out to need, in checkpoints: a run that goes on need not find out
again.

    rows     of dispatchers, over what equally busy experts would need     `factor` of a dispatcher, as it grew
    pages    of the stash, over the same                                   pages / those of a balanced load

Both are shares, so they say something at another layout, too: other ranks, capacities, slots. The
largest of all ranks counts. Room that was configured and is larger stays; more rows than can ever
be needed are not given (with `ep` halved, half of them). Where that does not suffice after all, it
grows as ever (`train/overflow.py`).
"""  # noqa: E501

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from packgraph.models.decoder import ModelChunks
from packgraph.models.layers.moe import MoEBlock, moe_blocks
from packgraph.moe.dispatch.choose import Budgeted
from packgraph.moe.stash.stash import Stash
from packgraph.parallel.mesh import Mesh
from packgraph.train.expert_stash import planned_pages, share
from packgraph.train.options import TrainConfig
from packgraph.train.overflow import give_room

ROUNDING = 1e-9  # a share times what it is of


def room_of_experts(
    model: ModelChunks, config: TrainConfig, mesh: Mesh, device: torch.device
) -> dict[str, float]:
    """rows and pages, 0 where there is no such budget; empty for a model without experts. The same
    on all ranks; collective, waits for the device.
    """
    if not config.model.experts.enabled:
        return {}
    stash = _stash(model)
    pages = stash.pages.pages / _balanced(stash, model, config, mesh) if stash is not None else 0.0
    rows = max((dispatcher.factor for _, dispatcher in _budgets(model)), default=0.0)
    largest = torch.tensor([rows, pages], dtype=torch.float64, device=device)
    if mesh.everyone() is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(("rows", "pages"), largest.tolist(), strict=True))


def restore_room(
    model: ModelChunks, config: TrainConfig, mesh: Mesh, saved: Mapping[str, float]
) -> list[str]:
    """Give layers and stash what `room_of_experts` has said, before the first capture: the same on
    all ranks, since it may be collective. Returns what was done, for a person.
    """
    told, budgets = [], _budgets(model)
    if budgets:
        dispatcher = budgets[0][1]  # all have the same room
        rows = min(saved.get("rows", 0.0), dispatcher.most_factor)
        if rows > dispatcher.factor:
            give_room([block for block, _ in budgets], rows)
            told.append(
                f"experts go on with {rows:.2f} times the room of a balanced load, as they had at "
                "last"
            )
    stash = _stash(model)
    if stash is not None:
        pages = math.ceil(
            saved.get("pages", 0.0) * _balanced(stash, model, config, mesh) * (1 - ROUNDING)
        )
        if pages > stash.pages.pages:
            stash.allocate(pages, columns=dict(stash.columns))
            share(stash, model)
            told.append(f"the stash goes on with {pages} pages, as it had at last")
    return told


def _budgets(model: ModelChunks) -> list[tuple[MoEBlock, Budgeted]]:
    return [
        (block, block.dispatcher)
        for block in moe_blocks(model.chunks)
        if isinstance(block.dispatcher, Budgeted)
    ]


def _stash(model: ModelChunks) -> Stash | None:
    return next((block.stash for block in moe_blocks(model.chunks)), None)


def _balanced(stash: Stash, model: ModelChunks, config: TrainConfig, mesh: Mesh) -> int:
    return planned_pages(model, config, mesh, 1.0, stash.page_rows)
