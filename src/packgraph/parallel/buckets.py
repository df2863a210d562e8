"""Places of parameters in flat buffers: spans in the order in which a backward ends gradients.

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
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

ALIGNMENT = 128  # elements: 256 bytes in bfloat16, which is what kernels like


@dataclass(frozen=True)
class Placed:
    """The place of parameter `index` in its span, in elements."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class GradientBucketPlan:
    """One span. size: elements with padding, a multiple of the number of ranks."""

    kind: Hashable
    members: tuple[Placed, ...]
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
    open_now: dict[Hashable, list[Placed]] = {}
    done: list[GradientBucketPlan] = []
    for index in reversed(range(len(sizes))):
        members = open_now.setdefault(kinds[index], [])
        start = _rounded(members[-1].stop, ALIGNMENT) if members else 0
        is_full = most is not None and start + sizes[index] > most
        if members and is_full and kinds[index] not in undivided:
            done.append(_closed(kinds[index], members, ranks))
            members, start = [], 0
            open_now[kinds[index]] = members
        members.append(Placed(index, start, start + sizes[index]))
    done += [_closed(kind, members, ranks) for kind, members in open_now.items()]
    # A backward comes to the first parameters last.
    return sorted(done, key=lambda span: max(-member.index for member in span.members))


def _closed(kind: Hashable, members: list[Placed], ranks: int) -> GradientBucketPlan:
    return GradientBucketPlan(kind, tuple(members), _rounded(members[-1].stop, ALIGNMENT * ranks))


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
