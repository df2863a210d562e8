"""Models of transformers over packed batches: `packed` makes a module of stages of one."""

from packgraph.integrations.transformers.families import FAMILIES, Family
from packgraph.integrations.transformers.model import PackedModel, packed

__all__ = ["FAMILIES", "Family", "PackedModel", "packed"]
