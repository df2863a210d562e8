"""Memory of a rank's device at the peak of a step, predicted from shapes alone.

    state      weights, gradients, optimizer state: `memory.need_of`
    near       what layers keep for the backward, of all microbatches in flight
    working    what one layer computes again
    head       logits, and what the loss keeps

Activations are those of `decoder_estimates.py`, within 15 % of what Qwen3-0.6B took.
"""

from dataclasses import replace
from typing import NamedTuple

from packgraph.models.config import DecoderConfig
from packgraph.models.recompute import FULL, KINDS, NONE, SELECTIVE
from packgraph.packing.capacity import Capacity
from packgraph.train.config.sections import TrainConfig
from packgraph.train.decoder_estimates import DecoderMemory
from packgraph.train.memory import need_of

# Of the memory that there is: predictions of activations are off by some percent, allocators round
# and pools fragment, libraries take some.
SHARE = 0.9


class ActivationBytes(NamedTuple):
    """Bytes of the fullest rank. moved: what of one row waits on the host. near: what all rows in
    flight keep on the device. working: what one layer computes again. head: of logits and loss."""

    moved: int
    near: int
    working: int
    head: int

    @property
    def device(self) -> int:
        """Bytes on the device at the peak."""
        return self.near + self.working + self.head


def activation_bytes(
    config: TrainConfig, capacity: Capacity, rows: int, offload: bool
) -> ActivationBytes:
    """Predicts what rows of a capacity keep on their way through the layers.

    Args:
        config: A run whose `run.recompute` is one of KINDS.
        capacity: Of a row; ranks of a context share its tokens.
        rows: Microbatches of a step on each rank.
        offload: Whether what is kept waits on the host, or with recomputation the inputs of layers.
    """
    model, layout = config.model, config.parallel.layout()
    itemsize = 4 if config.run.dtype == "float32" else 2
    recompute = config.run.recompute
    compiled = config.graph.compile and recompute == NONE
    memory = DecoderMemory(model, 0, itemsize, layout.tp, layout.cp, compiled)
    head = memory(capacity)
    layers = -(-model.depth // layout.pp)
    whole = replace(memory, layers=layers)(capacity) - head
    columns = {kind: kept_columns(model, kind) for kind in KINDS}
    kept, passing = (
        round(whole * columns[kind] / columns[NONE]) for kind in (recompute, moved_kind(recompute))
    )
    moved = passing if offload else 0
    near = (kept - moved) * min(layout.pp, rows) + round(2 * moved / layers)
    working = 0 if recompute == NONE else round(whole / layers)
    return ActivationBytes(moved, near, working, head)


def predicted_peak(config: TrainConfig, device_type: str, world: int = 1, rank: int = 0) -> int:
    """Bytes that a rank takes at the peak. Allocates nothing.

    Recomputation of some stages counts as none, and so does `auto`, which takes what is left.
    Activations of a model of transformers are those of a decoder of its sizes.

    Args:
        config: A run whose capacities are known.
        device_type: `cpu` or `cuda`.
        world: Number of processes.
        rank: This one's.
    """
    need = need_of(config, device_type, world, rank)
    if device_type == "cpu":
        return need.total
    counted = config
    if config.run.recompute not in KINDS:
        counted = replace(config, run=replace(config.run, recompute=NONE))
    largest = max(config.graph.packing_capacities())
    offload = bool(config.offload.modules)
    return need.state + activation_bytes(counted, largest, config.parallel.pp, offload).device


def moved_kind(recompute: str) -> str:
    """The recomputation that keeps as much as offloading moves beside `recompute`: everything, or
    the inputs of layers, since results that are kept selectively do not pass its hooks."""
    return NONE if recompute == NONE else FULL


def kept_columns(model: DecoderConfig, kind: str) -> float:
    """Numbers per token that all layers keep with a kind of recomputation."""
    hidden, layers = model.hidden_size, model.depth
    if kind == FULL:
        return layers * hidden
    found = float(layers * hidden if kind == SELECTIVE else 0)
    for name, branch in model.kinds().items():
        count = model.count(name)
        if kind == SELECTIVE:
            found += count * branch.product_columns(model)
        else:
            found += count * (3 * hidden + branch.saved_columns(model))
    return found
