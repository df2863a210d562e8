"""Dispatchers by the names that configurations use, and those of a model with more room."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch.distributed as dist

from packgraph.moe.dispatch.all_to_all import HostSplitsDispatcher, PaddedDispatcher
from packgraph.moe.dispatch.dispatcher import Dispatcher, LocalDispatcher
from packgraph.moe.dispatch.symmetric import SymmetricDispatcher
from packgraph.moe.peer_read.buffers import Buffers

DispatcherName = Literal["local", "host_splits", "padded", "symmetric"]
Budgeted = PaddedDispatcher | SymmetricDispatcher


def make_dispatcher(
    name: str,
    num_experts: int,
    group: dist.ProcessGroup | None,
    factor: float,
    buffers: Buffers | None = None,
) -> Dispatcher:
    """A dispatcher for one layer. group: the ranks that share its experts, None = this process has
    all.

    factor: room for rows over the balanced load, where a dispatcher has a budget. buffers: for
    `symmetric`, shared by all layers. Raises ValueError for an unknown name, for experts that the
    ranks cannot share equally, for a factor below 1, for `local` with several ranks, and for
    `symmetric` without buffers.
    """
    if name == "local":
        if group is not None:
            raise ValueError(
                f"the local dispatcher sends nothing, but {dist.get_world_size(group)} ranks share "
                "the "
                "experts: choose another"
            )
        return LocalDispatcher(num_experts)
    if name == "host_splits":
        return HostSplitsDispatcher(num_experts, group)
    if name == "padded":
        return PaddedDispatcher(num_experts, group, factor)
    if name == "symmetric":
        if buffers is None:
            raise ValueError(
                "the symmetric dispatcher needs the buffers that its layers share: make "
                "SymmetricBuffers before the layers"
            )
        return SymmetricDispatcher(num_experts, group, factor, buffers)
    raise ValueError(
        f"there is no dispatcher {name!r}; there are {', '.join(get_args(DispatcherName))}"
    )


def with_factor(dispatchers: Sequence[Budgeted], factor: float) -> list[Budgeted]:
    """The same dispatchers with room for `factor` times a balanced load, inf = for whatever comes,
    and none with less than it has. Collective: all ranks must take the same. What shares buffers
    goes on to share larger ones, made once.
    """
    made: list[Budgeted] = []
    larger: dict[tuple[Buffers, float], Buffers] = {}
    for dispatcher in dispatchers:
        wanted = max(dispatcher.most_factor if math.isinf(factor) else factor, dispatcher.factor)
        if isinstance(dispatcher, PaddedDispatcher):
            made.append(dispatcher.with_factor(wanted))
            continue
        key = dispatcher.buffers, wanted
        if key not in larger:
            larger[key] = dispatcher.buffers.grown(wanted)
        made.append(dispatcher.with_room(wanted, larger[key]))
    return made
