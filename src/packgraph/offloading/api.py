"""Offloading of a module: `packgraph.offload`, and the runtime that the layers of a chunk get.

Every module with a mark `offload` gets one that knows its layer (`attach`).
"""

import contextlib
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from packgraph.graphs.checks.unsupported import owners
from packgraph.graphs.errors import warn
from packgraph.graphs.graphed import GraphedModule, control
from packgraph.graphs.saved_tensors import are_others, are_watched_by_others
from packgraph.offloading.marks import HoldsMemory, Mark, offload_block
from packgraph.offloading.plan import OffloadPlan, OffloadTrace
from packgraph.offloading.runtime import PARTS, OffloadRuntime, Policy
from packgraph.offloading.search import plan_for_bytes, plan_for_time
from packgraph.offloading.timing import copy_speed

WHOLE = "layer"  # all that a compiled layer saves


class OffloadedLayer:
    """A layer with marked modules, which hold it and which it holds weakly, as marks do: a model
    that nobody has any more goes at once."""

    def __init__(self, number: int, module: nn.Module) -> None:
        self.number, self._module = number, weakref.ref(module)
        # Places of users of a name, in the order of their first blocks.
        self._users: defaultdict[str, dict[int, int]] = defaultdict(dict)

    def called(self, name: str, user: int) -> str:
        """The group's name of a block that marked module number `user` opens: another one for the
        second module that does so (self-attention, and attention to the encoder)."""
        users = self._users[name]
        place = users.setdefault(user, len(users))
        return f"{name} {place + 1}" if place else name

    def stays(self, part: nn.Module | None) -> Sequence[Tensor]:
        """Parameters, buffers and what parts hold besides (`HoldsMemory`), of `part` alone where
        that was taken out of a layer that is gone."""
        module = self._module()
        module = part if module is None else module
        if module is None:
            return []
        held = [part.held_memory() for part in module.modules() if isinstance(part, HoldsMemory)]
        return [*module.parameters(), *module.buffers(), *itertools.chain(*held)]


class LayerMark:
    """The mark of one module in a layer. Code that torch.compile traces passes it by: there the
    whole piece is one group."""

    BAKED = True

    def __init__(
        self, runtime: OffloadRuntime, layer: OffloadedLayer, user: int, module: nn.Module
    ) -> None:
        self.runtime, self.layer, self.user, self._module = (
            runtime,
            layer,
            user,
            weakref.ref(module),
        )

    def __call__(self, name: str, leave: Any = ()) -> contextlib.AbstractContextManager[None]:
        """The block of the group `name`, see `marks.Mark`."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        self.runtime.met.add(name)
        if name != WHOLE and name not in self.runtime.modules:
            return contextlib.nullcontext()
        if are_others():
            if are_watched_by_others():
                self.runtime.pass_by(name)
            return contextlib.nullcontext()
        return self.runtime.group(
            self.layer.called(name, self.user), self.layer.number, self._stays, leave
        )

    def __reduce__(self) -> tuple[Callable[[], Mark], tuple[()]]:
        """A copy of a module has no runtime, and neither has what is read from a file."""
        return _unmarked, ()

    def _stays(self) -> Sequence[Tensor]:
        return self.layer.stays(self._module())


def _unmarked() -> Mark:
    return offload_block


def attach(runtime: OffloadRuntime, chunk: nn.Module) -> list[int]:
    """Let `runtime` move what the layers of `chunk` save; returns the numbers of these layers.

    A layer is what stands under a number in the names of modules (`layers.7`), beside others of its
    kind; everything in it with an attribute `offload` gets a mark. Where they do not stand in one
    list (`encoder.layers.0`, `decoder.layers.0`) all are numbered in the order of the chunk. Graphs
    of the chunk are captured again. A layer that a forward uses several times begins a pass with
    each use. Raises ValueError when there is no such module.
    """
    named = dict(owners(chunk))
    marked = {
        name: module
        for name, module in named.items()
        # A flag of the user's may have that name, too.
        if (mark := vars(module).get("offload", False)) is None
        or (callable(mark) and not isinstance(mark, nn.Module))
    }
    if not marked:
        raise ValueError(
            f"{type(chunk).__name__} has no module with an attribute `offload` that marks blocks "
            "(packgraph.offload_block): nothing says what could be moved"
        )
    names = layer_names(list(marked))
    numbers = layer_numbers(names)
    layers = {name: OffloadedLayer(number, named[name]) for name, number in numbers.items()}
    for user, (name, module) in enumerate(zip(names, marked.values(), strict=True)):
        vars(module)["offload"] = LayerMark(runtime, layers[name], user, module)
    return sorted(numbers.values())


def layer_names(names: Sequence[str]) -> list[str]:
    """Returns the name of the layer of each of these modules: up to the last number that others of
    them stand beside under another one, or else the first number at all; without a number the
    whole, ''."""
    beside: dict[str, set[str]] = defaultdict(set)
    for name in names:
        for parent, number in _numbers_in(name):
            beside[parent].add(number)
    found = []
    for name in names:
        places = _numbers_in(name)
        crowded = [place for place in places if len(beside[place[0]]) > 1]
        chosen = [*crowded[-1:], *places[:1]]
        found.append(".".join(filter(None, chosen[0])) if chosen else "")
    return found


def layer_numbers(layers: Sequence[str]) -> dict[str, int]:
    """The number of each layer: its own where all stand in one list, else that of its place among
    all."""
    parts = {layer: layer.rpartition(".") for layer in layers}
    if len({parent for parent, _, _ in parts.values()}) == 1:
        return {layer: int(number or 0) for layer, (_, _, number) in parts.items()}
    return {layer: place for place, layer in enumerate(parts)}


def _numbers_in(name: str) -> list[tuple[str, str]]:
    """(what stands before it, number) for every number in a dotted name."""
    parts = name.split(".")
    return [(".".join(parts[:place]), part) for place, part in enumerate(parts) if part.isdigit()]


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
        for module in self._module.modules():
            mark = vars(module).get("offload")
            if isinstance(mark, LayerMark) and mark.runtime is self._runtime:
                vars(module)["offload"] = offload_block


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
    if any(isinstance(vars(part).get("offload"), LayerMark) for part in own.module.modules()):
        raise ValueError(
            "this module offloads already: call close() of what the first packgraph.offload "
            "returned"
        )
    policy: Policy | None = None
    if max_overhead is not None or max_bytes is not None:
        speed = copy_speed(own.device)
        own.warm_up(1)
        policy = (
            (lambda trace: plan_for_time(trace, speed, max_overhead))
            if max_overhead is not None
            else (lambda trace: plan_for_bytes(trace, speed, max_bytes or 0))
        )
    runtime = OffloadRuntime(
        modules,
        own.capture_backend.copy_streams,
        min_bytes=min_bytes,
        in_flight=in_flight,
        policy=policy,
        parts=1 if policy is None else PARTS,
    )
    return Offloading(own.module, runtime)
