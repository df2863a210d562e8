"""Activations that wait on the host between a microbatch's forward and backward: what is known,
what is decided.

A *group* is what one module of one layer saves for its backward. A moved group is copied to the
host when its forward has made it, and its device memory is free from there to its reload:

    compute   | F0  | F1  | F2  | F3  |        | B3  | B2  | B1  | B0  |
    to host         [  0  ]     [  2  ]        :     :
    to device                                  [  2  ][  0  ]              reload_at[2] = 3, reload_at[0] = 2
    memory    | 0   | 01  | 012 | 123 |   13   | 123 | 012 | 01  | 0   |

The rules that runtime and plan agree on (`offloading/simulate.py` is the specification, with the
times):
* Commit of group i, when its forward ends: if it moves, its copy to the host is queued; then, while
  more than `in_flight` copies are queued and not yet waited for, compute waits for the oldest and
  gives its device memory back. So memory is given back at fixed points of the program, which is all
  that a captured graph knows.
* Then compute waits for the copies of all groups i with `release_at[i]` up to this group, oldest
  first, and gives their memory back, too. A planner names the first commit at which a copy should
  have ended, so that nothing waits long.
* At the end of a microbatch's forward compute waits for all copies to the host that are left.
* Start of group j's backward: memory of the group before it in backward order is given back; then
  the reloads of all groups i with `reload_at[i] == j` get their memory and are queued, those needed
  first at first; then, if j was moved, compute waits for its reload. A reload waits for its group's
  copy to the host, whatever the plan is.
* What one module saves may be several groups, its *parts*, which move each for itself. All of them
  are there before the first one's copy is queued. Their backwards may be one, so memory of none of
  them is given back before the backward of another module starts.
* Copies of a direction run one after another, in the order in which they were queued; reloads are
  queued in the order in which backwards need them. (A small group that overtakes a large one for
  which there is no room yet could gain a little, and nobody could say any more which reloads are
  the best.)
"""  # noqa: E501

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

KEPT = -1  # reload_at of a group that does not move


@dataclass(frozen=True)
class OffloadGroup:
    """Tensors that one module of one layer saves, of one microbatch; a trace holds groups in the
    order of their forwards.

    name: of the module (`offloading/rules.py`). layer: index. bytes: on the device, and of its
    buffer on the host. forward_us: from the start of the microbatch's forward to this group's
    commit. backward_us: from the start of the microbatch's backward to the start of this group's
    backward. Both count compute alone, without waiting for copies. copies: how many tensors are
    copied, each of which has the latency of a copy. part: number among those of its module, which
    follow each other. stays: what a trace found that somebody else holds, too, so that moving it
    would free nothing: it does not move and is not counted. Places among all that the module saves,
    in order.
    """

    name: str
    layer: int
    bytes: int
    forward_us: float
    backward_us: float
    copies: int = 1
    part: int = 0
    stays: tuple[int, ...] = ()


@dataclass(frozen=True)
class CopySpeed:
    """Measured copies between device and pinned host memory; 1 GB/s is 1000 bytes per us."""

    to_host_bytes_per_us: float = 50_000.0
    to_device_bytes_per_us: float = 50_000.0
    latency_us: float = 10.0

    def to_host_us(self, group: OffloadGroup) -> float:
        """Time that the copy of a group to the host takes."""
        return group.copies * self.latency_us + group.bytes / self.to_host_bytes_per_us

    def to_device_us(self, group: OffloadGroup) -> float:
        """Time that its reload takes."""
        return group.copies * self.latency_us + group.bytes / self.to_device_bytes_per_us


@dataclass(frozen=True)
class OffloadTrace:
    """One microbatch of one chunk as warm-up saw it. Raises ValueError with all reasons when it
    cannot have been so.

    groups: in forward order. forward_us, backward_us: compute of the whole forward and backward.
    slots: microbatches in flight at most, this one included; of a rank with several like chunks,
    those of all of them. other_bytes: everything else that the device holds at the same time, of
    which no plan gets rid (0: plans then speak of the groups alone). All else (gradients of
    activations, temporaries) is not as large everywhere as at its largest, and groups may exceed
    the peak by the difference: by forward_room bytes in the forward, and by backward_room, per
    group, from the start of its backward until that of the next one (empty: by nothing). Rooms
    count with a single slot only; with more, passes run beside what others hold.
    """

    groups: tuple[OffloadGroup, ...]
    forward_us: float
    backward_us: float
    slots: int = 1
    other_bytes: int = 0
    forward_room: int = 0
    backward_room: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        numbers = [
            ("slots", self.slots, 1),
            ("other_bytes", self.other_bytes, 0),
            ("forward_room", self.forward_room, 0),
            ("forward_us", self.forward_us, 0),
            ("backward_us", self.backward_us, 0),
            ("the least backward_room", min(self.backward_room, default=0), 0),
        ]
        wrong, before = list[str](), 0.0
        if len(self.backward_room) not in (0, len(self.groups)):
            wrong.append(
                f"there are {len(self.groups)} groups and backward_room of "
                f"{len(self.backward_room)}"
            )
        for index, group in enumerate(self.groups):
            told = f"group {index} ({group.name} of layer {group.layer})"
            numbers += [
                (f"{told}: bytes", group.bytes, 0),
                (f"{told}: copies", group.copies, 1),
                (f"{told}: the least of stays", min(group.stays, default=0), 0),
            ]
            if not before <= group.forward_us <= self.forward_us:
                wrong.append(
                    f"{told} is made after {group.forward_us} us: groups stand in the order of "
                    f"their forwards, so it must be {before} to {self.forward_us}, the end of the "
                    "forward"
                )
            if not 0 <= group.backward_us <= self.backward_us:
                wrong.append(
                    f"{told} is needed after {group.backward_us} us of a backward of "
                    f"{self.backward_us}"
                )
            before = group.forward_us
        low = [
            f"{name} is {value}, must be at least {least}"
            for name, value, least in numbers
            if not value >= least
        ]
        if errors := low + wrong:
            raise ValueError("this is no trace of a microbatch:\n  - " + "\n  - ".join(errors))

    @cached_property
    def places(self) -> dict[tuple[int, str, int], int]:
        """Layer, name and part of a group -> its index."""
        return {
            (group.layer, group.name, group.part): index for index, group in enumerate(self.groups)
        }

    @cached_property
    def backward_order(self) -> tuple[int, ...]:
        """Indices of the groups as their backwards start; what starts at one time runs in reverse
        of the forward."""
        return tuple(
            sorted(
                range(len(self.groups)), key=lambda index: (self.groups[index].backward_us, -index)
            )
        )

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Per group, the number of the module that it is a part of."""
        return tuple(
            accumulate(
                int(group.part == 0 or index == 0) for index, group in enumerate(self.groups)
            )
        )

    @cached_property
    def arriving(self) -> tuple[int, ...]:
        """Per group, the bytes that are new at its commit: those of all parts with the first
        one."""
        sums = Counter[int]()
        for group, block in zip(self.groups, self.blocks):
            sums[block] += group.bytes
        return tuple(sums.pop(block, 0) for block in self.blocks)

    @cached_property
    def backward_place(self) -> dict[int, int]:
        """Index of a group -> its place in `backward_order`."""
        return {index: place for place, index in enumerate(self.backward_order)}

    @cached_property
    def gone(self) -> tuple[int, ...]:
        """Bytes of the modules whose backwards are over as a group's own starts, in backward
        order."""
        found, gone, running, block = list[int](), 0, 0, KEPT
        for index in self.backward_order:
            if self.blocks[index] != block:
                gone, running, block = gone + running, 0, self.blocks[index]
            running += self.groups[index].bytes
            found.append(gone)
        return tuple(found)

    @property
    def room(self) -> int:
        """Bytes by which a forward may exceed the peak."""
        return self.forward_room if self.slots == 1 else 0

    @cached_property
    def backward_rooms(self) -> tuple[int, ...]:
        """Per group, bytes by which its backward may exceed the peak."""
        return (
            self.backward_room
            if self.slots == 1 and self.backward_room
            else (0,) * len(self.groups)
        )

    @property
    def first_room(self) -> int:
        """Bytes by which the peak may be exceeded as the backward begins."""
        return self.backward_rooms[self.backward_order[0]] if self.groups else 0

    @property
    def bytes(self) -> int:
        """Bytes of all groups of one microbatch."""
        return sum(group.bytes for group in self.groups)

    @property
    def kept_peak_bytes(self) -> int:
        """Peak memory when nothing moves, beyond the rooms."""
        backward = (
            self.bytes - gone - self.backward_rooms[index]
            for index, gone in zip(self.backward_order, self.gone)
        )
        return (
            self.other_bytes
            + (self.slots - 1) * self.bytes
            + max(0, self.bytes - self.room, *backward)
        )

    @property
    def compute_us(self) -> float:
        """Forward and backward without any waiting."""
        return self.forward_us + self.backward_us


@dataclass(frozen=True)
class OffloadPlan:
    """Plan of offloading: what moves, when it comes back, and the predicted savings and costs.

    moves: per group. reload_at: per group, the index of the group at whose backward its reload is
    queued (its own at the latest), KEPT where it does not move. in_flight: copies to the host that
    compute has not waited for, at most. release_at: per group, the index of the group at whose
    commit compute waits for its copy to the host at the latest, KEPT: when the forward ends; empty:
    KEPT for all.

    Predicted, per microbatch: peak_bytes and kept_peak_bytes of the device with and without the
    plan (all slots, other_bytes included, beyond the trace's rooms), moved_bytes, host_bytes
    (pinned, all slots), copy_us (both directions), exposed_us (compute waits for copies),
    compute_us (without waiting).
    """

    moves: tuple[bool, ...]
    reload_at: tuple[int, ...]
    in_flight: int
    peak_bytes: int = 0
    kept_peak_bytes: int = 0
    moved_bytes: int = 0
    host_bytes: int = 0
    copy_us: float = 0.0
    exposed_us: float = 0.0
    compute_us: float = 0.0
    release_at: tuple[int, ...] = ()

    @property
    def hidden_us(self) -> float:
        """Copy time that passes while compute runs."""
        return self.copy_us - self.exposed_us

    @property
    def lost(self) -> float:
        """Waiting over the time of a microbatch's forward and backward without offloading."""
        return self.exposed_us / self.compute_us if self.compute_us else 0.0

    @property
    def saved_bytes(self) -> int:
        """Bytes by which the peak falls."""
        return self.kept_peak_bytes - self.peak_bytes


def plan_errors(trace: OffloadTrace, plan: OffloadPlan) -> list[str]:
    """Every reason why the runtime cannot follow `plan` on `trace`; empty when it can."""
    count, place = len(trace.groups), trace.backward_place
    release_at = plan.release_at or (KEPT,) * count
    if {len(plan.moves), len(plan.reload_at), len(release_at)} != {count}:
        return [
            f"the trace has {count} groups, the plan {len(plan.moves)} moves, "
            f"{len(plan.reload_at)} reloads and {len(release_at)} places to give memory back at"
        ]
    errors = [] if plan.in_flight >= 0 else [f"in_flight is {plan.in_flight}, must be at least 0"]
    released = 0
    for index, (group, moves, at, back) in enumerate(
        zip(trace.groups, plan.moves, plan.reload_at, release_at)
    ):
        end = count if back == KEPT else back
        problems = {
            f"does not move and is reloaded at {at}": not moves and at != KEPT,
            f"does not move and is given back at {back}": not moves and back != KEPT,
            f"moves, and there is no group {at} at whose backward it could be reloaded": (
                moves and at not in place
            ),
            f"is reloaded at the backward of group {at}, which comes after its own": (
                moves and at in place and place[at] > place[index]
            ),
            f"is given back at {back}: it must be itself, a group after it, or {KEPT}": (
                moves and not index <= end <= count
            ),
            "is given back before a group whose copy comes first": (
                moves and index <= end < released
            ),
        }
        told = f"group {index} ({group.name} of layer {group.layer})"
        errors += [f"{told} {text}" for text, is_so in problems.items() if is_so]
        released = max(released, min(end, count)) if moves else released
    moved = [
        index
        for index in trace.backward_order
        if plan.moves[index] and plan.reload_at[index] in place
    ]
    return errors + [
        f"group {two} is reloaded before group {one}, which is needed earlier"
        for one, two in pairwise(moved)
        if place[plan.reload_at[two]] < place[plan.reload_at[one]]
    ]


@dataclass(frozen=True)
class OffloadKnobs:
    """Options that are set by hand. Raises ValueError with all reasons when it makes no sense.

    fraction: of the groups that may move, 0 to 1; those first in the forward move. min_bytes:
    smaller groups stay. margin: so many groups stay that the backward needs first, all parts of
    them; None = the last one of each module. delta_bytes_per_pp_rank: this many bytes more stay on
    each later rank of a pipeline. in_flight: copies to the host at one time.
    """

    fraction: float = 1.0
    min_bytes: int = 2**20
    margin: int | None = None
    delta_bytes_per_pp_rank: int = 0
    in_flight: int = 2

    def __post_init__(self) -> None:
        errors = [
            f"{name} must be at least 0, got {value}"
            for name, value in (
                ("min_bytes", self.min_bytes),
                ("margin", 0 if self.margin is None else self.margin),
                ("delta_bytes_per_pp_rank", self.delta_bytes_per_pp_rank),
                ("in_flight", self.in_flight),
            )
            if value < 0
        ]
        if not 0 <= self.fraction <= 1:
            errors.append(f"fraction must be 0 to 1, got {self.fraction}")
        if errors:
            raise ValueError("offloading by hand: " + "; ".join(errors))
