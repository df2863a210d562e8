"""The rules of `offloading/plan.py` as a judge of timelines that knows nothing of how they came
about.

For timelines that were simulated, and for those that were measured: a runtime that forgets a wait
is caught by it.
"""

from itertools import pairwise

from packgraph.offloading.plan import KEPT, OffloadPlan, OffloadTrace
from packgraph.offloading.simulate import OffloadTimeline

NEAR = 1e-6  # share of a time by which sums of floats may differ


def timeline_errors(trace: OffloadTrace, plan: OffloadPlan, timeline: OffloadTimeline) -> list[str]:
    """Every rule of offloading/plan.py that a timeline breaks; empty when it is sound. The plan is
    not run for it."""
    slack = NEAR * max(timeline.end, 1.0)
    return [
        *_queue_errors(plan, timeline, slack),
        *_order_errors(trace, plan, timeline, slack),
        *_memory_errors(trace, plan, timeline, slack),
    ]


def _queue_errors(plan: OffloadPlan, timeline: OffloadTimeline, slack: float) -> list[str]:
    """One copy at a time, in order; each moved group once in each direction, out before in."""
    errors = []
    for to_host, told in ((True, "to the host"), (False, "to the device")):
        copies = [copy for copy in timeline.copies if copy.to_host == to_host]
        errors += [
            f"group {copy.group} is copied {told} before it was queued, or ends before it starts"
            for copy in copies
            if not copy.queued - slack <= copy.start <= copy.end
        ]
        errors += [
            f"groups {one.group} and {two.group} are copied {told} at one time or out of order"
            for one, two in pairwise(copies)
            if two.start < one.end - slack or two.queued < one.queued - slack
        ]
        expected = [index for index, moves in enumerate(plan.moves) if moves]
        if sorted(copy.group for copy in copies) != expected:
            errors.append(
                f"copied {told} are {sorted(copy.group for copy in copies)}, not the moved groups "
                f"{expected}"
            )
    out = {copy.group: copy.end for copy in timeline.copies if copy.to_host}
    errors += [
        f"group {copy.group} is reloaded before it is on the host"
        for copy in timeline.copies
        if not copy.to_host and copy.start < out.get(copy.group, float("inf")) - slack
    ]
    return errors


def _order_errors(
    trace: OffloadTrace, plan: OffloadPlan, timeline: OffloadTimeline, slack: float
) -> list[str]:
    """Compute waits for what it needs, for no more copies than allowed, and takes as long as it did
    without copies."""
    errors = []
    out = [copy for copy in timeline.copies if copy.to_host]
    for index, moves in enumerate(plan.moves):
        if not moves:
            continue
        commit = timeline.commits[index]
        if any(copy.group == index and copy.queued > commit + slack for copy in out):
            errors.append(f"group {index} goes to the host later than it is made")
        pending = sum(
            copy.queued <= commit + slack and copy.end > commit + slack
            for copy in out
            if copy.group <= index
        )
        if pending > plan.in_flight:
            errors.append(
                f"{pending} copies to the host are in flight after group {index}, {plan.in_flight} "
                "may be"
            )
        given_back = plan.release_at[index] if plan.release_at else KEPT
        if given_back != KEPT and any(
            copy.group == index and copy.end > timeline.commits[given_back] + slack for copy in out
        ):
            errors.append(
                f"the memory of group {index} is given back after group {given_back}, before it is "
                "copied"
            )
        queued = timeline.backwards[plan.reload_at[index]] + slack
        for copy in timeline.copies:
            if copy.group == index and not copy.to_host:
                if copy.end > timeline.backwards[index] + slack:
                    errors.append(f"the backward of group {index} starts before it is back")
                if copy.queued > queued:
                    errors.append(
                        f"group {index} is reloaded later than the backward of "
                        f"{plan.reload_at[index]}"
                    )
    if any(copy.end > timeline.forward_end + slack for copy in out):
        errors.append("the forward ends before its copies to the host do")
    marks = [(group.forward_us, time) for group, time in zip(trace.groups, timeline.commits)]
    marks += [(trace.forward_us, timeline.forward_end)]
    marks += [
        (trace.forward_us + trace.groups[index].backward_us, timeline.backwards[index])
        for index in trace.backward_order
    ]
    marks += [(trace.compute_us, timeline.end)]
    for planned, seen in marks:
        waited = sum(wait.end - wait.start for wait in timeline.waits if wait.end <= seen + slack)
        if abs(seen - planned - waited) > slack:
            errors.append(f"until {seen} us compute takes {planned} us and waits {waited} us")
    return errors


def _memory_errors(
    trace: OffloadTrace, plan: OffloadPlan, timeline: OffloadTimeline, slack: float
) -> list[str]:
    """The device holds whatever a copy or a backward still reads, and in the end as little as at
    the start."""
    kept = sum(group.bytes for group, moves in zip(trace.groups, plan.moves) if not moves)
    floor = trace.other_bytes + (trace.slots - 1) * kept
    order = trace.backward_order
    # A backward lasts as long as its compute; waiting that follows is for the next one.
    starts = [*[trace.groups[index].backward_us for index in order], trace.backward_us]
    ends = {
        index: timeline.backwards[index] + starts[place + 1] - starts[place]
        for place, index in enumerate(order)
    }
    for index, following in list(pairwise(order))[::-1]:
        if trace.blocks[index] == trace.blocks[following]:
            ends[index] = ends[following]
    spans = []  # from, until, bytes
    for index, group in enumerate(trace.groups):
        ways = [copy for copy in timeline.copies if copy.group == index]
        spans += [(timeline.commits[index], copy.end, group.bytes) for copy in ways if copy.to_host]
        spans += [(copy.start, ends[index], group.bytes) for copy in ways if not copy.to_host]
        if not plan.moves[index]:
            spans.append((timeline.commits[index], ends[index], group.bytes))
    errors = []
    for (time, held), (until, _) in pairwise([*timeline.memory, (timeline.end, 0)]):
        if until - time <= 2 * slack:
            continue
        middle = (time + until) / 2
        needed = floor + sum(
            nbytes for start, end, nbytes in spans if start + slack < middle < end - slack
        )
        if held < needed:
            errors.append(f"at {middle} us the device holds {held} bytes, and {needed} are in use")
    if timeline.memory[-1][1] != floor:
        errors.append(f"{timeline.memory[-1][1]} bytes are held in the end, must be {floor}")
    return errors
