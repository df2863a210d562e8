"""Linear models of a microbatch's cost, with measured defaults: time by its static shape, bytes of
its graphs' pool.

Absolute numbers are those of one model on one GPU and only ratios decide which buckets are chosen:
how many tokens a place for a document costs, and how many a microbatch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packgraph.packing.capacity import Capacity

TILE = 128  # tokens of one document that a block of an attention kernel works on
GIBIBYTE = 2**30
PoolBytes = Callable[[Capacity], int]


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Time of forward and backward of one microbatch in microseconds, and of capturing its graphs
    in seconds.

    microbatch_us: whatever the shape. token_us: for each place for a token, used or not.
    document_us: for each place for a document. tile_us: for each place for a document and each TILE
    tokens of the longest that is allowed (here: of the row), for kernels that start a block for
    every tile that might be there. attention_us: for each pair of tokens of a document, whatever
    the row it stands in. capture_layer_seconds: capture of one layer's graphs.

    The defaults are Qwen3-0.6B (28 layers, bf16) on one H200 with torch's varlen attention. Rows of
    benchmarks/results/first_step.jsonl (chunk graphs, 64 places for documents, documents of 256
    tokens on average): 25.9, 45.8, 79.6, 141.0 ms at 1k, 2k, 4k, 8k tokens, which is 9.5 ms + 16.7
    µs a token within 5 %. Of the 16.7 the places for documents have 1.8: attention alone took 784
    µs a layer in a row of 4096 tokens with 64 places and 1588 µs with 256, 4.2 µs a place, and its
    grid grows with the longest document. 0.7 is attention proper, which is an estimate: 14,336
    floating point operations a pair and layer at 400 TFLOP/s. Capture took 14 to 44 ms a layer.
    """

    microbatch_us: float = 9500.0
    token_us: float = 14.2
    document_us: float = 0.0
    tile_us: float = 3.67
    attention_us: float = 1e-3
    capture_layer_seconds: float = 0.03

    def __post_init__(self) -> None:
        wrong = [name for name, value in self.__dict__.items() if not value >= 0]
        if wrong or not self.token_us:
            raise ValueError(
                f"CostModel: {', '.join(wrong or ['token_us'])} must be positive numbers (others "
                "than "
                "token_us may be 0)"
            )

    def shape_us(self, tokens: Any, documents: Any) -> Any:
        """Microseconds that a static shape costs; numbers or arrays. Larger shapes never cost
        less."""
        per_document = self.document_us + self.tile_us * tokens / TILE
        return self.microbatch_us + self.token_us * tokens + per_document * documents


# The same shape with flash-attn-4 and compiled layers (hand-made graphs): 10.6, 16.6, 31.5, 60.3 ms
# at 1k to 8k tokens. A place for a document costs 1.03 µs a layer there whatever the row (295 and
# 493 µs with 64 and 256 places): the kernel's scheduler counts the tiles of the documents that are
# there.
FLASH4 = CostModel(microbatch_us=3400.0, token_us=6.1, document_us=29.0, tile_us=0.0)


@dataclass(frozen=True, kw_only=True)
class LinearMemory:
    """Bytes of a slot's pool for graphs of one capacity: fixed, and for each place for a token and
    for a document.

    The defaults are Qwen3-0.6B in bf16 on one H200 (first_step.jsonl: 3.5, 5.8, 9.1, 14.7
    GiB at 1k, 2k, 4k, 8k tokens; within 8 %), until a run measures its own.
    """

    fixed: float = 1.98 * GIBIBYTE
    per_token: float = 1.65e-3 * GIBIBYTE
    per_document: float = 0.0

    def __call__(self, capacity: Capacity) -> int:
        """Bytes of the pool for `capacity`."""
        return round(
            self.fixed + self.per_token * capacity.tokens + self.per_document * capacity.documents
        )
