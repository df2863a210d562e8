"""TRL's trainers over packed batches: the mixin of `packgraph.integrations.transformers`.

    from packgraph.integrations.trl import PackedTrainer

    class SFT(PackedTrainer, SFTTrainer): ...

Rows that TRL has packed keep their documents (`seq_lengths`), and so do columns of labels and
masks. Of TRL's own metrics the accuracy of tokens is logged; entropy is not computed.
"""

from packgraph.integrations.transformers.collator import PackingCollator
from packgraph.integrations.transformers.trainer import PackedTrainer

__all__ = ["PackedTrainer", "PackingCollator"]
