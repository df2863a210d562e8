"""Which layers belong to which virtual pipeline stage."""


def split_layers(num_layers: int, stages: int, head_cost: float = 0.0) -> tuple[range, ...]:
    """Cut `num_layers` into `stages` consecutive ranges so that the costliest stage is as cheap as possible.

    head_cost: work of the head, which the last stage does besides its layers, in layers. A pipeline is as fast as its
    slowest stage, and with a large vocabulary the head weighs as much as several layers. Where there is a choice the
    first stage, which holds the embedding, and the last one get the shorter ranges.

    Raises ValueError when there are fewer layers than stages.
    """
    if not 1 <= stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be cut into {stages} stages: every stage needs a layer")
    if stages == 1:
        return (range(num_layers),)
    choices = [[*_equal_parts(num_layers - last, stages - 1), last] for last in range(1, num_layers - stages + 2)]

    def slowest(sizes: list[int]) -> tuple[float, float]:
        costs = [*sizes[:-1], sizes[-1] + head_cost]
        return max(costs), sum(cost * cost for cost in costs)

    sizes = min(choices, key=slowest)
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _equal_parts(total: int, parts: int) -> list[int]:
    """`total` in `parts` that differ by at most one; the first one is never among the larger."""
    larger = total % parts
    return [total // parts + (0 < part <= larger) for part in range(parts)]
