"""Models of transformers over packed batches: `packed` makes a module of stages of one."""

from packgraph.integrations.transformers.families import FAMILIES, PackedFamily
from packgraph.integrations.transformers.model import PackedModel, packed

__all__ = ["FAMILIES", "PackedFamily", "PackedModel", "packed"]
