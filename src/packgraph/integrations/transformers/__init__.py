"""Models of transformers over packed batches: `packed` makes a module of stages of one."""

from packgraph.integrations.transformers.collator import PackingCollator
from packgraph.integrations.transformers.deferred import load_deferred
from packgraph.integrations.transformers.families import FAMILIES, PackedFamily
from packgraph.integrations.transformers.model import PackedModel, packed
from packgraph.integrations.transformers.trainer import PackedTrainer

__all__ = [
    "FAMILIES",
    "PackedFamily",
    "PackedModel",
    "PackedTrainer",
    "PackingCollator",
    "load_deferred",
    "packed",
]
