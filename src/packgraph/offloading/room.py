r"""What else the device holds beside the groups, forwards and backwards: how much more groups may
lie there at a time.

    memory   |            ____/|\                      /: groups on the device, all of them kept
                                                       here
             |       ____/     | \___  gradients       |: the forward ends
             |  ____/          |_____\___ ...
    all else |  ==f== ==f==  f | b  ======             room of a place = the most there is anywhere
                                                       - the most there

Copies to the host that have not ended with the forward's last group hold memory that the backward
takes a moment later, for gradients of activations: giving it back earlier lowers no peak. A
backward of small matrices may have some groups back that one of large ones has no room for; and if
nothing moves, what is needed last finds all groups gone. Measured in traced passes, where the lanes
know the allocator. What is between the last group and the first backward counts as forward; behind
the last group's start nobody looks, so there is no room.

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

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from packgraph.graphs.copy_streams import CopyStreams


class _Look(NamedTuple):
    """Backward comes to a group of `module`. held: bytes of groups that are on the device from here
    on. rest: all else now. most: all else since the look before, at the most."""

    module: int
    held: int
    rest: int
    most: int


class Headroom:
    """Of one pass. Begins with the pass."""

    def __init__(self, lanes: CopyStreams) -> None:
        self._lanes = lanes
        self._forward: list[
            int
        ] = []  # all else at the most, by module, then until the first backward
        self._looks: list[_Look] = []
        lanes.memory()

    def made(self, held: int) -> None:
        """The groups of a module are made. held: bytes of groups on the device, these ones'
        included."""
        found = self._lanes.memory()
        if found is not None:
            self._forward.append(found.most - held)

    def is_others(self, nbytes: int, first: int, end: int) -> None:
        """As modules `first` up to `end` were made, by number from 0, `nbytes` counted as groups'
        that were not."""
        for module in range(first, min(end, len(self._forward))):
            self._forward[module] += nbytes

    def reached(self, before: int, after: int, module: int) -> None:
        """Backward has come to a group of `module`. before, after: bytes of groups on the device,
        without and with those whose reload begins here."""
        found = self._lanes.memory()
        if found is None:
            return
        if not self._looks:
            self._forward.append(found.most - before)
        most = found.most - (self._looks[-1].held if self._looks else before)
        self._looks.append(_Look(module, after, found.now - before, most))

    @property
    def _backward(self) -> dict[int, int]:
        """By module, what its backward needs of all else."""
        needs = dict[int, int]()
        least = list(accumulate((look.rest for look in reversed(self._looks)), min))[
            ::-1
        ]  # from each look on
        for (last, look), left in zip(pairwise(self._looks), least[1:]):
            needed = look.most - max(0, left - self._looks[0].rest)
            needs[last.module] = max(needs.get(last.module, needed), needed)
        return needs

    @property
    def _most(self) -> int:
        return max([0, *self._forward, *self._backward.values()])

    @property
    def nbytes(self) -> int:
        """What `OffloadTrace.forward_room` says; 0 where nobody knows."""
        return self._most - max([0, *self._forward])

    def of(self, modules: Sequence[int]) -> tuple[int, ...]:
        """What `OffloadTrace.backward_room` says of groups of these modules; empty where nobody
        knows."""
        needs, most = self._backward, self._most
        return tuple(most - needs.get(module, most) for module in modules) if needs else ()
