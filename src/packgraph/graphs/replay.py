"""Replaying a region inside the user's autograd graph.

    forward     copy inputs in ─▶ forward graph ─▶ outputs, aliases of static memory
    backward    the outputs' gradients ─▶ copy in ─▶ the backward graph of their pattern ─▶ inputs' gradients, .grad

A backward that nobody has captured (a new pattern, or under autocast) runs eagerly: the region's
inputs lie in the slot yet, so its forward is run again (`recompute.py`).
"""  # noqa: E501

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from packgraph.graphs.autograd_walk import is_seen
from packgraph.graphs.checks.random_state import PastDraws
from packgraph.graphs.gradients import GradientBuffer, SeparateGradients, attach, settle
from packgraph.graphs.hooks import expect_visits
from packgraph.graphs.output_gradients import pattern_of
from packgraph.graphs.parameters import are_quiet, has_hooks
from packgraph.graphs.recompute import recompute_gradients
from packgraph.graphs.region import Backward, Inner, Region, StaticAliases, Version, make_entry
from packgraph.graphs.shared_gradients import let_go
from packgraph.graphs.signature import kernel_settings
from packgraph.graphs.slots import SlotLease
from packgraph.graphs.stages import State
from packgraph.graphs.strides import copy_into

_VERSION = operator.attrgetter("_version")
Gradients = Sequence[torch.Tensor | None]


def stage_inputs(
    region: Region, state: State, aliases: StaticAliases
) -> tuple[list[torch.Tensor], list[Version]]:
    """Copy what comes from eager code into the slot; the tensors whose gradients autograd wants, in
    order, and those that backwards read."""
    wanted: list[torch.Tensor] = []
    tensors: list[torch.Tensor] = []
    key: str | None = None
    leaves: list[torch.Tensor] = []
    for entry in region.inputs:
        if entry.key != key:
            key, value = entry.key, state[entry.key]
            leaves = [value] if isinstance(value, torch.Tensor) else tree_leaves(value)
        tensor = leaves[entry.leaf]
        tensors.append(tensor)
        if entry.buffer is not None:
            if tensor.data_ptr() != entry.buffer.data_ptr():
                entry.buffer.copy_(tensor.detach())
            aliases.note(tensor, entry.token, alias=False)
        if entry.differentiable:
            wanted.append(tensor)
    read = [tensors[number] for number in region.context.inputs]
    # A view may be gone before its base is written to.
    read = [tensor if tensor._base is None else tensor._base for tensor in read]
    return wanted, [(weakref.ref(tensor), tensor._version) for tensor in read]


def replay_region(region: Region, state: State, lease: SlotLease, aliases: StaticAliases) -> State:
    """Replay the forward graph and return the next state; its outputs alias static memory and are
    noted in `homes`."""
    edge = region.parameters
    with lease.slots.launches:
        wanted, read = stage_inputs(region, state, aliases)
        if any(output.differentiable for output in region.outputs):
            lease.pending.add(region.number)
            inner: list[Inner] = []
            made = _Replay.apply(
                edge.anchor, edge.tensor, region, lease, read, inner, *wanted, *region.returned
            )
            for number in region.inner:
                aliases.note_inner(made[number], inner)
            for number in region.saved:
                aliases.note_saved(made[number], read)
        else:
            replay_forward(region)
            made = tuple(output.static.tensor.detach() for output in region.outputs)
    for number, tensor in enumerate(made):
        aliases.note(tensor, (region.number, number), alias=True)
    return {key: make_entry(entry, state, made) for key, entry in region.entries.items()}


def replay_forward(region: Region) -> None:
    """Replay the forward graph. What it writes to counts as changed, as it would by an eager
    call."""
    region.forward.replay()
    if region.context.counted:
        torch.autograd.graph.increment_version(region.context.counted)


class _Replay(torch.autograd.Function):
    """The node of one call of a region. It takes the anchor and the edge of its parameters
    (`ParameterEdge`)."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        edge: torch.Tensor,
        region: Region,
        lease: SlotLease,
        read: list[Version],
        inner: list[Inner],
        *inputs: torch.Tensor,
    ) -> Any:
        ctx.region, ctx.lease, ctx.read, ctx.inner = region, lease, read, inner
        ctx.set_materialize_grads(False)
        ctx.draws = PastDraws(region.context.generators)
        replay_forward(region)
        ctx.draws.end()
        ctx.versions = region.versions()
        made = tuple(output.static.tensor.detach() for output in region.outputs)
        ctx.mark_non_differentiable(
            *[t for t, o in zip(made, region.outputs, strict=True) if not o.differentiable]
        )
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        region, lease = ctx.region, ctx.lease
        inputs = sum(entry.differentiable for entry in region.inputs)
        returned = ctx.next_functions[len(ctx.next_functions) - len(region.returned) :]
        if all(gradient is None for gradient in gradients):
            expect_visits(returned, region.returned, [None] * len(returned))
            return (None,) * (6 + inputs + len(region.returned))
        _refuse_second_derivatives(region)
        _refuse_hooks_inside(region, ctx.inner)
        _check_settings(region)
        _check_versions(region, ctx.versions, ctx.read)
        with lease.slots.launches:
            lease.start_backward(region.number)
        pattern = pattern_of(gradients)
        casts = torch.is_autocast_enabled(region.modes.device_type)
        backward = None if casts else region.backwards.get(pattern)
        with torch.no_grad():
            if backward is not None:
                signal, results = _replay_backward(region, backward, gradients, lease)
            else:
                signal, results = recompute_gradients(region, gradients, ctx.versions, ctx.draws)
                known = region.context.gradients
                known.runs_under_autocast() if casts else known.learn(
                    region.number, list(region.backwards), pattern
                )
        with lease.slots.launches:
            lease.finish_backward(region.number)
        expect_visits(returned, region.returned, results[inputs:])
        return None, signal, None, None, None, None, *results


def _replay_backward(
    region: Region, backward: Backward, gradients: Gradients, lease: SlotLease
) -> tuple[Any, list[Any]]:
    """Replay a backward graph; what autograd is given for the parameters' edge, inputs and returned
    parameters."""
    launches = lease.slots.launches
    # What is wanted by itself: of some tensors only, or to be seen by a hook.
    whole = region.parameters.is_whole()
    asked: list[GradientBuffer] = []
    owned = [buffer.parameter for buffer in backward.owned]
    if not whole or not are_quiet(owned):
        # One that was frozen since its forward gets none, which autograd knows.
        asked = [
            buffer
            for buffer in backward.owned
            if not whole or not buffer.parameter.requires_grad or has_hooks(buffer.parameter)
        ]
    with launches:
        if not launches.shared:
            found, results = _launch_backward(region, backward, gradients, asked)
            return _delivered(region, asked, found) if asked else None, results
    let_go(backward.owned, launches)  # all of it is to be added beside other threads
    with launches:
        found, results = _launch_backward(region, backward, gradients, backward.owned)
    return _delivered(region, backward.owned, found), results


def _launch_backward(
    region: Region, backward: Backward, gradients: Gradients, asked: Sequence[GradientBuffer]
) -> tuple[list[torch.Tensor], list[Any]]:
    """Within `launches`: replay; gradients of `asked`, which are not added to `.grad`, and those of
    inputs and returned parameters."""
    for number, static in backward.incoming.items():
        given, target = gradients[number], static.tensor
        assert given is not None
        if given.data_ptr() != target.data_ptr():
            copy_into(target, given)
    added = backward.owned
    if asked:
        apart = set(map(id, asked))
        added = [buffer for buffer in backward.owned if id(buffer) not in apart]
    separate, aside = SeparateGradients(asked), attach(added)
    backward.graph.replay()
    settle(aside)
    found = separate.take()
    results: list[Any] = []
    for entry, gradient in zip(region.inputs, backward.gradients, strict=True):
        if entry.differentiable:
            results.append(
                None
                if gradient is None
                else gradient.tensor
                if entry.lend
                else gradient.tensor.clone()
            )
    results += [None if static is None else static.tensor.clone() for static in backward.returned]
    return found, results


def _delivered(
    region: Region, buffers: Sequence[GradientBuffer], gradients: Sequence[torch.Tensor]
) -> Any:
    """Hand gradients over that are not added to `.grad` here, if autograd wants them at all."""
    if not region.parameters.is_wanted():
        return None
    found = {
        id(buffer.parameter): gradient for buffer, gradient in zip(buffers, gradients, strict=True)
    }
    return region.parameters.deliver(
        [found.get(id(parameter)) for parameter in region.parameters.parameters]
    )


def _refuse_second_derivatives(region: Region) -> None:
    if torch.is_grad_enabled():
        region.context.gradients.refuse_twice()
        raise RuntimeError(
            f"create_graph=True through {region.name}: a captured backward has no graph of its own "
            "that could be "
            "differentiated again. Calls after this one run eagerly. To keep graphs for other "
            "calls, run those whose "
            "gradients are differentiated under packgraph.eager(...)"
        )


def _refuse_hooks_inside(region: Region, inner: Sequence[Inner]) -> None:
    """Raise RuntimeError when somebody has seen the gradient of an output that others were computed
    from: it lacked what comes from those. inner: such outputs."""
    if any(
        output is not None and is_seen(output, hooks)
        for output, hooks in ((given(), own) for given, own in inner)
    ):
        region.context.gradients.refuse_seen_inside()
        raise RuntimeError(
            f"an output of {region.name} that other outputs were computed from has a hook, or "
            "keeps its gradient "
            "(retain_grad): a replay gives it the gradients of your own code only. Calls after "
            "this one run eagerly. "
            "Do it during warm-up, or run such calls under packgraph.eager(...)"
        )


def _check_settings(region: Region) -> None:
    """Raise RuntimeError when torch's settings are not those under which the backward was
    captured."""
    if kernel_settings(region.settings[0]) != region.settings:
        raise RuntimeError(
            "precision, determinism or another global setting of torch was changed between forward "
            "and backward of "
            f"{region.name}: its backward was captured with those of the forward. Run the backward "
            "with them, too, or "
            "such calls under packgraph.eager(...)"
        )
    if not region.context.asks_later:
        return
    if torch.get_default_dtype() != region.modes.dtype or region.context.changed():
        raise RuntimeError(
            f"{region.name} runs Python code in its backward (a custom function, a checkpoint), "
            "and the module, or "
            "something else that its code reads, was changed between forward and backward. Change "
            "it after the "
            "backward, or run such calls under packgraph.eager(...)"
        )


def _check_versions(region: Region, versions: tuple[int, ...], inputs: Sequence[Version]) -> None:
    """Raise RuntimeError when what the backward reads was changed since the forward."""
    for reference, version in inputs:
        tensor = reference()
        if tensor is not None and tensor._version != version:
            raise RuntimeError(
                f"an argument or output of shape {tuple(tensor.shape)} that {region.name} reads in "
                "its backward was "
                "changed in place between forward and backward. Write to a new tensor, or run the "
                "backward first"
            )
    later, addresses = region.context.read_later, region.context.addresses
    if (
        list(map(_VERSION, later)) == list(versions[: len(later)])
        and list(map(torch.Tensor.data_ptr, later)) == addresses
    ):
        return
    for tensor, address, version in zip(later, addresses, versions, strict=False):
        if tensor._version != version or tensor.data_ptr() != address:
            raise RuntimeError(
                f"a parameter or buffer of shape {tuple(tensor.shape)} that {region.name} reads in "
                "its backward was "
                "changed in place, or given other memory, between forward and backward. Step the "
                "optimizer after the "
                "last backward, and write to a new tensor otherwise"
            )
