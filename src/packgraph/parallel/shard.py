"""`packgraph.shard`: layers of an own module whose weights and gradients the ranks share.

    module ─▶ shard ─▶ graph ─▶ calls and backwards, which gather and reduce ─▶ `Shards.step`

What lies where is said in `parallel/sharded_layers.py`, as for packgraph's trainer. The optimizer
is any that works on single elements: it gets flat parts, not matrices.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from packgraph.graphs.agreement import set_consensus
from packgraph.graphs.errors import described
from packgraph.graphs.parameters import set_gradient_dtype
from packgraph.graphs.stages import Staged
from packgraph.graphs.wrapper import Wrapper
from packgraph.parallel.data import FlatParameters
from packgraph.parallel.deferred import Piece, defer, fill_copies, values_of
from packgraph.parallel.flat_buffers import WHOLE, GradientBucket
from packgraph.parallel.mesh import ShardGroups
from packgraph.parallel.pieces import collect_over
from packgraph.parallel.ranks import consensus_over
from packgraph.parallel.replicate import (
    Reduce,
    broadcast_from_first,
    check_ranks,
    check_same_parameters,
)
from packgraph.parallel.sharded_layers import ShardedLayers, layers_of
from packgraph.torch_internals import divide_each, multiply_each, norm_each, zero_each

TINY = 1e-6  # added to the norm when clipping, as in torch.nn.utils.clip_grad_norm_


def shard(
    module: nn.Module,
    *,
    layers: Sequence[nn.Module] | Mapping[int, nn.Module] | None = None,
    keep: Literal["parameters", "gradients"] = "parameters",
    reduce: Reduce = "mean",
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    values: Callable[[str, Tensor], None] | None = None,
    device: torch.device | str | None = None,
) -> "Shards":
    """Shards the layers of a module over ranks, in place, before `packgraph.graph` is called.

    Each rank keeps its part of every matrix of a layer and of its gradient. Whole ones exist only
    while the layer runs; they are gathered and reduced by two stages that are put around those of
    each layer, inside graphs as in eager calls, while another layer runs. What is smaller than a
    matrix, outside of layers or in two of them stays whole, and so do adapters (trained matrices
    that are small beside the frozen ones of their layer). Frozen matrices are gathered as the
    others. Parameters and buffers of the first rank are sent to all others now.

    Stages hand on entries of the state that they do not know (`{**state, ...}`). A parameter that
    gets no gradient counts as zeros, so weight decay applies to it.

    Every rank must make equally many calls of the module, and backwards by `loss.backward()` from
    one thread. Ranks capture a call together: where one has to and others do not, it runs eagerly;
    `packgraph.control(graphed).build` captures several shapes ahead. A call runs the module's
    stages; code that reads parameters past them (`generate` of a model of transformers) finds those
    of other layers. So does who reads a sharded parameter, or its `.grad`, between calls:
    `full_state_dict` gathers them.

    Args:
        module: A module with stages (see `packgraph.Stage`); `packed(...)` makes one of a model of
            transformers. What needs a gradient now is trained.
        layers: Its layers, by the numbers that their stages have; the embedding may be one (-1),
            and the head. None is `module.layers`, and `module.ends` (both, by numbers) if there
            are any, as in models of this package and of transformers.
        keep: What each rank keeps its part of alone: `parameters` and gradients, or `gradients`.
        reduce: `mean` divides the sum over the ranks by their number: right for losses that are
            means on each rank. `sum` is right for losses that are divided by what all ranks count.
        group: The process group of the ranks. None is that of all ranks.
        mesh: Instead of `group`, a device mesh of one dimension, or of two: (hosts, ranks of a
            host), such as `init_device_mesh("cuda", (2, 8))`. Then the ranks of a host share
            layers, and hosts hold copies: layers travel within hosts, and what a rank keeps of
            their gradients is summed over hosts once in a step.
        values: Fills parameters that are on the meta device. It is called on the first rank with
            each one's name and a whole tensor, one after another; that is sent to all ranks, each
            of which keeps its part. So no rank ever holds the whole module. Parameters that
            `packgraph.integrations.transformers.load_deferred` has made need no such function:
            each rank reads its part of them.
        device: Where those parameters are from now on. None is torch's default device.

    Returns:
        What the optimizer gets, and a step of it.

    Raises:
        RuntimeError: If there is no process group.
        TypeError: If `module` has no stages, or is graphed already, or has distributed parameters.
        ValueError: If an option is unknown, no layer has a matrix to share, nothing needs a
            gradient, a mesh has more dimensions, ranks have other parameters, or something on the
            meta device has no values.

    Examples:
        >>> import functools
        >>> import torch.distributed as dist
        >>> class Layers(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        ...     def run(self, layer, state):
        ...         return {**state, "x": layer(state["x"]).relu()}
        ...     def begin(self, x):
        ...         return {"x": x}
        ...     def stages(self):
        ...         return [
        ...             packgraph.Stage("layer", number, functools.partial(self.run, layer))
        ...             for number, layer in enumerate(self.layers)
        ...         ]
        ...     def end(self, state):
        ...         return state["x"]
        >>> store = dist.HashStore()  # one rank; torchrun and init_process_group("nccl") for more
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> module = Layers()
        >>> shards = packgraph.shard(module)
        >>> graphed = packgraph.graph(module, warmup=1)
        >>> optimizer = torch.optim.AdamW(shards.parameters(), lr=1e-3)
        >>> for _ in range(3):
        ...     graphed(torch.ones(2, 4)).sum().backward()
        ...     norm = shards.step(optimizer, clip_norm=1.0)
        >>> graphed.stats.replayed, norm.shape
        (2, torch.Size([]))
        >>> dist.destroy_process_group()
    """
    if isinstance(module, Wrapper):
        raise TypeError("packgraph.shard wants the module itself: call it before packgraph.graph")
    if not isinstance(module, nn.Module) or not isinstance(module, Staged):
        raise TypeError(
            f"packgraph.shard wants a module with stages (packgraph.Stage), not {described(module)}"
        )
    if keep not in ("parameters", "gradients"):
        raise ValueError(f"keep must be 'parameters' or 'gradients', not {keep!r}")
    check_ranks("shard", reduce)
    numbers = layers_of(module, layers)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not numbers or (keep == "gradients" and not numbers.keys() & trained):
        raise ValueError(
            f"packgraph.shard finds no matrix with {keep} to share that a layer has to itself: "
            "give layers=[...]" + (", or keep='parameters'" if numbers else "")
        )
    group, within = _groups(group, mesh)
    check_same_parameters(module, group, "shard")
    _defer_meta(module, values, device, group)
    here = [parameter for parameter in module.parameters() if values_of(parameter) is None]
    broadcast_from_first([*here, *module.buffers()], group)
    flat = FlatParameters(
        module.named_parameters(), group, layers=numbers, shard=keep, within={WHOLE: within}
    )
    ShardedLayers(flat).put_into(module)
    set_consensus(module, consensus_over(within.shard))
    return Shards(module, flat, reduce, group)


def _groups(
    group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> tuple[dist.ProcessGroup, ShardGroups]:
    """The group of all ranks, and with whom this one shares layers. Collective over the ranks of
    `mesh`."""
    if mesh is None:
        group = dist.group.WORLD if group is None else group
        assert group is not None
        return group, ShardGroups(group)
    if group is not None or mesh.ndim > 2:
        raise ValueError(
            "packgraph.shard wants group or mesh, not both"
            if group is not None
            else f"packgraph.shard wants a mesh of (hosts, ranks of a host), not of {mesh.ndim} "
            "dimensions: give it a part of yours, such as mesh['replicate', 'shard']"
        )
    shard, hosts = mesh.get_group(-1), mesh.size(0)
    if mesh.ndim == 1 or hosts == 1:
        return shard, ShardGroups(shard)
    across, ranks = mesh.get_group(0), sorted(mesh.mesh.flatten().tolist())
    if mesh.size(1) == 1:
        return across, ShardGroups(across)
    every = (
        dist.group.WORLD
        if len(ranks) == dist.get_world_size()
        else dist.new_group(ranks, use_local_synchronization=True)
    )
    assert every is not None
    return every, ShardGroups(shard, across)


def _defer_meta(
    module: nn.Module,
    values: Callable[[str, Tensor], None] | None,
    device: torch.device | str | None,
    group: dist.ProcessGroup,
) -> None:
    """Let parameters on the meta device be filled by `values` when their parts are known. Raises
    ValueError for what has no values."""
    waiting = {name: found for name, found in module.named_parameters() if found.is_meta}
    empty = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    empty += [] if values is not None else waiting
    if empty:
        raise ValueError(
            f"{empty[0]} is on the meta device and has no values: give values=function for "
            "parameters, and make buffers elsewhere"
        )
    target = torch.get_default_device() if device is None else torch.device(device)
    fills = {
        name: _FromFirst(name, parameter, values, target, group)
        for name, parameter in waiting.items()
        if values is not None
    }
    defer(module, fills, target)


class _FromFirst:
    """Fills any part of a parameter with what the first rank is given of the whole. Collective."""

    in_turn = True

    def __init__(
        self,
        name: str,
        parameter: Tensor,
        values: Callable[[str, Tensor], None],
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        self._name, self._values, self._group = name, values, group
        self._shape, self._dtype, self._device = parameter.shape, parameter.dtype, device

    def __call__(self, pieces: Sequence[Piece]) -> None:
        whole = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        if dist.get_rank(self._group) == 0:
            self._values(self._name, whole)
        dist.broadcast(whole, src=dist.get_global_rank(self._group, 0), group=self._group)
        fill_copies(whole, pieces)


class Shards:
    """Returned by `packgraph.shard`: what this rank keeps, for the optimizer."""

    def __init__(
        self, module: nn.Module, flat: FlatParameters, reduce: Reduce, group: dist.ProcessGroup
    ) -> None:
        self._module, self._flat, self._reduce, self._group = module, flat, reduce, group
        self._parts = [nn.Parameter(span.own_parameters) for span in flat.spans]
        for part, span in self._both():
            set_gradient_dtype(part, span.own_gradients.dtype)
        flat.zero_gradients()
        self._attach()

    def parameters(self) -> list[nn.Parameter]:
        """This rank's parts of all parameters, flat, for an optimizer that works on single elements
        (SGD, Adam, AdamW)."""
        return list(self._parts)

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """The same as groups of an optimizer: weight decay for matrices alone."""

        def group(decays: bool) -> dict[str, Any]:
            chosen = [part for part, span in self._both() if span.decays == decays]
            return {"params": chosen, "weight_decay": weight_decay if decays else 0.0}

        return [found for found in map(group, (True, False)) if found["params"]]

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, *, clip_norm: float | None = None) -> Tensor:
        """Ends a step, on all ranks: reduces what is left, clips, lets `optimizer` update the
        parts, and zeroes gradients.

        Args:
            optimizer: Over `parameters()` or `groups(...)`.
            clip_norm: The largest norm of the whole gradient; None clips nothing.

        Returns:
            The norm of the whole gradient before clipping, float32 [] on the device.
        """
        self._flat.reduce()
        self._attach()
        gradients = [span.own_gradients for span in self._flat.spans]
        if self._reduce == "mean":
            divide_each(gradients, dist.get_world_size(self._group))
        norms = norm_each([gradient.float() for gradient in gradients])
        total = torch.stack(list(norms)).square().sum()
        dist.all_reduce(total, group=self._group)
        norm = total.sqrt()
        if clip_norm is not None:
            multiply_each(gradients, (clip_norm / (norm + TINY)).clamp(max=1.0))
        with torch.enable_grad():
            optimizer.step()
        self._flat.gather()
        self._flat.zero_gradients()
        zero_each(gradients)
        return norm

    def full_state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers, whole, on the first rank of the group; nothing on others. All
        ranks must call it."""
        held = self._module.state_dict() | self._flat.gathered()
        return dict(collect_over(self._group, held))

    def sharded_state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers as `torch.distributed.checkpoint` saves and loads them, in place:
        of sharded parameters this rank's parts alone. Any number of ranks, sharded or not, loads
        what another saved."""
        return self._module.state_dict() | self._flat.gathered()

    def _both(self) -> Iterable[tuple[nn.Parameter, GradientBucket]]:
        return zip(self._parts, self._flat.spans, strict=True)

    def _attach(self) -> None:
        for part, span in self._both():
            part.grad = span.own_gradients
