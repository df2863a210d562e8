"""Costs of a decoder's graphs, estimated from its shape before a run has measured anything.

Times are scaled from one measured model, Qwen3-0.6B in bf16 on one H200 (the defaults of
`CostModel`), so absolute numbers are a guide; which buckets are chosen depends on ratios only.
"""

from dataclasses import dataclass

from packgraph.models.branches import head_sizes, head_weights, token_weights
from packgraph.models.config import DecoderConfig
from packgraph.ops.float8.cast import BLOCK
from packgraph.ops.float8.linear import FLOAT8_GRADIENTS, MXFP8, is_float8
from packgraph.ops.loss import rows_per_chunk
from packgraph.packing.buckets.cost import CostModel
from packgraph.packing.capacity import Capacity

SCALE_BYTES = 4
KERNELS_PER_LAYER = 75  # forward and backward, nothing fused
BYTES_PER_KERNEL = 10_000  # of device memory in an instantiated graph
COMPILED = 0.85  # of what a layer keeps that is not compiled
MEASURED_LAYERS, MEASURED_HEADS, MEASURED_WEIGHTS = 28, 16 * 128, 596_000_000


@dataclass(frozen=True)
class DecoderMemory:
    """Bytes of the pool that graphs of a decoder need, from its shape, until a run measures them.

    layers: in one chunk. itemsize: bytes of an activation. parts: ranks that share heads and
    columns (tp). rows: ranks that share rows (cp); in attention they share heads instead, which is
    as much. compiled: whether the layers are. in_place: whether the loss writes gradients over its
    logits, as on CUDA. A branch of a layer keeps for every token 3 vectors of the hidden size and
    those of its own, compiled layers `COMPILED` of that; the loss holds the gradient of the head
    twice, and one chunk of logits, with float32 copies unless it writes over them, which it does
    not with tp; a product in float8 has codes of its operands while it runs. Within 5
    % of compiled layers of Qwen3-0.6B and of the 8B shape on an H100, 12 % above uncompiled ones;
    not measured for latent attention, experts and Mamba-2.
    """

    model: DecoderConfig
    layers: int
    itemsize: int
    parts: int = 1
    rows: int = 1
    compiled: bool = False
    in_place: bool = True

    def __call__(self, capacity: Capacity) -> int:
        """Bytes for graphs of `capacity`."""
        model, tokens = self.model, capacity.tokens // self.rows
        # Averaged over layers: branches, and numbers that they save for the backward.
        branches = sum(len(model.branches(layer)) for layer in range(model.depth)) / model.depth
        counted = ((model.count(name), kind) for name, kind in model.kinds().items())
        columns = sum(count * kind.saved_columns(model) for count, kind in counted) / model.depth
        per_token = 3 * branches * model.hidden_size + columns / self.parts
        head = 4 * head_weights(model)
        kept = self.layers * per_token * self.itemsize * tokens * (COMPILED if self.compiled else 1)
        codes = _codes(model, tokens, self.parts) if self.layers else 0
        return round(kept + self._logits(tokens) + head / self.parts) + codes

    def _logits(self, tokens: int) -> float:
        """Bytes of a chunk of logits, and of what their gradients are made of."""
        words = self.model.vocab_size / self.parts
        in_place = self.in_place and self.parts == 1
        rows = min(tokens, rows_per_chunk(round(words), self.itemsize if in_place else None))
        return rows * words * (self.itemsize if in_place else 4 + 2 * self.itemsize + 2)


def graph_bytes(layers: int) -> int:
    """Device memory of the graphs of one capacity beside the pool."""
    return layers * KERNELS_PER_LAYER * BYTES_PER_KERNEL


def decoder_cost(
    model: DecoderConfig, parts: int = 1, measured: CostModel | None = None
) -> CostModel:
    """The measured model's cost scaled to `model`: launches by layers, tokens by weights, attention
    by heads.

    parts: ranks that share heads and columns (tp), or rows and in attention heads (cp). measured:
    cost of the measured model, with torch's varlen attention by default.
    """
    measured = measured or CostModel()
    layers = model.depth / MEASURED_LAYERS
    attending = model.count("attn") / MEASURED_LAYERS
    heads = attending * model.num_heads * sum(head_sizes(model)) / 2 / MEASURED_HEADS / parts
    weights = token_weights(model) + head_weights(model)  # that every token is multiplied by
    return CostModel(
        microbatch_us=measured.microbatch_us * layers,
        token_us=measured.token_us * weights / MEASURED_WEIGHTS / parts,
        document_us=measured.document_us * heads,
        tile_us=measured.tile_us * heads,
        attention_us=measured.attention_us * heads,
        capture_layer_seconds=measured.capture_layer_seconds,
    )


def _codes(model: DecoderConfig, tokens: int, parts: int) -> int:
    """Bytes of the largest product's operands in float8, and of what their rows are scaled by.
    parts: as in `DecoderMemory`."""
    if not is_float8(model.precision):
        return 0
    hidden = model.hidden_size
    width = max(model.intermediate_size // parts, hidden)
    if model.precision == MXFP8:  # scales in float32, and as the product reads them
        per_block = BLOCK + SCALE_BYTES + 1
        return (tokens * width + width * hidden) // BLOCK * per_block
    of_rows = tokens * (width + SCALE_BYTES) + width * (hidden + SCALE_BYTES)
    of_columns = (width + hidden) * (tokens + SCALE_BYTES)
    return max(of_rows, of_columns if model.precision == FLOAT8_GRADIENTS else 0)
