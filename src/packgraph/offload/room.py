r"""What else the device holds beside the groups, forwards and backwards: how much more groups may lie there at a time.

    memory   |            ____/|\                      /: groups on the device, all of them kept here
             |       ____/     | \___  gradients       |: the forward ends
             |  ____/          |_____\___ ...
    all else |  ==f== ==f==  f | b  ======             room of a place = the most there is anywhere - the most there

Copies to the host that have not ended with the forward's last group hold memory that the backward takes a moment
later, for gradients of activations: giving it back earlier lowers no peak. A backward of small matrices may have some
groups back that one of large ones has no room for; and if nothing moves, what is needed last finds all groups gone.
Measured in traced passes, where the lanes know the allocator; what stays behind a backward (gradients of parameters
that are made for the first time) is no such need. What is between the last group and the first backward counts as
forward; behind the last group's start nobody looks, so there is no room.
"""
from collections.abc import Sequence

from packgraph.graphs.lanes import Lanes


class Room:
    """Of one pass. Begins with the pass."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes, self._forward, self._rest = lanes, 0, 0
        self._backward: dict[int, int] = {}  # by module
        self._last: tuple[int, int] | None = None  # the module whose backward runs, and bytes of groups on the device
        lanes.memory()

    def made(self, held: int) -> None:
        """A group is made. held: bytes of groups on the device, this one's included."""
        found = self._lanes.memory()
        if found is not None:
            self._forward = max(self._forward, found.most - held)

    def reached(self, before: int, after: int, module: int) -> None:
        """Backward has come to a group of `module`. before, after: bytes of groups on the device, without and with
        those whose reload begins here."""
        found = self._lanes.memory()
        if found is None:
            return
        rest = found.now - before
        if self._last is None:
            self._forward, self._rest = max(self._forward, found.most - before), rest
        else:
            last, held = self._last
            needed = found.most - held - max(0, rest - self._rest)
            self._backward[last] = max(self._backward.get(last, needed), needed)
        self._last = (module, after)

    @property
    def _most(self) -> int:
        return max(self._forward, *self._backward.values()) if self._backward else self._forward

    @property
    def nbytes(self) -> int:
        """What `OffloadTrace.forward_room` says; 0 where nobody knows."""
        return self._most - self._forward

    def of(self, modules: Sequence[int]) -> tuple[int, ...]:
        """What `OffloadTrace.backward_room` says of groups of these modules; empty where nobody knows."""
        if not self._backward:
            return ()
        return tuple(self._most - self._backward.get(module, self._most) for module in modules)
