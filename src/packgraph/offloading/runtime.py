"""The runtime of one chunk: which groups move, when they come back, and how many copies are under
way.

A *pass* is one forward of the chunk and its backward: the groups in the order of their forwards.
Passes are not numbered, since nothing is looked up by microbatch: autograd's own graph knows which
group a saved tensor belongs to. So any number of microbatches may be in flight, in any order, and
captured graphs of one slot know nothing of another's.

    forward     block opens, hooks pack ─▶ block closes, commit ─▶ main waits for the oldest of too many copies
    backward    first tensor of group j is asked for ─▶ reloads planned for j start ─▶ main waits for j's own

Memory that somebody else holds, too, is freed by no copy. Eager passes that are traced look for it
when their forward is over, and it stays in the next pass; with a plan what stays is the trace's,
and no graph differs from another in it.

Before there is a plan everything eligible moves and comes back one group ahead: what a first step
would not have room for would never be traced. Eager work and captures follow the plan from the next
pass on; it does not change under graphs: whoever follows another one gives up the graphs first, or
attaches another runtime, which modules notice.

Eager passes may be slower than graphs: they wait for the host. So the graphs that follow a first
plan can carry clocks (`times_graphs`), and `replayed` tells what they take, for a better plan and
other graphs.

In a capture the copy streams are the capture's. Reloads start within the capture that holds the
group's own backward, since no copy may outlast its graph."""  # noqa: E501

import contextlib
import gc
import itertools
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from packgraph.graphs.checks.host_sync import capturing
from packgraph.graphs.copy_streams import Copy, CopyStreams, captured_copy_streams
from packgraph.graphs.errors import PackgraphWarning
from packgraph.graphs.parameters import local_tensor
from packgraph.graphs.saved_tensors import Staying, staying
from packgraph.offloading.group import GroupMemory, Handle, SavedGroup, unpack
from packgraph.offloading.plan import KEPT, CopySpeed, OffloadPlan, OffloadTrace, plan_errors
from packgraph.offloading.timing import PassTimes, Waits, copy_speed_of
from packgraph.torch_internals import identity, storage_id

Policy = Callable[[OffloadTrace], OffloadPlan]
# of a block's bytes between which a plan can choose; `in_flight` of knobs speaks of whole blocks
PARTS = 8
# passes that are traced without a policy: events and a look at the allocator's peak for every group
LOOKS = 16


class Pass:
    """The groups of one forward, by weak references: autograd's graph holds them."""

    def __init__(self, copy_streams: CopyStreams, times: PassTimes | None) -> None:
        self.copy_streams, self.times = copy_streams, times
        self.seen: set[tuple[int, str]] = set()  # layer and name
        self.fixed: dict[int, set[int]] = {}  # by layer, where its parameters and buffers lie
        self.groups: list[weakref.ref[SavedGroup]] = []
        self.leaving: list[
            tuple[int, weakref.ref[SavedGroup]]
        ] = []  # with the place at whose commit main waits for it
        self.memories: weakref.WeakValueDictionary[int, GroupMemory] = weakref.WeakValueDictionary()

    def known(self, tensor: Tensor) -> GroupMemory | None:
        """The memory of an earlier group that `tensor` lies in."""
        memory = self.memories.get(storage_id(tensor))
        return memory if memory is not None and memory.still(tensor) else None

    def living(self) -> list[SavedGroup]:
        """Groups that a backward can still ask for, in order."""
        return [group for reference in self.groups if (group := reference()) is not None]

    def to_reload(self, here: SavedGroup) -> list[SavedGroup]:
        """Groups that start to come back when backward reaches group `here`: first what is needed
        first."""
        waiting = [
            group for group in self.living() if group.scope == here.scope and group.host is not None
        ]
        found, ahead = [], 0
        for group in sorted(waiting, key=lambda group: group.needed):
            planned = group.starts is not None and group.starts <= here.needed
            if group.needed <= here.needed or planned or (group.starts is None and ahead == 0):
                ahead += group.needed > here.needed and not planned
                found.append(group)
        return found


class OffloadRuntime:
    """Moves what blocks of one chunk save; see `attach`, which gives it to modules.

    modules: names of the groups that may move. copy_streams: of eager work. min_bytes: smaller
    memory stays. in_flight: copies to the host that main has not waited for, at most, until a plan
    says another number. postpones: eager copies are queued after the next launch of a graph.
    policy: makes the plan of what was traced, at `settle` or at the first capture; None =
    everything moves. measures: nothing moves, for a trace of compute alone. times_graphs: captures
    from now on carry clocks. parts: what a block saves moves as so many groups at the most, for
    plans that can choose among them.
    """

    def __init__(
        self,
        modules: Collection[str],
        copy_streams: CopyStreams,
        *,
        min_bytes: int = 2**20,
        in_flight: int = 2,
        postpones: bool = False,
        policy: Policy | None = None,
        measures: bool = False,
        times_graphs: bool = False,
        parts: int = 1,
    ) -> None:
        self.modules, self.copy_streams, self.min_bytes, self.postpones = (
            frozenset(modules),
            copy_streams,
            min_bytes,
            postpones,
        )
        self.in_flight, self.policy, self.measures, self.times_graphs = (
            in_flight,
            policy,
            measures,
            times_graphs,
        )
        self.parts, self._in_flight_at_first = parts, in_flight
        self.met = set[str]()  # names of all blocks that were opened, be they to move or not
        self._others: set[str] = set()  # names of blocks whose tensors somebody else's hooks got
        self._abandoned: deque[Copy] = deque()
        self._waits = self._captured_waits = Waits(copy_streams)
        self._captured: list[PassTimes] = []  # whole passes of captures
        self._forget_traces()
        self._under_way: weakref.WeakKeyDictionary[CopyStreams, deque[Copy]] = (
            weakref.WeakKeyDictionary()
        )

    def _forget_traces(self) -> None:
        """There is no plan, and nothing that one could be made of."""
        self.plan: OffloadPlan | None = None
        self._trace: OffloadTrace | None = None
        self._largest: PassTimes | None = None  # of the passes that backward has come to
        self._looks, self._has_saved = 0, False  # passes that were traced, anything saved in one
        self._stays: defaultdict[tuple[int, str], set[int]] = defaultdict(set)  # by layer and name
        self._pass: Pass | None = None

    def follow(self, trace: OffloadTrace, plan: OffloadPlan) -> None:
        """Do as `plan` says of `trace` from the next pass on. Raises ValueError when they do not
        fit together."""
        if errors := plan_errors(trace, plan):
            raise ValueError(
                "this plan of offloading cannot be followed:\n  - " + "\n  - ".join(errors)
            )
        self.plan, self._trace, self.in_flight = plan, trace, plan.in_flight
        self._stays = defaultdict(set)  # another one: passes in flight add to theirs
        for planned in trace.groups:
            self._stays[planned.layer, planned.name].update(planned.stays)
        self._pass = None

    def settle(self) -> None:
        """Plan for the largest pass that was traced, unless there is a plan, or nothing that could
        be planned: all that was traced has saved nothing (frozen layers), or all is saved under
        hooks of others. Raises RuntimeError without a trace."""
        if (
            self.plan is not None
            or self.policy is None
            or ((self._looks or self._others) and not self._has_saved)
        ):
            return
        if self.trace is None:
            raise RuntimeError(
                "there is nothing to plan offloading by: run a forward and its backward eagerly "
                "before "
                "the first capture (warmup of at least 1), or give a plan to `follow`"
            )
        self.follow(self.trace, self.policy(self.trace))

    @property
    def trace(self) -> OffloadTrace | None:
        """The trace of the plan; before there is one that of the largest pass so far, for which the
        host waits: of those that backward has come through, otherwise (a loss may leave out what a
        module has made) of all that it has come to."""
        if self._trace is not None or self._largest is None:
            return self._trace
        return self._largest.trace()

    def replayed(self, speed: CopySpeed) -> tuple[OffloadTrace, CopySpeed] | None:
        """Returns the trace of the plan's groups in graphs, and the speed of copies, by their last
        replay: of the largest pass that was captured whole with `times_graphs` and has run,
        stretched to the bytes that the plan is for. None where there is none, as with graphs of
        layers. speed: of copies, where none were timed. Waits for the device."""
        if self._trace is None:
            return None
        named = list(self._trace.places)
        known = [
            times for times in self._captured if times.is_replayed() and times.names() == named
        ]
        if not known:
            return None
        largest = max(reversed(known), key=lambda times: times.nbytes)  # the newest of equals
        found, times = (
            largest.trace(),
            self._trace.bytes / largest.nbytes if largest.nbytes else 1.0,
        )
        groups = tuple(
            replace(
                group, forward_us=times * timed.forward_us, backward_us=times * timed.backward_us
            )
            for group, timed in zip(self._trace.groups, found.groups)
        )
        return replace(
            self._trace,
            groups=groups,
            forward_us=times * found.forward_us,
            backward_us=times * found.backward_us,
        ), copy_speed_of(largest.copy_streams, speed)

    def forget_replays(self) -> None:
        """Captures carry no clocks from now on, and those that do are not asked any more."""
        self.times_graphs, self._captured, self._captured_waits = False, [], self._waits

    def end_step(self) -> None:
        """The step is over, nothing is in flight: main waits for all copies."""
        self.copy_streams.join()
        self._pass, self._waits = None, Waits(self.copy_streams)

    def start_over(self, modules: Collection[str]) -> None:
        """Move all that blocks of these names save, as before there was a plan; what was traced is
        forgotten. Nothing may be in flight, and there may be no graphs."""
        self.end_step()
        self.forget_replays()
        self.modules, self.in_flight = frozenset(modules), self._in_flight_at_first
        self.policy = None
        self._forget_traces()

    def pass_by(self, name: str) -> None:
        """A block's tensors are somebody else's: say so, once for each name."""
        if name not in self._others:
            self._others.add(name)
            warnings.warn(
                f"offloading passes {name} by: what it saves for backward goes to saved-tensor "
                "hooks around "
                "it (a checkpoint, say, which computes it again). Leave one of the two out",
                PackgraphWarning,
                stacklevel=4,
            )

    @contextlib.contextmanager
    def group(
        self, name: str, layer: int, stays: Callable[[], Sequence[Tensor]], leave: Any
    ) -> Iterator[None]:
        """The block of one group. stays: gives parameters and buffers of its layer. leave: more
        tensors that stay."""
        copy_streams = captured_copy_streams() or self.copy_streams
        # In the dry run, where there is one: clocks of a device cannot be read inside a capture.
        # What is compiled ahead of the first pass comes by here without a trace.
        if (
            self.plan is None
            and self.policy is not None
            and (copy_streams is not self.copy_streams or (capturing() and self.trace is not None))
        ):
            self.settle()
        now = self._pass
        if now is None or now.copy_streams is not copy_streams or (layer, name) in now.seen:
            now = self._begin(copy_streams)
        group = self._open(now, name, layer)
        if layer not in now.fixed:
            now.fixed[layer] = {_address(tensor) for tensor in stays()}
        fixed = now.fixed[layer].union(
            _address(leaf) for leaf in tree_leaves(leave) if isinstance(leaf, Tensor)
        )
        saves = itertools.count()

        def pack(tensor: Tensor) -> Handle | Staying | Tensor:
            place = next(
                saves
            )  # of all, since what a capture takes in stays there, and moves elsewhere
            # What is looked at here is no call of captured code.
            with torch._C.DisableTorchFunction():
                if not _can_move(tensor) or _address(tensor) in fixed:
                    return staying(tensor, group.told)
                return group.pack(tensor, now.known(local_tensor(tensor)), place)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        groups = [group]
        for part, memories in enumerate(group.in_parts(self.parts)[1:], 1):
            groups.append(self._open(now, name, layer, part))
            group.hand_over(memories, groups[-1])
        for group in groups:
            self._commit(now, group, group is groups[-1])

    def _begin(self, copy_streams: CopyStreams) -> Pass:
        """Another pass. It is traced where it is an eager one of training, until there is a plan;
        where nobody makes one, the first `LOOKS` are."""
        wanted = self.policy is not None or self.measures or self._looks < LOOKS
        is_traced = (
            wanted and copy_streams is self.copy_streams and self.plan is None and not capturing()
        )
        if is_traced and self._looks == 0 and copy_streams.memory() is not None:
            # what went meanwhile, of work before, would count as memory that this pass does not
            # need
            gc.collect()
        self._looks += is_traced
        self._end_forward(copy_streams)
        while self._abandoned and copy_streams is self.copy_streams:
            copy = self._abandoned.popleft()
            if copy.scope == 0:  # those of captures are joined there
                copy_streams.wait(copy)
        times = None
        if (
            self.times_graphs
            and copy_streams is not self.copy_streams
            and not copy_streams.memories.is_trial
        ):
            if self._captured_waits.copy_streams is not copy_streams:
                self._captured_waits = Waits(copy_streams)
            copy_streams.timed = [] if copy_streams.timed is None else copy_streams.timed
            times = PassTimes(self._captured_waits, captured=True)
        elif is_traced:
            times = PassTimes(self._waits, captured=False)
        self._pass = Pass(copy_streams, times)
        return self._pass

    def _open(self, now: Pass, name: str, layer: int, part: int = 0) -> SavedGroup:
        place = KEPT if self._trace is None else self._trace.places.get((layer, name, part), KEPT)
        moves = not self.measures and (
            self.plan is None or (place != KEPT and self.plan.moves[place])
        )
        now.seen.add((layer, name))
        return SavedGroup(
            name,
            layer,
            now.copy_streams,
            part=part,
            place=place,
            moves=moves,
            min_bytes=self.min_bytes,
            stays=self._stays[layer, name],
            reached=partial(self._reached, now),
            wait=partial(self._wait, now.copy_streams),
            abandoned=self._abandoned.append,
        )

    def _commit(self, now: Pass, group: SavedGroup, is_last: bool) -> None:
        """Give the group its place in the pass, and send what moves on its way."""
        group.order, group.scope = len(now.groups), now.copy_streams.scope
        group.needed, leaves = -group.order, KEPT
        if self.plan is not None and self._trace is not None:
            backward = self._trace.backward_place
            group.needed = backward.get(group.place, len(backward))
            group.starts = backward[self.plan.reload_at[group.place]] if group.moves else None
            if self.plan.release_at and group.place != KEPT:
                leaves = self.plan.release_at[group.place]
        now.groups.append(weakref.ref(group))
        self._has_saved = self._has_saved or (now.times is not None and bool(group.memories))
        group.commit(
            partial(self._queued, now.copy_streams),
            postpone=self.postpones and now.copy_streams is self.copy_streams,
        )
        for memory in group.memories.values():
            if (storage := memory.storage()) is not None:
                now.memories[identity(storage)] = memory
        if leaves != KEPT and group.host is not None:
            now.leaving.append((leaves, weakref.ref(group)))
        self._release(now, group.place)
        if now.times is not None:
            now.times.committed(group, is_last)

    def _release(self, now: Pass, place: int) -> None:
        """Main waits for what the plan gives back at the commits up to that of group `place`: a
        pass may lack the group that the plan names (a graph has it). A copy that is postponed is
        waited for at the first commit after it."""
        later = []
        for at, reference in now.leaving:
            group = reference()
            if group is not None and (at > place or group.copy_out is None):
                later.append((at, reference))
            elif group is not None and group.copy_out is not None and not group.copy_out.done:
                self._wait(now.copy_streams, group.copy_out)
        now.leaving = later

    def _end_forward(self, copy_streams: CopyStreams) -> None:
        """Main waits for the copies to the host that are left: a plan counts on their memory no
        longer. What tells that a forward is over is the next one, or its backward."""
        under_way = self._under_way.get(copy_streams)
        while self.plan is not None and under_way:
            self._wait(copy_streams, under_way.popleft())

    def _queued(self, copy_streams: CopyStreams, copy: Copy) -> None:
        """A copy to the host is queued: main waits for the oldest ones if there are too many."""
        under_way = self._under_way.setdefault(copy_streams, deque())
        under_way.append(copy)
        while under_way and (under_way[0].done or len(under_way) > self.in_flight):
            self._wait(copy_streams, under_way.popleft())

    def _wait(self, copy_streams: CopyStreams, copy: Copy) -> None:
        """Main waits for a copy; it is timed where passes are traced."""
        # Not asked of `captured_copy_streams`: backwards may run in a thread of their own.
        if copy_streams is not self.copy_streams:
            waits, is_timed = self._captured_waits, self.times_graphs
        else:
            traces = self._pass is not None and self._pass.times is not None
            waits, is_timed = self._waits, self.plan is None and traces and not capturing()
        timed = is_timed and copy_streams is waits.copy_streams and not copy.done
        (waits if timed else copy_streams).wait(copy)

    def _reached(self, now: Pass, group: SavedGroup) -> None:
        self._end_forward(now.copy_streams)
        times, reloads = now.times, now.to_reload(group)
        if times is not None:
            if not times.needed and now.copy_streams is self.copy_streams and self.plan is None:
                self._find_held(now)
                times.forward_is_over()
            times.reached(group, reloads)
            self._keep(times, now.copy_streams is self.copy_streams)
        for other in reloads:
            other.start_reload()

    def _keep(self, times: PassTimes, eager: bool) -> None:
        """Remember a pass that backward has come to: of eager ones the largest."""
        if not eager:
            if times.is_complete() and times not in self._captured:
                self._captured.append(times)
        elif self._largest is None or times.rank() >= self._largest.rank():
            self._largest = times

    def _find_held(self, now: Pass) -> None:
        """A forward is over and its locals are gone: who holds memory of its groups now has saved
        it, too, or keeps it for other reasons. The last pass decides: first ones compile kernels,
        which may keep what they were given."""
        for group in now.living():
            held = {memory.place for memory in group.large if memory.is_held()}
            self._stays[group.layer, group.name] -= {memory.place for memory in group.large} - held
            self._stays[group.layer, group.name] |= held


def _can_move(tensor: Tensor) -> bool:
    """Returns whether a tensor is its bytes, in memory that a backward alone needs: no parameter,
    and no conjugate or negative that is yet to be made (a bit of the tensor says so)."""
    return (
        type(tensor) in (Tensor, DTensor)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.numel() > 0
        and not (tensor.is_leaf and tensor.requires_grad)
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
    )


def _address(tensor: Tensor) -> int:
    return local_tensor(tensor).untyped_storage().data_ptr()
