"""A group: what one module of one layer saves for its backward, of one microbatch, and its way to
the host and back.

    pack     autograd saves a tensor      a handle takes its place; the memory behind it is noted
    commit   the module's forward ends    what is large enough goes to the host, as one copy or in
                                          parts
    unpack   autograd wants the tensor    the group is reached: reloads start; main waits for its
                                          own; a view comes back

What moves is memory, not tensors: q, k and v as views of one product are one copy and come back as
the views they were, in the layout they had, so kernels compute the same bits. Memory that an
earlier group has saved already is that group's. Whether memory moves is known at commit only: it
must be `min_bytes` large, and the views saved must cover half of it, since copying the rest would
free nothing. Memory that somebody else holds, too, is freed by no copy; that is known when a
forward is over, so the next pass leaves it where it is (`stays`).

Memory must not be written to before its copy has ended. Autograd counts changes in place, and so
does a copy, until main has waited for it: what was changed meanwhile is refused, as it is without
offloading. Of what passes hooks autograd counts nothing itself, so what stays has something in its
place, too (`Staying`).

Handles own the group, and nothing that it owns knows it strongly. When the last one is gone without
a backward, the host memory goes back to the copy streams, and what was brought back for nobody is
freed.
"""

import weakref
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from packgraph.graphs.copy_streams import Copy, CopyStreams, HostMemory, aligned
from packgraph.graphs.parameters import local_tensor
from packgraph.graphs.saved_tensors import Given, Staying, in_backward, was_changed
from packgraph.torch_internals import below_modes, identity, storage_id, storage_uses, version_of

COVERED = 0.5  # of memory that moves, by the views that were saved


class GroupMemory:
    """The memory behind saved tensors of a group.

    place: number of the save, among all of its block, that brought it in: the same in every pass,
    however it is cut. device: uint8 [n], until commit. moved: whether it did. restored: what was
    brought back, while a handle needs it. waiting: handles that have not been asked for. handles:
    all of them, of later groups, too. watched: while it is on its way, what was saved by which
    handle.
    """

    def __init__(self, group: "SavedGroup", tensor: Tensor, place: int) -> None:
        storage = tensor.untyped_storage()
        self.version, self.place = version_of(tensor), place
        self._group = weakref.ref(group)
        self.handles: list[weakref.ref[Handle]] = []
        self.nbytes, self.covered, self.waiting, self.moved = storage.nbytes(), 0, 0, False
        self.storage = weakref.ref(storage)
        self.device: Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            storage
        )
        self.restored: Tensor | None = None
        self.watched: list[tuple[weakref.ref[Handle], Tensor]] = []

    @property
    def group(self) -> "SavedGroup":
        """The group that moves it. Every handle keeps it, so it is there for whoever has one."""
        group = self._group()
        assert group is not None, "a memory without a handle"
        return group

    @group.setter
    def group(self, group: "SavedGroup") -> None:
        self._group = weakref.ref(group)

    def still(self, tensor: Tensor) -> bool:
        """Returns whether `tensor` lies in this memory, unchanged since it was saved first, and may
        be saved as a part of it: once it comes back from the host that is another memory."""
        group = self._group()
        return (
            self.storage() is not None
            and self.version == version_of(tensor)
            and group is not None
            and not (self.moved and group.host is None)
        )

    def left(self) -> None:
        """Main has waited for its copy."""
        watched, self.watched = self.watched, []
        for reference, tensor in watched:
            if (handle := reference()) is not None:
                handle.changed = version_of(tensor) != handle.version

    def is_held(self) -> bool:
        """Returns whether somebody else holds it, so that moving frees nothing. Our references are
        the tensor of every handle while it has not moved, the source of its copy and what is
        watched until main has waited, and the storage's Python object here; who keeps that object
        instead of a tensor is not seen."""
        if (storage := self.storage()) is None:
            return False
        handles = [
            handle for handle in (reference() for reference in self.handles) if handle is not None
        ]
        ours = sum(handle.kept is not None for handle in handles) + len(self.watched)
        ours += self.device is not None or (self.moved and not self.group.has_left())
        return storage_uses(identity(storage)) > ours + 1


@dataclass(eq=False)
class Handle:
    """Stand-in that autograd holds for a saved tensor. home: the group of its memory, an earlier
    one perhaps. kept: the tensor itself, where its memory stays. placed: of a DTensor, how its
    local part, which is what all else speaks of, lies on the mesh. asked: whether a backward has.
    given: what came back for it. changed: whether it was written to while its memory was copied."""

    group: "SavedGroup"
    home: "SavedGroup"
    memory: GroupMemory
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    version: int
    kept: Tensor | None
    placed: dict[str, Any] | None
    asked: bool = False
    given: Given = field(default_factory=Given)
    changed: bool = False

    def back(self) -> Tensor:
        """The tensor. Raises RuntimeError when it was changed in place, or is asked for when it is
        gone."""
        if in_backward():
            self.group.reached()
        memory = self.memory
        if not memory.moved:
            assert self.kept is not None
            if version_of(self.kept) != self.version:
                raise was_changed(self.size, self.group.told)
            return self._placed(self.kept)
        if (again := self.given.again()) is not None:
            return self._placed(again)
        whole = self.home.bring(memory)
        if self.changed:
            raise was_changed(self.size, self.group.told)
        if in_backward() and not self.asked:
            self.asked = True
            memory.waiting -= 1
        if memory.waiting == 0:
            memory.restored = None
        with below_modes():
            tensor = torch.empty(0, dtype=self.dtype, device=whole.device)
            tensor = tensor.set_(whole.untyped_storage(), self.offset, self.size, self.stride)
        return self._placed(self.given.keep(tensor))

    def _placed(self, tensor: Tensor) -> Tensor:
        if self.placed is None:
            return tensor
        with torch.no_grad():
            return DTensor.from_local(tensor, run_check=False, **self.placed)


class SavedGroup:
    """name, layer: the module's. part: of what it saves. place: in the plan's trace, `KEPT` where
    it has none. copy_streams: that carry its copies.

    moves: whether the plan wants it on the host. stays: places of the memories that do not move,
    since somebody else holds them; the runtime may change it. reached: called by the first tensor
    that backward asks for. wait: lets main wait for a copy of `copy_streams`. abandoned: told of
    reloads that nobody came for. large: since commit, what may move, with what stays.

    The pass sets at the commit: order, number within it, -1 before; scope, the capture of the
    forward; needed, the place in backward order, smallest first; starts, that of the group at whose
    backward the reload starts, None = the group before it.
    """

    def __init__(
        self,
        name: str,
        layer: int,
        copy_streams: CopyStreams,
        *,
        part: int,
        place: int,
        moves: bool,
        min_bytes: int,
        stays: Set[int],
        reached: Callable[["SavedGroup"], None],
        wait: Callable[[Copy], None],
        abandoned: Callable[[Copy], None],
    ) -> None:
        self.name, self.layer, self.part, self.place = name, layer, part, place
        self.copy_streams, self.moves, self.min_bytes, self.stays = (
            copy_streams,
            moves,
            min_bytes,
            stays,
        )
        self.order, self.scope, self.needed = -1, copy_streams.scope, 0
        self.starts: int | None = None
        self.memories: dict[int, GroupMemory] = {}
        self.large: list[GroupMemory] = []
        self.moved: list[GroupMemory] = []
        self.host: HostMemory | None = None
        self.copy_out: Copy | None = None
        self.copy_back: Copy | None = None
        self.handles: list[weakref.ref[Handle]] = []
        self._reached: Callable[[SavedGroup], None] | None = reached
        self._wait, self._abandoned = wait, abandoned

    def pack(self, tensor: Tensor, memory: GroupMemory | None, place: int) -> Handle:
        """The handle of `tensor`. memory: of an earlier group, None = this group's own. place:
        number of the save."""
        placed = None
        if isinstance(tensor, DTensor):
            placed = {
                "device_mesh": tensor.device_mesh,
                "placements": tensor.placements,
                "shape": tensor.shape,
                "stride": tensor.stride(),
            }
            tensor = local_tensor(tensor)
        with below_modes(), torch.no_grad():
            tensor = tensor.detach()  # without its graph, in which this handle will be
            if memory is None:
                key = storage_id(tensor)
                memory = self.memories.get(key)
                if memory is None or not memory.still(tensor):
                    memory = self.memories[key] = GroupMemory(self, tensor, place)
        memory.covered += tensor.numel() * tensor.element_size()
        memory.waiting += 1
        handle = Handle(
            self,
            memory.group,
            memory,
            tensor.dtype,
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            version_of(tensor),
            None if memory.moved else tensor,
            placed,
        )
        memory.handles.append(weakref.ref(handle))
        if memory.moved and not memory.group.has_left():
            memory.watched.append((memory.handles[-1], tensor))
        if memory.group is self:
            self.handles.append(memory.handles[-1])
        return handle

    def in_parts(self, most: int) -> list[list[GroupMemory]]:
        """Splits what was saved, in order, into at most `most` parts of about as many bytes. They
        follow from shares, so that rows of all sizes have the same ones."""
        living = {id(handle.memory) for handle in self._living()}
        memories = [memory for memory in self.memories.values() if id(memory) in living]
        total, before, found = (
            sum(memory.nbytes for memory in memories),
            0,
            list[list[GroupMemory]](),
        )
        for memory in memories:
            # A part ends where the first memory beyond its share of the bytes begins.
            if not found or most * before >= len(found) * total:
                found.append([])
            found[-1].append(memory)
            before += memory.nbytes
        return found

    def hand_over(self, memories: Sequence[GroupMemory], part: "SavedGroup") -> None:
        """Let `memories` and what was saved of them belong to `part`."""
        own = {id(memory) for memory in memories}
        part.memories = {key: memory for key, memory in self.memories.items() if id(memory) in own}
        self.memories = {
            key: memory for key, memory in self.memories.items() if id(memory) not in own
        }
        for handle in self._living():
            if id(handle.memory) in own:
                handle.group = handle.home = part
        part.handles = [
            reference for reference in self.handles if (held := reference()) and held.group is part
        ]
        self.handles = [
            reference for reference in self.handles if (held := reference()) and held.group is self
        ]
        for memory in memories:
            memory.group = part

    def commit(self, queued: Callable[[Copy], None], postpone: bool) -> None:
        """The module's forward is over: send what moves on its way.

        queued: called when the copy is queued. postpone: that is after the next launch of a graph,
        instead of now.
        """
        changed = {
            id(handle.memory)
            for handle in self._living()
            if handle.kept is not None and version_of(handle.kept) != handle.version
        }
        self.large = [
            memory
            for memory in self.memories.values()
            if memory.nbytes >= self.min_bytes
            and memory.covered >= COVERED * memory.nbytes
            and id(memory) not in changed
        ]
        moving = [memory for memory in self.large if memory.place not in self.stays]
        sources = [memory.device for memory in moving if memory.device is not None]
        for memory in self.memories.values():
            memory.device = None
        if self.moves and moving:
            self._send(moving, sources, queued, postpone)

    def _send(
        self,
        moving: list[GroupMemory],
        sources: list[Tensor],
        queued: Callable[[Copy], None],
        postpone: bool,
    ) -> None:
        self.moved, self._device = moving, sources[0].device
        for memory in moving:
            memory.moved = True
        for handle in self._living():
            if handle.memory.moved and handle.kept is not None:
                handle.memory.watched.append((weakref.ref(handle), handle.kept))
                handle.kept = None
        host = self.host = self.copy_streams.host(sum(aligned(memory.nbytes) for memory in moving))

        def left() -> None:
            for memory in moving:
                memory.left()

        if not postpone:
            self.copy_out = self.copy_streams.out(sources, host)
            self.copy_out.left = left
            queued(self.copy_out)
            return
        since, group = self.copy_streams.point(), weakref.ref(self)

        def launch() -> None:
            own = group()
            if own is not None:  # else nobody will ask for it
                own.copy_out = own.copy_streams.out(sources, host, since)
                own.copy_out.left = left
                queued(own.copy_out)

        self.copy_streams.postpone(launch)

    def _living(self) -> list[Handle]:
        return [
            handle for handle in (reference() for reference in self.handles) if handle is not None
        ]

    @property
    def told(self) -> str:
        """Name in messages."""
        return f"{self.name} of layer {self.layer}"

    @property
    def moved_bytes(self) -> int:
        """Bytes that have moved, and come back."""
        return sum(memory.nbytes for memory in self.moved)

    def has_left(self) -> bool:
        """Returns whether main has waited for the copy to the host."""
        return self.copy_out is not None and self.copy_out.done

    def reached(self) -> None:
        """A backward asks for a tensor of this group; one within its block, or of a block that has
        failed, is none of its pass."""
        if self.order < 0:
            return
        reached, self._reached = self._reached, None
        if reached is not None:
            reached(self)

    def start_reload(self) -> None:
        """Bring back what has moved, unless that was begun; main does not wait."""
        if self.host is None:
            return
        if self.copy_out is None:
            self.copy_streams.launched()
        assert self.copy_out is not None
        self._wait(self.copy_out)
        for memory in self.moved:
            memory.restored = torch.empty(memory.nbytes, dtype=torch.uint8, device=self._device)
        self.copy_back = self.copy_streams.back(
            self.host, [m.restored for m in self.moved if m.restored is not None]
        )
        self.copy_streams.give_back(self.host)
        self.host = None

    def bring(self, memory: GroupMemory) -> Tensor:
        """Returns the contents of `memory`, uint8 [n]; main has waited for them. Raises
        RuntimeError when it is gone."""
        self.start_reload()
        if self.copy_back is not None and not self.copy_back.done:
            self._wait(self.copy_back)
        if memory.restored is None:
            raise RuntimeError(
                f"backward through {self.told} a second time: what it had saved "
                "was on the host and is gone after the first (retain_graph=True has no effect on "
                "offloaded tensors). Add the losses before backward, or run the forward again"
            )
        return memory.restored

    def __del__(self) -> None:
        if self.host is not None:  # a forward without backward
            self.copy_streams.give_back(self.host)
        if (
            self.copy_back is not None and not self.copy_back.done
        ):  # nobody came for it: it may still be written
            self.copy_back.held = [
                memory.restored for memory in self.moved if memory.restored is not None
            ]
            self._abandoned(self.copy_back)


def unpack(packed: Any) -> Tensor:
    """The tensor that autograd has saved."""
    return packed.back() if isinstance(packed, Handle | Staying) else packed
