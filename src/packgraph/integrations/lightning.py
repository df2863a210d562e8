"""Lightning Fabric on several devices: a strategy whose replicas are packgraph's.

    from lightning_fabric.strategies import DDPStrategy     # or lightning.fabric.strategies

    class Replicated(ReplicatedStrategy, DDPStrategy): ...

    fabric = Fabric(strategy=Replicated(), devices=8)

On one device a graphed module needs nothing: `fabric.setup` takes it like any other.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from packgraph.graphs.graphed import GraphedModule
from packgraph.parallel.replicate import ReplicatedModule, replicate

_Strategy: Any = object  # what the class is mixed into


class ReplicatedStrategy(_Strategy):
    """Mixin for Fabric's `DDPStrategy`: graphed modules become replicas by `packgraph.replicate`,
    other modules by DistributedDataParallel.

    Name it before the strategy's class. Gradients are means over the ranks, as Fabric's users
    expect; `fabric.no_backward_sync` is followed.

    Examples:
        >>> from lightning_fabric import Fabric
        >>> from lightning_fabric.strategies import DDPStrategy
        >>> from packgraph.integrations.lightning import ReplicatedStrategy
        >>> class Replicated(ReplicatedStrategy, DDPStrategy): ...
        >>> fabric = Fabric(accelerator="cpu", devices=2, strategy=Replicated())
        >>> fabric.world_size
        2
    """

    _backward_sync_control: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _BackwardSync(self._backward_sync_control)

    def setup_module(self, module: Any) -> Any:
        """The module that makes replicas of `module`."""
        if isinstance(module, GraphedModule):
            return replicate(module)
        return super().setup_module(module)


class _BackwardSync:
    """Strategy behind `fabric.no_backward_sync`. others: for modules that are not graphed."""

    def __init__(self, others: Any) -> None:
        self._others = others

    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[None]:
        """Within the block backwards send nothing, if `enabled`."""
        if isinstance(module, ReplicatedModule):
            found: AbstractContextManager[None] = module.no_sync() if enabled else nullcontext()
            return found
        others: AbstractContextManager[None] = self._others.no_backward_sync(module, enabled)
        return others
