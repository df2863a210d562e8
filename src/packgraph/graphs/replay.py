"""Replaying a region inside the user's autograd graph.

    forward     copy inputs in ─▶ forward graph ─▶ outputs, aliases of static memory
    backward    the outputs' gradients ─▶ copy in ─▶ the backward graph of their pattern ─▶ inputs' gradients, .grad

A backward that nobody has captured (a new pattern, or under autocast) runs eagerly: the region's
inputs lie in the slot yet, so its forward is run again (`recompute.py`).

Replaying a variant without autograd, for a schedule that knows itself when a microbatch's
backward runs.

A call that users write goes through autograd, region by region: their loss may hang on anything. A
schedule calls a chunk forward and later backward, and hands over hidden states and their gradient
itself. If every stage is captured and the gradients go from region to region by baked pointers,
nothing is left for Python to do in between:

    forward    copy the inputs in, launch F1 F2 ... Fn
    backward   copy the gradient in, launch Bn ... B2 B1

The invariant: `direct_replay` returns None unless these launches compute all that autograd would
make of the call.

Leased slot with the captured graphs and static buffers for one call.

An ordinary call acquires a handle, runs and forgets it. A pipeline holds handles: it receives
activations straight into the slot's input buffer, gradients straight into its gradient buffer, and
keeps the slot until its sends are done.
"""  # noqa: E501

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from packgraph.graphs import fallback
from packgraph.graphs.backend import Graph, Static
from packgraph.graphs.checks.calls import DryRun
from packgraph.graphs.checks.random_state import PastDraws
from packgraph.graphs.fallback import Stats
from packgraph.graphs.gradients import (
    Attached,
    GradientBuffer,
    SeparateGradients,
    attach,
    let_go,
    settle,
)
from packgraph.graphs.key import Pattern, call_tensors, copy_into, kernel_settings, pattern_of
from packgraph.graphs.output_gradients import KeyGradients, is_seen
from packgraph.graphs.parameters import expect_visits, has_hooks, is_sharded
from packgraph.graphs.program import Program, close_objects
from packgraph.graphs.recompute import recompute_gradients, unlike_captured
from packgraph.graphs.region import (
    Backward,
    Inner,
    Owned,
    Region,
    Token,
    Version,
    check_first,
    make_entry,
    shown_facts,
)
from packgraph.graphs.slots import Calls, SlotLease
from packgraph.graphs.stages import Run, State
from packgraph.torch_internals import base_of, version_of, will_run

_DIFFERENTIABLE = operator.attrgetter("differentiable")
Gradients = Sequence[torch.Tensor | None]


class StaticAlias(NamedTuple):
    """Where a tensor of the running call lives in static memory, as of its version then. alias: it
    is that memory."""

    tensor: torch.Tensor
    token: Token
    version: int
    alias: bool


class StaticAliases:
    """The static homes of a call's tensors, by identity."""

    def __init__(self) -> None:
        self._homes: dict[int, StaticAlias] = {}
        self._inner: dict[int, list[Inner]] = {}
        self._saved: dict[int, list[Version]] = {}

    def note_saved(self, tensor: torch.Tensor, versions: list[Version]) -> None:
        """`tensor` is an output that the backward reads. versions: gets those of its copies."""
        self._saved[id(tensor)] = versions

    def note_inner(self, tensor: torch.Tensor, shown: list[Inner]) -> None:
        """`tensor` is an output that others were computed from. shown: gets it, and its copies."""
        self._inner[id(tensor)] = shown
        shown.append((weakref.ref(tensor), 0))

    def note_copy(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """`copy` is given away in place of `tensor`."""
        if id(tensor) in self._saved:
            self._saved[id(tensor)].append((weakref.ref(copy), version_of(copy)))
        if id(tensor) in self._inner:
            self._inner[id(tensor)].append((weakref.ref(copy), 1))
            copy.register_hook(partial(_refuse_alone, tensor.grad_fn))

    def note(self, tensor: torch.Tensor, token: Token, alias: bool) -> None:
        """`tensor` has the contents of the static memory `token`."""
        version = -1 if tensor.is_inference() else version_of(tensor)
        self._homes[id(tensor)] = StaticAlias(tensor, token, version, alias)

    def token(self, tensor: torch.Tensor) -> Token | None:
        """The static memory with `tensor`'s contents, unless it was written to since."""
        home = self._homes.get(id(tensor))
        return home.token if home is not None and home.version == version_of(tensor) else None

    def is_alias(self, tensor: Any) -> bool:
        """Returns whether `tensor` is static memory itself."""
        home = self._homes.get(id(tensor))
        return home is not None and home.alias

    def shares(self, tensor: Any) -> bool:
        """Returns whether `tensor` may be a view of static memory."""
        if not isinstance(tensor, torch.Tensor) or self.is_alias(tensor):
            return isinstance(tensor, torch.Tensor)
        storage = tensor.untyped_storage().data_ptr()
        return any(
            h.alias and h.tensor.untyped_storage().data_ptr() == storage
            for h in self._homes.values()
        )

    def cloning(self, is_static: Callable[[Any], bool]) -> Callable[[Any], Any]:
        """Returns a function of a leaf that clones it, once, where it is static: nobody may keep
        static memory. One tensor in several places stays one."""
        clones: dict[int, torch.Tensor] = {}

        def own(leaf: Any) -> Any:
            if not is_static(leaf):
                return leaf
            if id(leaf) not in clones:
                clone, token = leaf.clone(), self.token(leaf)
                self.note_copy(leaf, clone)
                if token is not None:
                    self.note(clone, token, alias=False)
                clones[id(leaf)] = clone
            return clones[id(leaf)]

        return own


def _refuse_alone(node: Any, gradient: torch.Tensor) -> None:
    """A hook of an inner output. Raises RuntimeError if the backward ends there: what comes from
    others is missing."""
    if not will_run(node):
        raise RuntimeError(
            "torch.autograd.grad asks for the gradient of an output that other outputs were "
            "computed from: a replay "
            "gives it the gradients of your own code only. Run such calls under "
            "packgraph.eager(...)"
        )


def accepts(region: Region, state: State, aliases: StaticAliases) -> bool:
    """Returns whether a state that came through eager code is what the region was captured for.

    An eager stage may do what it likes, so its results are compared in all that is baked:
    structure, constants, shapes, and the identity of tensors whose pointer is baked, be it that
    another entry of this state is copied there.
    """
    if shown_facts(state) != region.facts:
        return False
    copied: dict[Token, torch.Tensor] = {}
    for entry in region.inputs:
        tensor = tree_leaves(state[entry.key])[entry.leaf]
        if entry.buffer is not None:
            copied[entry.token] = tensor
        elif copied.get(entry.token) is not tensor and aliases.token(tensor) != entry.token:
            return False
    return True


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
    read: list[Version] = []
    for number in region.context.inputs:
        tensor, base = tensors[number], base_of(tensors[number])
        # A view may be gone before its base is written to.
        read.append((weakref.ref(tensor if base is None else base), version_of(tensor)))
    return wanted, read


def replay_region(region: Region, state: State, lease: SlotLease, aliases: StaticAliases) -> State:
    """Replay the forward graph and return the next state; its outputs alias static memory and are
    noted in `aliases`."""
    edge = region.parameters
    with lease.slots.launches:
        wanted, read = stage_inputs(region, state, aliases)
        if region.is_differentiable:
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
            made = replay_forward(region)
    for number, tensor in enumerate(made):
        aliases.note(tensor, (region.number, number), alias=True)
    return {key: make_entry(entry, state, made) for key, entry in region.entries.items()}


def replay_forward(region: Region) -> tuple[torch.Tensor, ...]:
    """Replay the forward graph; its outputs, aliases of static memory. What it writes to counts as
    changed, as it would by an eager call."""
    region.forward.replay()
    if region.context.counted:
        torch.autograd.graph.increment_version(region.context.counted)
    return tuple([output.static.tensor.detach() for output in region.outputs])


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
        generators = region.context.generators
        ctx.draws = draws = PastDraws(generators) if generators else None
        made = replay_forward(region)
        if draws is not None:
            draws.end()
        ctx.versions = list(map(version_of, region.context.reads))
        if not all(map(_DIFFERENTIABLE, region.outputs)):
            ctx.mark_non_differentiable(
                *[t for t, o in zip(made, region.outputs, strict=True) if not o.differentiable]
            )
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        region, lease = ctx.region, ctx.lease
        inputs = sum(map(_DIFFERENTIABLE, region.inputs))
        returned = ctx.next_functions[len(ctx.next_functions) - len(region.returned) :]
        pattern = pattern_of(gradients)
        if pattern.count(None) == len(pattern):
            expect_visits(returned, region.returned, [None] * len(returned))
            return (None,) * (6 + inputs + len(region.returned))
        if torch.is_grad_enabled():
            _refuse_second_derivatives(region)
        if ctx.inner:
            _refuse_hooks_inside(region, ctx.inner)
        if kernel_settings(region.settings[0]) != region.settings[1] or region.context.asks_later:
            _check_settings(region)
        _check_versions(region, ctx.versions, ctx.read)
        reason, backward = unlike_captured(region, lease, gradients), region.backwards.get(pattern)
        if backward is not None and reason is None:
            signal, results = _replay_backward(region, backward, gradients, lease)
        else:
            signal, results = _recompute(region, pattern, gradients, ctx, reason)
        if returned:
            expect_visits(returned, region.returned, results[inputs:])
        return None, signal, None, None, None, None, *results


def _recompute(
    region: Region, pattern: Pattern, gradients: Gradients, ctx: Any, reason: str | None
) -> tuple[Any, list[Any]]:
    """Run a backward eagerly that nobody has captured, and learn its pattern. reason: Why, if it
    has none."""
    lease, known = ctx.lease, region.context.gradients
    if any(map(is_sharded, region.parameters.parameters)):
        raise _refuse_separate(region)
    with lease.slots.launches:
        lease.start_backward(region.number)
    with torch.no_grad():
        found = recompute_gradients(region, gradients, ctx.versions, ctx.draws)
    if reason is None:
        known.learn(region.number, list(region.backwards), pattern)
    else:
        known.fell_back(reason)
    with lease.slots.launches:
        lease.finish_backward(region.number)
    return found


def _replay_backward(
    region: Region, backward: Backward, gradients: Gradients, lease: SlotLease
) -> tuple[Any, list[Any]]:
    """Replay a backward graph; what autograd is given for the parameters' edge, inputs and returned
    parameters."""
    launches, asked = lease.slots.launches, _asked(region, backward)
    if backward.reduces and (asked or launches.shared):
        raise _refuse_separate(region)
    with launches:
        lease.start_backward(region.number)
        if not launches.shared:
            found, results = _launch_backward(region, backward, gradients, asked)
            lease.finish_backward(region.number)
            return _delivered(region, asked, found) if asked else None, results
    let_go(backward.owned, launches)  # all of it is to be added beside other threads
    with launches:
        found, results = _launch_backward(region, backward, gradients, backward.owned)
        lease.finish_backward(region.number)
    return _delivered(region, backward.owned, found), results


def _refuse_separate(region: Region) -> RuntimeError:
    return RuntimeError(
        f"gradients of {region.name} are sharded: ranks add them up while the backward runs, and "
        "none can be had by itself. Call loss.backward() without inputs, from one thread, on the "
        "outputs that warm-up has used, and register no hooks on these parameters"
    )


def _asked(region: Region, backward: Backward) -> list[GradientBuffer]:
    """The buffers whose gradient is wanted by itself: of some tensors only, or to be seen by a
    hook."""
    whole = region.parameters.is_whole()
    if whole and backward.parameters.are_quiet():
        return []
    # One that was frozen since its forward gets none, which autograd knows.
    return [
        buffer
        for buffer in backward.owned
        if not whole or not buffer.parameter.requires_grad or has_hooks(buffer.parameter)
    ]


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
    found: list[torch.Tensor] = []
    if asked:
        apart = set(map(id, asked))
        added = [buffer for buffer in backward.owned if id(buffer) not in apart]
        separate, aside = SeparateGradients(asked), attach(added)
        backward.graph.replay()
        settle(aside)
        found = separate.take()
    elif backward.attached.holds():
        backward.attached.count_writes()
        backward.graph.replay()
    else:
        aside = attach(backward.owned)
        backward.graph.replay()
        settle(aside)
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
    region.context.gradients.shared.twice = True
    raise RuntimeError(
        f"create_graph=True through {region.name}: a captured backward has no graph of its own "
        "that could be differentiated again. Calls after this one run eagerly. To keep graphs for "
        "other calls, run those whose gradients are differentiated under packgraph.eager(...)"
    )


def _refuse_hooks_inside(region: Region, inner: Sequence[Inner]) -> None:
    """Raise RuntimeError when somebody has seen the gradient of an output that others were computed
    from: it lacked what comes from those. inner: such outputs."""
    if any(
        output is not None and is_seen(output, hooks)
        for output, hooks in ((given(), own) for given, own in inner)
    ):
        region.context.gradients.shared.seen_inside = True
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
    if kernel_settings(region.settings[0]) != region.settings[1]:
        raise RuntimeError(
            "precision, determinism or another global setting of torch was changed between forward "
            "and backward of "
            f"{region.name}: its backward was captured with those of the forward. Run the backward "
            "with them, too, or "
            "such calls under packgraph.eager(...)"
        )
    if not region.context.asks_later:
        return
    with torch.enable_grad(), region.modes.entered():  # as in the call
        changed = region.context.changed()
    if torch.get_default_dtype() != region.modes.dtype or changed:
        raise RuntimeError(
            f"{region.name} runs Python code in its backward (a custom function, a checkpoint), "
            "and the module, or "
            "something else that its code reads, was changed between forward and backward. Change "
            "it after the "
            "backward, or run such calls under packgraph.eager(...)"
        )


def _check_versions(region: Region, versions: list[int], inputs: Sequence[Version]) -> None:
    """Raise RuntimeError when what the backward reads was changed since the forward."""
    for reference, version in inputs:
        tensor = reference()
        if tensor is not None and version_of(tensor) != version:
            raise RuntimeError(
                f"an argument or output of shape {tuple(tensor.shape)} that {region.name} reads in "
                "its backward was "
                "changed in place between forward and backward. Write to a new tensor, or run the "
                "backward first"
            )
    later, addresses = region.context.read_later, region.context.addresses
    if (
        list(map(version_of, later)) == versions[: len(later)]
        and list(map(torch.Tensor.data_ptr, later)) == addresses
    ):
        return
    for tensor, address, version in zip(later, addresses, versions, strict=False):
        if version_of(tensor) != version or tensor.data_ptr() != address:
            raise RuntimeError(
                f"a parameter or buffer of shape {tuple(tensor.shape)} that {region.name} reads in "
                "its backward was "
                "changed in place, or given other memory, between forward and backward. Step the "
                "optimizer after the "
                "last backward, and write to a new tensor otherwise"
            )


Ends = Sequence[tuple[int, int] | None]


@dataclass
class Direct:
    """The launches of one variant.

    copies: which of the call's tensors go into which memory of the slot, and its address. out: the
    call's only output. incoming: where its gradient belongs. gradients: by number of the call's
    tensor, where the backward leaves its gradient. gradients_attached: whether `.grad` of all
    parameters are their buffers. attached: the block in which they were found to be.
    """

    forwards: list[Graph]
    backwards: list[Graph]
    copies: list[tuple[int, torch.Tensor, int]]
    out: Static
    incoming: Static
    gradients: dict[int, Static]
    owned: list[GradientBuffer]
    gradients_attached: Attached
    attached: object = None

    def forward(self, tensors: Sequence[torch.Tensor], lease: SlotLease) -> torch.Tensor:
        """Launch all forwards on the call's tensors; returns the output, static memory of the
        slot."""
        lease.pending.add(0)
        with lease.slots.launches:
            for number, buffer, address in self.copies:
                if tensors[number].data_ptr() != address:
                    buffer.copy_(tensors[number].detach())
            for graph in self.forwards:
                graph.replay()
        return self.out.tensor

    def backward(self, gradient: torch.Tensor | None, lease: SlotLease, frozen: object) -> None:
        """Launch all backwards. gradient: of the output, None = one.

        frozen: the block in which nobody replaces `.grad`, or None; gradients are looked at once
        per block.
        """
        with lease.slots.launches as launches:
            if not launches.shared:
                known = frozen is not None and self.attached is frozen
                known = known or self.gradients_attached.holds()
                aside = [] if known else attach(self.owned)
                self._launch_backward(gradient, lease)
                settle(aside)
                self.attached = None if aside else frozen
                return
        let_go(self.owned, launches)
        with launches:
            separate = SeparateGradients(self.owned)
            self._launch_backward(gradient, lease)
            found = separate.take()
        torch.autograd.backward([buffer.parameter for buffer in self.owned], found)

    def _launch_backward(self, gradient: torch.Tensor | None, lease: SlotLease) -> None:
        lease.start_backward(0)
        target = self.incoming.tensor
        if gradient is None:
            target.fill_(1)
        elif gradient.data_ptr() != target.data_ptr():
            target.copy_(gradient)
        for graph in self.backwards:
            graph.replay()
        lease.finish_backward(0)


@dataclass
class Variant:
    """The regions of one key in one slot, by the index of their run.

    ends: for each of the call's outputs the region and output number it comes from, None for eager
    code's. direct: how to replay all regions without autograd, where that can be. version: of what
    is known of gradients of such calls (`gradients`) at capture. dry_run: keeps what graphs read,
    and know by its address only. replays_left: before one is compared with a plain call again.
    """

    regions: dict[int, Region]
    ends: list[tuple[int, int] | None]
    direct: Direct | None
    gradients: KeyGradients
    version: int
    dry_run: DryRun
    replays_left: float = inf

    @property
    def segments(self) -> int:
        """Number of captured segments."""
        return len(self.regions)

    @property
    def is_current(self) -> bool:
        """The next call may replay it as it is."""
        return self.version == self.gradients.version and self.replays_left > 0

    def touched(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Tensors from outside that its forwards write to, and those that they read."""
        of = [region.context for region in self.regions.values()]
        return [t for each in of for t in each.writes], [t for each in of for t in each.reads]

    def reset(self) -> None:
        """Free all graphs."""
        for region in self.regions.values():
            region.reset()


def direct_replay(
    regions: dict[int, Region], runs: int, ends: Ends, tensors: Sequence[int | None]
) -> Direct | None:
    """How to replay a variant directly, or None when something has to go through eager code or
    autograd.

    runs: how many runs the program has. tensors: for each static input of the slot the number of
    the call's tensor that it takes in, None for one that the call does not have.
    """
    if (
        len(regions) != runs
        or len(ends) != 1
        or ends[0] is None
        or any(number is None for number in tensors)
    ):
        return None
    if any(
        region.returned or region.summed or len(region.backwards) > 1 for region in regions.values()
    ):
        return None
    producer, output = ends[0]
    last, incoming = regions[producer].outputs[output], regions[producer].incoming(output)
    backwards = [
        region.backward
        for _, region in sorted(regions.items(), reverse=True)
        if region.backward is not None
    ]
    if incoming is None or not backwards:
        return None
    copies: list[tuple[int, torch.Tensor, int]] = []
    gradients: dict[int, Static] = {}
    for region in regions.values():
        for place, entry in enumerate(region.inputs):
            if entry.token[0] != "slot":
                continue
            number = tensors[entry.token[1]]
            assert number is not None
            if entry.buffer is not None:
                copies.append((number, entry.buffer, entry.buffer.data_ptr()))
            gradient = region.backward.gradients[place] if region.backward is not None else None
            if gradient is not None:
                if number in gradients or not entry.lend:
                    return None
                gradients[number] = gradient
    owned = [buffer for backward in backwards for buffer in backward.owned]
    return Direct(
        [region.forward for region in regions.values()],
        [backward.graph for backward in backwards],
        copies,
        last.static,
        incoming,
        gradients,
        owned,
        Attached(owned),
    )


class ReplayHandle:
    """A slot held for one microbatch, and the variant captured in it for this call.

    lends: outputs are aliases of static memory, valid until the slot is released, instead of
    clones.
    """

    def __init__(
        self,
        program: Program,
        variant: Variant,
        lease: SlotLease,
        lends: bool,
        stats: Stats,
        calls: Calls,
        frozen: object = None,
    ) -> None:
        """calls: of the module. frozen: stands for a block of time in which nothing about the
        module but values changes; None = no such."""
        self.program, self.variant, self.lease = program, variant, lease
        self.lends, self.stats, self.calls, self.frozen = lends, stats, calls, frozen
        self._aliases, self._was_eager = StaticAliases(), program.staged  # as `begin` is

    @property
    def is_direct(self) -> bool:
        """Returns whether `forward` and `backward` may be used in place of `run` and autograd."""
        return self.variant.direct is not None

    @property
    def makes_one_number(self) -> bool:
        """Returns whether `forward` and `backward` may be used for a single number, of which
        autograd takes the gradient to be one."""
        direct = self.variant.direct
        return direct is not None and direct.out.tensor.numel() == 1

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Replay the forward alone: the call's output, an alias of the slot's memory that autograd
        knows nothing of.

        What the module says of the arguments as a call begins is heard here, too: graphs cannot
        look at what the host alone knows. Raises what its `begin` raises.
        """
        assert self.variant.direct is not None
        try:
            with self.calls:
                if self.program.staged:
                    check_first(self.variant.regions, self.program, args, kwargs)
                return self.variant.direct.forward(call_tensors(args, kwargs), self.lease)
        except BaseException:
            self.lease.release()
            raise

    def backward(self, gradient: torch.Tensor | None = None) -> None:
        """Replay the backward. gradient: of the output, None = one."""
        assert self.variant.direct is not None
        self.variant.direct.backward(gradient, self.lease, self.frozen)

    def input_gradient(self, tensor: int) -> torch.Tensor | None:
        """Where `backward` leaves the gradient of the call's tensor number `tensor`: an alias of
        the slot's memory."""
        assert self.variant.direct is not None
        static = self.variant.direct.gradients.get(tensor)
        return None if static is None else static.tensor

    def buffer(self, key: str) -> torch.Tensor | None:
        """The slot's memory for the state's entry `key`, if a region reads it from there: filling
        it saves a copy."""
        for region in self.variant.regions.values():
            for entry in region.inputs:
                if entry.key == key and entry.buffer is not None:
                    return entry.buffer
        return None

    def gradient_buffer(self, number: int = 0) -> torch.Tensor | None:
        """The slot's memory for the incoming gradient of the call's output `number`, if a region
        reads it there."""
        end = self.variant.ends[number]
        if end is None:
            return None
        incoming = self.variant.regions[end[0]].incoming(end[1])
        return incoming.tensor if isinstance(incoming, Owned) else None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replay the call's forward; its backward follows by autograd."""
        with self.calls:
            return self.replay(args, kwargs)

    def replay(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `run`, by a thread that is counted among the calls of the module."""
        replayed = False
        try:
            program = self.program
            result = program.end(program.execute(program.begin(args, kwargs), self))
            if self.lends:
                result = close_objects(result)
            else:
                with self.lease.slots.launches:
                    result = _left(result, self._aliases)
            replayed = True
        finally:
            if not replayed or not (self.lends or self.lease.pending):  # no backward is to come
                self.lease.release()
        return result

    def captured(self, index: int, run: Run, state: State) -> State:
        """Executes a run by replay, where the slot has graphs for it and the state is theirs."""
        region = self.variant.regions.get(index)
        if region is None:
            return self.eager(index, run, state)
        if self._was_eager and not accepts(region, state, self._aliases):
            self.stats.fell_back(fallback.OTHER_STATE)
            return self.eager(index, run, state)
        self._was_eager = False
        return replay_region(region, state, self.lease, self._aliases)

    def eager(self, index: int, run: Run, state: State) -> State:
        """Executes a run eagerly."""
        self._was_eager = True
        own = self._aliases.cloning(self._aliases.is_alias)
        return self.program.run(run, tree_map(own, state))


def _left(result: Any, aliases: StaticAliases) -> Any:
    """Clones outputs that alias static memory."""
    own = aliases.cloning(aliases.shares)
    return own(result) if type(result) is torch.Tensor else close_objects(tree_map(own, result))
