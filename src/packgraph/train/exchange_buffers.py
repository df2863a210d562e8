"""The memory of a run through which ranks exchange tokens with `parallel.dispatcher = symmetric`.

It is made once, before anything is captured, for the longest row and `parallel.expert_room`, and
serves all layers of a rank, which exchange one after another. Where its room does not suffice, all
ranks make a larger one together (`train/overflow.py`).
"""

from collections.abc import Sequence

import torch
from torch import nn

from packgraph.models.branches import routed_width
from packgraph.models.layers.moe import moe_blocks
from packgraph.moe.peer_read.buffers import (
    Buffers,
    NoSymmetricMemory,
    SymmetricBuffers,
    symmetric_problem,
)
from packgraph.parallel.mesh import Mesh
from packgraph.train.config import ConfigError
from packgraph.train.options import TrainConfig
from packgraph.train.stage_tokens import longest_row


def exchange_problems(config: TrainConfig, device_type: str) -> list[str]:
    """What keeps ranks on devices of this type from exchanging tokens through each other's memory,
    if they are to."""
    parallel = config.parallel
    if not config.model.experts.enabled or parallel.dispatcher_name != "symmetric":
        return []
    problem, found = symmetric_problem(torch.device(device_type), parallel.ep), []
    if problem is not None:
        found = [
            f"parallel.dispatcher = symmetric with parallel.ep = {parallel.ep}: {problem}; use "
            "dispatcher = "
            "padded"
        ]
    if config.graph.compile and config.offload.modules:
        found.append(
            "offload.modules with graph.compile and parallel.dispatcher = symmetric is not there "
            "yet: all "
            "that a compiled layer saves would move, the memory that other ranks read among it; "
            "leave one of "
            "them out, or use dispatcher = padded"
        )
    return found


def make_buffers(
    chunks: Sequence[nn.Module], config: TrainConfig, device: torch.device, mesh: Mesh
) -> Buffers | None:
    """What the layers with experts of `chunks`, this rank's, exchange tokens through; None where
    they need nothing.

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
