"""Rows of a decoder that several ranks share: which group a microbatch is spread over, and what of
it is this rank's. A context cuts the whole row; tensor parallel ranks may cut hidden states further
(sequence parallelism)."""

from torch import Tensor

from packgraph.ops.attention.context import ContextGroup
from packgraph.ops.attention.kind import row_problems
from packgraph.ops.attention.zigzag import ZigzagTables, rank_rows, zigzag_tables
from packgraph.packing.batch import PackedBatch


class SharedRows:
    """Mix-in of decoders whose rows may be spread over ranks.

    Attributes:
        split_rows: Hidden states are this rank's rows only (sequence parallelism).
        context: Ranks that a row is spread over; set by `parallel/context/rows.py`.
        contexts: Groups of ranks, by their size.
        rank_tokens: Of any row; how many ranks share it then follows from its capacity.
    """

    split_rows = False
    context = 1
    contexts: dict[int, ContextGroup]
    rank_tokens: int | None = None

    def spread(self, batch: PackedBatch, asked: int | None = None) -> ContextGroup | None:
        """The group that a microbatch is spread over, None for this rank alone. asked: its size,
        None = as many as the model was spread over. Raises ValueError for a size without a group,
        and for rows that cannot be cut."""
        over = (
            self.context if self.rank_tokens is None else batch.capacity.tokens // self.rank_tokens
        )
        if (size := over if asked is None else asked) == 1:
            return None
        if size not in self.contexts:
            raise ValueError(
                f"rows cannot be spread over {size} ranks: this model knows groups of "
                f"{sorted({1, *self.contexts})}; make others by packgraph.parallel.context.rows"
            )
        found = self.contexts[size]
        lengths, tokens = batch.host.lengths, batch.capacity.tokens
        if problems := row_problems(lengths, tokens, found.kind, size):
            raise ValueError("; ".join(problems))
        return found


def own_part(
    batch: PackedBatch, context: ContextGroup | None
) -> tuple[Tensor, Tensor, Tensor, ZigzagTables | None]:
    """Tokens, padding and positions [T / context] of a microbatch that are this rank's, all of them
    without a context; and the tables where the row is cut in zigzag."""
    tables = None
    if context is not None and context.kind == "zigzag":
        tables = zigzag_tables(batch, context)
    rows = None if tables is None else tables.rows
    entries = (batch.tokens, 0), (batch.padding_mask, True), (batch.position_ids, 0)
    tokens, padding, positions = (rank_rows(x, context, rows, fill) for x, fill in entries)
    return tokens, padding, positions, tables
