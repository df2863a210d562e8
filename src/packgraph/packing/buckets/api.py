"""Capacities for documents of given lengths."""

from collections.abc import Iterable

from packgraph.packing.buckets.choose import choose_buckets
from packgraph.packing.buckets.lengths import LengthHistogram, Overlong
from packgraph.packing.buckets.packing import PackingPolicy
from packgraph.packing.buckets.request import BucketRequest
from packgraph.packing.capacity import Capacity


def plan_buckets(
    lengths: Iterable[int],
    *,
    max_tokens: int = 8192,
    max_buckets: int = 8,
    window: int = 256,
    overlong: Overlong = "error",
) -> list[Capacity]:
    """Chooses the few capacities that graphs are captured for.

    A sample of the lengths is packed into every proposal; padding, empty places for documents and
    launches of further microbatches cost time, by a model that was measured on an H200. The same
    arguments give the same capacities.

    Args:
        lengths: Tokens of each document, such as those of the training data or a sample of it.
        max_tokens: Tokens of the largest capacity.
        max_buckets: Maximum number of capacities.
        window: Number of documents that wait to be combined, as in `packgraph.pack_stream`.
        overlong: What becomes of documents longer than `max_tokens`: `error`, `split` or `drop`.

    Returns:
        Capacities for `packgraph.pack_stream` and `packgraph.graph`, the smallest first.

    Raises:
        ValueError: If there are no documents, one is too long and `overlong` is `error`, or a
            number is out of range.

    Example:
        >>> capacities = packgraph.plan_buckets([30, 50, 200] * 100, max_tokens=256, max_buckets=2)
        >>> capacities[-1].tokens, len(capacities) <= 2
        (256, True)
    """
    request = BucketRequest(
        policy=PackingPolicy(documents=window, overlong=overlong),
        max_tokens=max_tokens,
        max_buckets=max_buckets,
    )
    return list(choose_buckets(LengthHistogram.of(lengths), request).capacities)
