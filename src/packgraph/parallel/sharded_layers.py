"""Sharded layers: parameters and gradients that are whole only while a layer runs (ZeRO stages 2
and 3, Rajbhandari et al. 2020, arXiv:1910.02054).

Every rank keeps its own part of a layer's matrices, of their gradients and of the optimizer's
state. The whole ones lie in a buffer in which layers take turns (A, B), so addresses are static and
captured graphs may hold them. Embedding and head may be the first and the last of the layers. What
is exchanged is on its way while another layer runs:

    forward     layer 0    layer 1    layer 2    ...    layer 2    layer 1    layer 0    backward
    buffer      A          B          A                 A          B          A
    gathers     0, then 1  2          3                 2, then 1  0
    reduces                                             3          2          1, then 0

Two stages stand around those of a layer. `enter` begins to gather the parameters of the layer
behind, and `leave` waits for them. In the backward their nodes of autograd do the same for the
layer in front: that of `leave` begins to gather its parameters and to reduce the gradients of the
layer behind, and that of `enter` waits. A reduction leaves each rank its part of the sum over all
ranks, which is added to what the rank keeps. Each exchange begins and ends in the stages of one
layer, and so in one graph, whether that holds a layer or all. GPUs of one host exchange by copies,
with barriers where parameters may change: in the first and the last stage of a forward, and behind
a backward (`parallel/peer_copies.py`). The nodes are identities, so all numbers are those without
them. They are stages as others: a scope captures them, and recomputation lies between them, so that
it needs no gather of its own.

Why the order of autograd is the right one. Every differentiable tensor that gets into a layer goes
through the node of `enter`, every one that gets out through that of `leave`. So all gradients of
the layer come by way of `leave`, which runs first. Autograd runs ready nodes by the order in which
they were made, latest first. Take a node of the layer that has not run when that of `enter` is the
next: some node for which it waits is ready, that one was made still later, and would be next
itself. So no node of the layer is left, and the accumulators of its parameters, which come before
all others, have run, too. (One device has one such queue, and so has a captured backward.) The
layer in front begins after that, so buffers are free when they are needed.

Where a backward does not get to the node of `enter` (nothing differentiable gets into the layer, or
it stops the gradient), it gets to no layer in front either. The layer ends when the whole backward
does, or when that gets to another call.

Frozen matrices are gathered as the others, and have no gradients. Trained ones that are small
beside the frozen ones of their layer, such as adapters, stay whole.

Gradients of several microbatches are added up in the parts. So a sum over ranks is rounded before
the sum over microbatches; with one microbatch a rank, and two ranks, the bits are those of replicas
that are not sharded.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

from packgraph.graphs.gradients import add_waiting_gradients
from packgraph.graphs.parameters import mark_sharded
from packgraph.graphs.stages import Stage, State, run_stages
from packgraph.ops.collectives import all_gather_flat, reduce_scatter_flat
from packgraph.ops.elementwise import add_sum
from packgraph.parallel.data import FlatParameters
from packgraph.parallel.flat_buffers import GradientBucket
from packgraph.parallel.peer_copies import Exchange, Peers, Reduction
from packgraph.torch_internals import at_end_of_backward, backward_task

ENTER, LEAVE = "shard_gather", "shard_leave"
FROZEN_TIMES = 4  # adapters of rank 64 are a tenth of a layer of 1,024 numbers, and less of others
# Entries of the state: the layer that was left last, and whether it has a node; within a layer what
# its node of `leave` has to know.
_LEFT, _WITHIN = "shard_left", "shard_within"
_open: dict[int, "ShardedLayer"] = {}  # whose backward has begun, by autograd's number of it


def layers_of(
    module: nn.Module, layers: Sequence[nn.Module] | Mapping[int, nn.Module] | None = None
) -> dict[str, int]:
    """The number of the layer by the name of each parameter that is a matrix of that layer alone.

    layers: By the numbers that their stages have; None = `module.layers`, which may be a ModuleDict
    by numbers, and `module.ends`, such as the embedding and the head, by numbers. Empty where there
    are none. Trained matrices are left out of a layer whose frozen ones are `FROZEN_TIMES` as
    large.
    """
    found: Any = getattr(module, "layers", ()) if layers is None else layers
    if isinstance(found, nn.ModuleDict):
        found = {int(number): layer for number, layer in found.items()}
    numbered = list(found.items() if isinstance(found, Mapping) else enumerate(found))
    ends = getattr(module, "ends", None)
    if layers is None and isinstance(ends, Mapping):
        numbered += ends.items()
    inside: dict[int, set[int | None]] = {}
    for number, layer in numbered:
        for owner in layer.modules():
            inside.setdefault(id(owner), set()).add(number)
    users: dict[int, set[int | None]] = {}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            users.setdefault(id(parameter), set()).update(inside.get(id(owner), {None}))
    every = [
        (name, parameter, number)
        for name, parameter in module.named_parameters()
        if parameter.ndim >= 2
        and len(users[id(parameter)]) == 1
        and (number := next(iter(users[id(parameter)]))) is not None
    ]
    sizes = Counter[tuple[int, bool]]()
    for _, parameter, number in every:
        sizes[number, parameter.requires_grad] += parameter.numel()
    return {
        name: number
        for name, parameter, number in every
        if not parameter.requires_grad or sizes[number, False] < FROZEN_TIMES * sizes[number, True]
    }


class ShardedLayer:
    """One layer: its spans, and the stages around its own.

    Attributes:
        before: The sharded layer in front, None for the first.
        after: The sharded layer behind, None for the last.
    """

    def __init__(self, number: int, spans: Sequence[GradientBucket]) -> None:
        self.number, self.spans = number, list(spans)
        self.trained = [span for span in spans if not span.is_frozen]
        self.peers: Peers | None = None  # where any layer of the chain is gathered by copies
        self.before: ShardedLayer | None = None
        self.after: ShardedLayer | None = None
        self._gathers = list[Exchange]()  # of a neighbour, empty but between `enter` and `leave`
        self._reductions = list[tuple[GradientBucket, Reduction]]()  # of the layer behind
        for span in spans:
            for member in span.members:
                mark_sharded(member.parameter, is_gathered=span.is_gathered)

    def around(self, stages: Sequence[Stage]) -> list[Stage]:
        """The stages of the layer between those that shard it."""
        last = stages[-1]  # of the last layer it may leave nothing but the output
        return [
            Stage(ENTER, self.number, self.enter, opaque=True),
            *stages[:-1],
            last if self.after is not None else replace(last, run=partial(_keeps_within, last.run)),
            Stage(LEAVE, self.number, self.leave, opaque=True),
        ]

    def enter(self, state: State) -> State:
        """Stage `shard_gather`: the layer's parameters are whole. Raises RuntimeError where layers
        run in another order, or again for their backward."""
        if backward_task() != -1:
            raise RuntimeError(
                f"sharded layer {self.number} runs again within a backward, where parameters of "
                "other layers are whole: recompute within layers only, and call loss.backward() on "
                "the outputs that warm-up has used"
            )
        state = dict(state)
        left = state.pop(_LEFT, None)
        if self.before is None:
            self.barrier()
            self.wait_for(self.gather())
        elif left is None or left[0] != self.before.number:
            raise RuntimeError(
                f"sharded layer {self.number} runs behind layer {left and left[0]}, not behind "
                f"{self.before.number}: parameters are gathered for layers in their order, and "
                "stages between them must return {**state, ...}"
            )
        self._gathers = [] if self.after is None else self.after.gather()
        # The layer in front reduces these gradients, if it has a backward.
        hands_over = left is not None and left[1]
        state, has_node = _through(lambda on: _end_open(self, hands_over and on), state)
        return {**state, _WITHIN: not has_node}

    def leave(self, state: State) -> State:
        """Stage `shard_leave`: the parameters of the layer behind are whole."""
        state = dict(state)
        if _WITHIN not in state:
            raise RuntimeError(
                f"a stage of layer {self.number} drops entries of the state that it does not know: "
                "return {**state, ...}, from which sharded layers learn what ran before"
            )
        late = state.pop(_WITHIN)
        self.wait_for(self._gathers)
        self._gathers = []
        if self.after is None:
            self.barrier()
        state, has_node = _through(partial(self.begin_backward, late), state)
        return state if self.after is None else {**state, _LEFT: (self.number, has_node)}

    @torch.no_grad()
    def gather(self) -> list[Exchange]:
        """Begin to make the parameters whole, where they are sharded; what to wait for."""
        return [_gather(span) for span in self.spans if span.is_gathered]

    @torch.no_grad()
    def reduce(self) -> list[tuple[GradientBucket, Reduction]]:
        """Begin to sum the gradients of all ranks."""
        return [(span, _reduce(span)) for span in self.trained]

    def wait_for(self, gathers: Sequence[Exchange]) -> None:
        """Wait for gathers."""
        for work in gathers:
            work.wait()

    @torch.no_grad()
    def add(self, reductions: Sequence[tuple[GradientBucket, Reduction]]) -> None:
        """Wait for reductions, and add this rank's parts of the sums to what it keeps."""
        for span, (work, parts) in reductions:
            work.wait()
            # As tensors without a past: backwards in flight do not depend on what was there.
            kept = span.kept_gradients.data
            if len(parts) == 1:
                kept.add_(parts[0])
            else:
                add_sum(kept, *parts)

    def barrier(self) -> None:
        """Wait for ranks that read this one's parameters, and whose parameters this one reads."""
        if self.peers is not None:
            self.peers.barrier()

    @torch.no_grad()
    def begin_backward(self, late: bool, is_reached: bool = True) -> None:
        """Parameters are whole, gradients zero; the neighbours' are on their way. late: there is no
        node in front. Raises RuntimeError where a `.grad` is not what this layer has given."""
        if not is_reached:
            return
        _end_open()  # of another call in the same backward
        _open[backward_task()] = self
        at_end_of_backward(_end_open)
        if self.after is None:
            self.wait_for(self.gather())
        for span in self.trained:
            for member in span.members:
                if member.parameter.grad is None:
                    member.parameter.grad = member.gradient
                elif member.parameter.grad is not member.gradient:
                    raise RuntimeError(
                        f"the gradient of {member.name} was replaced, but it is sharded: ranks add "
                        "up what comes to its own memory only. Leave .grad alone, or set it to None"
                    )
            span.gradients.data.zero_()
        self._gathers = [] if self.before is None or late else self.before.gather()
        self._reductions = [] if self.after is None else self.after.reduce()

    def end_backward(self, hands_over: bool) -> None:
        """The gradients are complete. hands_over: the layer in front reduces them."""
        add_waiting_gradients()
        self.wait_for(self._gathers)
        self.add(self._reductions)
        self._gathers, self._reductions = [], []
        if not hands_over:
            self.add(self.reduce())
            self.barrier()


def _gather(span: GradientBucket) -> Exchange:
    """Begin to make its parameters whole."""
    if span.peers is not None:
        return span.peers.gather()
    return all_gather_flat(
        span.parameters, span.kept_parameters, group=span.within.shard, async_op=True
    )


def _reduce(span: GradientBucket) -> Reduction:
    """Begin to sum its gradients over all ranks."""
    if span.peers is not None:
        return span.peers.reduce()
    part = torch.empty_like(span.kept_gradients)
    work = reduce_scatter_flat(part, span.gradients.data, group=span.within.shard, async_op=True)
    return Reduction(work, (part,))


class ShardedLayers:
    """The sharded layers of a model, or of one chunk of it, by their numbers."""

    def __init__(self, flat: FlatParameters, numbers: Collection[int] | None = None) -> None:
        """numbers: of the chunk's layers, None = all."""
        spans: dict[int, list[GradientBucket]] = {}
        for span in (*flat.spans, *flat.frozen):
            chosen = numbers is None or span.sharded_layer in numbers
            if span.sharded_layer is not None and chosen:
                spans.setdefault(span.sharded_layer, []).append(span)
        self.layers: Mapping[int, ShardedLayer] = {
            number: ShardedLayer(number, found) for number, found in sorted(spans.items())
        }
        ordered = list(self.layers.values())
        read = (span.peers for layer in ordered for span in layer.spans if span.is_gathered)
        peers = next((found.peers for found in read if found is not None), None)
        for layer in ordered:
            layer.peers = peers
        for before, after in itertools.pairwise(ordered):
            before.after, after.before = after, before
        for behind, layer in zip(ordered, ordered[2:], strict=False):
            for span in layer.trained:
                span.behind = [member for found in behind.trained for member in found.members]

    def around(self, stages: Iterable[Stage]) -> list[Stage]:
        """All stages of the model, those of each sharded layer between its two."""
        made: list[Stage] = []
        for number, group in itertools.groupby(stages, key=lambda stage: stage.layer):
            layer, own = self.layers.get(number), list(group)
            made += own if layer is None else layer.around(own)
        return made

    def put_into(self, module: nn.Module) -> None:
        """From now on `module`, which has stages, has those of sharded layers, too."""
        kind = type(module)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        module.__class__ = type(kind.__name__, (_WithShards, kind), names)
        module.shards = self  # type: ignore[assignment]


class _WithShards:
    """Additions to the class of a sharded module."""

    shards: ShardedLayers

    def stages(self) -> list[Stage]:
        """Those of the module, and of its sharded layers."""
        return self.shards.around(super().stages())  # type: ignore[misc]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the stages: nothing else knows when parameters are whole."""
        return run_stages(self, *args, **kwargs)  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("a sharded module has no whole parameters to copy; copy it before")


def _keeps_within(run: Callable[..., State], *given: Any) -> State:
    """Runs `run` and keeps in the state, the last argument, what `leave` has to know."""
    found = run(*given)
    return found if _WITHIN in found else {**found, _WITHIN: given[-1][_WITHIN]}


def _through(then: Callable[[bool], None], state: State) -> tuple[State, bool]:
    """The state, its differentiable tensors through one `_Edge`; whether there is one.

    A tensor in several places stays one. Entries without such tensors stay the objects they are.
    """
    found = {
        id(leaf): leaf
        for leaf in tree_leaves(state)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    if not found or not torch.is_grad_enabled():
        return state, False
    made = dict(zip(found, _Edge.apply(then, *found.values()), strict=True))
    passed = {
        key: tree_map(lambda leaf: made.get(id(leaf), leaf), value)
        if any(id(leaf) in made for leaf in tree_leaves(value))
        else value
        for key, value in state.items()
    }
    return passed, True


class _Edge(torch.autograd.Function):
    """The node in front of a layer's, or behind them. Calls `then` in the backward with whether
    that goes on: a layer may stop the gradient of what it gets."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[bool], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.then(any(gradient is not None for gradient in gradients))
        return None, *gradients


def _end_open(layer: ShardedLayer | None = None, hands_over: bool = False) -> None:
    """Within a backward or at its end: end that of `layer`, None = of any, if it has begun."""
    task = backward_task()
    found = _open.get(task)
    if found is not None and layer in (None, found):
        del _open[task]
        found.end_backward(hands_over)
