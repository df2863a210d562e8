"""What drawings of offloading show: blocks of compute, waiting and copies on three lanes, and
figures of a rank.

From a timeline that was simulated or measured, so that both can be laid side by side.
"""

from dataclasses import dataclass

from packgraph.offloading.plan import OffloadPlan, OffloadTrace
from packgraph.offloading.simulate import OffloadTimeline

COMPUTE, TO_HOST, TO_DEVICE = LANES = ("compute", "to host", "to device")
FORWARD, BACKWARD, WAIT, COPY = "forward", "backward", "wait", "copy"


@dataclass(frozen=True)
class OffloadBlock:
    """Something that takes time. group: index of the group that is computed, waited for or copied,
    None for what lies outside of all groups. Times in us from the start of the forward."""

    lane: str
    kind: str
    group: int | None
    start: float
    end: float


def offload_blocks(trace: OffloadTrace, timeline: OffloadTimeline) -> list[OffloadBlock]:
    """All of them by lane and time, those of no length left out."""
    blocks, before_us, time = [], 0.0, 0.0
    for index, group in enumerate(trace.groups):
        blocks.append(
            OffloadBlock(COMPUTE, FORWARD, index, time, time + group.forward_us - before_us)
        )
        before_us, time = group.forward_us, timeline.commits[index]
    blocks.append(OffloadBlock(COMPUTE, FORWARD, None, time, time + trace.forward_us - before_us))
    order = trace.backward_order
    marks = [*(trace.groups[index].backward_us for index in order), trace.backward_us]
    blocks.append(
        OffloadBlock(COMPUTE, BACKWARD, None, timeline.forward_end, timeline.forward_end + marks[0])
    )
    blocks += [
        OffloadBlock(
            COMPUTE,
            BACKWARD,
            index,
            timeline.backwards[index],
            timeline.backwards[index] + marks[place + 1] - marks[place],
        )
        for place, index in enumerate(order)
    ]
    blocks += [
        OffloadBlock(COMPUTE, WAIT, wait.group, wait.start, wait.end) for wait in timeline.waits
    ]
    blocks += [
        OffloadBlock(TO_HOST if copy.to_host else TO_DEVICE, COPY, copy.group, copy.start, copy.end)
        for copy in timeline.copies
    ]
    blocks.sort(key=lambda block: (LANES.index(block.lane), block.start))
    return [block for block in blocks if block.end > block.start]


@dataclass(frozen=True)
class OffloadFigures:
    """A rank's row of the table: per microbatch, but for the peaks, which are those of the device.

    copied: bytes in one direction. kept_bytes: what all groups keep for the backward when nothing
        moves. host_us,
    device_us: how long copies to the host and back take together.
    """

    moved: int
    groups: int
    copied: int
    host_us: float
    device_us: float
    exposed_us: float
    compute_us: float
    peak_bytes: int
    kept_peak_bytes: int
    kept_bytes: int

    @property
    def share(self) -> float:
        """Of what the groups keep for the backward, what moves."""
        return self.copied / self.kept_bytes if self.kept_bytes else 0.0

    @property
    def hidden_us(self) -> float:
        """Copy time that passes while compute runs."""
        return self.host_us + self.device_us - self.exposed_us

    @property
    def lost(self) -> float:
        """Waiting over compute."""
        return self.exposed_us / self.compute_us if self.compute_us else 0.0


def offload_figures(
    trace: OffloadTrace, plan: OffloadPlan, timeline: OffloadTimeline
) -> OffloadFigures:
    """The figures of one rank."""
    copied = sum(group.bytes for group, moves in zip(trace.groups, plan.moves) if moves)
    return OffloadFigures(
        sum(plan.moves),
        len(plan.moves),
        copied,
        timeline.copy_us(True),
        timeline.copy_us(False),
        timeline.exposed_us,
        trace.compute_us,
        timeline.peak_bytes,
        trace.kept_peak_bytes,
        trace.bytes,
    )
