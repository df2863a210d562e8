"""Offloading in a training loop of one's own: `packgraph.offload`."""

from collections.abc import Collection

import torch

from packgraph.graphs.errors import warn
from packgraph.graphs.graphed import GraphedModule, control
from packgraph.offloading.attach import attach, detach, is_attached
from packgraph.offloading.plan import OffloadPlan, OffloadTrace
from packgraph.offloading.runtime import PARTS, OffloadRuntime, Policy
from packgraph.offloading.search import plan_for_bytes, plan_for_time
from packgraph.offloading.timing import copy_speed


class Offloading:
    """Offloading of one graphed module, as `packgraph.offload` returns it. `close` ends it.

    Attributes:
        plan: The groups that move, and when; None before the first capture, or where everything
            moves.
        trace: The groups of the largest forward and backward so far; None before one has run
            eagerly.
    """

    def __init__(self, module: torch.nn.Module, runtime: OffloadRuntime) -> None:
        self._module, self._runtime, self._is_checked = module, runtime, False
        attach(runtime, module)

    @property
    def plan(self) -> OffloadPlan | None:
        """See the class."""
        return self._runtime.plan

    @property
    def trace(self) -> OffloadTrace | None:
        """See the class."""
        return self._runtime.trace

    def end_step(self) -> None:
        """Ends a step: the current stream waits for all copies. Call it after every optimizer step,
        when all backwards are over. Warns once of names that no block of the module has."""
        self._runtime.end_step()
        met, asked = self._runtime.met, self._runtime.modules
        if met and not self._is_checked:
            self._is_checked = True
            if asked - met:
                warn(
                    f"offloading: no block is called {', '.join(sorted(asked - met))}; blocks of "
                    "this module are "
                    f"{', '.join(sorted(met))}"
                )

    def close(self) -> None:
        """Moves nothing any more. Graphs are captured again at their next call."""
        detach(self._runtime, self._module)


def offload(
    graphed: torch.nn.Module,
    *,
    modules: Collection[str],
    max_overhead: float | None = None,
    max_bytes: int | None = None,
    min_bytes: int = 2**20,
    in_flight: int = 2,
) -> Offloading:
    """Moves what marked blocks save for backward to pinned host memory, in eager calls and inside
    graphs.

    Blocks are `with self.offload("mlp_act"):` in the forward of modules with an attribute
    `offload`, which is `packgraph.offload_block` until this is called; the decoders of
    `packgraph.models` have `core_attn`, `mlp_act` and others. Outputs and gradients have the same
    bits as without. With a limit the next call runs eagerly, since a plan needs a forward and its
    backward to go by.

    Args:
        graphed: What `packgraph.graph` returned.
        modules: Names of the blocks that may move.
        max_overhead: Maximum step-time overhead, as a fraction of the compute time: the plan with
            the lowest peak that waits no longer than that. Copy speed is measured now, on CUDA.
        max_bytes: Bytes of device memory that a forward and its backward may hold at most, saved
            blocks included: the plan that waits least. Without either limit every block moves.
        min_bytes: Smaller storages stay on the device.
        in_flight: Copies to the host that the compute stream has not waited for, at most; a plan
            may choose otherwise.

    Returns:
        A handle: call its `end_step` after every optimizer step.

    Raises:
        TypeError: If `graphed` is no module that `packgraph.graph` returned.
        ValueError: If no module marks a block, the module offloads already, both limits are given,
            or an argument is out of range.

    Examples:
        >>> offloading = packgraph.offload(graphed, modules=["core_attn"], max_overhead=0.01)  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     graphed(batch).backward()
        ...     optimizer.step()
        ...     offloading.end_step()
    """  # noqa: E501
    if not isinstance(graphed, GraphedModule):
        raise TypeError(
            "packgraph.offload wants the module that packgraph.graph returned, not an object of "
            "type "
            f"{type(graphed).__name__}"
        )
    own = control(graphed)
    if (
        isinstance(modules, str)
        or not modules
        or not all(isinstance(name, str) for name in modules)
    ):
        raise ValueError(
            f"modules must be names of blocks that may move, such as ['mlp_act'], not {modules!r}"
        )
    if max_overhead is not None and max_bytes is not None:
        raise ValueError("give max_overhead or max_bytes, not both")
    for name, number, least in (
        ("max_overhead", max_overhead, 0),
        ("max_bytes", max_bytes, 0),
        ("min_bytes", min_bytes, 0),
        ("in_flight", in_flight, 1),
    ):
        kinds = (int, float) if name == "max_overhead" else (int,)
        optional = name.startswith("max") and number is None
        if not optional and (
            not isinstance(number, kinds) or isinstance(number, bool) or not number >= least
        ):
            raise ValueError(f"{name} must be a number of at least {least}, not {number!r}")
    if is_attached(own.module):
        raise ValueError(
            "this module offloads already: call close() of what the first packgraph.offload "
            "returned"
        )
    policy = _policy(own.device, max_overhead, max_bytes)
    if policy is not None:
        own.warm_up(1)
    runtime = OffloadRuntime(
        modules,
        own.capture_backend.copy_streams,
        min_bytes=min_bytes,
        in_flight=in_flight,
        policy=policy,
        parts=1 if policy is None else PARTS,
    )
    return Offloading(own.module, runtime)


def _policy(
    device: torch.device, max_overhead: float | None, max_bytes: int | None
) -> Policy | None:
    if max_overhead is None and max_bytes is None:
        return None
    speed = copy_speed(device)
    if max_overhead is not None:
        return lambda trace: plan_for_time(trace, speed, max_overhead)
    assert max_bytes is not None
    return lambda trace: plan_for_bytes(trace, speed, max_bytes)
