"""`parallel.shard = auto`: as little of the layers is sharded as memory allows.

    none ──▶ fits? ──▶ gradients ──▶ fits? ──▶ parameters

What is whole on every rank is exchanged once a step; what is sharded, in every microbatch. So the
first that fits is the fastest, and each takes more memory than the next. What was chosen is written
into the run's config.json; a run goes on with it, unless it is told `auto` again.
"""

from dataclasses import replace

from packgraph.graphs.memory.budget import shown
from packgraph.parallel.flat_buffers import SHARDS
from packgraph.train.config.sections import AUTO, TrainConfig
from packgraph.train.memory import SHARE, Agree, predicted_peak
from packgraph.train.validate import validate


def most_sharded(config: TrainConfig, device_type: str, world: int) -> TrainConfig:
    """`config` with what takes the least memory of all that `auto` may choose."""
    return _choices(config, device_type, world)[-1]


def with_chosen_shard(
    config: TrainConfig,
    device_type: str,
    available: int | None,
    world: int,
    rank: int,
    agree: Agree,
) -> tuple[TrainConfig, list[str]]:
    """`config` with `parallel.shard` chosen if it is `auto`, and what is to be said of it.

    Collective where `agree` is: every rank predicts its own peak, and the choice is what fits on
    all. Where none is sure to fit it is what takes the least; where the memory of a device is not
    known nothing is sharded. Where there are no replicas `auto` stays, for a run that goes on with
    some.

    Args:
        config: A run whose capacities are known.
        device_type: `cpu` or `cuda`.
        available: Bytes that this process may still take there; None = nobody knows.
        world: Number of processes.
        rank: This one's.
        agree: Whether something holds on all ranks.
    """
    if config.parallel.shard != AUTO:
        return config, []
    choices = _choices(config, device_type, world)
    if len(choices) == 1:
        return config, []
    if not agree(available is not None):
        return choices[0], ["parallel.shard auto: the memory of devices is not known, so none"]
    told, room = [], round(SHARE * (available or 0))
    for chosen in choices:
        peak = predicted_peak(chosen, device_type, world, rank)
        told.append(f"{chosen.parallel.shard} {shown(peak)}")
        if agree(peak <= room):
            break
    if chosen.parallel.shard == "none":
        return chosen, []
    return chosen, [
        f"parallel.shard auto chose {chosen.parallel.shard}: predicted peaks, {', '.join(told)}; "
        f"{shown(room)} may be used"
    ]


def _choices(config: TrainConfig, device_type: str, world: int) -> list[TrainConfig]:
    """All that `auto` may choose, none first; `config` itself where it has chosen."""
    if config.parallel.shard != AUTO:
        return [config]
    # How many ranks share a layer says nothing where none is shared.
    none = replace(config, parallel=replace(config.parallel, shard="none", shard_ranks=0))
    layout = config.parallel.layout().resolved(world)
    if layout.replicas(world) * layout.cp == 1:
        return [none]
    tried = [
        replace(config, parallel=replace(config.parallel, shard=shard)) for shard in SHARDS[1:]
    ]
    return [none, *(one for one in tried if not validate(one, device_type, world=world))]
