r"""How much more a backward needs beside the groups than the forward did: what copies may still lie in as it ends.

    memory   |            ____/|\                      /: groups on the device, all of them kept here
             |       ____/     | \___  gradients       |: the forward ends
             |  ____/          |_____\___ ...
    all else |  ==f== ==f==  f | b  ======             room = most of (b - groups that have gone) - most of f

Copies to the host that have not ended with the forward's last group hold memory that the backward takes a moment
later, for gradients of activations: giving it back earlier lowers no peak. What a backward needs later, when groups
have gone, counts as far as it would exceed that if nothing moved. Measured in traced passes, where the lanes
know the allocator; what stays behind a backward (gradients of parameters that are made for the first time) is no such
need. What is between the last group and the first backward counts as forward.
"""
from packgraph.graphs.lanes import Lanes


class Room:
    """Of one pass. Begins with the pass."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes, self._forward, self._backward, self._rest, self._passed = lanes, 0, 0, 0, 0
        self._held: int | None = None
        lanes.memory()

    def made(self, held: int) -> None:
        """A group is made. held: bytes of groups on the device, this one's included."""
        found = self._lanes.memory()
        if found is not None:
            self._forward = max(self._forward, found.most - held)

    def reached(self, before: int, after: int, passed: int) -> None:
        """Backward has come to a group. before, after: bytes of groups on the device, without and with those whose
        reload begins here. passed: bytes of groups whose backward is over."""
        found = self._lanes.memory()
        if found is None:
            return
        rest = found.now - before
        if self._held is None:
            self._forward, self._rest = max(self._forward, found.most - before), rest
        else:
            stays = max(0, rest - self._rest)
            self._backward = max(self._backward, found.most - self._held - stays - self._passed)
        self._held, self._passed = after, passed

    @property
    def nbytes(self) -> int:
        """What `OffloadTrace.forward_room` says; 0 where nobody knows."""
        return max(0, self._backward - self._forward)
