"""Data parallelism: flat buffers, gradients reduced in spans, every rank updates its own part of
all parameters (or, with an optimizer that knows of no parts, all of them).

    backward   .grad views of one flat buffer, added to in place (by captured graphs too)
    reduce     span complete -> reduce-scatter: each rank gets the sum of its own part
    update     the optimizer changes own parts only (ZeRO stage 1, Rajbhandari et al. 2020,
               arXiv:1910.02054)
    gather     all-gather puts the new parts into everyone's parameters, in place

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
turns (`parallel/sharded_layers.py`). What is smaller than a matrix stays whole.

`plan_gradient_buckets` says where every parameter lies in the flat buffers: spans in the order in
which a backward finishes gradients.

    registered    embed  layer 0  layer 1  head            (a backward runs from right to left)
    span 0        |head .. layer 1 ..|       first to be complete, first to be reduced
    span 1        |layer 0 .. embed ..|pad|  every span divides by the number of ranks: each owns
                                             one equal part

A span holds parameters of one kind only (dtype, weight decay or not, whole on every tensor-parallel
rank or a part), so that whatever is done to a span is one kernel. The matrices of a layer have a
span to themselves, of any size, so one collective moves all of them; whether layers are sharded or
not, so that the sums of a norm have the same bits either way. Other spans are closed at SPAN_BYTES.
The invariant: a parameter lies in one span, whole, and starts at a multiple of ALIGNMENT elements.
"""

import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from packgraph.graphs.parameters import local_tensor
from packgraph.graphs.region import Region
from packgraph.ops.collectives import all_gather_flat, reduce_scatter_flat
from packgraph.parallel.deferred import fill_deferred, values_of
from packgraph.parallel.pieces import Pieces, part_of
from packgraph.parallel.turns import take_turns

ALIGNMENT = 128  # elements: 256 bytes in bfloat16, which is what kernels like
Result = Literal["part", "sum", "mean"]
Shard = Literal["none", "gradients", "parameters"]
SPAN_BYTES = (
    32 * 2**20
)  # large enough for full bandwidth, small enough that most of a model overlaps with backward

WHOLE = "copies"  # the group of parameters that are no part of anything: `Part.copies`


@dataclass(frozen=True)
class Placed:
    """The place of parameter `index` in its span, in elements."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class GradientBucketPlan:
    """One span. size: elements with padding, a multiple of the number of ranks."""

    kind: Hashable
    members: tuple[Placed, ...]
    size: int


def plan_gradient_buckets(
    sizes: Sequence[int],
    kinds: Sequence[Hashable],
    ranks: int,
    most: int | None,
    undivided: Collection[Hashable] = (),
) -> list[GradientBucketPlan]:
    """Buckets for parameters of `sizes` elements, given in order of registration.

    kinds: parameters of unequal kinds share no span. most: elements after which a span is closed (a
    larger parameter has one of its own); None = never. undivided: kinds of which all parameters lie
    in one span, however many elements they have.
    """
    open_now: dict[Hashable, list[Placed]] = {}
    done: list[GradientBucketPlan] = []
    for index in reversed(range(len(sizes))):
        members = open_now.setdefault(kinds[index], [])
        start = _rounded(members[-1].stop, ALIGNMENT) if members else 0
        is_full = most is not None and start + sizes[index] > most
        if members and is_full and kinds[index] not in undivided:
            done.append(_closed(kinds[index], members, ranks))
            members, start = [], 0
            open_now[kinds[index]] = members
        members.append(Placed(index, start, start + sizes[index]))
    done += [_closed(kind, members, ranks) for kind, members in open_now.items()]
    return sorted(done, key=lambda span: min(-member.index for member in span.members))


def _closed(kind: Hashable, members: list[Placed], ranks: int) -> GradientBucketPlan:
    return GradientBucketPlan(kind, tuple(members), _rounded(members[-1].stop, ALIGNMENT * ranks))


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@dataclass
class Member:
    """A parameter, and which elements of its span it is. gradient: its view, a DTensor for a
    DTensor.

    The gradient of a DTensor that is copied to all ranks of its mesh is this rank's share of a sum
    (Partial): so nothing is sent while microbatches add to it, but once per step.
    """

    name: str
    parameter: nn.Parameter
    place: slice
    gradient: Tensor

    @torch.no_grad()
    def attach(self) -> None:
        """Make `.grad` the view again; what was accumulated elsewhere is taken in, None counts as
        zero."""
        found = self.parameter.grad
        if found is self.gradient:
            return
        if found is None:
            local_tensor(self.gradient).zero_()
        elif local_tensor(found).data_ptr() != local_tensor(self.gradient).data_ptr():
            self.gradient.copy_(found)
        self.parameter.grad = self.gradient


@dataclass
class GradientBucket:
    """A part of the flat buffers, all of one kind.

    parameters, gradients: [size] of one dtype; parameters is empty where every rank gets whole
    gradients, since none of them has moved. group: the replicas that hold the same parameters,
    None = no other rank does. own: the part of this rank. own_parameters, own_gradients: [size /
    ranks of the group]; after `reduce` the latter are the sums over the group. sharded_layer: whose
    `gradients` are memory of other layers, too, so that sums are in own_gradients alone; None = of
    no other. is_gathered: so are `parameters`, and own_parameters are memory of their own.
    decays: weight decay applies (two or more dimensions). sharded: other tensor-parallel ranks hold
    other elements, not copies. sharers: the ranks over which gradients of copies are still to be
    summed, None where every rank computes the whole gradient. tied: the name of the one parameter
    here of which other pipeline stages (the sharers) have copies, None for all others.
    """

    members: list[Member]
    parameters: Tensor
    gradients: Tensor
    group: dist.ProcessGroup | None
    own: slice
    own_parameters: Tensor
    own_gradients: Tensor
    decays: bool
    sharded: bool
    sharers: dist.ProcessGroup | None
    tied: str | None
    sharded_layer: int | None = None
    is_gathered: bool = False

    def part(self, member: Member, flat: Tensor) -> Tensor:
        """What `flat` (a value for each element of this rank's part) says about one parameter,
        without a copy.

        A tensor of the parameter's shape where every rank has all of it, else `Pieces`.
        """
        start, stop = max(member.place.start, self.own.start), min(member.place.stop, self.own.stop)
        held = flat[start - self.own.start : max(start, stop) - self.own.start]
        local, part = local_tensor(member.parameter), part_of(member.parameter)
        shape, offsets = member.parameter.shape, (0,) * local.ndim
        if part is not None:
            shape, offsets = part.shape, part.offsets
        elif isinstance(member.parameter, DTensor):
            (chunk,) = member.parameter.__create_chunk_list__()
            offsets = chunk.offsets
        elif self.own_gradients.numel() == self.gradients.numel():
            return held.view(local.shape)
        return Pieces.of_flat(held, start - member.place.start, local.shape, shape, offsets)


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
    of alone. apart: names of parameters that share spans with each other only.
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
    ) -> None:
        """Moves the parameters into the buffers (gradients only, where they are whole). Raises
        ValueError when there is nothing to train, or a tied parameter is copied over tensor
        parallel ranks as well."""
        self.group, self.result = group, result
        every = list(named_parameters)
        named = [(name, parameter) for name, parameter in every if parameter.requires_grad]
        if not named:
            raise ValueError(
                "there is no parameter that needs a gradient, so there is nothing to train"
            )
        self.spans = _make_spans(
            named,
            {WHOLE: group, **(parts or {})},
            span_bytes,
            ties or {},
            result == "part",
            {} if group is None else layers or {},
            "none" if group is None else shard,
            apart,
        )
        fill_deferred(every, self.spans)
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
        self._expected: list[set[int]] = []
        self._launched = 0
        self._one_at_a_time = threading.Lock()
        self._works: list[Any] = []
        self._handles: list[Any] = []

    def members(self) -> Iterable[Member]:
        """All parameters with their places."""
        return (member for span in self.spans for member in span.members)

    @torch.no_grad()
    def zero_gradients(self) -> None:
        """Zero all gradients in place and make every `.grad` a view of the buffer."""
        torch._foreach_zero_(
            [
                span.gradients if span.sharded_layer is None else span.own_gradients
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
            self._handles.append(node.register_hook(_after(self.ready, parameters)))

    def expect(self, parameters: Iterable[Tensor], settled: Iterable[Tensor] | None = None) -> None:
        """Say which gradients of `settled` (None = all) the coming backward will still add to.

        `ready` must follow for each of them; the gradients of the others are final already.
        """
        if not self._expected:  # the first time in a step
            self._expected = [
                {id(member.parameter) for member in span.members} for span in self.spans
            ]
        awaited = {id(parameter) for parameter in parameters}
        for parameter in (
            [member.parameter for member in self.members()] if settled is None else settled
        ):
            if id(parameter) not in awaited:
                self._discard(parameter)

    def ready(self, parameters: Sequence[Tensor]) -> None:
        """Say that these gradients of the step are final; starts to reduce spans that are complete
        by it.

        Autograd calls hooks from one thread per device, and from the caller's for nodes that got no
        gradient. Sending lets go of the interpreter, so without the lock a second thread would send
        the next span before this one.
        """
        with self._one_at_a_time:
            for parameter in parameters:
                self._discard(parameter)
            # In order, so that all ranks send the same span at the same time whatever each of them
            # finished first.
            while self._launched < len(self.spans) and not self._expected[self._launched]:
                self._launch()

    def reduce(self) -> None:
        """Sum all gradients over the group: afterwards every span's `own_gradients` are final. Once
        per step."""
        while self._launched < len(self.spans):
            self._launch()
        for work in self._works:
            work.wait()
        for span in self._shared:
            if span.group is None:
                span.own_gradients.copy_(span.gradients)
            dist.all_reduce(span.own_gradients, group=span.sharers)
        self.forget()

    def forget(self) -> None:
        """Expect nothing any more of what a backward was to finish."""
        for handle in self._handles:
            handle.remove()
        self._expected, self._launched, self._works, self._handles = [], 0, [], []

    @torch.no_grad()
    def gather(self) -> None:
        """Give every rank the parts that the others have updated. Work queued afterwards sees all
        of them."""
        works = [
            all_gather_flat(span.parameters, span.own_parameters, group=span.group, async_op=True)
            for span in self.spans
            if span.group is not None and not span.is_gathered
        ]
        for work in works:
            work.wait()
        # What layers will gather next is something else: a backward that waits for it must know.
        torch.autograd.graph.increment_version(
            [m.parameter for span in self.spans if span.is_gathered for m in span.members]
        )

    def gathered(self) -> dict[str, Tensor]:
        """The parameters that are whole only while their layer runs: what this rank keeps of each,
        by name."""
        return {
            member.name: span.part(member, span.own_parameters)
            for span in self.spans
            if span.is_gathered
            for member in span.members
        }

    def kept(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The memory that this rank keeps of `parameters`: of sharded ones its parts alone."""
        spans = [span for span in self.spans if span.is_gathered]
        gathered = {id(member.parameter) for span in spans for member in span.members}
        whole = [local_tensor(p.detach()) for p in parameters if id(p) not in gathered]
        return whole + [span.own_parameters for span in spans]

    @property
    def launched(self) -> int:
        """Spans of this step that are on their way already."""
        return self._launched

    def _discard(self, parameter: Tensor) -> None:
        if id(parameter) in self._span_of:
            self._expected[self._span_of[id(parameter)]].discard(id(parameter))

    def _launch(self) -> None:
        span = self.spans[self._launched]
        self._launched += 1
        if span.sharded_layer is not None:  # sent as the layer's backwards ended
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


def _after(
    ready: Callable[[Sequence[Tensor]], None], parameters: Sequence[Tensor]
) -> Callable[..., None]:
    return lambda *_: ready(parameters)


def accumulating_nodes(
    roots: Iterable[Any], walked: set[Any] | None = None
) -> Iterable[tuple[Any, list[Tensor]]]:
    """The autograd nodes behind `roots` that add to parameters' gradients: captured regions, and
    accumulators. walked: gets all nodes."""
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
            yield node, [node.variable]  # type: ignore[attr-defined]
        stack.extend(parent for parent, _ in node.next_functions)


def _make_spans(
    named: list[tuple[str, nn.Parameter]],
    groups: Mapping[str, dist.ProcessGroup | None],
    span_bytes: int,
    ties: Mapping[str, dist.ProcessGroup],
    moves: bool,
    layers: Mapping[str, int],
    shard: Shard,
    apart: Collection[str],
) -> list[GradientBucket]:
    """groups: the replicas of whole parameters, and of parts by `Part.copies`. moves: each rank
    gets its own part of the sums, and parameters move. layers, shard: as in FlatParameters."""
    everyone, spans = groups[WHOLE], list[GradientBucket]()
    # Replicas of the same part are some of all replicas, their number divides that of all, and so
    # each span.
    replicas = 1 if everyone is None else dist.get_world_size(everyone)
    for dtype in dict.fromkeys(parameter.dtype for _, parameter in named):
        ours = [(name, parameter) for name, parameter in named if parameter.dtype == dtype]
        most = None if everyone is None else span_bytes // dtype.itemsize
        # A tied parameter has a span to itself: then every stage has it at the same place, cut into
        # the same parts.
        kinds = [
            (
                parameter.ndim >= 2,
                *_spread(parameter),
                name if name in ties else None,
                (copies := WHOLE if (part := part_of(parameter)) is None else part.copies),
                name in apart,
                layers.get(name) if groups[copies] is not None else None,
            )
            for name, parameter in ours
        ]
        sizes = [local_tensor(parameter).numel() for _, parameter in ours]
        of_layers = {kind for kind in kinds if kind[-1] is not None}
        plans = plan_gradient_buckets(sizes, kinds, replicas, most, of_layers)
        device = local_tensor(ours[0][1]).device
        # Two storages: whoever journals writes to gradients must not have to save the parameters
        # with them.
        turns = [kinds[plan.members[0].index][-1] for plan in plans]
        alone_all = [None] * len(plans)
        pieces = [
            _memory(padded, turns if passes else alone_all, dtype, device)
            for padded, passes in (
                ([plan.size if moves else 0 for plan in plans], shard == "parameters"),
                ([plan.size for plan in plans], shard != "none"),
            )
        ]
        for plan, parameters, gradients in zip(plans, *pieces, strict=True):
            decays, sharded, shared, tied, copies, _, layer = kinds[plan.members[0].index]
            group = groups[copies]
            ranks, rank = (
                (dist.get_world_size(group), dist.get_rank(group))
                if group is not None and moves
                else (1, 0)
            )
            own = slice(rank * plan.size // ranks, (rank + 1) * plan.size // ranks)
            gathered = shard == "parameters" and layer is not None
            if gathered:
                parameters.zero_()  # of other layers, in the padding, too
            members = [
                _place(ours[place.index], slice(place.start, place.stop), parameters, gradients)
                for place in plan.members
            ]
            if shared and tied is not None:
                raise ValueError(
                    f"{tied} is tied to another stage and copied over tensor parallel ranks: split "
                    "it, as "
                    "packgraph.parallel.tensor.parallelize does with embedding and head"
                )
            sharers = ties[tied] if tied is not None else None
            if shared:
                sharers = ours[plan.members[0].index][1].device_mesh.get_group()  # type: ignore[attr-defined]
            alone = group is None and sharers is None
            reduced = gradients if alone or not moves else torch.zeros_like(gradients[own])
            spans.append(
                GradientBucket(
                    members,
                    parameters,
                    gradients,
                    group,
                    own,
                    # Before the next layer gets the same memory.
                    parameters[own].clone() if gathered else parameters[own if moves else slice(0)],
                    reduced,
                    decays,
                    sharded,
                    sharers,
                    tied,
                    layer if shard != "none" else None,
                    gathered,
                )
            )
    return spans


def _memory(
    sizes: Sequence[int],
    layers: Sequence[int | None],
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """Zeros [size] for every span: memory of its own where it has no layer, else a place in the
    buffer in which layers take turns in their order."""
    order = sorted({layer for layer in layers if layer is not None})
    ends, starts = dict.fromkeys(order, 0), list[int]()
    for size, layer in zip(sizes, layers, strict=True):
        starts.append(0 if layer is None else ends[layer])
        if layer is not None:
            ends[layer] += size
    places, count = take_turns([ends[layer] for layer in order])
    begin = dict(zip(order, places, strict=True))
    buffer = torch.zeros(count, dtype=dtype, device=device)
    own = [size if layer is None else 0 for size, layer in zip(sizes, layers, strict=True)]
    whole = torch.zeros(sum(own), dtype=dtype, device=device).split(own)
    return [
        single if layer is None else buffer[begin[layer] + start :][:size]
        for single, layer, start, size in zip(whole, layers, starts, sizes, strict=True)
    ]


@torch.no_grad()
def _place(
    named: tuple[str, nn.Parameter], place: slice, parameters: Tensor, gradients: Tensor
) -> Member:
    """Let a parameter live in the buffers: the same object, with its present values and gradient.
    Where there is none for it, its gradient alone, from its first backward on."""
    name, parameter = named
    local = local_tensor(parameter)
    if parameters.numel():
        home = parameters[place].view(local.shape)
        if values_of(parameter) is None:
            home.copy_(local)
        local.data = home
    gradient = gradients[place].view(local.shape)
    if isinstance(parameter, DTensor):
        placements = (
            parameter.placements
            if _spread(parameter)[0]
            else [Partial()] * parameter.device_mesh.ndim
        )
        gradient = DTensor.from_local(
            gradient,
            parameter.device_mesh,
            placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    member = Member(name, parameter, place, gradient)
    if parameters.numel() or parameter.grad is not None:
        member.attach()
    return member


def _spread(parameter: Tensor) -> tuple[bool, bool]:
    """Whether other ranks of a DTensor's mesh hold other elements; whether copies, and each a share
    of the gradient.

    Neither for a plain tensor: where there are copies, all ranks compute the same whole gradient.
    """
    if not isinstance(parameter, DTensor):
        return False, False
    copied = all(placement.is_replicate() for placement in parameter.placements)
    return not copied, copied
