"""Data parallelism: flat buffers, gradients reduced in spans, every rank updates its own part of
all parameters (or, with an optimizer that knows of no parts, all of them).

    backward   .grad views of one flat buffer, added to in place (by captured graphs too)
    reduce     span complete -> reduce-scatter: each rank gets the sum of its own part
    update     the optimizer changes own parts only (ZeRO stage 1, Rajbhandari et al. 2020,
               arXiv:1910.02054)
    gather     all-gather puts the new parts into everyone's parameters, in place, span by span,
               while others are updated

Other optimizers want whole gradients: `result` "sum" or "mean" sends spans by all-reduce, and
leaves parameters where they are; only gradients are views of a flat buffer then.

The invariant: parameters and gradients never move, so graphs that baked their addresses stay right;
a `.grad` that was set to None or replaced meanwhile is found and taken in. Spans are reduced in one
fixed order on all ranks, whatever order their gradients are finished in, and whichever thread of
autograd says so. Single process: nothing is sent.

Where replicas share the experts of a layer (`parallel/expert.py`), experts lie in spans of their
own: only replicas that hold the same ones (`edp`) add up. That is the whole sum: a loss is a sum
over tokens, and the tokens of all ranks that share the experts have been to them.

Layers may be sharded (ZeRO stages 2 and 3): each rank keeps its own part of a layer's matrices and
gradients, and the whole ones exist only while the layer runs, in a buffer in which layers take
turns (`parallel/sharded_layers.py`). What is smaller than a matrix stays whole. Frozen matrices may
be sharded as well; they have no gradients.

Where some of the replicas share a layer (`parallel/flat_buffers.py`), each of them keeps a part
that others keep, too, and updates a part of that. Once a step the kept gradients are summed over
those others (reduce-scatter) while the last backward runs, and updated parameters are gathered from
them. That is as many bytes as an all-reduce, and the optimizer's state is in as many parts as there
are replicas.

The flat buffers are made in `parallel/flat_buffers.py`.
"""

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from packgraph.graphs.parameters import local_tensor, unaliased
from packgraph.graphs.region import Region
from packgraph.ops.collectives import all_gather_flat, reduce_scatter_flat
from packgraph.parallel.deferred import fill_deferred
from packgraph.parallel.flat_buffers import (
    SPAN_BYTES,
    WHOLE,
    GradientBucket,
    Member,
    Shard,
    make_spans,
)
from packgraph.parallel.mesh import ShardGroups
from packgraph.parallel.peer_copies import find_peers
from packgraph.torch_internals import zero_each

Result = Literal["part", "sum", "mean"]


class FlatParameters:
    """All trainable parameters of a rank as views of flat buffers, one per dtype, and their way
    over the replicas.

    group: the ranks that hold the same parameters, None = this process alone. result: what a rank
    gets of the gradients: `part`, the sum of its own part of each span; `sum` or `mean`, that of
    all of them. ties: names of
    parameters of which other pipeline stages have copies, with the groups of all that have them.
    parts: by `Part.copies`, the ranks of `group` that hold the same parts, None = no other rank
    does. layers: of matrices that a layer has to itself, its number by their names; those of one
    layer share a span, whatever `span_bytes` says. shard: what of them each rank keeps its own part
    of alone. apart: names of parameters that share spans with each other only. within: by
    `Part.copies`, of what groups each rank keeps a part, where those are not all replicas.
    sums_apart: whether sums over replicas have memory of their own, so that gradients stay what
    this rank has added up, and may be reduced again.

    Attributes:
        spans: Of all parameters that are trained.
        frozen: Of those that are not, but sharded; without gradients.
        launched: Spans of this step that are on their way already.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup | None,
        span_bytes: int = SPAN_BYTES,
        ties: Mapping[str, dist.ProcessGroup] | None = None,
        parts: Mapping[str, dist.ProcessGroup | None] | None = None,
        result: Result = "part",
        layers: Mapping[str, int] | None = None,
        shard: Shard = "none",
        apart: Collection[str] = (),
        within: Mapping[str, ShardGroups] | None = None,
        sums_apart: bool = False,
    ) -> None:
        """Moves the parameters into the buffers (gradients only, where they are whole). Raises
        ValueError when there is nothing to train, or a tied parameter is copied over tensor
        parallel ranks as well."""
        self.group, self.result = group, result
        layers, shard = ({}, "none") if group is None else (layers or {}, shard)
        every, gathers = list(named_parameters), shard == "parameters"
        named = [
            (name, parameter)
            for name, parameter in every
            if parameter.requires_grad or (gathers and name in layers)
        ]
        if not any(parameter.requires_grad for _, parameter in named):
            raise ValueError(
                "there is no parameter that needs a gradient, so there is nothing to train"
            )
        groups = {WHOLE: group, **(parts or {})}
        sharing = {copies: ShardGroups(found) for copies, found in groups.items()}
        sharing |= dict(within or {})
        device = local_tensor(named[0][1]).device
        is_shared = shard != "none" and any(name in layers for name, _ in named)
        peers = find_peers(sharing[WHOLE].shard, device) if is_shared else None
        made = make_spans(
            named,
            groups,
            span_bytes,
            ties or {},
            result == "part",
            layers,
            shard,
            apart,
            sharing,
            peers,
            sums_apart,
        )
        self.spans = [span for span in made if not span.is_frozen]
        self.frozen = [span for span in made if span.is_frozen]
        fill_deferred(every, made)
        # Tensor parallel ranks first, then stages: an order that all of them share, so nobody waits
        # in a circle.
        self._shared = sorted(
            (span for span in self.spans if span.sharers is not None), key=lambda s: s.tied or ""
        )
        self._span_of = {
            id(member.parameter): number
            for number, span in enumerate(self.spans)
            for member in span.members
        }
        self._busy = {
            span.within.shard
            for span in (*self.spans, *self.frozen)
            if span.sharded_layer is not None
        }
        self._one_at_a_time = threading.Lock()
        self._gathers = dict[int, Any]()  # under way, by the id of their span
        self._handles: list[Any] = []
        self.forget()

    def members(self) -> Iterable[Member]:
        """All parameters with their places."""
        return (member for span in self.spans for member in span.members)

    def forget(self) -> None:
        """Expect nothing any more of what a backward was to finish."""
        for handle in self._handles:
            handle.remove()
        self._expected = list[set[int]]()
        self._behind = list[set[int] | None]()  # None: of spans that wait for the end
        self.launched = 0
        self._works, self._handles = list[Any](), list[Any]()

    @torch.no_grad()
    def zero_gradients(self) -> None:
        """Zero all gradients in place, make every `.grad` a view of the buffer, and `forget`."""
        self.forget()
        zero_each(
            [
                span.gradients if span.sharded_layer is None else span.kept_gradients
                for span in self.spans
            ]
        )
        for member in self.members():
            member.parameter.grad = member.gradient

    def overlap(self, output: Tensor, settled: Iterable[Tensor] | None = None) -> None:
        """Reduce spans while the backward of `output` is running.

        settled: parameters that no later backward of the step adds to; None = all, this backward is
        the last one. A rank with several chunks calls it before the last backward of each.
        """
        if self.group is None:
            return
        found = (
            (node, [parameter for parameter in parameters if id(parameter) in self._span_of])
            for node, parameters in accumulating_nodes([output.grad_fn])
        )
        accumulating = [(node, parameters) for node, parameters in found if parameters]
        self.expect(
            [parameter for _, parameters in accumulating for parameter in parameters], settled
        )
        for node, parameters in accumulating:
            self._handles.append(node.register_hook(partial(self.ready, parameters)))

    def expect(self, parameters: Iterable[Tensor], settled: Iterable[Tensor] | None = None) -> None:
        """Say which gradients of `settled` (None = all) the coming backward will still add to.

        `ready` must follow for each of them; the gradients of the others are final already.
        """
        if not self._expected:  # the first time in a step
            self._expected = [
                {id(member.parameter) for member in span.members} for span in self.spans
            ]
            self._behind = [
                {id(member.parameter) for member in span.behind} or None for span in self.spans
            ]
        awaited = {id(parameter) for parameter in parameters}
        for parameter in (
            [member.parameter for member in self.members()] if settled is None else settled
        ):
            if id(parameter) not in awaited:
                self._discard(parameter)

    def _is_complete(self, number: int) -> bool:
        """Tells whether a span's gradients are complete. Those of a sharded layer are in what is
        kept when the layer in front is done, hence when the one before that has begun.

        What goes over a group of sharded layers waits for the end of the backward: an eager
        backward gets to it between their exchanges, one by graphs behind those of a whole graph,
        and ranks may differ in that.
        """
        span = self.spans[number]
        if self._expected[number] or (span.sharded_layer is None and span.group in self._busy):
            return False
        return span.within.across is None or self._behind[number] == set()

    def ready(self, parameters: Sequence[Tensor], *_: Any) -> None:
        """Say that these gradients of the step are final; starts to reduce spans that are complete
        by it. Further arguments are those of a hook.

        Autograd calls hooks from one thread per device, and from the caller's for nodes that got no
        gradient. Sending lets go of the interpreter, so without the lock a second thread would send
        the next span before this one.
        """
        with self._one_at_a_time:
            for parameter in parameters:
                self._discard(parameter)
            for waiting in self._behind:
                if waiting is not None:
                    waiting.difference_update(map(id, parameters))
            # In order, so that all ranks send the same span at the same time whatever each of them
            # finished first.
            while self.launched < len(self.spans) and self._is_complete(self.launched):
                self._launch()

    def reduce(self) -> None:
        """Sum all gradients over the group: afterwards every span's `own_gradients` are final. Once
        per step."""
        while self.launched < len(self.spans):
            self._launch()
        for work in self._works:
            work.wait()
        for span in self._shared:
            if span.group is None:
                span.own_gradients.copy_(span.gradients)
            dist.all_reduce(span.own_gradients, group=span.sharers)
        self.forget()

    @torch.no_grad()
    def begin_gather(self, span: GradientBucket) -> None:
        """Say that the rank has updated its part of a span; starts to give it to the others, while
        other spans are updated. In the same order on all ranks, and `gather` must follow."""
        if span.within.across is None:
            self._begin_gather(span)

    @torch.no_grad()
    def gather(self) -> None:
        """Give every rank the parts that the others have updated. Work queued afterwards sees all
        of them."""
        for work in self._gather_across():
            work.wait()
        for span in self.spans:
            self._begin_gather(span)
        for work in self._gathers.values():
            work.wait()
        self._gathers = {}
        # What layers will gather next is something else: a backward that waits for it must know.
        torch.autograd.graph.increment_version(
            [m.parameter for span in self.spans if span.is_gathered for m in span.members]
        )

    def gathered(self) -> dict[str, Tensor]:
        """The parameters that are whole only while their layer runs: what this rank keeps of each,
        by name."""
        return {
            member.name: span.part(member, span.own_parameters)
            for span in (*self.spans, *self.frozen)
            if span.is_gathered
            for member in span.members
        }

    def kept(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The memory that this rank keeps of `parameters`: of sharded ones its parts alone."""
        spans = [span for span in (*self.spans, *self.frozen) if span.is_gathered]
        gathered = {id(member.parameter) for span in spans for member in span.members}
        whole = [local_tensor(p.detach()) for p in parameters if id(p) not in gathered]
        return whole + [span.kept_parameters for span in spans]

    def _begin_gather(self, span: GradientBucket) -> None:
        """Once a step; nothing for what its layer gathers."""
        group = span.within.shard
        if group is not None and not span.is_gathered and id(span) not in self._gathers:
            self._gathers[id(span)] = all_gather_flat(
                span.parameters, span.kept_parameters, group=group, async_op=True
            )

    def _reduce_across(self, span: GradientBucket) -> None:
        """Begin to sum what is kept over all that keep the same."""
        if (group := span.within.across) is not None:
            kept, own = span.kept_gradients, span.own_gradients
            self._works.append(reduce_scatter_flat(own, kept, group=group, async_op=True))

    def _gather_across(self) -> list[Any]:
        """Begin to give all that keep the same what each has updated; what to wait for."""
        return [
            all_gather_flat(span.kept_parameters, span.own_parameters, group=group, async_op=True)
            for span in self.spans
            if (group := span.within.across) is not None
        ]

    @property
    def shards_layers(self) -> bool:
        """True if layers are sharded, so that exchanges of theirs are among those of the spans."""
        return any(s.sharded_layer is not None for s in (*self.spans, *self.frozen))

    def _discard(self, parameter: Tensor) -> None:
        if id(parameter) in self._span_of:
            self._expected[self._span_of[id(parameter)]].discard(id(parameter))

    def _launch(self) -> None:
        span = self.spans[self.launched]
        self.launched += 1
        if span.sharded_layer is not None:  # sent as the layer's backwards ended
            self._reduce_across(span)
            return
        for member in span.members:
            member.attach()
        if span.group is None:
            return
        if self.result == "mean":
            # Before they are sent, as in DistributedDataParallel: half precision overflows later.
            span.gradients.div_(dist.get_world_size(span.group))
        self._works.append(
            reduce_scatter_flat(span.own_gradients, span.gradients, group=span.group, async_op=True)
            if self.result == "part"
            else dist.all_reduce(span.gradients, group=span.group, async_op=True)
        )


def accumulating_nodes(
    roots: Iterable[Any], walked: set[Any] | None = None
) -> Iterable[tuple[Any, list[Tensor]]]:
    """The autograd nodes behind `roots` that add to parameters' gradients: captured regions, and
    accumulators, in a capture those of aliases. walked: gets all nodes."""
    seen: set[Any] = set() if walked is None else walked
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        region = getattr(node, "region", None)
        if isinstance(region, Region):
            yield node, list(region.parameters.parameters)
            seen.add(region.parameters.tensor.grad_fn)  # the same parameters
        elif type(node).__name__ == "AccumulateGrad":
            yield node, [unaliased(node.variable)]  # type: ignore[attr-defined]
        stack.extend(parent for parent, _ in node.next_functions)
