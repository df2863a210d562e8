r"""Measurements that plans of offloading are made from: times, bytes and room of a pass, and the
speed of plain copies.

Plans are to know about compute alone. Where groups moved meanwhile main has waited for copies, so
its waits are timed, too, and taken out:

    main   | F0 | F1 |wait| F2 |        a clock at every bar
                                        F2 is made after F0 + F1 + F2

In a captured pass the same clocks are nodes of its graphs, and tell what the last replay took: the
compute of a graph, without the host that eager work may wait for.

Bytes of groups that are on the device are counted beside in eager passes: a group's from its commit
on, without those whose copies main has waited for, and those that come back until the next backward
begins. Memory that somebody else turns out to hold (`SavedGroup.stays`) was none of theirs, in this
pass, too; but what a copy of it brings back takes memory once more.

`Headroom` is what else the device holds beside the groups, forwards and backwards: how much more
groups may lie there at a time.

    memory   |            ____/|\                      /: groups on the device, all of them kept
                                                       here
             |       ____/     | \___  gradients       |: the forward ends
             |  ____/          |_____\___ ...
    all else |  ==f== ==f==  f | b  ======             room of a place = the most there is anywhere
                                                       - the most there

Copies to the host that have not ended with the forward's last group hold memory that the backward
takes a moment later, for gradients of activations: giving it back earlier lowers no peak. A
backward of small matrices may have some groups back that one of large ones has no room for; and if
nothing moves, what is needed last finds all groups gone. Measured in traced passes, where the copy
streams know the allocator. What is between the last group and the first backward counts as forward;
behind the last group's start nobody looks, so there is no room.

What stays behind a backward (gradients of parameters that are made for the first time) is no such
need, and what is handed on to the next module (gradients of activations) is one. Both are growth,
but what stays is there until the end:

    backward of a module    3   2   1
    all else at its start   0   4   1    3 hands 4 on, or hands 3 on and 1 stays: 1 counts as stayed

So what counts as stayed until a look is the least by which all else has grown at this or any later
one. Where all else falls along the backward while such gradients grow, that is too little: rooms
are too small, which is the safe side. Where they grow from module to module, it hides what is
handed on; runs have their gradients from the start.
"""

import statistics
import weakref
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from packgraph.graphs.backend import Stopwatch
from packgraph.graphs.copy_streams import Copy, CopyStreams
from packgraph.offloading.group import SavedGroup
from packgraph.offloading.plan import CopySpeed, OffloadGroup, OffloadTrace

BYTES = 64 * 2**20
SMALL = 4096
ROUNDS = 5
LARGE = 2**21  # bytes of a copy that tells a speed
LAST_US = 1.0  # behind all others comes, if at all, what a loss leaves out


def copy_speed(device: torch.device, nbytes: int = BYTES) -> CopySpeed:
    """Copies of `nbytes`, one direction at a time; on a CPU, which copies nothing, what plans
    assume. Waits for the device."""
    if device.type != "cuda":
        return CopySpeed()
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
    on_host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    out = _microseconds(device, lambda: on_host.copy_(on_device, non_blocking=True))
    back = _microseconds(device, lambda: on_device.copy_(on_host, non_blocking=True))
    small = _microseconds(
        device, lambda: on_host[:SMALL].copy_(on_device[:SMALL], non_blocking=True)
    )
    return CopySpeed(nbytes / out, nbytes / back, round(small, 3))


def _microseconds(device: torch.device, copy: Callable[[], object]) -> float:
    """The median of one copy, behind another one that gives the host its lead."""
    watch, times = Stopwatch(device), []
    for _ in range(ROUNDS):
        copy()
        watch.mark()
        copy()
        watch.mark()
        times += watch.take_laps()
    return 1000.0 * statistics.median(times)


class _Look(NamedTuple):
    """Backward comes to a group of `module`. held: bytes of groups that are on the device from here
    on. rest: all else now. most: all else since the look before, at the most."""

    module: int
    held: int
    rest: int
    most: int


class Headroom:
    """Room that one pass leaves beside the groups. Begins with the pass."""

    def __init__(self, copy_streams: CopyStreams) -> None:
        self._copy_streams = copy_streams
        # All else at the most, by module, then until the first backward.
        self._forward: list[int] = []
        self._looks: list[_Look] = []
        copy_streams.memory()

    def made(self, held: int) -> None:
        """The groups of a module are made. held: bytes of groups on the device, these ones'
        included."""
        if (found := self._copy_streams.memory()) is not None:
            self._forward.append(found.most - held)

    def is_others(self, nbytes: int, first: int, end: int) -> None:
        """Corrects the count: as modules `first` up to `end` were made, by number from 0, `nbytes`
        counted as groups' that were not."""
        for module in range(first, min(end, len(self._forward))):
            self._forward[module] += nbytes

    def reached(self, before: int, after: int, module: int) -> None:
        """Backward has come to a group of `module`. before, after: bytes of groups on the device,
        without and with those whose reload begins here."""
        if (found := self._copy_streams.memory()) is None:
            return
        if not self._looks:
            self._forward.append(found.most - before)
        most = found.most - (self._looks[-1].held if self._looks else before)
        self._looks.append(_Look(module, after, found.now - before, most))

    def _needs(self) -> tuple[dict[int, int], int]:
        """Memory beside the groups that each module's backward needs, and the most there is."""
        needs = dict[int, int]()
        rests = [look.rest for look in reversed(self._looks)]
        least = list(accumulate(rests, min))[::-1]  # from each look on
        for (last, look), left in zip(pairwise(self._looks), least[1:]):
            needed = look.most - max(0, left - self._looks[0].rest)
            needs[last.module] = max(needs.get(last.module, needed), needed)
        return needs, max([0, *self._forward, *needs.values()])

    @property
    def nbytes(self) -> int:
        """Room of the forward, as in `OffloadTrace.forward_room`; 0 where nobody knows."""
        return self._needs()[1] - max([0, *self._forward])

    def of(self, modules: Sequence[int]) -> tuple[int, ...]:
        """Room of the backward for groups of these modules, as in `OffloadTrace.backward_room`;
        empty where nobody knows."""
        needs, most = self._needs()
        return tuple(most - needs.get(module, most) for module in modules) if needs else ()


class TimeMark(NamedTuple):
    """A time at which main got somewhere, and how many waits it had behind it."""

    clock: Any
    waits: int


class Waits:
    """The waits of main, in order: when they began and ended."""

    def __init__(self, copy_streams: CopyStreams) -> None:
        self.copy_streams = copy_streams
        self.all: list[tuple[Any, Any]] = []

    def wait(self, copy: Copy) -> None:
        """Let main wait for a copy, between two clocks."""
        began = self.copy_streams.clock()
        self.copy_streams.wait(copy)
        self.all.append((began, self.copy_streams.clock()))

    def mark(self) -> TimeMark:
        """Main gets here."""
        return TimeMark(self.copy_streams.clock(), len(self.all))


def copy_speed_of(copy_streams: CopyStreams, known: CopySpeed) -> CopySpeed:
    """The speed of the copies that were timed in captures of `copy_streams`, in their last replays;
    `known` where there are none of a direction. Waits for the device."""

    def speed(copy_stream: str, otherwise: float) -> float:
        copies = [
            copy
            for copy in copy_streams.timed or ()
            if copy.copy_stream == copy_stream and copy.nbytes >= LARGE
        ]
        spent = sum(copy_streams.elapsed_us(copy.began, copy.ended) for copy in copies)
        spent -= known.latency_us * sum(
            copy.tensors for copy in copies
        )  # plans add that for every tensor
        return sum(copy.nbytes for copy in copies) / spent if spent > 0 else otherwise

    return replace(
        known,
        to_host_bytes_per_us=speed("out", known.to_host_bytes_per_us),
        to_device_bytes_per_us=speed("back", known.to_device_bytes_per_us),
    )


class _Made(NamedTuple):
    """A group and the time at which it was made. memories: place and bytes of what is large enough.
    stays: places of those that stay, by all that is known until now. block: number of the module
    that it is a part of, from 1."""

    name: str
    layer: int
    part: int
    memories: tuple[tuple[int, int], ...]
    stays: Set[int]
    mark: TimeMark
    block: int

    @property
    def nbytes(self) -> int:
        """Bytes that may move."""
        return sum(nbytes for place, nbytes in self.memories if place not in self.stays)

    def planned(self, forward_us: float, backward_us: float) -> OffloadGroup:
        """The group as plans know it."""
        stays = tuple(place for place, _ in self.memories if place in self.stays)
        copies = max(1, len(self.memories) - len(stays))
        times = forward_us, backward_us
        return OffloadGroup(self.name, self.layer, self.nbytes, *times, copies, self.part, stays)


class PassTimes:
    """The times of one pass, by order of its groups. waits: of its copy streams. captured: of its
    graphs, whose memory nobody looks at. scopes: the captures that it lies in."""

    def __init__(self, waits: Waits, captured: bool) -> None:
        self.copy_streams, self.waits, self.started = waits.copy_streams, waits, waits.mark()
        self.made: list[_Made] = []
        self.needed: dict[int, TimeMark] = {}
        self.scopes = {self.copy_streams.scope}
        self.room = None if captured else Headroom(self.copy_streams)
        self._held = self._running = self._block = 0
        self._saving: set[int] = (
            set()
        )  # modules that have saved something: backward comes to no other
        self._leaving: deque[tuple[weakref.ref[SavedGroup], int]] = deque()  # with its order
        self._counted: list[int] = []  # by order, bytes of the group while it is on the device
        self._left: dict[int, int] = {}  # by order, the number of modules made until it had left

    def committed(self, group: SavedGroup, is_last: bool) -> None:
        """The next group is made. is_last: of its parts, all of which have been there."""
        memories = tuple((memory.place, memory.nbytes) for memory in group.large)
        self.made.append(
            _Made(
                group.name,
                group.layer,
                group.part,
                memories,
                group.stays,
                self.waits.mark(),
                self._blocks + (group.part == 0),
            )
        )
        self._counted.append(self.made[-1].nbytes)
        if group.memories:
            self._saving.add(self.made[-1].block)
        self._held += self._counted[-1]
        if group.host is not None:
            self._leaving.append((weakref.ref(group), group.order))
        self.scopes.add(self.copy_streams.scope)
        if self.room is not None and is_last:
            self.room.made(
                self._held
            )  # with what main has waited for since the block opened: it was there until then
        if is_last:
            self._given_back()

    def forward_is_over(self) -> None:
        """Corrects the counts, now that it is known what stays: that never was the groups'."""
        self._given_back()
        for order, made in enumerate(self.made):
            surplus = self._counted[order] - made.nbytes
            if surplus == 0:
                continue
            self._counted[order] = made.nbytes
            if order not in self._left:
                self._held -= surplus
            if self.room is not None:
                self.room.is_others(surplus, made.block - 1, self._left.get(order, self._blocks))

    def reached(self, group: SavedGroup, reloads: Sequence[SavedGroup]) -> None:
        """Backward has come to `group`; `reloads` begin now."""
        self.needed.setdefault(group.order, self.waits.mark())
        self.scopes.add(self.copy_streams.scope)
        self._given_back()
        if (block := self.made[group.order].block) != self._block:
            self._held, self._running, self._block = self._held - self._running, 0, block
        before, coming = self._held, {other.order for other in reloads}
        # What comes back has left first, if only now.
        self._held -= sum(self._counted[order] for _, order in self._leaving if order in coming)
        self._leaving = deque(entry for entry in self._leaving if entry[1] not in coming)
        self._held += sum(other.moved_bytes for other in reloads)
        self._running += group.moved_bytes if group.moved else self._counted[group.order]
        if self.room is not None:
            self.room.reached(before, self._held, block)

    def _given_back(self) -> None:
        while self._leaving:
            group, order = self._leaving[0][0](), self._leaving[0][1]
            if group is not None and not group.has_left():
                break
            self._leaving.popleft()
            self._left[order] = self._blocks
            self._held -= self._counted[order]

    @property
    def _blocks(self) -> int:
        return self.made[-1].block if self.made else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all groups that may move."""
        return sum(made.nbytes for made in self.made)

    def names(self) -> list[tuple[int, str, int]]:
        """(layer, name, part) of the groups, in order."""
        return [(made.layer, made.name, made.part) for made in self.made]

    def is_complete(self) -> bool:
        """Returns whether backward has come to every module that has saved something, if not to
        each part of that."""
        came = {self.made[order].block for order in self.needed}
        return bool(came) and self._saving <= came

    def rank(self) -> tuple[bool, int]:
        """Order of passes to plan by: complete ones, then large ones."""
        return self.is_complete(), self.nbytes

    def is_replayed(self) -> bool:
        """Tells whether the graphs of a captured pass have run: one, or one of its forward and one
        of its backward. Among more, copies end with each, and those waits belong to no group."""
        return len(self.scopes) <= 2 and self.scopes <= self.copy_streams.replayed

    def trace(self) -> OffloadTrace:
        """The times in microseconds, without waits; waits for the device."""
        waited = [0.0, *accumulate(self.copy_streams.elapsed_us(*wait) for wait in self.waits.all)]

        def worked(start: TimeMark, end: TimeMark) -> float:
            return self.copy_streams.elapsed_us(start.clock, end.clock) - (
                waited[end.waits] - waited[start.waits]
            )

        begin, first = next(iter(self.needed.values())), dict[int, TimeMark]()
        came, reached = 0.0, dict[int, float]()
        for order, mark in self.needed.items():
            first.setdefault(self.made[order].block, mark)
            # Clocks of one moment tell any order.
            reached[order] = came = max(came, worked(begin, mark))
        groups, passed = list[OffloadGroup](), 0.0
        for order, made in enumerate(self.made):
            passed = max(passed, worked(self.started, made.mark))
            needed = came + LAST_US
            if made.block in first:
                needed = reached.get(order, max(0.0, worked(begin, first[made.block])))
            groups.append(made.planned(passed, needed))
        found = OffloadTrace(tuple(groups), passed, max(group.backward_us for group in groups))
        if self.room is None:
            return found
        rooms = self.room.of([made.block for made in self.made])
        return replace(found, forward_room=self.room.nbytes, backward_room=rooms)
