"""Spans: parameters and gradients as views of flat buffers, and which part of them a rank keeps.

    span        | matrix | matrix | pad |      parameters, gradients
    replicas    |   0    |   1    |   2 |      `own`: the part that a rank updates

Where layers are shared by some of the replicas, such as those of a host (hybrid sharding, Zhao et
al. 2023, arXiv:2304.11277), each of them keeps a part that replicas of other hosts keep, too, and
updates a part of that:

    kept        |       0, 2       |       1, 3       |     by replica, hosts of two
    own         |    0   |    2    |    1   |    3    |

What becomes of spans is said in `parallel/data.py`. A backward ends gradients from the last
parameter that was registered to the first, and spans follow that order:

    registered    embed  layer 0  layer 1  head            (a backward runs from right to left)
    span 0        |head .. layer 1 ..|       first to be complete, first to be reduced
    span 1        |layer 0 .. embed ..|pad|  every span divides by the number of ranks: each owns
                                             one equal part

Norms of all layers share a span, which is complete when the first layer is: it is one of the last.
A span holds parameters of one kind only (dtype, weight decay or not, whole on every tensor-parallel
rank or a part), so that whatever is done to a span is one kernel. The matrices of a layer have a
span to themselves, of any size, so one collective moves all of them; whether layers are sharded or
not, so that the sums of a norm have the same bits either way. Other spans are closed at SPAN_BYTES.
The invariant: a parameter lies in one span, whole, and starts at a multiple of ALIGNMENT elements.

Layers that are whole only while they run take turns in one buffer (`take_turns`):

    unit        embed       layer 0   layer 1   layer 2   layer 3   head
    elements    |0 ..... E| |E .. |   |0 .. |   |l .. |   |0 .. |   |0 ..

Neighbours are there at the same time: while one is used the next is on its way. All others may
share elements. The largest get places first, so embedding and head, which are larger than layers,
have the same, and layers alternate within it.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from packgraph.graphs.parameters import gradient_dtype, local_tensor
from packgraph.parallel.deferred import values_of
from packgraph.parallel.layout import Shard
from packgraph.parallel.mesh import ShardGroups
from packgraph.parallel.peer_copies import PeerParts, Peers
from packgraph.parallel.pieces import Pieces, part_of

# Large enough for full bandwidth, small enough that most of a model overlaps with the backward.
SPAN_BYTES = 32 * 2**20
ALIGNMENT = 128  # elements: 256 bytes in bfloat16, which is what kernels like
WHOLE = "copies"  # the group of parameters that are no part of anything: `Part.copies`


@dataclass(frozen=True)
class GradientBucketPlan:
    """One span. members: numbers of its parameters, and their elements of it. size: elements with
    padding, a multiple of the number of ranks."""

    kind: Hashable
    members: tuple[tuple[int, slice], ...]
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
    open_now: dict[Hashable, list[tuple[int, slice]]] = {}
    done: list[GradientBucketPlan] = []
    for index in reversed(range(len(sizes))):
        members = open_now.setdefault(kinds[index], [])
        start = _rounded(members[-1][1].stop, ALIGNMENT) if members else 0
        is_full = most is not None and start + sizes[index] > most
        if members and is_full and kinds[index] not in undivided:
            done.append(_closed(kinds[index], members, ranks))
            members, start = [], 0
            open_now[kinds[index]] = members
        members.append((index, slice(start, start + sizes[index])))
    done += [_closed(kind, members, ranks) for kind, members in open_now.items()]
    # A backward comes to the first parameters last.
    return sorted(done, key=lambda span: max(-index for index, _ in span.members))


def _closed(kind: Hashable, members: list[tuple[int, slice]], ranks: int) -> GradientBucketPlan:
    size = _rounded(members[-1][1].stop, ALIGNMENT * ranks)
    return GradientBucketPlan(kind, tuple(members), size)


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def take_turns(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Starts of the units, and the elements that all of them need. No two neighbours overlap.

    sizes: elements of the units, in the order in which they are used.
    """
    starts = [-1] * len(sizes)
    for unit in sorted(range(len(sizes)), key=lambda unit: -sizes[unit]):
        taken = sorted(
            (starts[other], starts[other] + sizes[other])
            for other in (unit - 1, unit + 1)
            if 0 <= other < len(sizes) and starts[other] >= 0
        )
        start = 0
        for first, stop in taken:
            if start + sizes[unit] > first:
                start = max(start, stop)
        starts[unit] = start
    return starts, max((a + n for a, n in zip(starts, sizes, strict=True)), default=0)


@dataclass
class Member:
    """A parameter, and which elements of its span it is. gradient: its view, a DTensor for a
    DTensor.

    That of a frozen parameter is empty. The gradient of a DTensor that is copied to all ranks of
    its mesh is this rank's share of a sum (Partial): so nothing is sent while microbatches add to
    it, but once per step.
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

    parameters, gradients: [size] of one dtype each, that of gradients being the `grad_dtype` of the
    parameters; parameters is empty where every rank gets whole gradients, since none of them has
    moved. group: the replicas that hold the same parameters, None = no other rank does. own: the
    part of this rank. own_parameters, own_gradients: [size / ranks of the group]; after `reduce`
    the latter are the sums over the group, in place of what this rank's microbatches have added up
    unless there is memory apart. sharded_layer: whose `gradients` are memory of other layers, too,
    so that sums are in kept_gradients alone; None = of no other. is_gathered: so are `parameters`,
    and kept_parameters are memory of their own. kept_parameters, kept_gradients: [size / ranks of
    `within.shard`], of a sharded layer: what this rank keeps of them, own_parameters are among it;
    the latter are sums over within.shard. peers: how the layer's parts are exchanged where ranks
    read each other's memory, None = by collectives. behind: what has its gradient only after those
    of a sharded layer are in kept_gradients; empty where that is not known before the backward
    ends. decays: weight decay applies (two or more dimensions, no bias). sharded: other
    tensor-parallel ranks hold other elements, not copies. sharers: the ranks over which gradients
    of copies are still to be summed, None where every rank computes the whole gradient. tied: the
    name of the one parameter here of which other pipeline stages (the sharers) have copies, None
    for all others.
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
    within: ShardGroups
    kept_parameters: Tensor
    kept_gradients: Tensor
    sharded_layer: int | None = None
    is_gathered: bool = False
    peers: PeerParts | None = None
    behind: Sequence[Member] = ()

    @property
    def is_frozen(self) -> bool:
        """True if its parameters are gathered only: there is no memory for gradients."""
        return not self.gradients.numel() and self.parameters.numel() > 0

    def part(self, member: Member, flat: Tensor, first: int = 0) -> Tensor:
        """Values in `flat` of one parameter, without a copy.

        flat: a value for each element of this rank's part from `first` on, or of some of them, with
        all that this rank has of the parameter. Returns a tensor of the parameter's shape where
        every rank has all of it, else `Pieces`.
        """
        return self._part(member, flat, self.own, first)

    def kept_part(self, member: Member) -> Tensor:
        """The same of kept_parameters."""
        size = self.kept_parameters.numel()
        start = self.own.start // size * size
        return self._part(member, self.kept_parameters, slice(start, start + size))

    def _part(self, member: Member, flat: Tensor, place: slice, first: int = 0) -> Tensor:
        start, stop = max(member.place.start, place.start), min(member.place.stop, place.stop)
        before = place.start + first
        held = flat[start - before : max(start, stop) - before]
        local, part = local_tensor(member.parameter), part_of(member.parameter)
        shape, offsets = member.parameter.shape, (0,) * local.ndim
        if part is not None:
            shape, offsets = part.shape, part.offsets
        elif isinstance(member.parameter, DTensor):
            (chunk,) = member.parameter.__create_chunk_list__()
            offsets = chunk.offsets
        elif place == slice(0, self.gradients.numel()):
            return held.view(local.shape)
        return Pieces.of_flat(held, start - member.place.start, local.shape, shape, offsets)


class _Kind(NamedTuple):
    """Key of parameters that may share a span: see `GradientBucket`. shared: copies on other ranks
    of a DTensor's mesh. copies: `Part.copies`. apart: of `FlatParameters`. layer: which has it to
    itself."""

    decays: bool
    sharded: bool
    shared: bool
    tied: str | None
    copies: str
    apart: bool
    trained: bool
    layer: int | None


def make_spans(
    named: list[tuple[str, nn.Parameter]],
    groups: Mapping[str, dist.ProcessGroup | None],
    span_bytes: int,
    ties: Mapping[str, dist.ProcessGroup],
    moves: bool,
    layers: Mapping[str, int],
    shard: Shard,
    apart: Collection[str],
    within: Mapping[str, ShardGroups],
    peers: Peers | None = None,
    sums_apart: bool = False,
) -> list[GradientBucket]:
    """groups: the replicas of whole parameters, and of parts by `Part.copies`. moves: each rank
    gets its own part of the sums, and parameters move. layers, shard, within, sums_apart: as in
    FlatParameters. peers: the ranks of `within[WHOLE].shard`, where they read each other's
    memory."""

    def kind(name: str, parameter: nn.Parameter) -> _Kind:
        copies = WHOLE if (part := part_of(parameter)) is None else part.copies
        return _Kind(
            parameter.ndim >= 2 and not name.endswith("bias"),  # those of experts are [E, d]
            *_spread(parameter),
            # It has a span to itself: then every stage has it at the same place, cut into the same
            # parts.
            name if name in ties else None,
            copies,
            name in apart,
            parameter.requires_grad,
            layers.get(name) if groups[copies] is not None else None,
        )

    everyone, spans = groups[WHOLE], list[GradientBucket]()
    # Replicas of the same part are some of all replicas, their number divides that of all, and so
    # each span.
    replicas = 1 if everyone is None else dist.get_world_size(everyone)
    dtypes = [(parameter.dtype, gradient_dtype(parameter)) for _, parameter in named]
    for of_span in dict.fromkeys(dtypes):
        ours = [each for each, found in zip(named, dtypes, strict=True) if found == of_span]
        most = None if everyone is None else span_bytes // of_span[0].itemsize
        kinds = [kind(*each) for each in ours]
        sizes = [local_tensor(parameter).numel() for _, parameter in ours]
        of_layers = {found for found in kinds if found.layer is not None}
        plans = plan_gradient_buckets(sizes, kinds, replicas, most, of_layers)
        of = [kinds[plan.members[0][0]] for plan in plans]
        # Experts of which replicas that share layers have one each are whole.
        turns = [
            each.layer if shard != "none" and within[each.copies].shard is not None else None
            for each in of
        ]
        device = local_tensor(ours[0][1]).device
        zeros, sums = (partial(torch.zeros, dtype=dtype, device=device) for dtype in of_span)
        for plan, each, room in zip(
            plans, of, _make_rooms(plans, of, turns, moves, shard, peers, zeros, sums), strict=True
        ):
            chosen = [(ours[index], place) for index, place in plan.members]
            group = groups[each.copies]
            shares = ShardGroups(group) if room.turn is None else within[each.copies]
            first, sharers = chosen[0][0][1], None if each.tied is None else ties[each.tied]
            if each.shared and each.tied is not None:
                raise ValueError(
                    f"{each.tied} is tied to another stage and copied over tensor parallel ranks: "
                    "split it, as packgraph.parallel.tensor.parallelize does with embedding and "
                    "head"
                )
            if isinstance(first, DTensor) and each.shared:
                sharers = first.device_mesh.get_group()
            spans.append(
                _make_bucket(chosen, each, room, group, shares, sharers, moves, sums_apart)
            )
    return spans


class _Room(NamedTuple):
    """Memory of a span. parameters, gradients: [size], empty where it has none. kept: for what this
    rank keeps of parameters that are gathered. turn: of its layer, None = the memory is its own.
    peers: who reads gradients and `kept`."""

    parameters: Tensor
    gradients: Tensor
    kept: Tensor
    turn: int | None
    is_gathered: bool
    peers: Peers | None


def _make_rooms(
    plans: Sequence[GradientBucketPlan],
    kinds: Sequence[_Kind],
    turns: Sequence[int | None],
    moves: bool,
    shard: Shard,
    peers: Peers | None,
    zeros: Callable[[int], Tensor],
    sums: Callable[[int], Tensor],
) -> list[_Room]:
    """Memory of spans of one dtype. turns: of their layers. moves, peers: as in `make_spans`.
    zeros, sums: make that of parameters and of gradients."""
    reading = [
        None if turn is None or kind.copies != WHOLE else peers
        for turn, kind in zip(turns, kinds, strict=True)
    ]
    read = peers if any(reading) else None
    shown, shown_sums = (
        make if read is None else partial(read.allocate, dtype=make(0).dtype)
        for make in (zeros, sums)
    )
    gathers = [shard == "parameters" and turn is not None for turn in turns]
    kept = [
        plan.size // found.ranks if gathered and found is not None else 0
        for plan, gathered, found in zip(plans, gathers, reading, strict=True)
    ]
    # Two storages: whoever journals writes to gradients must not have to save the parameters with
    # them.
    parameters = _memory(
        [plan.size if moves else 0 for plan in plans],
        turns if shard == "parameters" else [None] * len(plans),
        zeros,
        zeros,
    )
    sizes = [plan.size if kind.trained else 0 for plan, kind in zip(plans, kinds, strict=True)]
    gradients = _memory(sizes, turns, sums, shown_sums)
    rooms = (shown(sum(kept)) if any(kept) else zeros(0)).split(kept)
    return list(map(_Room, parameters, gradients, rooms, turns, gathers, reading))


def _make_bucket(
    chosen: Sequence[tuple[tuple[str, nn.Parameter], slice]],
    kind: _Kind,
    room: _Room,
    group: dist.ProcessGroup | None,
    shares: ShardGroups,
    sharers: dist.ProcessGroup | None,
    moves: bool,
    sums_apart: bool,
) -> GradientBucket:
    """The bucket of parameters, which move into its memory. chosen: with their places."""
    parameters, gradients = room.parameters, room.gradients
    if room.is_gathered:
        parameters.zero_()  # what another layer has left between the members
    members = [_place(named, at, parameters, gradients) for named, at in chosen]
    size = max(parameters.numel(), gradients.numel())
    kept = _part(slice(0, size), shares.shard if moves else None)
    own = _part(kept, shares.across)
    inside = slice(own.start - kept.start, own.stop - kept.start)
    kept_parameters = parameters[kept]
    if room.is_gathered:  # a copy, before the next layer gets the same memory
        target = room.kept if room.kept.numel() else torch.empty_like(kept_parameters)
        kept_parameters = target.copy_(kept_parameters)
    # Of a layer's gradients the memory is other layers', too; elsewhere sums are made in place.
    kept_gradients, is_summed = gradients[kept], group is not None or sharers is not None
    if room.turn is not None or (moves and sums_apart and is_summed):
        kept_gradients = torch.zeros_like(kept_gradients)
    parts = None
    if room.peers is not None:
        read = kept_parameters if room.is_gathered else None
        parts = PeerParts(room.peers, parameters, read, gradients)
    return GradientBucket(
        members,
        parameters,
        gradients,
        group,
        own,
        kept_parameters[inside],
        kept_gradients if shares.across is None else torch.zeros_like(kept_gradients[inside]),
        kind.decays,
        kind.sharded,
        sharers,
        kind.tied,
        shares,
        kept_parameters,
        kept_gradients,
        room.turn,
        room.is_gathered,
        parts,
    )


def _part(whole: slice, group: dist.ProcessGroup | None) -> slice:
    """This rank's part of elements that the ranks of `group` share, all where there are none."""
    if group is None:
        return whole
    size = (whole.stop - whole.start) // dist.get_world_size(group)
    start = whole.start + size * dist.get_rank(group)
    return slice(start, start + size)


def _memory(
    sizes: Sequence[int],
    layers: Sequence[int | None],
    own_zeros: Callable[[int], Tensor],
    shared_zeros: Callable[[int], Tensor],
) -> list[Tensor]:
    """Zeros [size] for every span: memory of its own where it has no layer, else a place in the
    buffer in which layers take turns in their order. own_zeros makes the former, shared_zeros the
    latter."""
    order = sorted({layer for layer in layers if layer is not None})
    ends, starts = dict.fromkeys(order, 0), list[int]()
    for size, layer in zip(sizes, layers, strict=True):
        starts.append(0 if layer is None else ends[layer])
        if layer is not None:
            ends[layer] += size
    places, count = take_turns([ends[layer] for layer in order])
    begin = dict(zip(order, places, strict=True))
    buffer = shared_zeros(count) if count else own_zeros(0)
    own = [size if layer is None else 0 for size, layer in zip(sizes, layers, strict=True)]
    whole = own_zeros(sum(own)).split(own)
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
    if not gradients.numel():  # it is frozen
        return Member(name, parameter, place, gradients)
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
    """Tells whether other ranks of a DTensor's mesh hold other elements; whether copies, and each a
    share of the gradient.

    Neither for a plain tensor: where there are copies, all ranks compute the same whole gradient.
    """
    if not isinstance(parameter, DTensor):
        return False, False
    copied = all(placement.is_replicate() for placement in parameter.placements)
    return not copied, copied
