"""Which layers belong to which virtual pipeline stage."""


def split_layers(num_layers: int, stages: int) -> tuple[range, ...]:
    """Cut `num_layers` into `stages` consecutive ranges, as equal as possible; the first and last stage, which also
    hold the embedding and the head, get the shorter ones.

    Raises ValueError when there are fewer layers than stages.
    """
    if not 1 <= stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be cut into {stages} stages: every stage needs a layer")
    sizes = [num_layers // stages] * stages
    inner_first = sorted(range(stages), key=lambda stage: stage in (0, stages - 1))
    for stage in inner_first[: num_layers % stages]:
        sizes[stage] += 1
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))
