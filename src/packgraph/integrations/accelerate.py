"""Hugging Face Accelerate: a graphed module that its loop can prepare.

accelerator.prepare(module)    replaces `forward`: stages would no longer say what it does
prepare(accelerator, module)   replaces `forward` of a module around the graphed one

AcceleratedModule -- autocast of the accelerator --> GraphedModule -- replay --> loss

Over several processes the graphed module is one of `packgraph.replicate`, without a wrapper of
DistributedDataParallel; gradients are means over the processes, as Accelerate has them.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from packgraph.graphs.fallback import Stats
from packgraph.graphs.graphed import GraphedModule, control, graph
from packgraph.packing.capacity import Capacity
from packgraph.parallel.replicate import ReplicatedModule, replicate

KINDS = ("NO", "MULTI_CPU", "MULTI_GPU")  # of accelerators, whose processes have whole parameters


class AcceleratedModule(torch.nn.Module):
    """Returned by `prepare`: calls the graphed module in the accelerator's precision.

    Args:
        graphed: The graphed module, registered as the submodule `graphed`. Its state is this
            module's, without a prefix, so that `accelerator.save_state` writes the names of the
            model.
        replicated: What is called in its place, over several processes.

    Examples:
        >>> from packgraph.integrations.accelerate import AcceleratedModule
        >>> list(AcceleratedModule(packgraph.graph(torch.nn.Linear(2, 2))).state_dict())
        ['weight', 'bias']
    """

    def __init__(self, graphed: GraphedModule, replicated: ReplicatedModule | None = None) -> None:
        super().__init__()
        self.graphed = graphed
        self._called = (graphed if replicated is None else replicated,)  # no second submodule

    @property
    def stats(self) -> Stats:
        """Replays and fallbacks."""
        return control(self.graphed).stats

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self._called[0](*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Sends nothing to other processes within the block, for `accelerator.no_sync` and
        `accelerator.accumulate`."""
        (called,) = self._called
        return called.no_sync() if isinstance(called, ReplicatedModule) else nullcontext()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state."""
        return self.graphed.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the module's state."""
        return self.graphed.load_state_dict(*args, **kwargs)


def prepare(
    accelerator: Any,
    module: torch.nn.Module,
    *,
    capacities: Capacity | Iterable[Capacity] | None = None,
    **options: Any,
) -> AcceleratedModule:
    """Graphs a module and prepares it for a loop of Accelerate, in place of `accelerator.prepare`.

    The module is moved to the accelerator's device, called in its precision, and saved by
    `accelerator.save_state`. Optimizers, schedulers and data loaders (of packed batches, or of
    what they are made of) go through `accelerator.prepare` as ever.

    Args:
        accelerator: An `accelerate.Accelerator`, of any number of processes with one device each.
        module: The module whose calls are to be replayed, such as what
            `packgraph.integrations.transformers.packed` returns.
        capacities: As in `packgraph.graph`.
        **options: As in `packgraph.graph`.

    Returns:
        The module to call, and to pass to `accelerator.accumulate`.

    Raises:
        ValueError: If the accelerator takes parameters apart, or compiles.

    Examples:
        >>> from accelerate import Accelerator
        >>> from packgraph.integrations.accelerate import prepare
        >>> accelerator = Accelerator(cpu=True)
        >>> module = prepare(accelerator, torch.nn.Linear(4, 4), warmup=1)
        >>> for _ in range(3):
        ...     accelerator.backward(module(torch.ones(2, 4)).sum())
        >>> module.stats.replayed
        2
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind not in KINDS:
        raise ValueError(
            f"prepare takes an accelerator of type {', '.join(KINDS)}, whose processes have whole "
            f"parameters, not {kind}"
        )
    compiler = getattr(accelerator.state.dynamo_plugin, "backend", None)
    if str(getattr(compiler, "value", compiler)).upper() not in ("NO", "NONE"):
        raise ValueError(
            "the accelerator compiles what it prepares, and compiled code cannot hold replays; "
            "leave out its dynamo backend, and pass compile=True"
        )
    graphed = graph(module.to(accelerator.device), capacities, **options)
    replicated = replicate(graphed) if accelerator.num_processes > 1 else None
    prepared = AcceleratedModule(graphed, replicated)
    accelerator.prepare_model(prepared, device_placement=False, evaluation_mode=True)
    return prepared
