"""Dispatchers by the names that configurations use."""
from typing import Literal, get_args

import torch.distributed as dist

from packgraph.moe.dispatch import Dispatcher, LocalDispatcher
from packgraph.moe.dispatch_host_splits import HostSplitsDispatcher
from packgraph.moe.dispatch_padded import PaddedDispatcher

DispatcherName = Literal["local", "host_splits", "padded"]


def make_dispatcher(name: str, num_experts: int, group: dist.ProcessGroup | None, factor: float) -> Dispatcher:
    """A dispatcher for one layer. group: the ranks that share its experts, None = this process has all.

    factor: room for rows over the balanced load, where a dispatcher has a budget. Raises ValueError for an unknown
    name, for experts that the ranks cannot share equally, for a factor below 1, and for `local` with several ranks.
    """
    if name == "local":
        if group is not None:
            raise ValueError(f"the local dispatcher sends nothing, but {dist.get_world_size(group)} ranks share the "
                             "experts: choose host_splits or padded")
        return LocalDispatcher(num_experts)
    if name == "host_splits":
        return HostSplitsDispatcher(num_experts, group)
    if name == "padded":
        return PaddedDispatcher(num_experts, group, factor)
    raise ValueError(f"there is no dispatcher {name!r}; there are {', '.join(get_args(DispatcherName))}")
