"""The stash of a run: pages for what the experts of this rank's layers keep from forward to
backward.

How many is planned from the largest capacity and the microbatches that are in flight by the
schedule, for equally busy experts and `parallel.expert_stash` times that. Where it does not
suffice, the update of the step changes nothing (`train/overflow.py`) and there are more pages when
the step is made again.
"""

import torch

from packgraph.models.decoder import ModelChunks
from packgraph.models.layers.moe import moe_blocks
from packgraph.moe.stash.experts import columns_of
from packgraph.moe.stash.plan import pages_for
from packgraph.moe.stash.stash import Stash
from packgraph.parallel.mesh import Mesh
from packgraph.parallel.pipeline.schedule import slot_counts
from packgraph.train.options import TrainConfig
from packgraph.train.stage_tokens import longest_row


def make_stash(
    model: ModelChunks, config: TrainConfig, mesh: Mesh, device: torch.device
) -> Stash | None:
    """The stash of all layers with experts of this rank, attached to them; None where there is
    none."""
    blocks = moe_blocks(model.chunks)
    if not config.parallel.expert_stash or not blocks:
        return None
    stash = Stash(device)
    stash.allocate(
        planned_pages(model, config, mesh, config.parallel.expert_stash, stash.page_rows),
        columns=columns_of(blocks[0].experts),
    )
    share(stash, model)
    return stash


def planned_pages(
    model: ModelChunks, config: TrainConfig, mesh: Mesh, factor: float, page_rows: int
) -> int:
    """Pages for what is in flight on this rank, of `factor` times the rows that equally busy
    experts would get."""
    records = sum(
        len(moe_blocks([chunk])) * slots
        for chunk, slots in zip(model.chunks, _in_flight(mesh, len(model.chunks)), strict=True)
    )
    return pages_for(
        longest_row(config), config.model.experts.per_token, records, 1, factor, page_rows
    )


def share(stash: Stash, model: ModelChunks) -> None:
    """Give the stash to all layers with experts, once its pages are there."""
    for block in moe_blocks(model.chunks):
        block.stash = stash
        stash.attach(block)


def _in_flight(mesh: Mesh, chunks: int) -> list[int]:
    """Microbatches between forward and backward, for each chunk."""
    if mesh.size("pp") > 1:
        return list(slot_counts(mesh.size("pp"), chunks)[mesh.place["pp"]])
    return [1] * chunks  # the backward follows at once, however many slots there are
